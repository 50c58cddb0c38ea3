"""torch.profiler windows in the loop of one rank: checked before it, recorded in it, listed and judged after it.

`train.py` makes a `LoopProfiler` of its `profiling=` group; `aorta.Profiler` and `aorta.TorchProfiler` are the same
with the arguments of the tools they follow. Must not be a condition of the training: what goes wrong in the loop is
logged and written down, and raised only after it. Must not look at another rank's disk: its files are known from its
own account alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerAction

from aorta.config.profiling import Profiling, fill, profiling_rules, selected_ranks
from aorta.config.schema import Training
from aorta.distributed.output_folder import RunFolder
from aorta.distributed.peers import Peers, gather_when_idle, leave_value
from aorta.distributed.topology import Topology, default_label
from aorta.errors import ConfigError, FolderNotEmpty, PeerFailed, TraceExists, TracesIncomplete
from aorta.profiling.profiler_plan import (
    Counters,
    ProfilerPlan,
    TraceProcess,
    coordinate_of,
    export_disabled,
    placed,
)
from aorta.profiling.trace_saver import Moment
from aorta.profiling.upload import Destination, destination
from aorta.profiling.window_recording import NullProfiler, WindowRecording, open_profiler
from aorta.recording.rank_process import meet
from aorta.recording.trace_accounts import NOTHING, Account, account, files_of, missing_traces, publish, saved_traces

_log = logging.getLogger(__name__)
_SIGNAL_WAIT_S = 20.0
"""Limit after a signal: launchers kill 30 s after it."""
_KEY = "traces"


class LoopProfiler:
    """Profiles windows of steps of one loop, around it or as a callback, whose arguments do not matter. Every rank of
    the process group makes one, and uses it alike.

        with profiler:                          profiler.start()
            for batch in data:                  fit(model, on_step_end=profiler)
                ...                             profiler.close()
                profiler.step()

    Args:
        settings: the profiling group.
        folder: of traces where `settings.folder` is None.
        root: what a relative `settings.folder` is relative to.
        run_name: for templates; None: the platform.
        mesh: gives the coordinate in names.
        counters: converts steps to epochs and samples.
        timeout_s: how long a rank waits for the others to begin.

    Raises:
        ValueError: the schedule is impossible.
        ConfigError: a setting is not allowed.
    """

    def __init__(
        self,
        settings: Profiling,
        *,
        folder: Path | None = None,
        root: Path = Path(),
        run_name: str | None = None,
        mesh: DeviceMesh | None = None,
        counters: Counters | None = None,
        timeout_s: float = Training().timeout_s,
    ) -> None:
        self.settings, self._folder, self._root, self._mesh = settings, folder, root, mesh
        self._counters, self._timeout_s = counters or Counters(), timeout_s
        # Unchecked, torch built for CUDA names a device that this machine may not have.
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self._run_name = run_name or default_label(device)
        ProfilerPlan(replace(settings, enabled=False), TraceProcess(self._run_name), Path(), counters=self._counters)
        refuse_broken(settings, 1)
        self._topology: Topology | None = None
        self._peers: Peers | None = None
        self._recording: WindowRecording | NullProfiler = NullProfiler()
        self._trace_remote: Destination | None = None
        self._memory_remote: Destination | None = None
        self._accounts: list[Account] | None = None

    def start(self, start_step: int = 0) -> WindowRecording | NullProfiler:
        """Begin before global step `start_step`. Collective.

        Raises:
            ConfigError: on every rank, when any rank cannot profile; names it.
            PeerFailed: another rank did not call it.
        """
        topology, peers = meet(self._timeout_s, f"aorta.{type(self).__name__}")
        self.check(topology, peers, resuming=start_step > 0)
        recording = self.begin(start_step)
        recording.__enter__()
        return recording

    def step(self) -> None:
        """Call it once at the end of every step.

        Raises:
            ConfigError: it has not been started.
        """
        self._joined()
        self._recording.step()

    def __call__(self, *_: object, **__: object) -> None:
        """Call `step`, as a callback: what it is given does not matter."""
        self.step()

    def close(self) -> None:
        """End the last window, and wait until every rank's files are written and uploaded. Collective.

        Raises:
            TracesIncomplete: on every rank, when a file of any rank is missing or not uploaded; names it. A
                `TraceExists`, which is also a `FileExistsError`, where another file has its name.
        """
        self.settle(None)

    @contextmanager
    def open(self, start_step: int = 0) -> Iterator[WindowRecording | NullProfiler]:
        """Start and close around a `with` block, in which `step()` of torch's own profiler is called."""
        with ExitStack() as stack:
            recording = self.start(start_step)
            stack.push(self)
            yield recording

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.abandon(error)

    @property
    def saved_traces(self) -> list[tuple[Moment, list[Path | None]]]:
        """When each window closed, and its trace by the global rank that wrote it; newest last.

        At most `num_traces_to_keep` of them. A path is valid on the node of its rank; None: that rank has none. Until
        `close`, which asks the others, only this rank's own are known.
        """
        accounts = self._accounts
        if accounts is None and self._topology is not None:
            accounts = [NOTHING] * self._topology.world_size
            accounts[self._topology.rank] = account(self._recording, self._topology)
        return [
            (Moment(**moment), [None if path is None else Path(path) for path in paths])
            for moment, paths in saved_traces(accounts or ())
        ]

    def check(self, topology: Topology, peers: Peers, *, resuming: bool) -> None:
        """Check, before anything is touched, folders that must be empty and upload destinations. Collective.

        Args:
            resuming: the folder may hold earlier windows of this run.

        Raises:
            ConfigError: on every rank, when any rank cannot continue; names it.
        """
        self._topology, self._peers, self._accounts = topology, peers, None
        if not self.settings.enabled:
            return
        answer: list[str] | None = None
        try:
            refuse_broken(self.settings, topology.world_size)
            if self._mesh is not None and self._mesh.get_coordinate() is None:
                raise ConfigError(f"not in the mesh {self._mesh}, so its traces have no name")
            folder = self._own_folder()
            if folder is not None and not (self.settings.overwrite or resuming or topology.restart_count):
                must_be_empty(folder)
            self._check_destinations()
        except ConfigError as error:
            answer = [type(error).__name__, str(error)]
        except (OSError, ValueError) as error:  # an unreadable folder: the others must not wait for this rank
            answer = [ConfigError.__name__, f"{type(error).__name__}: {error}"]
        ranks_of: dict[str, list[int]] = {}
        kinds = set()
        for rank, refused in enumerate(peers.gather("profiling", answer)):
            if refused:
                kinds.add(refused[0])
                ranks_of.setdefault(refused[1], []).append(rank)
        if ranks_of:
            kind = FolderNotEmpty if FolderNotEmpty.__name__ in kinds else ConfigError
            raise kind("; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()))

    def facts(self) -> dict[str, Any]:
        """Return its entries of the manifest at the start."""
        return {"chrome_trace_disabled": "rocm"} if self.settings.enabled and export_disabled(self.settings) else {}

    def profiles(self, first_step: int) -> Callable[[int], bool]:
        """Return whether torch.profiler is on, by global step of a loop from `first_step`; `check` comes first."""
        plan = ProfilerPlan(self.settings, self._process(), Path(), counters=self._counters)
        if not plan.selected or not plan.records:
            return lambda _step: False
        schedule = plan.schedule(first_step)
        return lambda step: schedule(step) is not ProfilerAction.NONE

    def begin(
        self,
        first_step: int,
        folder: Path | None = None,
        shape: Mapping[str, int] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> WindowRecording | NullProfiler:
        """Return the profiler of a loop from global step `first_step`, to be entered; `check` comes first.

        Args:
            folder: of the traces, where the settings name none.
            shape: dimension -> size of a mesh that ranks fill in row-major order, without a `mesh`; empty: one
                dimension.
            metadata: further top-level keys of every trace (JSON types).
        """
        process, sizes = self._process(), shape or {}
        coordinate = coordinate_of(process.rank, list(sizes.values()), process.world_size)
        where = self._own_folder() or self._folder or folder
        assert where is not None  # a run gives it here, a loop of one's own at the start
        mesh = self._mesh if self.settings.enabled else None  # which `check` has looked at
        plan = ProfilerPlan(
            self.settings,
            placed(replace(process, coordinate=coordinate), mesh),
            where.absolute(),
            counters=self._counters,
            trace_remote=self._trace_remote,
            memory_remote=self._memory_remote,
            metadata=metadata,
        )
        self._recording = open_profiler(plan, first_step)
        return self._recording

    def settle(self, folder: RunFolder | None, *, stopped: bool = False) -> None:
        """End the last window, wait for every rank's files and uploads, and say what is where. Collective.

        Args:
            folder: of the run, whose `run.json` gets the list.
            stopped: a signal ended the run, so there is little time, and nothing is raised.

        Raises:
            TracesIncomplete: as `close` does.
        """
        if not self.settings.enabled:
            return
        recording, (topology, peers) = self._recording, self._joined()
        recording.close()
        limit_s = _SIGNAL_WAIT_S if stopped else self.settings.upload_wait_s
        end = time.monotonic() + limit_s
        try:
            everyone = gather_when_idle(
                peers,
                _KEY,
                lambda: (
                    isinstance(recording, WindowRecording) and recording.saver.pending > 0 and time.monotonic() < end
                ),
                lambda: account(recording, topology),
            )
        except PeerFailed as error:
            everyone = [NOTHING] * topology.rank + [account(recording, topology)]
            _log.error("profiling: not every rank said where its traces are: %s", error)
        else:
            self._accounts = everyone
            if topology.rank == 0:
                publish(everyone, folder)
        finally:
            # All the time there is has been given: at its own end the recording would wait as long again.
            if isinstance(recording, WindowRecording):
                recording.saver.given_up = True
        missing = missing_traces(everyone)
        if missing and not stopped:
            exists = any(
                (file["error"] or "").startswith(f"{FileExistsError.__name__}: ") for _, file in files_of(everyone)
            )
            raise TraceExists(missing) if exists else TracesIncomplete(missing)

    def abandon(self, error: BaseException) -> None:
        """After the loop failed with `error`, keep what was recorded, without waiting for the other ranks."""
        recording = self._recording
        recording.__exit__(type(error), error, error.__traceback__)
        if isinstance(recording, WindowRecording):
            recording.saver.given_up = True
        if self.settings.enabled and self._peers is not None and self._topology is not None:
            leave_value(self._peers, _KEY, account(self._recording, self._topology))

    def _joined(self) -> tuple[Topology, Peers]:
        if self._topology is None or self._peers is None:
            raise ConfigError(f"aorta.{type(self).__name__}: it has not been started; call start(), or use `with`")
        return self._topology, self._peers

    def _process(self) -> TraceProcess:
        topology, _ = self._joined()
        return TraceProcess(
            self._run_name,
            topology.rank,
            topology.local_rank,
            topology.world_size,
            topology.local_world_size,
            topology.node_rank,
            topology.host,
            topology.pid,
        )

    def _own_folder(self) -> Path | None:
        """Return the configured folder; None for the run's own."""
        if self.settings.folder is None:
            return None
        return Path(self._root, fill(self.settings.folder, self._process().variables())).absolute()

    def _check_destinations(self) -> None:
        """Keep where this rank uploads traces and memory pages; raises ConfigError where it cannot write."""
        settings, process = self.settings, self._process()
        selected = selected_ranks(settings.ranks)
        if selected is not None and process.rank not in selected:
            self._trace_remote = self._memory_remote = None
            return
        root, known, overwrite = settings.remote_root, process.variables(), settings.overwrite
        self._trace_remote = destination(root, settings.remote_file_name, known, overwrite=overwrite)
        self._memory_remote = None
        if settings.memory_filename is not None:
            self._memory_remote = destination(root, settings.memory_remote_file_name, known, overwrite=overwrite)
        remotes = {to.address: to for to in (self._trace_remote, self._memory_remote) if to}
        for remote in remotes.values():
            remote.check(f"rank{process.rank}")


def refuse_broken(settings: Profiling, world_size: int) -> None:
    """Raise ConfigError with the broken rules of the group, if any."""
    if broken := list(profiling_rules(settings, world_size)):
        raise ConfigError("; ".join(broken))


def must_be_empty(folder: Path) -> None:
    """Raise FolderNotEmpty where a folder holds a file; hidden ones do not count, and a missing folder is empty."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            raise FolderNotEmpty(
                f"FileExistsError: {folder} is not empty; {inside} exists. Set profiling.overwrite=true, choose "
                "another profiling.folder, or label the run; in a loop of your own: overwrite=True, folder=... or "
                "run_name=..."
            )
