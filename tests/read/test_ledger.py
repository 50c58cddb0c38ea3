"""The bounds that gaps give hold whatever is missing, and what breaks an invariant is null."""

from __future__ import annotations

import random
from math import inf

import numpy as np
import pytest

from aorta.read.frames import Steps
from aorta.read.ledger import COMM, LANES, WHOLE, Gap, audit, balanced, entries, lacking
from aorta.timeline.classes import COMPUTE, COPY
from aorta.timeline.overlap import DECIDED, Overlap
from tests.windows import measure_window

MS = 1_000_000
SEEN = {COMPUTE: [(0, 4 * MS)], COMM: [(3 * MS, 5 * MS)], COPY: [(6 * MS, 7 * MS)]}


def window(spans: dict[str, list[tuple[int, int]]]) -> Overlap:
    comm = {"allreduce": spans[COMM]}
    return measure_window((0, 10 * MS), compute=spans[COMPUTE], comm=comm, copy=spans[COPY])


@pytest.mark.parametrize("most_ms", [0.5, 2, inf])
@pytest.mark.parametrize("lanes", [(COMPUTE,), (COMM,), (COPY,), (COMPUTE, COMM), LANES])
def test_bounds_hold_whatever_ran_in_the_gap(lanes: tuple[str, ...], most_ms: float) -> None:
    """Rows are added at random to the lanes that may lack some: every metric stays within its bounds."""
    values, reasons, bounds = balanced(window(SEEN), [Gap(lane, "lost", most_ns=most_ms * MS) for lane in lanes])
    chance = random.Random(f"{lanes} {most_ms}")
    for _ in range(60):
        spans = {lane: [*own] for lane, own in SEEN.items()}
        for lane in lanes:
            left = round(min(most_ms, 10) * MS)
            while left > 0 and chance.random() < 0.8:
                start = chance.randrange(10 * MS)
                length = chance.randint(1, min(left, 10 * MS - start))
                spans[lane].append((start, start + length))
                left -= length
        for name, value in window(spans).metrics()[0].items():
            if name in bounds and value is not None:
                assert bounds[name][0] - 1e-9 <= value <= bounds[name][1] + 1e-9, name
            elif value is not None and values.get(name) is not None and name not in bounds:
                scale = 1.0 if not name.endswith("_ms") else 10.0
                assert value == pytest.approx(values[name], abs=2 * DECIDED * scale), name
    assert {name for name, value in values.items() if value is None and name in bounds} <= reasons.keys()


def test_small_losses_cost_nothing_and_large_ones_say_what_is_known() -> None:
    whole, _, _ = balanced(window(SEEN), ())
    small, _, _ = balanced(window(SEEN), [Gap(COMPUTE, "lost", most_ns=10_000)])
    assert small == whole
    values, reasons, _ = balanced(window(SEEN), [Gap(COMPUTE, "8 launches have no kernel")])
    assert values["comm_ms"] == 2.0
    assert values["compute_ms"] is values["overlap_ratio"] is None
    assert reasons["compute_ms"] == "8 launches have no kernel: it is at least 4 ms"
    assert reasons["exposed_comm_ms"] == "8 launches have no kernel: it is at most 1 ms"
    assert reasons["overlap_ratio"] == "8 launches have no kernel: it is at least 0.5"


def test_what_was_seen_of_an_unobserved_lane_says_nothing() -> None:
    values, reasons, bounds = balanced(window(SEEN), lacking("no device", COMPUTE, COMM, seen=False))
    assert {values[name] for name in ("compute_ms", "comm_ms", "idle_ms", "overlap_ratio", "exposed_share")} == {None}
    assert (values["copy_ms"], values["window_ms"]) == (1.0, 10.0)
    assert reasons["compute_ms"] == reasons["overlap_ratio"] == "no device"
    assert bounds == {}


def test_a_recording_without_steps_ends_with_what_was_seen() -> None:
    """More may have run outside of it, so that no time has a greatest value."""
    _, reasons, bounds = balanced(window(SEEN), [Gap(COMM, "lost")], open_ended=True)
    assert bounds["comm_ms"] == (2.0, inf)
    assert reasons["idle_ms"] == "lost"


def steps(**metrics: list[float]) -> Steps:
    count = len(metrics["window_ms"])
    start = np.arange(count) * 10 * MS
    return Steps(
        global_step=np.arange(count),
        warmup=np.zeros(count, bool),
        start_mono_ns=start,
        end_mono_ns=start + np.array(metrics["window_ms"], np.int64) * MS,
        t_start_ns=start,
        t_end_ns=start,
        reason=np.zeros(count, np.int64),
        reasons=({},),
        metrics={name: np.array(values) for name, values in metrics.items()},
    )


ADDED = {"comm_ms": [3, 3], "compute_comm_ms": [1, 1], "exposed_comm_ms": [2, 1]}


@pytest.mark.parametrize(
    ("metrics", "whole", "why", "broken"),
    [
        ({"window_ms": [10, 10], "compute_ms": [3, 3]}, {"compute_ms": 6.0}, None, []),
        ({"window_ms": [16, 10], "compute_ms": [3, 3]}, None, "steps overlap", [0, 1]),
        ({"window_ms": [10, 10], "compute_ms": [3, 11]}, None, "lasts longer than its step", [1]),
        ({"window_ms": [10, 10], "compute_ms": [4, 4]}, {"compute_ms": 5.0}, "8 ms of 5 ms", [0, 1]),
        ({"window_ms": [10, 10]} | ADDED, None, "do not add up", [1]),
    ],
)
def test_what_breaks_an_invariant_is_null(metrics, whole, why, broken) -> None:
    audited, gaps = audit(steps(**metrics), whole)
    (name, *_) = set(metrics) - {"window_ms"}
    assert np.flatnonzero(np.isnan(audited.metrics[name])).tolist() == broken
    assert {(gap.step, gap.count) for gap in gaps} == ({(broken[0], len(broken))} if broken else set())
    assert all(why in audited.reasons[audited.reason[at]][name] for at in broken)


def test_a_report_lists_a_gap_once() -> None:
    gaps = [Gap(lane, f"{n} launches have no kernel", n) for n in (3, 4) for lane in (COMPUTE, COMM)]
    gaps.append(Gap(COMPUTE, "7 launches have no kernel", WHOLE))
    (entry,) = entries(gaps, 5)
    assert (entry.rank, entry.lanes, entry.why, entry.steps) == (5, [COMPUTE, COMM], "7 launches have no kernel", 2)
