"""Runs written and read back; among them those whose host sets the pace, with steps that marks decide, steps that they
leave open, and steps measured by kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from aorta.analysis.account import account_of
from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.findings import explain
from aorta.documents.dataset import DatasetEntry
from aorta.read.record import load_run
from aorta.records.schema import AuxRange, Calibration, Collective, ComputeRange, Stall, Step
from tests.analysis.builders import (
    MS,
    footer,
    header,
    measured_step,
    metrics,
    partial,
    step,
    write_manifest,
    write_rank,
)


def recorded(
    folder: Path,
    of_rank: Callable[[int], Iterable[Step]],
    ranks: int = 1,
    world: int | None = None,
    label: str = "x",
    manifest: dict[str, Any] | None = None,
    groups: Sequence[dict[str, list[int]] | None] | None = None,
    **head: Any,
) -> LabelledRun:
    """A run: the steps of each rank, of a world of so many ranks or more, with what is told for its manifest, or none.
    `groups`: of each rank; None for one that was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        lines = list(of_rank(rank))
        of_rank_groups = {"world": [*range(world or ranks)]} if groups is None else groups[rank]
        foot = None if of_rank_groups is None else footer(len(lines), groups=of_rank_groups)
        write_rank(folder, header(rank, world or ranks, label=label, **head), lines, foot)
    if manifest is not None:
        write_manifest(folder, **manifest)
    return LabelledRun(label, load_run(folder))


OPEN = ("compute_ms", "compute_comm_ms", "exposed_comm_ms", "overlap_ratio", "exposed_share")
WINDOW, COMM = 20.0, 8.0


def decided(rank: int, number: int, hidden: float = 6.0, **changes: Any) -> Step:
    """A step whose marks say all: the host is 4 ms ahead."""
    values = metrics(WINDOW, 16, COMM, hidden, host_lead_ms=4.0, undecided_share=0.0)
    return step(rank, 2, number, overlap=values, **changes)


def undecided(rank: int, number: int, low: float = 2.0, high: float = 6.0, **changes: Any) -> Step:
    """A step in which `low` to `high` of 8 ms of communication are hidden, and 8 to 16 ms are computation."""
    values = metrics(WINDOW, 16, COMM, high, host_lead_ms=0.01, undecided_share=0.5)
    bounds = {
        "compute_ms": (8.0, 16.0),
        "compute_comm_ms": (low, high),
        "exposed_comm_ms": (COMM - high, COMM - low),
        "overlap_ratio": (low / COMM, high / COMM),
        "exposed_share": ((COMM - high) / WINDOW, (COMM - low) / WINDOW),
        "comm_ms": (COMM, COMM),
    }
    reasons = {name: f"host-bound: between {bounds[name]}, in step {number}" for name in OPEN}
    return step(rank, 2, number, overlap=values | dict.fromkeys(OPEN), bounds=bounds, reasons=reasons, **changes)


def by_kernels(rank: int, number: int, hidden: float = 3.0, *, window: float = WINDOW) -> Step:
    values = metrics(window, 10, COMM, hidden, host_lead_ms=0.01, undecided_share=0.5)
    return step(rank, 2, number, overlap=values, measured_by="kernels")


def calibration(kernels: float | None, marks: float | None, **changes: Any) -> Calibration:
    steps = {"first_step": 2, "last_step": 4, "steps": 3, "window_step_ms": WINDOW, "other_step_ms": WINDOW}
    return partial(Calibration, ratio_by_kernels=kernels, ratio_by_marks=marks, setup_ms=1.0, **steps | changes)


def write(
    folder: Path,
    of_rank: Callable[[int, int], Step],
    *,
    ranks: int = 2,
    calibrated: Calibration | None = None,
    run: str = "run-1",
    **more: Any,
) -> Path:
    """A run: 40 steps a rank by `of_rank(rank, number)`, the first two of them warm-up."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {"platform": "cuda", "timer": "cuda_event", "warmup_steps": 2, "run_id": run, **more}
    for rank in range(ranks):
        lines: list[Any] = [of_rank(rank, number) for number in range(40)]
        lines = [msgspec.structs.replace(line, warmup=number < 2) for number, line in enumerate(lines)]
        if calibrated is not None:
            lines.insert(5, calibrated)
        write_rank(folder, header(rank, ranks, **head), lines, foot=footer(40, ranks))
    write_manifest(folder, run_id=run, world_size=ranks, platform="cuda")
    return folder


def entry(folder: Path) -> DatasetEntry:
    return aggregate(LabelledRun("x", load_run(folder)))


def in_window(number: int) -> bool:
    return 2 <= number < 5


def calibrated(rank: int, number: int) -> Step:
    """Steps that marks leave open, behind three that kernels measured."""
    return by_kernels(rank, number) if in_window(number) else undecided(rank, number)


# --- steps with blocks, collectives and stalls whose exposed time is known by hand


def ns(value_ms: float) -> int:
    return round(value_ms * MS)


def block(name: str, phase: str, start_ms: float, end_ms: float) -> ComputeRange:
    return ComputeRange(name, phase, ns(start_ms), ns(end_ms))


def comm(
    kind: str, start_ms: float, end_ms: float, size: int = 1_000_000, seq: int = 0, group: str = "0"
) -> Collective:
    return Collective(kind, group, seq, size, "float32", ns(start_ms), ns(start_ms), ns(end_ms), "future")


def made_step(
    rank: int,
    world_size: int,
    number: int,
    length_ms: float,
    blocks: Sequence[ComputeRange],
    collectives: Sequence[Collective],
    stalls: Sequence[tuple[float, float]] = (),
    aux: Sequence[tuple[str, float, float]] = (),
    **changes: Any,
) -> Step:
    """A measured step, in milliseconds."""
    stalled = [Stall(ns(start), ns(end)) for start, end in stalls]
    beside = [AuxRange(name, ns(start), ns(end)) for name, start, end in aux]
    return measured_step(rank, world_size, number, ns(length_ms), blocks, collectives, stalled, beside, **changes)


def dataset(
    folder: Path,
    label: str,
    ranks: Sequence[Sequence[Step]],
    parallel: str = "fsdp",
    groups: Sequence[dict[str, list[int]]] | None = None,
) -> LabelledRun:
    """A run whose group "0" has all ranks; `groups`: of each rank, other groups. One rank is the first of a world of
    two, as a world of one exposes nothing.
    """
    world_size, run = max(2, len(ranks)), f"run-{folder.name}"
    lines = [[replace(line, world_size=world_size) for line in steps] for steps in ranks]
    feet = groups or [{"0": list(range(len(ranks)))}] * len(ranks)
    more = {"manifest": {"run_id": run, "world_size": world_size}, "groups": feet}
    return recorded(folder, lines.__getitem__, len(ranks), world_size, label, **more, run_id=run, parallel=parallel)


def explained_entry(dataset: LabelledRun) -> DatasetEntry:
    entry = aggregate(dataset)
    explain(dataset, entry, account_of(dataset))
    return entry
