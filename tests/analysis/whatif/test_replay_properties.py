"""What must hold for every program: nothing gets slower by costing less, and ranks have no order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aorta.analysis.whatif.changes import apply, parse_changes
from aorta.analysis.whatif.critical_path import critical_path
from aorta.analysis.whatif.program import Issued, RunProgram
from aorta.analysis.whatif.replay import replay
from aorta.config.groups.fabric import network_cost_ns
from aorta.config.schema import EmulatedFabric
from tests.analysis.whatif.hand_made import Words, compute, issue, program, wait

NETWORK = EmulatedFabric(inter_latency_us=0.01, inter_bandwidth_gb_per_s=1.0)


@st.composite
def programs(draw: st.DrawFn) -> RunProgram:
    """Up to three ranks that do the same with their own lengths, on one link or two, whose costs follow the law."""
    ranks = draw(st.integers(2, 3))
    everyone = tuple(range(ranks))
    own = st.integers(0, 500)
    words: list[list[object]] = [[] for _ in everyone]
    issued: list[Issued] = []
    waited = 0
    for _ in range(draw(st.integers(1, 6))):
        link = draw(st.integers(0, 1))
        one = issue(draw(st.sampled_from(("allreduce", "allgather"))), draw(own), everyone, str(link), link)
        for each in words:
            each += [compute("block", draw(own)), draw(own), one]
        issued.append(one)
        while waited < len(issued) and draw(st.booleans()):
            for each in words:
                each += [draw(own), wait(waited, wake_ns=draw(st.integers(0, 20)))]
            waited += 1
    costs = [round(network_cost_ns(one.kind, one.bytes, one.ranks, ranks, NETWORK)) for one in issued]
    lists: list[Words] = words  # type: ignore[assignment]
    backend = draw(st.none() | st.just([draw(own) for _ in costs]))
    return program(
        lists, costs, steps=draw(st.integers(1, 3)), backend_ns=backend, between_ns=[10] * ranks, network=NETWORK
    )


def ends(made: RunProgram) -> np.ndarray:
    return replay(made).end_ns[:, :, 0]


def changed(made: RunProgram, text: str) -> RunProgram:
    return apply(made, parse_changes([text])).program


@settings(max_examples=60, deadline=None)
@given(
    programs(), st.sampled_from(["comm=free", "comm.kind.allreduce=free", "comm=x3", "compute=x2", "stragglers=none"])
)
def test_what_costs_less_ends_no_later(made: RunProgram, text: str) -> None:
    if text == "comm.kind.allreduce=free" and not any(o.kind == "allreduce" for y in made.layouts for o in y.issued):
        return
    assert (ends(changed(made, text)) <= ends(made)).all()


@settings(max_examples=60, deadline=None)
@given(programs(), st.floats(1.0, 20.0))
def test_more_bandwidth_ends_no_later(made: RunProgram, factor: float) -> None:
    slower, faster = (ends(changed(made, f"network.bandwidth=x{f:.3f}")) for f in (factor, factor * 1.5))
    assert (faster <= slower).all()


@settings(max_examples=40, deadline=None)
@given(programs(), st.permutations([0, 1, 2]))
def test_it_does_not_matter_in_which_order_the_ranks_stand(made: RunProgram, order: list[int]) -> None:
    chosen = [column for column in order if column < len(made.ranks)]
    shuffled = replace(
        made,
        steps=[
            replace(
                step, host_ns=step.host_ns[:, chosen], wake_ns=step.wake_ns[:, chosen], backend_ns=_of(step, chosen)
            )
            for step in made.steps
        ],
        start_ns=made.start_ns[chosen],
    )
    assert (ends(shuffled) == ends(made)[:, chosen]).all()


def _of(step: object, chosen: list[int]) -> np.ndarray | None:
    backend = step.backend_ns  # type: ignore[attr-defined]
    return None if backend is None else backend[:, chosen]


@settings(max_examples=60, deadline=None)
@given(programs())
def test_a_path_has_no_gap_and_sums_up_to_its_step(made: RunProgram) -> None:
    for step in made.steps:
        path = critical_path(made, step.global_step)
        edges = [path.begin_ns, *(segment.end_ns for segment in path.segments)]
        assert [segment.begin_ns for segment in path.segments] == edges[:-1]
        assert edges[-1] == path.end_ns


@settings(max_examples=40, deadline=None)
@given(programs())
def test_what_is_set_to_what_it_was_changes_nothing(made: RunProgram) -> None:
    for text in ("comm=x1", "network.bandwidth=x1", "network.latency=x1", "compute=x1", "rank.0.late_ms=0"):
        assert (ends(changed(made, text)) == ends(made)).all()
