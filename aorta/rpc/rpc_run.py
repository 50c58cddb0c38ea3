"""A run of the RPC workload: rank 0 drives, every rank serves, and each profiles itself window by window.

Windows are coordinated over the store, between main threads: rank 0 announces what to profile, the others start and
confirm, rank 0 starts last, makes its calls and announces the end, and the others save. The folder then holds
`rpc.json`, and per rank its traces and the list of the calls it made. Must not profile on a thread of the RPC server,
or lose what living workers recorded when one dies.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed.rpc as rpc

from aorta.config.resolve import Resolved
from aorta.config.schema import Rpc
from aorta.distributed.output_folder import RunFolder, prepare
from aorta.distributed.peers import Peers
from aorta.distributed.provenance import Asked, rank_facts
from aorta.distributed.topology import Topology
from aorta.errors import PeerFailed
from aorta.records.rpc_files import CALLS_FILE, RPC_FILE, RPC_VERSION, WINDOW_FILE, RpcFacts, Worker
from aorta.rpc.driver import Driver
from aorta.rpc.tracer import TracedRpc
from aorta.rpc.worker_window import OPTIONS, WorkerWindow
from aorta.runner.logs import log_to
from aorta.runner.rank_process import run_rank
from aorta.runner.recorded_run import RunSite, measured_clocks, publish_manifest

_log = logging.getLogger(__name__)
DRIVER = 0
_BEAT_S = 1.0
"""Interval of the driver's heartbeat; small compared with any `training.timeout_s`."""
_POLL_S = 0.1


def run_rpc(resolved: Resolved) -> int:
    """Run one worker, and return the process's exit code; raises as `run_rank` does.

    Losing a worker is no failure: what the others recorded is kept, and `rpc.json` says `incomplete`.
    """
    return run_rank(resolved, lambda *place: RpcRun(*place).run(), leave_together=False)


