"""Who holds the others up (K3): from records written by hand, and the rule on generated steps."""

from __future__ import annotations

from itertools import accumulate, product
from pathlib import Path

import numpy as np
import pytest
import scipy
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from aorta.analysis.collective_metrics import behind_others
from aorta.analysis.stragglers import later_than, name_stragglers, straggler_sentences
from aorta.documents.dataset import DatasetEntry
from tests.analysis.run_builders import block, comm, dataset, explained_entry, made_step

LATE = 1
RANKS = 3


def held_up(
    folder: Path, late_ms: float, where: str = "idle", steps: int = 20, end_source: str = "future"
) -> DatasetEntry:
    """Three ranks whose all-reduce ends at 80 ms; rank 1 arrives late, for something that takes longer in its step."""
    ranks = []
    for rank in range(RANKS):
        usual_ms = {"data": 2.0, "forward": 10.0, "idle": 1.0, "backward": 10.0}
        usual_ms[where] += late_ms if rank == LATE else 0.0
        data, forward, idle, backward = accumulate(usual_ms.values())
        blocks = [block("layer", "forward", data, forward), block("layer", "backward", idle, backward)]
        issued = [comm("allreduce", backward, 80, seq=number, group="g") for number in range(steps)]
        rows = [[replace(row, end_source=end_source)] for row in issued]
        aux = [("data", 0, data), ("optimizer", 80, 82)]
        ranks.append([made_step(rank, RANKS, number, 90, blocks, rows[number], aux=aux) for number in range(steps)])
    return explained_entry(dataset(folder, "x", ranks, groups=[{"g": [0, 1, 2]}] * RANKS))


@pytest.mark.parametrize(
    ("where", "what", "uneven"),
    [
        ("idle", "idle between forward and backward (outside timed blocks)", None),
        ("data", "waiting for the DataLoader", None),
        ("backward", "backward computation", "rank 1 computes 31 %"),
    ],
)
def test_a_late_rank_is_named_with_what_it_does_longer(tmp_path, where, what, uneven):
    entry = held_up(tmp_path, 28.0, where)
    (straggler,) = entry.stragglers.ranks
    because = f"{what}, 28 ms a step more than the others"
    assert (straggler.rank, straggler.because) == (LATE, because)
    assert (entry.stragglers.uneven or "").partition(" of the step")[0] == (uneven or "")
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
def test_without_evidence_nobody_is_named(tmp_path, changes, reason):
    found = held_up(tmp_path, **changes).stragglers
    assert not found.ranks
    assert reason in str(found.reason)


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
def test_a_named_rank_is_said_to_compute_longer_from_the_same_share_on(late, busy, uneven):
    values = np.zeros((STEPS, 3))
    for rank, late_ms in late.items():
        values[:, rank] = late_ms
    found = name_stragglers(range(3), values, np.zeros_like(values), 0.0, 0.2, busy, STEP_MS)
    assert {each.rank for each in found.ranks} == set(late)
    assert (found.uneven or "").partition(" of the step")[0] == (uneven or "")


STEPS, STEP_MS = 40, 100.0


def ruled(late: np.ndarray, cost: np.ndarray) -> set[int]:
    return {each.rank for each in name_stragglers(range(late.shape[1]), late, cost, 0.0, 0.2, {}, STEP_MS).ranks}


@given(st.integers(2, 8), st.integers(0, 10**6))
def test_a_planted_rank_is_named_and_no_other(ranks, seed):
    """Waits vary by 5 ms from step to step; rank 0 comes 15 ms after the others, or nobody does."""
    draw = np.random.default_rng(seed)
    waits = draw.exponential(5.0, (STEPS, ranks))
    late = waits.copy()
    late[:, 1:] += 15.0
    assert ruled(behind_others(late), np.zeros_like(late)) == {0}
    assert ruled(np.full_like(late, np.nan), behind_others(late)) == {0}
    assert ruled(behind_others(waits), behind_others(draw.permuted(waits, axis=1))) <= set()


def test_where_both_ways_name_different_ranks_nobody_is_named():
    one, other = np.zeros((STEPS, 3)), np.zeros((STEPS, 3))
    one[:, 0], other[:, 1] = 30.0, 30.0
    found = name_stragglers(range(3), one, other, 0.0, 0.2, {}, STEP_MS)
    assert not found.ranks
    assert found.reason == "rank 0 comes last to the first collective, rank 1 waits least over the step"
    assert ruled(one, one) == {0}


@given(
    st.lists(st.integers(-50, 50).map(float), min_size=1, max_size=10)
    | st.lists(st.integers(-50, 50).map(float), min_size=70, max_size=150),
    st.sampled_from([0.0, 2.0]),
    st.floats(1e-4, 0.2),
)
def test_later_is_what_the_signed_rank_test_and_the_median_say(values, least, level):
    beyond = np.array(values) - least
    beyond = beyond[beyond != 0]
    p = 1.0
    if len(beyond) > 10:
        p = scipy.stats.wilcoxon(beyond, alternative="greater", method="asymptotic").pvalue
    elif len(beyond):
        ranks = scipy.stats.rankdata(np.abs(beyond))
        signs = np.array(list(product((0, 1), repeat=len(beyond))))
        p = float(np.mean(signs @ ranks >= ranks[beyond > 0].sum()))
    assume(abs(p - level) > 1e-9)
    assert later_than(np.array(values), least, level) == (p <= level and np.median(values) > least)
