"""Why a rank is late or a side slower, from steps whose parts were written down by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.findings import add_reasons, because, rank_times, slower_side
from aorta.documents.comparison import Comparison
from aorta.read.record import load_run
from aorta.records.schema import AuxRange, ComputeRange
from tests.analysis import by_json
from tests.analysis.builders import MS, collective, footer, header, metrics, step, write_rank

LATE = 1


def record(folder: Path, late_ms: float, where: str) -> LabelledRun:
    """Three ranks whose all-reduce ends at 80 ms; rank 1 arrives late, for something that takes longer in its step."""
    folder.mkdir(exist_ok=True)
    for rank in range(3):
        late = late_ms if rank == LATE else 0.0
        longer = {name: late if name == where else 0.0 for name in ("forward", "idle", "data", "backward")}
        at = 0.0
        parts: list[tuple[str, float, float]] = []
        for name, length in (("data", 2.0), ("forward", 10.0), ("backward", 10.0)):
            parts.append((name, at, at + length + longer[name]))
            at = parts[-1][2]
        at += longer["idle"] + (late if where == "unseen" else 0.0)
        own = {name: end - start for name, start, end in parts}
        values = metrics(90.0, own["forward"] + own["backward"], 80.0 - at, 0.0) | {
            "aux_ms": own["data"] + 2.0,
            "idle_ms": 8.0 + longer["idle"],
            "compute_stall_ms": 80.0 - at,
        }
        ranges = {
            "compute": [ComputeRange("layer", n, round(a * MS), round(b * MS)) for n, a, b in parts if n != "data"],
            "aux": [
                AuxRange("data", 0, round(parts[0][2] * MS)),
                AuxRange("optimizer", 80 * MS, 82 * MS),
            ],
        }
        lines = [
            step(rank, 3, n, overlap=values, collectives=[collective("allreduce", n, at, 80.0, group="g")], **ranges)
            for n in range(20)
        ]
        write_rank(folder, header(rank, 3), lines, footer(20, 3, groups={"g": [0, 1, 2]}))
    return LabelledRun("x", load_run(folder))


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("idle", "rank 1 idles 28 ms more a step between backward and optimizer: code outside timed blocks"),
        ("data", "rank 1 spends 28 ms more a step in data"),
        ("backward", "rank 1 computes 28 ms more a step, most of it in backward of layer"),
    ],
)
def test_a_straggler_is_explained_by_what_it_does_longer(tmp_path: Path, where: str, said: str) -> None:
    dataset = record(tmp_path, 28.0, where)
    entry = aggregate(dataset)
    add_reasons(dataset, entry)
    (straggler,) = entry.stragglers
    assert (straggler.rank, straggler.because) == (LATE, said)
    assert [row.rank for row in entry.rank_times] == [0, 1, 2]
    assert entry.rank_times[0].exposed_ms == pytest.approx(58.0)
    assert entry.rank_times[1].compute_stall_ms == pytest.approx(30.0)


def test_what_no_part_of_the_step_explains_is_not_explained(tmp_path: Path) -> None:
    dataset = record(tmp_path / "unseen", 28.0, "unseen")
    entry = aggregate(dataset)
    assert entry.stragglers[0].rank == LATE
    assert because(dataset.run, entry.stragglers[0], rank_times(dataset.run)) is None
    nobody = record(tmp_path / "nobody", 0.0, "idle")
    (straggler,) = aggregate(nobody).stragglers
    assert straggler.rank is None
    assert because(nobody.run, straggler, rank_times(nobody.run)) is None


def compared(verdict: str | None, **changes: float) -> Comparison:
    metrics: dict[str, Any] = {name: {"difference": change, "unit": "ms"} for name, change in changes.items()}
    metrics["job_step_ms"] |= {"verdict": verdict}
    return by_json.built(Comparison, {"metrics": metrics, "launches": {}})


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            compared("regression", job_step_ms=42.0, exposed_comm_ms=43.3, compute_ms=2.0),
            "the step takes 42 ms longer, exposed communication +43.3 ms a rank",
        ),
        (
            compared("improvement", job_step_ms=-20.0, exposed_comm_ms=5.0, compute_ms=-18.0, idle_ms=-1.0),
            "the step takes 20 ms less, computation -18 ms a rank",
        ),
        (compared("regression", job_step_ms=42.0, exposed_comm_ms=10.0, compute_ms=12.0, idle_ms=11.0), None),
        (compared("inconclusive", job_step_ms=42.0, exposed_comm_ms=43.3), None),
    ],
)
def test_a_slower_side_is_explained_by_the_part_that_makes_up_most(found: Comparison, said: str | None) -> None:
    assert slower_side(found) == said


def test_ranks_of_which_nothing_is_known_have_no_times(tmp_path: Path) -> None:
    unknown = metrics(10, 5, 2, 1) | dict.fromkeys(("compute_ms", "idle_ms", "exposed_comm_ms"))
    write_rank(tmp_path, header(), [step(overlap=unknown)])
    (row,) = rank_times(load_run(tmp_path))
    assert (row.compute_ms, row.idle_ms, row.exposed_ms, row.aux_ms) == (None, None, None, 0.0)
