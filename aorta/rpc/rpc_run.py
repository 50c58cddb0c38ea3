"""A run of the RPC workload: rank 0 drives, every rank serves, and each profiles itself window by window.

Windows are coordinated over the store, between main threads: rank 0 announces what to profile, the others start and
confirm, rank 0 starts last, makes its calls and announces the end, and the others save. After every window the folder
holds `rpc.json`, and per rank its traces and the lists of the calls it made. Must not profile on a thread of the RPC
server, let what is called know that it is traced, or lose what was recorded when a worker dies or a launcher ends the
run.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed.rpc as rpc
from torch.profiler import profile

from aorta.config.resolve import Resolved
from aorta.config.schema import Rpc
from aorta.distributed.output_folder import RunFolder
from aorta.distributed.peers import Peers, stop_on_signals
from aorta.distributed.topology import Topology, profiled, read_topology
from aorta.errors import ConfigError, PeerFailed
from aorta.profiling.profiler_plan import NO_EXPORT, export_disabled
from aorta.profiling.trace_saver import export
from aorta.profiling.window_recording import all_threads
from aorta.recording.rank_process import run_rank
from aorta.recording.recorded_run import untrained_run
from aorta.records.clocks import trace_metadata
from aorta.records.files import whole_file, write_whole
from aorta.records.run_files import CALLS_FILE, MEMORY_KEY, RPC_FILE, RPC_VERSION, WINDOW_FILE, Call, RpcFacts, Worker
from aorta.rpc.tracer import TracedRpc, close_window, open_window

_log = logging.getLogger(__name__)
DRIVER = 0
OPTIONS = ("record_shapes", "profile_memory", "with_stack", "with_flops")
"""Settings that the driver chooses for all workers (C6)."""
_ANSWER_S = 3.0
"""After a signal: how long the driver waits for the others, and each rank for answers to its calls. Launchers kill 30 s
after their own signal."""
_BEAT_S = 1.0
"""Interval of the driver's heartbeat; small compared with any `training.timeout_s`."""
_POLL_S = 0.1
"""Waits are short polls, so that a signal is heard while waiting."""
_CONFIRMED_POLL_S = 0.01


def run_rpc(resolved: Resolved) -> int:
    """Run one worker, and return the process's exit code; raises as `run_rank` does.

    Losing a worker is no failure: what the others recorded is kept, and `rpc.json` says `incomplete`.

    Raises:
        ConfigError: there is no other process to call.
    """
    if (size := read_topology().world_size) < 2:
        raise ConfigError(
            f"workload=rpc: rank 0 calls the other processes, and there is none (WORLD_SIZE={size}; at least 2 are "
            "needed); start it with: torchrun --standalone --nproc_per_node 2 train.py workload=rpc ..."
        )
    return run_rank(resolved, lambda *where: RpcRun(*where).run(), leave_together=False)


def udf_with_torch_ops(x: torch.Tensor) -> torch.Tensor:
    """Run three operators: [n, n] float32 -> [n, n]."""
    return torch.relu(torch.add(torch.mul(x, x), x))


def relay(to: str, x: torch.Tensor) -> torch.Tensor:
    answer: torch.Tensor = rpc.rpc_sync(to, udf_with_torch_ops, args=(x,))
    return answer