class RpcRun:
    """One process of an RPC run."""

    def __init__(self, resolved: Resolved, topology: Topology, device: torch.device, peers: Peers) -> None:
        assert isinstance(resolved.config.workload, Rpc)  # the caller checked it
        self.resolved, self.config, self.workload = resolved, resolved.config, resolved.config.workload
        self.topology, self.device, self.peers = topology, device, peers
        self.rank = topology.rank
        self.names = [self.workload.worker_name.format(rank=r, number=r + 1) for r in range(topology.world_size)]
        self.lost: dict[int, str] = {}
        self.cut_short: str | None = None

    def run(self) -> None:
        """Run all windows, then write everything."""
        base = Path(self.config.training.output_dir) / (self.config.label or "")
        folder = prepare(base, self.topology, self.peers, overwrite=self.config.training.overwrite, resuming=False)
        with log_to(folder.log(self.rank)):
            for note in self.resolved.notes if self.rank == DRIVER else ():
                _log.warning(note)
            site = RunSite(folder, self.topology, self.device, self.peers)
            clocks = measured_clocks(self.config.clock, site)
            ranks = self.peers.gather("facts", rank_facts(self.topology, self.device))
            asked = Asked(self.config.label, self.resolved.plain, self.resolved.manifest_hash)
            plan = {"workers": self.names, "driver": self.names[DRIVER]}
            publish_manifest(site, asked, clocks, ranks, "tensorpipe", plan)
            with self._workers(), TracedRpc() as traced:
                try:
                    if self.rank == DRIVER:
                        with self._beating():
                            self._drive(traced, folder)
                    else:
                        self._serve(traced, folder)
                finally:
                    traced.settle(self.workload.timeout_s)
                    self._write_calls(traced, folder)
            clocks.at_end()
            if self.rank == DRIVER:
                self._write_facts(folder)
                _log.info("completed: %d windows, traces in %s", self.workload.windows, folder.path)

    def _drive(self, traced: TracedRpc, folder: RunFolder) -> None:
        callees = [name for rank, name in enumerate(self.names) if rank != DRIVER]
        driver = Driver(callees, self.workload.tensor_size, nested=self.workload.num_worker_threads > 1)
        options = {name: bool(getattr(self.config.profiling, name)) for name in OPTIONS}
        try:
            for number in range(self.workload.windows):
                self._say(f"window/{number}", {"profile": self.config.profiling.enabled, "options": options})
                self._hear(f"started/{number}")
                driver.callees = [name for rank, name in enumerate(self.names) if rank not in (DRIVER, *self.lost)]
                if not driver.callees:
                    _log.error("rpc: no worker is left to call after %d windows", number)
                    return
                with self._window(traced, folder, number, options):
                    try:
                        driver.call(self.workload.calls)
                    except RuntimeError as error:  # torch's error for a callee that is gone or late
                        _log.error("rpc: window %d was cut short: %s", number, str(error).splitlines()[0])
                        self.cut_short = f"window {number}: {str(error).splitlines()[0]}"
                    # One-way answers may still be in flight: a window contains its calls completely.
                    traced.settle(self.workload.timeout_s)
                self._say(f"ended/{number}", None)
                self._hear(f"saved/{number}")
        finally:
            for number in range(self.workload.windows):  # release every rank that waits for a window, or for its end
                self._say(f"window/{number}", None, only_if_missing=True)
                self._say(f"ended/{number}", None, only_if_missing=True)

    def _serve(self, traced: TracedRpc, folder: RunFolder) -> None:
        for number in range(self.workload.windows):
            told = self._listen(f"window/{number}")
            if told is None:
                return
            with self._window(traced, folder, number, told["options"], profile=told["profile"]):
                self._say(f"started/{number}/{self.rank}", True)
                self._listen(f"ended/{number}")
            self._say(f"saved/{number}/{self.rank}", True)

    @contextmanager
    def _window(
        self, traced: TracedRpc, folder: RunFolder, number: int, options: dict[str, bool], profile: bool | None = None
    ) -> Iterator[None]:
        traced.window = number
        if not (self.config.profiling.enabled if profile is None else profile):
            yield
            return
        window = WorkerWindow(options, {"id": self.rank, "name": self.names[self.rank], "window": number})
        window.start()
        try:
            yield
        finally:
            window.stop(folder.traces(self.rank) / WINDOW_FILE.format(window=number))

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
        try:
            yield
        finally:
            # A graceful shutdown waits for all workers, which a dead one would block.
            graceful = bool(self.peers.from_rank_zero("rpc/graceful", not (self.lost or self.cut_short)))
            try:
                rpc.shutdown(graceful=graceful)
            except RuntimeError as error:  # everything recorded is kept: only the shutdown failed
                _log.warning("rpc: the workers did not part in order: %s", str(error).splitlines()[0])

    def _say(self, key: str, value: Any, *, only_if_missing: bool = False) -> None:
        if not only_if_missing or not self.peers.store.check([f"rpc/{key}"]):
            self.peers.store.set(f"rpc/{key}", json.dumps(value))

    def _listen(self, key: str) -> Any:
        """Wait for rank 0's value of `key`, however long a window lasts, as long as rank 0 is alive.

        Raises:
            PeerFailed: it failed, or sent no heartbeat for `training.timeout_s`.
        """
        store, limit_s = self.peers.store, self.config.training.timeout_s
        beats, since = -1, time.monotonic()
        while not store.check([f"rpc/{key}"]):
            time.sleep(_POLL_S)
            # Another worker's failure is no reason to stop: what the others record is kept.
            if (word := self.peers.word_of(DRIVER)) is not None:
                raise PeerFailed(f"rank {self.rank} stops: rank {DRIVER} failed: {word}")
            now_beats, now = store.add("rpc/beat", 0), time.monotonic()
            if now_beats != beats:
                beats, since = now_beats, now
            elif now - since > limit_s:
                raise PeerFailed(f"rank {DRIVER}, the driver, has given no sign of life for {limit_s:g} s ({key})")
        return json.loads(store.get(f"rpc/{key}"))

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Rank 0 sends heartbeats, since a window may hold calls of any number and length."""
        over = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError, OSError):  # the store is gone, and with it every listener
                while not over.wait(_BEAT_S):
                    self.peers.store.add("rpc/beat", 1)

        thread = threading.Thread(target=beat, name="aorta-rpc-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_BEAT_S)

    def _hear(self, key: str) -> None:
        """Rank 0: wait until every living worker confirms, or counts as lost."""
        for rank in range(1, len(self.names)):
            if rank in self.lost:
                continue
            try:
                self.peers.store.wait([f"rpc/{key}/{rank}"], timedelta(seconds=self.workload.timeout_s))
            except (RuntimeError, OSError):
                self.lost[rank] = f"gave no sign of {key} within {self.workload.timeout_s:g} s"
                _log.warning(
                    "rpc: worker %s (rank %d) %s; going on without it", self.names[rank], rank, self.lost[rank]
                )

    def _write_calls(self, traced: TracedRpc, folder: RunFolder) -> None:
        path = folder.traces(self.rank) / CALLS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.Encoder().encode_lines(traced.calls))

    def _write_facts(self, folder: RunFolder) -> None:
        facts = RpcFacts(
            version=RPC_VERSION,
            workers=[Worker(rank, name) for rank, name in enumerate(self.names)],
            driver=DRIVER,
            windows=self.workload.windows,
            profiled=self.config.profiling.enabled,
            incomplete=bool(self.lost or self.cut_short),
            lost={str(rank): reason for rank, reason in self.lost.items()},
            cut_short=self.cut_short,
        )
        text = msgspec.json.format(msgspec.json.encode(facts), indent=2)
        (folder.path / RPC_FILE).write_bytes(text + b"\n")
