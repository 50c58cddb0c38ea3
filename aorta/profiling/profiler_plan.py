"""What one rank profiles: which steps the profiler skips, warms up on, keeps and saves after, and which files are made
of each window, here and at an upload destination.

Steps are global and 0-based, so all ranks and attempts of a run agree on them without communication. A file's name is
made of the writing process and the steps in a trace, and follows the tool that its pattern comes from: `step_<N>` and
`{batch}` count finished steps, `iter<a>_<b>` is 1-based and inclusive. The trace itself holds `first_step` and
`last_step`, 0-based. Must not touch the disk, start a profiler, know what is done in a step, or write any of the files
(that is `trace_saver`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerAction

from aorta.config.profiling import RANK_FIELDS, compression_of, fill, selected_ranks, steps_to_wait
from aorta.config.schema import Naming, Profiling
from aorta.errors import ConfigError
from aorta.profiling.trace_saver import Kind, Moment, SavedFile, TraceWindow
from aorta.profiling.upload import Destination, compressed

KEPT: Final = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
"""What is done with the steps that are in a trace."""


@dataclass(frozen=True)
class Schedule:
    """Cycles of `wait`, `warmup` and `active` steps; `repeat` cycles, 0 for unlimited.

    Attributes:
        skip_first: steps skipped before the first cycle.
        steps_per_epoch: restart counting in every epoch of this many steps, whose last one saves if it is kept; None:
            never.
        resumed_at: global step at which the run resumed; within that epoch, `skip_first` counts from there. Without
            epochs it changes nothing: windows lie on the same global steps as in an uninterrupted run.

    Raises:
        ValueError: a number is below its minimum; names all of them.
    """

    wait: int
    warmup: int
    active: int
    repeat: int
    skip_first: int = 0
    steps_per_epoch: int | None = None
    resumed_at: int = 0

    def __post_init__(self) -> None:
        if self.wait < 0 or self.warmup < 0 or self.active < 1 or self.repeat < 0 or self.skip_first < 0:
            raise ValueError(
                f"wait={self.wait}, warmup={self.warmup}, active={self.active}, repeat={self.repeat}, "
                f"skip_first={self.skip_first}: active must be at least 1, the others at least 0"
            )

    @property
    def cycle(self) -> int:
        return self.wait + self.warmup + self.active

    def __call__(self, step: int) -> ProfilerAction:
        """Return the action of 0-based global `step`."""
        in_cycle, left = self._place(step)
        if in_cycle is None or in_cycle < self.wait:
            return ProfilerAction.NONE
        if in_cycle < self.wait + self.warmup:
            # Skip a warm-up if the epoch ends before any step is kept: torch would warn about it.
            return ProfilerAction.WARMUP if in_cycle + left >= self.wait + self.warmup else ProfilerAction.NONE
        return ProfilerAction.RECORD_AND_SAVE if in_cycle == self.cycle - 1 or left == 0 else ProfilerAction.RECORD

    def _place(self, step: int) -> tuple[int | None, int]:
        """Return the position in the cycle (None: before the first or after the last), and steps left in the epoch
        after this one.
        """
        left = self.cycle
        if self.steps_per_epoch is not None:
            epoch, step = divmod(step, self.steps_per_epoch)
            left = self.steps_per_epoch - 1 - step
            if self.resumed_at and epoch == self.resumed_at // self.steps_per_epoch:
                step -= self.resumed_at % self.steps_per_epoch
        step -= self.skip_first
        if step < 0 or (self.repeat and step >= self.cycle * self.repeat):
            return None, left
        return step % self.cycle, left


@dataclass(frozen=True)
class TraceProcess:
    """The writing process. `coordinate` is its position in the device mesh, size-1 dimensions included; None for a
    single process.
    """

    run_name: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    host: str = "localhost"
    pid: int = 0
    coordinate: tuple[int, ...] | None = None

    def variables(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in RANK_FIELDS}


@dataclass(frozen=True)
class Counters:
    """Converts finished steps to epochs, samples (over all ranks) and tokens; None where that is not known."""

    steps_per_epoch: int | None = None
    samples_per_step: int | None = None
    tokens_per_sample: int | None = None

    def at(self, finished: int) -> Moment:
        def product(count: int | None, per_count: int | None) -> int | None:
            return None if count is None or per_count is None else count * per_count

        epoch, batch = 0, finished
        if self.steps_per_epoch and finished:
            epoch, batch = (finished - 1) // self.steps_per_epoch, (finished - 1) % self.steps_per_epoch + 1
        sample, sample_in_epoch = product(finished, self.samples_per_step), product(batch, self.samples_per_step)
        return Moment(
            epoch,
            finished,
            batch,
            sample,
            sample_in_epoch,
            product(sample, self.tokens_per_sample),
            product(sample_in_epoch, self.tokens_per_sample),
        )


def coordinate_of(rank: int, shape: Sequence[int], world_size: int) -> tuple[int, ...] | None:
    """Return the position of `rank` in a mesh that ranks fill in row-major order; None for a single process.

    An empty shape is a mesh of one dimension over all ranks.
    """
    sizes = tuple(shape) or (world_size,)
    if math.prod(sizes) == 1 and world_size == 1:
        return None
    if math.prod(sizes) == 1:
        sizes = (world_size,)  # ranks are independent: only the rank number distinguishes them
    coordinate: list[int] = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        coordinate.insert(0, index)
    return tuple(coordinate)


def template_values(process: TraceProcess, moment: Moment) -> Mapping[str, Any]:
    """Return the variables available in file templates; those of the moment that are not known are left out."""
    known = {name: value for name in Moment.__dataclass_fields__ if (value := getattr(moment, name)) is not None}
    return process.variables() | known


NO_EXPORT: Final = (
    "profiling: no trace is written on ROCm, where exporting has crashed; profiling.chrome_trace_force=true writes "
    "them all the same, and rocprofv3 needs no export (scripts/rocprof_capture.sh)"
)


class ProfilerPlan:
    """The windows of one rank, and the files of each.

    Args:
        settings: the profiling group.
        process: that writes.
        folder: of traces; templates in it use the variables of `process`.
        counters: converts steps to epochs and samples.
        trace_remote, memory_remote: upload destinations.
        metadata: further top-level keys of every trace (JSON types).

    Attributes:
        selected: whether this rank is profiled.
        exports: whether traces are written at all.
        records: whether there is anything to record for: traces, tables, or the allocator's history.

    Raises:
        ValueError: the schedule is impossible.
    """

    def __init__(
        self,
        settings: Profiling,
        process: TraceProcess,
        folder: Path,
        *,
        counters: Counters | None = None,
        trace_remote: Destination | None = None,
        memory_remote: Destination | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings, self.process = settings, process
        self.folder = Path(fill(str(folder), process.variables()))
        self.counters, self.metadata = counters or Counters(), metadata or {}
        self._trace_remote, self._memory_remote = trace_remote, memory_remote
        ranks = selected_ranks(settings.ranks)
        self.selected = settings.enabled and (ranks is None or process.rank in ranks)
        by_tensorboard = settings.naming is Naming.tensorboard
        self.exports = not export_disabled(settings) and (
            not by_tensorboard or settings.tensorboard or settings.chrome_trace
        )
        self.records = self.exports or settings.summary_rows > 0 or bool(settings.memory_filename)
        self.schedule(0)

    def schedule(self, first_step: int) -> Schedule:
        settings = self.settings
        period, warmup, active = settings.period, settings.warmup, settings.active
        chosen = None if settings.per_epoch or settings.wait is not None else period
        if chosen is not None and (warmup < 0 or active < 1 or chosen < warmup + active):
            raise ValueError(
                f"period={period}, warmup={warmup}, active={active}: period must be at least warmup + active, "
                "warmup at least 0 and active at least 1"
            )
        return Schedule(
            steps_to_wait(settings),
            warmup,
            active,
            settings.repeat,
            settings.skip_first,
            self.counters.steps_per_epoch if settings.per_epoch else None,
            first_step,
        )

    def outputs(self, window: TraceWindow) -> Iterator[SavedFile]:
        """Yield the files to be made of a window; the trace itself comes last. Nothing where nothing is exported."""
        if not self.exports:
            return
        settings, process, values = self.settings, self.process, template_values(self.process, window.moment)
        match settings.naming:
            case Naming.mesh:
                where = "-".join(map(str, process.coordinate or ()))
                name = f"rank-{process.rank}-coord-{where}-trace.json" if where else "trace.json"
                path = PurePosixPath(f"step_{window.finished}", name)
            case Naming.rank_iter:
                first = window.finished if window.first_step is None else window.first_step + 1
                last = window.finished if window.last_step is None else window.last_step + 1
                path = PurePosixPath(f"rank{process.rank}_iter{first}_{last}.json")
            case Naming.template:
                path = PurePosixPath(fill(settings.filename, values))
            case Naming.tensorboard:
                name = f"{process.host}_{process.pid}.{time.time_ns()}.pt.trace.json"
                path = PurePosixPath(f"rank{process.rank}", name)
        if settings.memory_filename is not None:
            yield self._output("memory", PurePosixPath(fill(settings.memory_filename, values)), values)
        if settings.chrome_trace and settings.naming is Naming.tensorboard:
            name = settings.trace_filename
            if settings.repeat != 1 or settings.active != 1 or settings.per_epoch:  # more than one window of one step
                stem, dot, suffixes = name.partition(".")
                name = f"{stem}_step{window.finished}{dot}{suffixes}"
            yield self._output("chrome" if settings.tensorboard else "trace", path.with_name(name), values)
        if settings.tensorboard or settings.naming is not Naming.tensorboard:
            compression = compression_of(settings)
            yield self._output("trace", compressed(path, compression), values, compression)

    def snapshot(self, window: TraceWindow) -> SavedFile:
        """Return the file of the allocator's history of the window, beside the memory timeline."""
        values = template_values(self.process, window.moment)
        assert self.settings.memory_filename is not None  # without it no history is recorded
        name = PurePosixPath(fill(self.settings.memory_filename, values))
        return self._output("snapshot", name.with_name(name.name.removesuffix(".html") + ".snapshot.pickle"), values)

    def _output(
        self, kind: Kind, name: PurePosixPath, values: Mapping[str, Any], compression: str = "none"
    ) -> SavedFile:
        to = self._trace_remote if kind in ("trace", "chrome") else self._memory_remote
        remote = to.name(values, name, compression) if to else ""
        if kind == "snapshot":
            remote = remote.removesuffix(".html").removesuffix(".snapshot.pickle") + ".snapshot.pickle"
        return SavedFile(kind, self.folder / name, to, remote)


def placed(process: TraceProcess, mesh: DeviceMesh | None) -> TraceProcess:
    """Return the writing process with its coordinate in `mesh`; without one, in a mesh of one dimension.

    Raises:
        ConfigError: this rank is not in the mesh.
    """
    if mesh is None:
        own = process.coordinate
        return dataclasses.replace(process, coordinate=own or coordinate_of(process.rank, (), process.world_size))
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"rank {process.rank} is not in the mesh {mesh}: there is no name for its traces")
    alone = all(size == 1 for size in mesh.shape) and process.world_size == 1
    return dataclasses.replace(process, coordinate=None if alone else tuple(coordinate))


def export_disabled(settings: Profiling) -> bool:
    """Return whether no trace is exported: on ROCm exporting has crashed, and every file of torch.profiler is the same
    export in Chrome format, whatever its name.
    """
    return torch.version.hip is not None and not settings.chrome_trace_force
