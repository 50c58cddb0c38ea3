"""Records with blocks, collectives and stalls whose exposed time is known by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution import COMPUTING, break_down, totals_of
from aorta.documents.explanations import ExposedBreakdown
from aorta.read.record import load_run
from aorta.records.schema import AuxRange, Collective, ComputeRange, Coverage, Stall, Step
from tests.analysis.builders import MS, footer, header, step, write_manifest, write_rank
from tests.windows import measure_window


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
    *,
    warmup: bool = False,
) -> Step:
    """A step whose metrics are measured by the recorder's own definition."""
    stalled = [(ns(start), ns(end)) for start, end in stalls]
    beside = [AuxRange(name, ns(start), ns(end)) for name, start, end in aux]
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for row in collectives:
        by_kind.setdefault(row.kind, []).append((row.start_ns or 0, row.end_ns or 0))
    values, reasons = measure_window(
        (0, ns(length_ms)),
        compute=[(part.start_ns, part.end_ns) for part in blocks],
        comm=by_kind,
        stalls=stalled,
        aux=[(part.start_ns, part.end_ns) for part in beside],
    ).metrics()
    return step(
        rank,
        world_size,
        number,
        overlap=values,
        reasons=reasons,
        warmup=warmup,
        coverage=Coverage(len(collectives), len(collectives), True),
        collectives=list(collectives),
        compute=list(blocks),
        stalls=[Stall(start, end) for start, end in stalled],
        aux=beside,
    )


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
    world_size = max(2, len(ranks))
    folder.mkdir(parents=True, exist_ok=True)
    for rank, steps in enumerate(ranks):
        head = header(rank, world_size, label=label, run_id=f"run-{folder.name}", parallel=parallel)
        foot = footer(len(steps), groups={"0": list(range(len(ranks)))} if groups is None else groups[rank])
        write_rank(folder, head, [replace(each, world_size=world_size) for each in steps], foot)
    write_manifest(folder, run_id=f"run-{folder.name}", world_size=world_size)
    return LabelledRun(label, load_run(folder))


def attributed(reference: LabelledRun, candidate: LabelledRun) -> ExposedBreakdown:
    """Where the exposed communication of two runs differs; every way of breaking it down adds up to the whole."""
    found = break_down([totals_of(candidate)], [totals_of(reference)])
    exact(found)
    return found


def exact(found: ExposedBreakdown) -> None:
    """Every way of breaking down adds up to the whole."""
    for name, rows in found.dimensions.items():
        if name == COMPUTING:
            continue
        for of_row, whole in (("ms", "exposed_ms"), ("reference_ms", "reference_ms"), ("difference_ms",) * 2):
            total = sum(getattr(row, of_row) for row in rows)
            assert total == pytest.approx(getattr(found, whole), abs=1e-9), name
        if found.difference_ms:
            assert sum(row.share or 0 for row in rows) == pytest.approx(1)
