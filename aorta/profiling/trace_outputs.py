"""Decides which files are made of a profiler window, locally and remotely.

Must not write any of them (that is `trace_saver`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from aorta.config.groups.profiling import compression_of
from aorta.config.schema import Naming, Profiling
from aorta.config.templates import fill
from aorta.profiling.destinations import Destination
from aorta.profiling.trace_names import (
    Counters,
    TracePlace,
    TraceWindow,
    chrome_name,
    compressed,
    snapshot_name,
    template_values,
    trace_path,
)
from aorta.profiling.trace_saver import Kind, SavedOutput

SNAPSHOT_DIR = "memory_snapshots"


@dataclass(frozen=True)
class Recipe:
    """Everything that a window's files depend on besides the window.

    Attributes:
        settings: the profiling group.
        place: the writing process.
        folder: of traces, with templates filled in.
        counters: converts steps to epochs and samples.
        exports: whether traces are written at all.
        trace_remote, memory_remote: upload destinations.
    """

    settings: Profiling
    place: TracePlace
    folder: Path
    counters: Counters
    exports: bool = True
    trace_remote: Destination | None = None
    memory_remote: Destination | None = None

    def outputs(self, window: TraceWindow) -> Iterator[SavedOutput]:
        """The files to be made of a window; the trace itself comes last. None where nothing is exported."""
        if not self.exports:
            return
        settings, values = self.settings, template_values(self.place, window.moment)
        compression = compression_of(settings)
        path = trace_path(settings.naming, self.place, window, settings.filename)
        if settings.memory_filename is not None:
            yield self._output("memory", PurePosixPath(fill(settings.memory_filename, values)), values)
        if settings.chrome_trace and settings.naming is Naming.tensorboard:
            only_one = settings.repeat == 1 and settings.active == 1 and not settings.per_epoch
            name = path.with_name(chrome_name(settings.trace_filename, window, only_one=only_one))
            yield self._output("chrome" if settings.tensorboard else "trace", name, values)
        if settings.tensorboard or settings.naming is not Naming.tensorboard:
            yield self._output("trace", compressed(path, compression), values, compression)

    def snapshot(self, window: TraceWindow) -> SavedOutput:
        """The file of the allocator's history of the window, beside the memory timeline."""
        values = template_values(self.place, window.moment)
        assert self.settings.memory_filename is not None  # without it no history is recorded
        name = PurePosixPath(fill(self.settings.memory_filename, values))
        return self._output("snapshot", name.with_name(name.name.removesuffix(".html") + ".snapshot.pickle"), values)

    def tagged_snapshot(self, tag: str) -> Path:
        """The file of a memory snapshot that belongs to no window."""
        return self.folder / SNAPSHOT_DIR / snapshot_name(self.place, tag)

    def _output(
        self, kind: Kind, name: PurePosixPath, values: Mapping[str, Any], compression: str = "none"
    ) -> SavedOutput:
        to = self.trace_remote if kind in ("trace", "chrome") else self.memory_remote
        remote = to.name(values, name, compression) if to else ""
        if kind == "snapshot":
            remote = remote.removesuffix(".html").removesuffix(".snapshot.pickle") + ".snapshot.pickle"
        return SavedOutput(kind, self.folder / name, to, remote)
