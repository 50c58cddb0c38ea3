"""Creates the torch.profiler of a rank, for every schedule and naming.

From the settings, the writing process and a folder, `ProfilerPlan.open` gives a `WindowRecording` of torch.profiler, or
a profiler that does nothing. Must not touch the disk, or start anything, before `open`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from aorta.config.groups.profiling import selected_ranks, steps_to_wait
from aorta.config.schema import Naming, Profiling
from aorta.config.templates import fill
from aorta.errors import ConfigError
from aorta.profiling.destinations import Destination
from aorta.profiling.schedule import Schedule
from aorta.profiling.trace_names import Counters, TracePlace, coordinate_of
from aorta.profiling.trace_outputs import Recipe
from aorta.profiling.window_recording import WindowRecording

_log = logging.getLogger(__name__)


class NullProfiler:
    """The profiler of a rank that is not profiled."""

    files: tuple[Path, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def iteration(self, global_step: int) -> AbstractContextManager[Any]:  # noqa: ARG002  as WindowRecording's
        """No-op."""
        return nullcontext()

    def step(self) -> None:
        """No-op."""

    def memory_snapshot(self, tag: str) -> Path | None:  # noqa: ARG002  as WindowRecording's
        """No-op."""
        return None

    def close(self, *, failed: bool = False) -> None:
        """No-op."""


NO_EXPORT: Final = (
    "profiling: no trace is written on ROCm, where exporting has crashed; profiling.chrome_trace_force=true writes "
    "them all the same, and rocprofv3 needs no export (scripts/rocprof_capture.sh)"
)


class ProfilerPlan:
    """What one rank profiles and where its traces go; nothing is touched before `open`.

    Args:
        settings: the profiling group.
        place: the writing process.
        folder: of traces; templates in it use the variables of `place`.
        mesh: gives the coordinate in names; without one, `place` does.
        counters: converts steps to epochs and samples.
        trace_remote, memory_remote: upload destinations.
        metadata: further top-level keys of every trace (JSON types).

    Raises:
        ValueError: the schedule is impossible.
    """

    def __init__(
        self,
        settings: Profiling,
        place: TracePlace,
        folder: Path,
        *,
        mesh: DeviceMesh | None = None,
        counters: Counters | None = None,
        trace_remote: Destination | None = None,
        memory_remote: Destination | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings, self.place, self.mesh = settings, place, mesh
        self.folder = Path(fill(str(folder), place.variables()))
        self.counters = counters or Counters()
        self.trace_remote, self.memory_remote = trace_remote, memory_remote
        self.metadata = metadata or {}
        selected = selected_ranks(settings.ranks)
        self.selected = settings.enabled and (selected is None or place.rank in selected)
        exports = not export_disabled(settings)
        if self.selected and not exports:
            _log.warning(NO_EXPORT)
        by_tensorboard = settings.naming is Naming.tensorboard
        self.exports = exports and (not by_tensorboard or settings.tensorboard or settings.chrome_trace)
        self.records = (
            self.exports or settings.summary_rows > 0 or bool(settings.memory_filename) or settings.oom_snapshot
        )
        self.schedule(0)

    def schedule(self, first_step: int) -> Schedule:
        """The schedule of a loop that begins at global step `first_step`."""
        settings = self.settings
        if settings.wait is None and settings.period is not None and not settings.per_epoch:
            Schedule.periodic(settings.period, settings.warmup, settings.active)  # for its error message
        return Schedule(
            steps_to_wait(settings),
            settings.warmup,
            settings.active,
            settings.repeat,
            settings.skip_first,
            self.counters.steps_per_epoch if settings.per_epoch else None,
            first_step,
        )

    def open(self, first_step: int = 0) -> WindowRecording | NullProfiler:
        """The profiler of a loop that begins at global step `first_step`, for a `with` block.

        Raises:
            ConfigError: this rank is not in the mesh.
        """
        if not self.selected or not self.records:
            return NullProfiler()
        place = self.place
        if self.mesh is not None:
            here = self.mesh.get_coordinate()
            if here is None:
                raise ConfigError(f"rank {place.rank} is not in the mesh {self.mesh}: there is no name for its traces")
            alone = all(size == 1 for size in self.mesh.shape) and place.world_size == 1
            names = tuple(self.mesh.mesh_dim_names or ())
            place = dataclasses.replace(place, coordinate=None if alone else tuple(here), dimensions=names)
        elif place.coordinate is None:
            place = dataclasses.replace(place, coordinate=coordinate_of(place.rank, (), place.world_size))
        try:
            recipe = Recipe(
                self.settings, place, self.folder, self.counters, self.exports, self.trace_remote, self.memory_remote
            )
            return WindowRecording(recipe, self.schedule(first_step), first_step, self.metadata)
        except Exception as error:  # noqa: BLE001  a missing prerequisite of the profiler must not stop the record
            _log.error("profiling: torch.profiler failed to start and is left out from here on: %s", error)
            return NullProfiler()


def export_disabled(settings: Profiling) -> bool:
    """Whether no trace is exported: on ROCm exporting has crashed, and every file of torch.profiler is the same export
    in Chrome format, whatever its name.
    """
    return torch.version.hip is not None and not settings.chrome_trace_force