class Driver:
    """The calls of rank 0: alternates between the three kinds, between a builtin and Python functions, and between
    callees.

    Args:
        callees: names of the other workers.
        size: side of the square tensors sent.
        nested: with two callees or more, some calls make another. Each blocks a server thread of its callee, and torch
            needs a second one there for the answer: with one thread a nested call never ends.
    """

    def __init__(self, callees: Sequence[str], size: int, *, nested: bool) -> None:
        self.callees, self._nested = list(callees), nested
        self._x = torch.ones(size, size)
        self._issued = 0

    def call(self, count: int) -> None:
        """Make `count` calls, and wait for their values."""
        waiting: list[Any] = []
        for _ in range(count):
            number, self._issued = self._issued, self._issued + 1
            to = self.callees[number % len(self.callees)]
            others = [name for name in self.callees if name != to]
            forms: list[tuple[Any, tuple[Any, ...]]] = [
                (torch.add, (self._x, self._x)),
                (udf_with_torch_ops, (self._x,)),
            ]
            if self._nested and others and number % 3 == 0:  # one at a time, so that two threads suffice
                forms.append((relay, (others[0], self._x)))
            function, args = forms[(number + number // 3) % len(forms)]
            match number % 3:
                case 0:
                    rpc.rpc_sync(to, function, args=args)
                case 1:
                    waiting.append(rpc.rpc_async(to, function, args=args).wait)
                case 2:
                    waiting.append(rpc.remote(to, function, args=args).to_here)
        for wait in waiting:
            wait()


class Coordination:
    """Rank 0 publishes what comes; the others listen as long as it gives signs of life, and confirm."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self._store = peers, peers.store

    def say(self, key: str, value: Any, *, only_if_missing: bool = False) -> None:
        if not only_if_missing or not self._store.check([f"rpc/{key}"]):
            self._store.set(f"rpc/{key}", json.dumps(value))

    def confirm(self, key: str) -> None:
        self.say(f"{key}/{self._peers.rank}", True)

    def listen(self, key: str) -> Any:
        """Wait for rank 0's value of `key`, however long a window lasts, as long as rank 0 is alive.

        Raises:
            PeerFailed: it failed, or sent no heartbeat for `training.timeout_s`.
        """
        rank, limit_s = self._peers.rank, self._peers.timeout_s
        beats, since = -1, time.monotonic()
        while not self._store.check([f"rpc/{key}"]):
            time.sleep(_POLL_S)
            # Another worker's failure is no reason to stop: what the others record is kept.
            if (word := self._peers.reported_failure(DRIVER)) is not None:
                raise PeerFailed(f"rank {rank} stops: rank {DRIVER} failed: {word}")
            now_beats, now = self._store.add("rpc/beat", 0), time.monotonic()
            if now_beats != beats:
                beats, since = now_beats, now
            elif now - since > limit_s:
                raise PeerFailed(f"rank {DRIVER}, the driver, has given no sign of life for {limit_s:g} s ({key})")
        return json.loads(self._store.get(f"rpc/{key}"))

    def silent(self, key: str, ranks: Sequence[int], limit_s: float) -> list[int]:
        """Wait until all `ranks` have confirmed `key`, at most `limit_s`; returns those that have not."""
        waiting, deadline = list(ranks), time.monotonic() + limit_s
        with suppress(RuntimeError, OSError):  # the store is gone, and nobody else can be heard
            over = False
            while waiting and not over:
                over = time.monotonic() > deadline  # before the look: the last one is behind the deadline
                waiting = [rank for rank in waiting if not self._store.check([f"rpc/{key}/{rank}"])]
                if waiting:
                    time.sleep(_CONFIRMED_POLL_S)
        return waiting

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats as rank 0, since a window may hold calls of any number and length."""
        over = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError, OSError):  # the store is gone, and with it every listener
                while not over.wait(_BEAT_S):
                    self._store.add("rpc/beat", 1)

        thread = threading.Thread(target=beat, name="aorta-rpc-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_BEAT_S)


class Stopped(BaseException):
    """A signal asks this process to end."""


class StopAtOnce:
    """Raises `Stopped` where the signal finds the main thread; if that is writing files, once they are written."""

    def __init__(self) -> None:
        self.stopped_by: signal.Signals | None = None
        self._writing = self._held_back = False

    def request(self, by: signal.Signals) -> None:
        """Ask for the end of the run, inside the signal handler."""
        self.stopped_by = by
        if not self._writing:
            raise Stopped
        self._held_back = True

    @contextmanager
    def writing(self) -> Iterator[None]:
        self._writing = True
        try:
            yield
        finally:
            self._writing = False
        if self._held_back:
            self._held_back = False
            raise Stopped


class WorkerWindow:
    """One profiling window on one worker: a Chrome trace of all threads of this process.

    Start it, let calls happen, stop it; all on the main thread: a profiler that a thread of the RPC server starts and
    another stops ends the process (torch 2.13).
    """

    def __init__(self, options: Mapping[str, bool], metadata: Mapping[str, Any]) -> None:
        self._metadata, self._memory = metadata, options["profile_memory"]
        chosen: dict[str, Any] = {name: options[name] for name in OPTIONS}
        self._profiler: Any = profile(
            activities=profiled(),
            # Server threads run the called functions: without this none is recorded (torch 2.13: 0 of 44 calls).
            experimental_config=all_threads(),
            acc_events=True,
            **chosen,
        )

    def start(self) -> None:
        self._profiler.__enter__()
        for key, value in self._metadata.items():
            self._profiler.add_metadata_json(key, json.dumps(value))
        if self._memory:
            open_window()

    def stop(self, path: Path) -> None:
        """Write the trace atomically.

        Raises:
            OSError: it could not be written; nothing is left of it.
        """
        try:
            if self._memory:
                calls = msgspec.json.encode(close_window())
                self._profiler.add_metadata_json(MEMORY_KEY, calls.decode())
        finally:
            self._profiler.__exit__(None, None, None)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            export(lambda target: self._profiler.export_chrome_trace(str(target)), part)


class RpcRun:
    def __init__(self, resolved: Resolved, topology: Topology, device: torch.device, peers: Peers) -> None:
        assert isinstance(resolved.config.workload, Rpc)  # the caller checked it
        self.resolved, self.config, self.workload = resolved, resolved.config, resolved.config.workload
        self.topology, self.device, self.peers = topology, device, peers
        self.rank = topology.rank
        self.profiled = self.config.profiling.enabled and not export_disabled(self.config.profiling)
        self.names = [self.workload.worker_name.format(rank=r, number=r + 1) for r in range(topology.world_size)]
        self.together, self.stop = Coordination(peers), StopAtOnce()
        self.lost: dict[int, str] = {}
        self.cut_short: str | None = None
        self.finished_windows = 0
        self._metadata: dict[str, object] = {}
        self._written: dict[int, tuple[int, int]] = {}  # window -> calls, and answered ones

    def run(self) -> signal.Signals | None:
        """Run all windows; returns the signal that ended them early."""
        plan = {"workers": self.names, "driver": self.names[DRIVER]}
        where = self.topology, self.device, self.peers
        with untrained_run(self.resolved, *where, "tensorpipe", plan) as (site, clocks):
            if self.rank == DRIVER and self.profiled != self.config.profiling.enabled:
                _log.warning(NO_EXPORT)
            folder = site.folder
            self._metadata = trace_metadata(clocks.result, self.rank)
            self._write_facts(folder, ended=False)
            with suppress(Stopped), self._workers(), TracedRpc() as traced:
                ended = False
                try:
                    if self.rank == DRIVER:
                        with self.together.beating():
                            self._drive(traced, folder)
                    else:
                        self._serve(traced, folder)
                    ended = True
                except Stopped:
                    self._leave()
                    ended = True
                finally:
                    with suppress(Stopped):
                        traced.settle(self.workload.timeout_s if self.stop.stopped_by is None else _ANSWER_S)
                    with self.stop.writing():
                        # A call or an answer may have come after the end of its window.
                        by_window: defaultdict[int, list[Call]] = defaultdict(list)
                        for call in traced.calls:
                            if call.window is not None:
                                by_window[call.window].append(call)
                        for window, calls in by_window.items():
                            self._write_calls(folder, window, calls)
                        self._write_facts(folder, ended=ended)
            if self.stop.stopped_by is None:
                clocks.at_end()
            if self.rank == DRIVER:
                planned = self.workload.windows
                _log.info("%d of %d windows completed, traces in %s", self.finished_windows, planned, folder.path)
        return self.stop.stopped_by

    @contextmanager
    def _workers(self) -> Iterator[None]:
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=self.workload.num_worker_threads, rpc_timeout=self.workload.timeout_s
        )
        with warnings.catch_warnings():
            # torch 2.13 warns about its own use of a deprecated form, which cannot be changed here.
            warnings.simplefilter("ignore", UserWarning)
            rpc.init_rpc(  # type: ignore[no-untyped-call]
                self.names[self.rank], rank=self.rank, world_size=len(self.names), rpc_backend_options=options
            )
        with stop_on_signals(self.stop.request):
            try:
                yield
            finally:
                # A graceful shutdown waits for all workers, which a dead one would block.
                graceful = not (self.lost or self.cut_short or self.stop.stopped_by)
                if self.rank == DRIVER or graceful:
                    graceful = bool(self.peers.from_first_rank("rpc/graceful", graceful))
                try:
                    rpc.shutdown(graceful=graceful)
                except RuntimeError as error:  # everything recorded is kept: only the shutdown failed
                    _log.warning("rpc: the shutdown of torch.distributed.rpc failed: %s", str(error).splitlines()[0])

    def _drive(self, traced: TracedRpc, folder: RunFolder) -> None:
        callees = [name for rank, name in enumerate(self.names) if rank != DRIVER]
        driver = Driver(callees, self.workload.tensor_size, nested=self.workload.num_worker_threads > 1)
        options = {name: bool(getattr(self.config.profiling, name)) for name in OPTIONS}
        say, limit_s, number = self.together.say, self.workload.timeout_s, 0
        try:
            for number in range(self.workload.windows):
                say(f"window/{number}", {"profile": self.profiled, "options": options})
                self._hear(f"started/{number}", limit_s)
                driver.callees = [name for rank, name in enumerate(self.names) if rank not in (DRIVER, *self.lost)]
                if not driver.callees:
                    _log.error("rpc: no worker is left to call after %d windows", number)
                    return
                with self._window(traced, folder, number, options, profile=self.profiled):
                    try:
                        driver.call(self.workload.calls)
                    except RuntimeError as error:  # torch's error for a callee that is gone or late
                        self.cut_short = f"window {number}: {str(error).splitlines()[0]}"
                        _log.error("rpc: cut short in %s", self.cut_short)
                    # One-way answers may still be in flight: a window contains its calls completely.
                    traced.settle(limit_s)
                say(f"ended/{number}", None)
                self._hear(f"saved/{number}", limit_s)
                self.finished_windows = number + 1
                with self.stop.writing():
                    self._write_facts(folder, ended=False)
        finally:
            # Release the ranks that wait for this window, for its end or for the next one; all before were announced.
            for key in (f"window/{number}", f"ended/{number}", f"window/{number + 1}"):
                say(key, None, only_if_missing=True)

    def _serve(self, traced: TracedRpc, folder: RunFolder) -> None:
        for number in range(self.workload.windows):
            window = self.together.listen(f"window/{number}")
            if window is None:
                return
            with self._window(traced, folder, number, window["options"], profile=window["profile"]):
                self.together.confirm(f"started/{number}")
                self.together.listen(f"ended/{number}")
            self.together.confirm(f"saved/{number}")

    def _leave(self) -> None:
        """Tell the driver, after a signal, that this rank lives; the driver finds out which ranks do not."""
        assert self.stop.stopped_by is not None  # only a signal leads here
        by = self.stop.stopped_by.name
        _log.warning("rpc: stopped by %s", by)
        with suppress(RuntimeError, OSError):  # the store may have ended by the same signal
            self.together.confirm("stopped")
        if self.rank == DRIVER:
            self.cut_short = f"stopped by {by}" + (f" ({self.cut_short})" if self.cut_short else "")
            self._hear("stopped", _ANSWER_S, f"no answer within {_ANSWER_S:g} s of {by}: killed, or hanging")

    @contextmanager
    def _window(
        self, traced: TracedRpc, folder: RunFolder, number: int, options: dict[str, bool], *, profile: bool
    ) -> Iterator[None]:
        """Profile one window if asked to, and write what this rank has of it."""
        traced.window = number
        window = None
        if profile:
            worker = {"id": self.rank, "name": self.names[self.rank], "window": number}
            window = WorkerWindow(options, {"rpcWorker": worker, **self._metadata})
            window.start()
        try:
            yield
        finally:
            with self.stop.writing():
                try:
                    self._write_calls(folder, number, traced.of_window(number))
                finally:
                    if window is not None:
                        window.stop(folder.traces(self.rank) / WINDOW_FILE.format(window=number))

    def _hear(self, key: str, limit_s: float, why: str | None = None) -> None:
        """Wait, as rank 0, until every living worker confirms, or counts as lost."""
        living = [rank for rank in range(1, len(self.names)) if rank not in self.lost]
        for rank in self.together.silent(key, living, limit_s):
            self.lost[rank] = why or f"did not confirm {key} within {limit_s:g} s"
            _log.warning("rpc: worker %s (rank %d): %s; going on without it", self.names[rank], rank, self.lost[rank])

    def _write_calls(self, folder: RunFolder, window: int, calls: Sequence[Call]) -> None:
        """Write the calls of one window, unless as many, with as many answers, have been written."""
        progress = len(calls), sum(call.reply_ns is not None for call in calls)
        if self._written.get(window) != progress:
            path = folder.traces(self.rank) / CALLS_FILE.format(window=window)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, msgspec.json.Encoder().encode_lines(calls).decode())
            self._written[window] = progress

    def _write_facts(self, folder: RunFolder, *, ended: bool) -> None:
        if self.rank != DRIVER:
            return
        facts = RpcFacts(
            version=RPC_VERSION,
            workers=[Worker(rank, name) for rank, name in enumerate(self.names)],
            driver=DRIVER,
            windows=self.workload.windows,
            profiled=self.profiled,
            incomplete=bool(not ended or self.lost or self.cut_short),
            lost={str(rank): reason for rank, reason in self.lost.items()},
            cut_short=self.cut_short,
            ended=ended,
            finished_windows=self.finished_windows,
        )
        text = msgspec.json.format(msgspec.json.encode(facts).decode(), indent=2)
        write_whole(folder.path / RPC_FILE, text + "\n")
