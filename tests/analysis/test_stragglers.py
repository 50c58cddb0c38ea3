"""Who holds the others up (K3): from records written by hand, and the rule on generated steps."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import rankdata, wilcoxon

from aorta.analysis.account import account_of
from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.findings import explain
from aorta.analysis.stragglers import Cost, behind_others, later_than, name_stragglers, straggler_sentences
from aorta.documents.dataset import DatasetEntry
from aorta.read.record import load_run
from aorta.records.schema import AuxRange, ComputeRange
from tests.analysis.builders import MS, collective, footer, header, metrics, step, write_rank

LATE = 1
RANKS = 3


def explained(
    folder: Path, late_ms: float, where: str = "idle", steps: int = 20, end_source: str = "future"
) -> DatasetEntry:
    """Three ranks whose all-reduce ends at 80 ms; rank 1 arrives late, for something that takes longer in its step."""
    for rank in range(RANKS):
        late = late_ms if rank == LATE else 0.0
        at, parts = 0.0, list[tuple[str, float, float]]()
        for name, length in (("data", 2.0), ("forward", 10.0), ("idle", 1.0), ("backward", 10.0)):
            length += late if name == where else 0.0
            if name != "idle":
                parts.append((name, at, at + length))
            at += length
        own = {name: end - start for name, start, end in parts}
        values = metrics(90.0, own["forward"] + own["backward"], 80.0 - at, 0.0)
        ranges = {
            "compute": [ComputeRange("layer", n, round(a * MS), round(b * MS)) for n, a, b in parts if n != "data"],
            "aux": [AuxRange("data", 0, round(parts[0][2] * MS)), AuxRange("optimizer", 80 * MS, 82 * MS)],
        }
        lines = [
            step(
                rank,
                RANKS,
                number,
                overlap=values,
                collectives=[collective("allreduce", number, at, 80.0, group="g", end_source=end_source)],
                **ranges,
            )
            for number in range(steps)
        ]
        write_rank(folder, header(rank, RANKS), lines, footer(steps, RANKS, groups={"g": [0, 1, 2]}))
    dataset = LabelledRun("x", load_run(folder, exposed=True))
    entry = aggregate(dataset)
    explain(dataset, entry, account_of(dataset))
    return entry


@pytest.mark.parametrize(
    ("where", "because"),
    [
        ("idle", "idle between forward and backward (outside timed blocks), 28 ms a step more than the others"),
        ("data", "waiting for the DataLoader, 28 ms a step more than the others"),
        ("backward", "backward computation, 28 ms a step more than the others"),
    ],
)
def test_a_late_rank_is_named_with_what_it_does_longer(tmp_path: Path, where: str, because: str) -> None:
    entry = explained(tmp_path, 28.0, where)
    (straggler,) = entry.stragglers.ranks
    assert (straggler.rank, straggler.because) == (LATE, because)
    assert (straggler.late_ms, straggler.cost_ms) == (pytest.approx(28.0), pytest.approx(28.0))
    assert straggler_sentences(entry.stragglers)[0] == f"rank 1 holds the others up 28 ms a step: {because}"
    assert [row.step_ms for row in entry.rank_times] == [pytest.approx(90.0)] * RANKS
    for row in entry.rank_times:
        parts = row.computation_ms + row.exposed_ms + row.outside_ms + row.idle_ms
        assert parts == pytest.approx(row.step_ms)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"late_ms": 0.0}, "no rank is late by more than"),
        ({"late_ms": 1.5}, "late by more than 1.8 ms"),  # 2 % of 90 ms
        ({"late_ms": 28.0, "steps": 15}, "15 steps on all ranks, 16 are needed"),
        ({"late_ms": 28.0, "end_source": "wait"}, "who waited is not known in "),
    ],
    ids=["even", "below 2 % of the step", "few steps", "ends that the caller saw"],
)
def test_without_evidence_nobody_is_named(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    found = explained(tmp_path, **changes).stragglers  # type: ignore[arg-type]
    assert not found.ranks
    assert reason in str(found.reason)


def test_a_rank_that_computes_longer_is_said_to(tmp_path: Path) -> None:
    assert "rank 1 computes 31 % of the step longer" in str(explained(tmp_path, 28.0, "backward").stragglers.uneven)
    assert explained(tmp_path / "data", 28.0, "data").stragglers.uneven is None


@pytest.mark.parametrize(
    ("late", "busy", "uneven"),
    [
        ({}, {0: 20.0, 1: 23.0, 2: 20.0}, None),  # nobody is named, and 5 ms would have to be
        ({}, {0: 20.0, 1: 26.0, 2: 20.0}, "rank 1 computes 6 %"),
        ({1: 30.0}, {0: 20.0, 1: 23.0, 2: 20.0}, "rank 1 computes 3 %"),
        ({1: 30.0}, {0: 20.0, 1: 21.0, 2: 20.0}, None),
        ({1: 30.0}, {0: 20.0, 1: 28.0, 2: 29.0}, "rank 1 computes 4 %"),  # the one that is named
    ],
)
def test_a_named_rank_is_said_to_compute_longer_from_the_same_share_on(
    late: dict[int, float], busy: dict[int, float], uneven: str | None
) -> None:
    values = np.zeros((STEPS, 3))
    for rank, late_ms in late.items():
        values[:, rank] = late_ms
    found = name_stragglers(range(3), values, Cost(np.zeros_like(values), 0.0), 0.2, busy, STEP_MS)
    assert {each.rank for each in found.ranks} == set(late)
    assert (found.uneven or "").partition(" of the step")[0] == (uneven or "")


STEPS, STEP_MS = 40, 100.0


def ruled(late: np.ndarray, cost: np.ndarray) -> set[int]:
    return {each.rank for each in name_stragglers(range(late.shape[1]), late, Cost(cost, 0.0), 0.2, {}, STEP_MS).ranks}


@given(st.integers(2, 8), st.integers(0, 10**6))
def test_a_planted_rank_is_named_and_no_other(ranks: int, seed: int) -> None:
    """Waits vary by 5 ms from step to step; rank 0 comes 15 ms after the others, or nobody does."""
    draw = np.random.default_rng(seed)
    waits = draw.exponential(5.0, (STEPS, ranks))
    late = waits.copy()
    late[:, 1:] += 15.0
    assert ruled(behind_others(late), np.zeros_like(late)) == {0}
    assert ruled(np.full_like(late, np.nan), behind_others(late)) == {0}
    assert ruled(behind_others(waits), behind_others(draw.permuted(waits, axis=1))) <= set()


def test_where_both_ways_name_different_ranks_nobody_is_named() -> None:
    one, other = np.zeros((STEPS, 3)), np.zeros((STEPS, 3))
    one[:, 0], other[:, 1] = 30.0, 30.0
    found = name_stragglers(range(3), one, Cost(other, 0.0), 0.2, {}, STEP_MS)
    assert not found.ranks
    assert found.reason == "rank 0 comes last to the first collective, rank 1 waits least over the step"
    assert ruled(one, one) == {0}


@given(
    st.lists(st.integers(-50, 50).map(float), min_size=1, max_size=10)
    | st.lists(st.integers(-50, 50).map(float), min_size=70, max_size=150),
    st.sampled_from([0.0, 2.0]),
    st.floats(1e-4, 0.2),
)
def test_later_is_what_the_signed_rank_test_and_the_median_say(values: list[float], least: float, level: float) -> None:
    beyond = np.array(values) - least
    beyond = beyond[beyond != 0]
    p = 1.0
    if len(beyond) > 10:
        p = wilcoxon(beyond, alternative="greater", method="asymptotic").pvalue
    elif len(beyond):
        ranks = rankdata(np.abs(beyond))
        signs = np.array(list(product((0, 1), repeat=len(beyond))))
        p = float(np.mean(signs @ ranks >= ranks[beyond > 0].sum()))
    assume(abs(p - level) > 1e-9)
    assert later_than(np.array(values), least, level) == (p <= level and np.median(values) > least)


@given(st.integers(2, 7), st.integers(0, 10**6))
def test_behind_others_is_the_median_of_the_others_less_the_own(ranks: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 5, (6, ranks)).astype(float)
    expected = [[np.median(np.delete(row, at)) - row[at] for at in range(ranks)] for row in values]
    assert behind_others(values).tolist() == expected
