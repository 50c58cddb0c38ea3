"""A small loop under a real torch.profiler, and what can be read back from its traces."""

from __future__ import annotations

import gzip
import json
import logging
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from aorta.config.schema import GROUPS, Profiling
from aorta.profiling.profiler_plan import Counters, ProfilerPlan, TraceProcess, placed
from aorta.profiling.window_recording import NullProfiler, WindowRecording, open_profiler

HERE = TraceProcess("run", host="node7", pid=42)


FLAGS = {"record_shapes": True, "profile_memory": True, "with_stack": True}
"""What a page of memory, and a snapshot of a window, need."""
TWELVE = {
    "folder": "{run_name}/torch_traces",
    "filename": "rank{rank}.{batch}.pt.trace.json",
    "remote_file_name": "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json",
    "memory_filename": None,
    "memory_remote_file_name": "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.trace.memory.html",
    "overwrite": False,
    "use_gzip": False,
    "record_shapes": False,
    "profile_memory": True,
    "with_stack": False,
    "with_flops": True,
    "num_traces_to_keep": -1,
}
"""Defaults of the callback that writes traces by templates (row E1)."""


def preset(name: str, **settings: Any) -> Profiling:
    """An option of the profiling group, switched on."""
    made: Profiling = GROUPS["profiling"][name](**{"enabled": True} | settings)
    return made


def loop(
    folder: Path, settings: Profiling, stop: int, first: int = 0, *, fail_in: int | None = None, **of: Any
) -> WindowRecording | NullProfiler:
    """Steps `first` to `stop` of a loop; gives the closed profiler."""
    of.setdefault("counters", Counters(steps_per_epoch=100, samples_per_step=4, tokens_per_sample=10))
    place = placed(of.pop("place", HERE), of.pop("mesh", None))
    with open_profiler(ProfilerPlan(settings, place, folder, **of), first) as profiler:
        for step in range(first, stop):
            with profiler.iteration(step):
                torch.ones(8, 8) @ torch.ones(8, 8)
                if step == fail_in:
                    raise ZeroDivisionError
            profiler.step()
    return profiler


@contextmanager
def listening(to: str = "aorta.profiling") -> Iterator[list[str]]:
    """What a logger and those below it say, from INFO."""
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(to)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def read(path: Path) -> Any:
    """A trace, however it is packed."""
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as archive:
            (member,) = archive.getmembers()
            assert member.isreg()
            return json.loads(archive.extractfile(member).read())
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def numbers(trace: dict[str, Any], mark: str = "ProfilerStep#") -> list[int]:
    """Numbers of the steps that ran inside a trace, by torch's own mark or by ours (`iteration#`)."""
    names = {event.get("name", "") for event in trace["traceEvents"]}
    return sorted(int(name.partition("#")[2]) for name in names if name.startswith(mark))


def steps_in(path: Path) -> list[int]:
    """Global steps whose `iteration#<n>` is in the trace at `path`."""
    return numbers(read(path), "iteration#")


def files_below(folder: Path) -> list[str]:
    """Every file, as a path below `folder`."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
