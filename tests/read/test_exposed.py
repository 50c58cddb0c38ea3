"""To which collective, region and part an exposed nanosecond belongs: all of them, once, by the rule
(docs/dev/attribution.md). The reference walks from nanosecond to nanosecond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.account import BUBBLE, NOT_KNOWN, TRANSFER, WAITING
from aorta.analysis.attribution import UNEXPLAINED, Totals, add_exposed
from aorta.errors import IntervalError
from aorta.read import exposed as module
from aorta.read.exposed import BRINGING, exposed_of
from aorta.read.frames import NO_TIME, CollectiveName, Collectives, Lane, SpanRows, Spans, Steps
from aorta.read.join import join
from aorta.read.run import Leaf, RankTables, Run, Source
from tests.strategies import interval_lists

FORWARD, BACKWARD, OPTIMIZER = ("forward", "a"), ("backward", "b"), ("optimizer", None)
NAMES = [CollectiveName(kind, group, 8, None, None) for kind in ("allreduce", "allgather") for group in "01"]


class Row(NamedTuple):
    start: int
    end: int
    name: int = 0
    wait: int = -1


@dataclass
class Step:
    """One step: its length, its collectives, and what ran when; times from its start."""

    length: int
    rows: list[Row] = field(default_factory=list)
    ranges: list[tuple[int, int, tuple[str, str | None]]] = field(default_factory=list)
    stalls: list[tuple[int, int]] = field(default_factory=list)
    bubbles: list[tuple[int, int]] = field(default_factory=list)
    warmup: bool = False


def spans_of(steps: Sequence[Step]) -> Spans:
    found = SpanRows()
    for place, step in enumerate(steps):
        for start, end, (phase, block) in step.ranges:
            lane, name = (Lane.AUX, (phase, "")) if block is None else (Lane.COMPUTE, (block, phase))
            found.add(lane, np.array([place]), [(lane.name.lower(), *name)], [start], [end])
        for lane, spans in ((Lane.STALL, step.stalls), (Lane.BUBBLE, step.bubbles)):
            for start, end in spans:
                found.add(lane, np.array([place]), [(lane.name.lower(), "", "")], [start], [end])
    return found.frame()


def totals(steps: Sequence[Step], exposed_ns: Sequence[int | None] | None = None) -> Totals:
    """Add up a rank of these steps, a gap of 5 ns between them; exposed time is what the reference says, if not
    given."""
    lengths = np.array([step.length for step in steps], np.int64)
    starts = 1_000 + np.cumsum(lengths + 5) - lengths
    rows = [row for step in steps for row in step.rows]
    stated = exposed_ns if exposed_ns is not None else reference(steps)[1]
    nothing = np.full(len(steps), np.nan)
    metrics = {"exposed_comm_ms": np.array([np.nan if each is None else each / 1e6 for each in stated])}
    number = np.arange(len(steps))
    table = Steps(
        global_step=number,
        warmup=np.array([step.warmup for step in steps], bool),
        start_mono_ns=starts,
        end_mono_ns=starts + lengths,
        t_start_ns=starts,
        t_end_ns=starts + lengths,
        reason=np.zeros(len(steps), np.int64),
        reasons=({},),
        metrics=metrics | {"comm_ms": nothing, "compute_ms": nothing},
    )
    start, end, name, wait = (np.array([row[place] for row in rows], np.int64) for place in range(4))
    of_step = np.repeat(number, [len(step.rows) for step in steps])
    times = {"issue_ns": start, "start_ns": start, "end_ns": end}
    collectives = Collectives(names=tuple(NAMES), step=of_step, name=name, seq=np.arange(len(rows)), **times)
    source = Source(path="", format="aorta", rank=0, world_size=2, lanes=(), timer="", instrument_mode="")
    pieces, sums = exposed_of(table, collectives, spans_of(steps))
    tables = RankTables(source, table, collectives, None, exposed=pieces, exposed_sums=sums)
    added = Totals()
    added.add(0, sums)
    run = Run(**vars(join([tables], 1)), location="", manifest=None, health=None)
    add_exposed(added, run, run.exposed, wait)
    return added


def reference(steps: Sequence[Step]) -> tuple[Counter, list[int], Counter, Counter]:
    """Return exposed ns by kind, group, order, region and part, exposed ns of each step, working ns by region, and what
    is not exposed, by leaf.
    """
    exposed: Counter = Counter()
    leaves: Counter = Counter()
    computing: Counter = Counter()
    of_step = []
    carried: list[tuple[int, int, int, int, Row]] = []
    place = 0
    for step in steps:
        orders: Counter = Counter()
        flying = list(carried)
        for row in step.rows:
            if NO_TIME not in (row.start, row.end):
                flying.append((row.start, row.end, orders[row.name], place, row))
                place += 1
            orders[row.name] += 1
        carried = [
            (start - step.length - 5, end - step.length - 5, order, turn, row)
            for start, end, order, turn, row in flying
            if end > step.length
        ]
        inward = [(max(part[0], 0), min(part[1], step.length), part[2]) for part in step.ranges]
        inward = sorted((part for part in inward if part[0] < part[1]), key=lambda part: part[2][1] is None)
        inside: list[tuple[str, str | None] | None] = []
        for at in range(step.length):
            over = [(-part[0], part[1], index) for index, part in enumerate(inward) if part[0] <= at < part[1]]
            inside.append(inward[min(over)[2]][2] if over else None)

        def covers(spans, at):
            return any(start <= at < end for start, end in spans)

        compute = [part[:2] for part in step.ranges if part[2][1] is not None]
        working = [covers(compute, at) and not covers(step.stalls, at) for at in range(step.length)]
        of_rows = [(start, end) for start, end, *_ in flying]
        bare = [covers(of_rows, at) and not working[at] for at in range(step.length)]
        of_step.append(sum(bare))
        for at in range(step.length):
            if step.warmup:
                continue
            if working[at]:
                computing[inside[at]] += 1
            if not bare[at]:
                leaves[_leaf(step, inward, inside[at], covers, working[at], covers(of_rows, at), at)] += 1
                continue
            until = next((later for later in range(at, step.length) if not bare[later]), step.length)
            over = [
                (end > until, start, end, order, turn, row)
                for start, end, order, turn, row in flying
                if start <= at < end
            ]
            _, start, _, order, _, row = min(over)
            name = NAMES[row.name]
            earlier = next((inside[each] for each in range(at, -1, -1) if inside[each]), None)
            later = next((inside[each] for each in range(at, step.length) if inside[each]), None)
            neighbours = (later, earlier) if name.kind in BRINGING else (earlier, later)
            region = inside[at] or neighbours[0] or neighbours[1] or (None, None)
            if covers(step.bubbles, at):
                part = BUBBLE
            elif row.wait < 0:
                part = NOT_KNOWN
            else:
                part = WAITING if at < start + row.wait else TRANSFER
            exposed[(name.kind, name.group, order, *region, part)] += 1
    return exposed, of_step, computing, leaves


def _leaf(step, inward, region, covers, working, communicating, at) -> Leaf:
    if working:
        return Leaf("computation", region[0], communicating)
    if covers([part[:2] for part in inward if part[2][1] is None], at) and not covers(step.stalls, at):
        return Leaf("outside blocks", region[0])
    if covers(step.bubbles, at):
        return Leaf("bubble")
    before = max(((part[1], index) for index, part in enumerate(inward) if part[1] <= at), default=None)
    after = min(((part[0], index) for index, part in enumerate(inward) if part[0] > at), default=None)
    names = ["start" if before is None else inward[before[1]][2][0], "end" if after is None else inward[after[1]][2][0]]
    return Leaf("idle", " .. ".join(names))


def by_key(result: Totals) -> Counter:
    """Exposed ns by the same keys, as accumulated."""
    return Counter(
        {
            (key.kind, key.group, key.order, key.phase, key.block, key.part): length
            for key, length in result.exposed.items()
        }
    )


times = st.integers(-4, 30)
spans = st.tuples(times, times).map(sorted)


@st.composite
def random_steps(draw: st.DrawFn) -> list[Step]:
    def rows() -> list[Row]:
        lengths = st.integers(-1, 12)
        timed = [Row(*draw(spans), draw(st.integers(0, 3)), draw(lengths)) for _ in range(draw(st.integers(0, 5)))]
        return [row if draw(st.integers(0, 5)) else row._replace(end=NO_TIME) for row in timed]

    regions = st.sampled_from([FORWARD, BACKWARD, OPTIMIZER])
    return [
        Step(
            draw(st.integers(0, 25)),
            rows(),
            [(*draw(spans), draw(regions)) for _ in range(draw(st.integers(0, 5)))],
            draw(interval_lists)[:2],
            draw(st.lists(spans.map(tuple), max_size=2)),
            draw(st.integers(0, 4)) == 0,
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


@given(random_steps())
def test_the_rule_nanosecond_by_nanosecond(steps):
    if all(step.warmup for step in steps):
        steps[0].warmup = False
    exposed, of_step, computing, leaves = reference(steps)
    kept = [step for step in steps if not step.warmup]
    exposed_ns = sum(length for length, step in zip(of_step, steps, strict=True) if not step.warmup)
    for block_steps in (1, 2, 256):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "BLOCK_STEPS", block_steps)
            result = totals(steps, of_step)
        sums = result.sums
        assert by_key(result) == exposed
        assert {tuple(region): length for region, length in sums.computing.items()} == {
            region or (None, None): length for region, length in computing.items()
        }
        assert sums.leaves == leaves
        assert (sums.rank_steps, sums.window_ns) == (len(kept), sum(step.length for step in kept))
        assert sums.exposed_ns == sum(exposed.values()) == exposed_ns
        assert leaves.total() + exposed_ns == sums.window_ns
        assert sums.compute_ns == sum(computing.values())


ALLREDUCE, ALLGATHER = 0, 2


def shares(*steps: Step) -> dict[tuple[object, ...], int]:
    """Return exposed ns by kind, order and part; the steps name no region."""
    return {(kind, order, part): length for (kind, _, order, *_, part), length in by_key(totals(steps)).items()}


def test_a_collective_that_outlasts_the_stretch_was_not_waited_for():
    # a long one in the background from 0, a short one from 10 to 20 behind which computing goes on at 22
    long, short = Row(0, 100, ALLREDUCE), Row(10, 20, ALLGATHER)
    computing = [(0, 10, FORWARD), (22, 100, FORWARD)]
    found = shares(Step(100, [long, short], computing))
    assert found == {("allgather", 0, NOT_KNOWN): 10, ("allreduce", 0, NOT_KNOWN): 2}


def test_a_rank_waits_first_and_transfers_then_and_a_bubble_is_neither():
    step = Step(40, [Row(0, 40, wait=12)], [(0, 5, FORWARD)])
    assert shares(step) == {("allreduce", 0, WAITING): 7, ("allreduce", 0, TRANSFER): 28}
    step.bubbles = [(10, 14), (30, 35)]
    assert shares(step) == {("allreduce", 0, part): ns for part, ns in ((BUBBLE, 9), (WAITING, 5), (TRANSFER, 21))}


@pytest.mark.parametrize(
    ("stated", "exposed", "counted"),
    [
        ([10, 13], {"allreduce": 20, UNEXPLAINED: 3}, (2, 0, 23)),  # no row covers what the record counts
        ([10, None], {"allreduce": 10}, (1, 1, 10)),  # a step whose exposed time is null is left out and counted
    ],
)
def test_exposed_time_is_that_of_the_record(stated, exposed, counted):
    result = totals([Step(20, [Row(0, 10)]), Step(20, [Row(0, 10)])], stated)
    assert {key.kind: length for key, length in result.exposed.items()} == exposed
    assert (result.sums.rank_steps, result.sums.left_out, result.sums.exposed_ns) == counted


@pytest.mark.parametrize("step", [Step(20, [Row(9, 3)]), Step(20, [], [(9, 3, FORWARD)]), Step(20, stalls=[(9, 3)])])
def test_an_interval_that_ends_before_it_starts_is_refused(step):
    with pytest.raises(IntervalError, match="ends before it starts"):
        totals([step], [0])


def test_ten_thousand_collectives_that_never_end_are_counted_once():
    """Each is in flight in all the steps after its own."""
    steps = [Step(1_000, [Row(at, 10**9) for at in range(50)]) for _ in range(200)]
    result = totals(steps, [1_000] * 200)
    assert sum(result.exposed.values()) == 200_000
    assert UNEXPLAINED not in {key.kind for key in result.exposed}
