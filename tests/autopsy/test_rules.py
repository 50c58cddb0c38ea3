"""Known answers: which ranks are accused, and of what, in jobs that hang as written down in `hangs`; and what holds of
every job: healthy ranks are never accused, order does not matter, missing evidence adds no culprit.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aorta.autopsy.evidence import ProcessState, RankEvidence, RankExit, ThreadStack, Verdict
from aorta.autopsy.judge import judge
from aorta.autopsy.report import verdict_on
from aorta.distributed.peers import Peers
from aorta.errors import PeerFailed
from tests.autopsy.hangs import (
    STOPPED,
    Fault,
    Group,
    Program,
    call,
    clipped,
    ddp,
    ended_in,
    phase,
    pipeline,
    resized,
    run,
    skipped,
    slow_in,
    stuck_in,
    swapped,
    two_groups,
)

KILLED = RankExit(signal="SIGKILL", exit_code=-9)
RAISED = RankExit(exit_code=1, exception="ZeroDivisionError: division by zero")
FAULTS: dict[str, tuple[Fault, str]] = {
    "stuck in data": (stuck_in("data"), "stuck_outside"),
    "stuck in forward": (stuck_in("forward"), "stuck_outside"),
    "stuck in optimizer": (stuck_in("optimizer"), "stuck_outside"),
    "killed": (ended_in("backward", KILLED), "dead"),
    "raised": (ended_in("forward", RAISED), "dead"),
    "stopped": (ended_in("backward", STOPPED), "stopped"),
}
LAYOUTS = {"ddp": ddp(4), "sharded": clipped(4), "two replicas of two stages": pipeline(2), "of four": pipeline(4)}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_that_is_the_cause_is_the_only_one_accused(layout: str, name: str) -> None:
    fault, kind = FAULTS[name]
    programs = LAYOUTS[layout]
    for rank in programs:
        verdict = judge(run(programs, {rank: fault}))
        assert [(one.rank, one.kind) for one in verdict.culprits] == [(rank, kind)], (rank, verdict.summary)
        assert (verdict.kind, verdict.waits[0].for_ranks) == (kind, [rank])
        assert {other for wait in verdict.waits for other in wait.ranks} == set(programs) - {rank}  # over all groups


@pytest.mark.parametrize("second", FAULTS)
@pytest.mark.parametrize("first", FAULTS)
@pytest.mark.parametrize("layout", ["ddp", "sharded"])
def test_two_causes_at_once_are_both_accused(layout: str, first: str, second: str) -> None:
    verdict = judge(run(LAYOUTS[layout], {0: FAULTS[first][0], 2: FAULTS[second][0]}))

    orders = _ORDER[layout].get(first, 0), _ORDER[layout].get(second, 0)
    reached = {rank for rank, order in zip((0, 2), orders, strict=True) if order == min(orders)}
    assert {one.rank for one in verdict.culprits} == reached


_ORDER = {
    "ddp": {"stuck in optimizer": 1},
    "sharded": {"stuck in optimizer": 2, "killed": 1, "stopped": 1},
}
"""Collectives of a step before a fault acts: whoever is to meet the later fault waits for the earlier one."""


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_wrong_size_is_the_rank_s_that_departs_from_its_past(ranks: int) -> None:
    for programs in (ddp(ranks), clipped(ranks)):
        for rank in range(ranks):
            verdict = judge(run(programs, {rank: resized(5)}))
            (one,) = verdict.culprits
            assert (one.rank, one.kind, one.aspect) == (rank, "signature_mismatch", "size")


@pytest.mark.parametrize(
    "ending",
    [RankExit(exit_code=1, exception="RuntimeError: op.preamble.length <= op.nbytes"), RankExit(signal="SIGABRT")],
)
def test_an_error_that_a_healthy_rank_meets_in_a_mismatch_is_no_cause(ending: RankExit) -> None:
    evidence = run(ddp(3), {2: resized(4)})
    evidence[0].state, evidence[0].exit = "dead", ending
    evidence[1].progress_ns = evidence[1].taken_ns
    (one,) = judge(evidence, stuck_after_s=10).culprits
    assert (one.rank, one.kind, one.aspect) == (2, "signature_mismatch", "size")


def test_without_a_past_the_minority_departs_and_of_two_camps_neither() -> None:
    (size,) = judge(run(clipped(3), {1: resized(0)})).culprits
    (circle,) = judge(run(two_groups(3), {1: swapped(0)})).culprits
    assert (size.rank, size.aspect, circle.rank, circle.kind) == (1, "size", 1, "order_swapped")
    for programs, fault, kind in (
        (clipped(2), resized(0), "signature_mismatch"),
        (two_groups(2), swapped(0), "order_swapped"),
    ):
        verdict = judge(run(programs, {1: fault}))
        assert (verdict.kind, verdict.culprits, verdict.suspects) == (kind, [], [0, 1])
        assert ("rank 0: all_gather of 2,000 bytes; rank 1:" in verdict.summary) == (kind == "signature_mismatch")


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("fault", [skipped(7), swapped(7)], ids=["skipped", "swapped"])
def test_a_collective_left_out_or_swapped_is_seen_by_its_kind(fault: Fault, ranks: int) -> None:
    for rank in range(ranks):
        (one,) = judge(run(clipped(ranks, steps=4), {rank: fault})).culprits
        assert (one.rank, one.kind, one.aspect) == (rank, "signature_mismatch", "kind")
        assert "skipped one collective or swapped two" in one.reason


def test_two_collectives_in_flight_show_that_they_were_swapped() -> None:
    (one,) = judge(run(ddp(2), {1: swapped(4)})).culprits
    assert (one.rank, one.kind) == (1, "order_swapped")
    assert one.reason.endswith(" of the default group, rank 0 all_reduce of 4,000 bytes: it swapped the two")


def test_a_collective_left_out_at_the_end_is_missed_by_the_others() -> None:
    (one,) = judge(run(ddp(3), {2: skipped(5)})).culprits
    assert (one.rank, one.reason) == (2, "ended with exit code 0")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_two_groups_in_two_orders_are_a_circle(ranks: int) -> None:
    for rank in range(ranks):
        evidence = run(two_groups(ranks), {rank: swapped(6)})
        ahead = [evidence[of].collectives[-1] for of in (rank, rank - 1)]  # of hosts that issue ahead of their devices
        issued = [replace(one, collectives=[*one.collectives, ahead[one.rank == rank]]) for one in evidence]
        for seen in (evidence, issued):
            (one,) = judge(seen).culprits
            assert (one.rank, one.kind, one.rule) == (rank, "order_swapped", "order_swapped")


def test_a_rank_for_which_others_wait_only_in_what_they_issued_before_is_not_odd_in_a_circle() -> None:
    """Ranks 1 to 3 wait in one group, rank 4 in another of the same ranks; rank 0 in one with rank 1, which has left a
    collective with it open.
    """
    pair, turned = Group("pair", (0, 1)), Group("turned", (0, 1))
    one, other = Group("one", (1, 2, 3, 4)), Group("other", (1, 2, 3, 4))
    size = 400
    programs = {rank: [call(one, "all_reduce", size)] for rank in (2, 3)}
    programs[1] = [call(pair, "all_reduce", size, blocking=False), call(one, "all_reduce", size)]
    programs[4] = [call(other, "all_reduce", size)]
    programs[0] = [call(turned, "all_reduce", size)]
    assert [culprit.rank for culprit in judge(run(programs)).culprits] == [4]


def errors_of_a_peer() -> list[str]:
    """What the ranks of a run end with when another one has failed, from those who say it."""
    store = dist.HashStore()
    failing, other = Peers(store, 1, 2, 1.0), Peers(store, 0, 2, 1.0)
    failing.report_failure("ZeroDivisionError: division by zero", own=True)
    with pytest.raises(PeerFailed) as stopped:
        other.raise_if_peer_failed()
    return [str(stopped.value), str(other.explain(dist.DistBackendError("abort")))]


LOST = (
    "Connection closed by peer [127.0.0.1]:4711",
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    *errors_of_a_peer(),
)


@pytest.mark.parametrize("lost", [None, *LOST])
def test_a_rank_that_has_left_its_program_is_the_cause_before_its_process_has_ended(lost: str | None) -> None:
    evidence = run(ddp(4), {2: ended_in("backward", RAISED)})
    for one in evidence:
        one.state, one.taken_ns = "running", (one.progress_ns or 0) + 1000  # nobody has waited for long
    evidence[1].exit = None if lost is None else RankExit(exit_code=1, exception=f"RuntimeError: {lost}")
    verdict = verdict_on(evidence, watched=True)
    assert [(one.rank, one.kind) for one in verdict.culprits] == [(2, "dead")]


LAUNCHER = RankExit(exit_code=143, exception="SystemExit: 143")
LOST_IT = RankExit(exit_code=1, exception="RuntimeError: Connection closed by peer")


@pytest.mark.parametrize(
    ("cause", "state", "others"),
    [
        pytest.param(KILLED, "running", LAUNCHER, id="they end in order on the launcher's signal"),
        pytest.param(KILLED, "dead", LAUNCHER, id="they ended in order on the launcher's signal"),
        pytest.param(RankExit(exit_code=130, exception="interrupted at once"), "dead", LOST_IT, id="they lost it"),
        pytest.param(RankExit(exit_code=0), "dead", LOST_IT, id="it left its loop before they did"),
    ],
)
def test_those_who_end_because_of_another_are_not_the_cause(
    cause: RankExit, state: ProcessState, others: RankExit
) -> None:
    evidence = run(ddp(4), {3: ended_in("backward", cause)})
    for one in evidence[:3]:
        one.state, one.exit = state, others
        one.collectives = [replace(op, state="completed") for op in one.collectives]  # as those are that fail
    assert [(one.rank, one.kind) for one in judge(evidence).culprits] == [(3, "dead")]


def test_of_ranks_that_were_all_killed_none_ended_first_but_one_that_left_before() -> None:
    evidence = run(ddp(3), {1: stuck_in("data")})
    for one in evidence:
        one.state, one.exit = "dead", KILLED if one.rank else None  # of one nothing tells how it ended
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits, verdict.waits[0].for_ranks) == ("cannot_decide", [], [1])
    evidence[1].exit = RankExit(exit_code=0)
    assert [(one.rank, one.kind) for one in judge(evidence).culprits] == [(1, "dead")]
    evidence[0].exit, evidence[1].exit = LOST_IT, None  # and what is not known of rank 2 changes nothing
    assert [(one.rank, one.kind) for one in judge(evidence[:2]).culprits] == [(1, "dead")]


@pytest.mark.parametrize("exception", [None, "KeyboardInterrupt"])
def test_a_rank_that_a_signal_asked_to_end_is_accused_only_where_others_wait_for_it(exception: str | None) -> None:
    for faults, accused in (({1: stuck_in("data")}, [1]), (dict.fromkeys(range(3), stuck_in("data")), [])):
        evidence = run(ddp(3), faults)
        for one in evidence:
            one.progress_ns = one.taken_ns
        evidence[1].state, evidence[1].exit = "dead", RankExit(exit_code=130, exception=exception)
        assert [one.rank for one in judge(evidence, stuck_after_s=10).culprits] == accused


def test_a_watchdog_has_waited_also_where_a_rank_left_its_loop_in_order_meanwhile() -> None:
    evidence = run(ddp(3), {1: stuck_in("data")})
    for one in evidence:
        one.taken_ns = (one.progress_ns or 0) + 3_000_000_000
    evidence[1].exit = RankExit(exit_code=0)
    verdict = verdict_on(evidence, watched=True)
    assert [one.rank for one in verdict.culprits] == [1]
    assert verdict.summary.startswith("rank 1 left its recorded program with exit code 0; ranks 0, 2 wait")
    evidence[1].exit = RankExit(exit_code=130)  # its process still ends
    assert [one.rank for one in verdict_on(evidence, watched=True).culprits] == [1]
    evidence[1].exit = None
    evidence[0].state, evidence[0].exit = "dead", RankExit(exit_code=130, exception="KeyboardInterrupt")
    assert [one.rank for one in verdict_on(evidence, watched=True).culprits] == [1]


def test_a_rank_that_others_wait_for_is_named_though_a_thread_of_it_communicates() -> None:
    evidence = run(ddp(3), {1: stuck_in("data")})
    evidence[1].progress_ns = evidence[1].phase_since_ns = evidence[1].taken_ns
    (one,) = judge(evidence, stuck_after_s=10).culprits
    assert (one.rank, one.kind, one.since_s) == (1, "slow", 63)


def test_ranks_in_a_call_that_nobody_counts_wait_for_those_that_are_not() -> None:
    evidence = run(ddp(3), dict.fromkeys(range(3), stuck_in("forward")))
    barrier = ThreadStack(name="main", frames=("/lib/torch/distributed/distributed_c10d.py:7 monitored_barrier",))
    evidence[0].stacks = evidence[2].stacks = [barrier]
    verdict = judge(evidence)
    assert [one.rank for one in verdict.culprits] == [1]
    assert "is in forward; ranks 0, 2 in a call of torch.distributed" in verdict.summary
    evidence[1].stacks = [barrier]
    assert [one.rank for one in judge(evidence).culprits] == [0, 1, 2]


def test_ranks_that_are_all_stuck_by_themselves_are_all_accused() -> None:
    verdict = judge(run(ddp(3), dict.fromkeys(range(3), stuck_in("data"))), stuck_after_s=10)
    assert [(one.rank, one.kind, one.phase) for one in verdict.culprits] == [
        (rank, "stuck_outside", "data") for rank in range(3)
    ]


@pytest.mark.parametrize("until", range(40, 60))
def test_a_slow_rank_is_accused_at_any_moment_and_those_who_wait_for_it_are_not(until: int) -> None:
    for programs, sure in ((ddp(3, steps=9), True), (clipped(4, steps=9), True), (pipeline(2, steps=9), False)):
        verdict = _of_a_job_that_moves({**programs, 1: slow_in("forward", 4)(programs[1])}, until)
        accused = [(one.rank, one.kind) for one in verdict.culprits]
        assert accused == [(1, "slow")] or not (sure or accused), verdict.summary


def test_a_rank_that_is_late_once_is_not_slow() -> None:
    programs = ddp(3, steps=9)
    late = [*programs[1][:8], *[phase("forward")] * 5, *programs[1][8:]]
    assert _of_a_job_that_moves({**programs, 1: late}, 40).kind == "not_stuck"


@pytest.mark.parametrize(("ranks", "late", "slow"), [(2, 1, 1), (4, 1, 1), (4, 2, 0), (8, 3, 3), (8, 5, 0)])
def test_of_half_the_ranks_late_at_once_none_is_slow(ranks: int, late: int, slow: int) -> None:
    evidence = run(ddp(ranks), {rank: stuck_in("forward") for rank in range(late)})
    newest = evidence[-1]
    assert newest.taken_ns is not None
    newest.progress_ns = newest.taken_ns - 1000  # the job goes on
    verdict = judge(evidence, stuck_after_s=10)
    assert [one.rank for one in verdict.culprits] == list(range(slow))
    assert verdict.kind == ("slow" if slow else "cannot_decide")
    assert verdict.suspects == ([] if slow else list(range(late)))


def _of_a_job_that_moves(programs: dict[int, Program], until: int, age_s: int = 0) -> Verdict:
    evidence = run(programs, until=until)
    for one in evidence:
        one.taken_ns = max(each.progress_ns or 0 for each in evidence) + age_s * 1_000_000_000
    return judge(evidence, stuck_after_s=10)


layouts: st.SearchStrategy[dict[int, Program]] = st.one_of(
    st.builds(ddp, st.integers(2, 6), st.just(4)),
    st.builds(clipped, st.integers(2, 6), st.just(4)),
    st.builds(two_groups, st.integers(2, 6)),
    st.builds(pipeline, st.integers(2, 3), st.just(4)),
)
faults: st.SearchStrategy[Fault] = st.one_of(
    st.builds(stuck_in, st.sampled_from(["data", "optimizer"]), st.integers(0, 3)),
    st.builds(ended_in, st.just("data"), st.just(STOPPED), st.integers(0, 3)),
    st.builds(ended_in, st.just("optimizer"), st.just(RankExit(signal="SIGKILL")), st.integers(0, 3)),
    st.builds(skipped, st.integers(0, 6)),
    st.builds(swapped, st.integers(0, 6)),
    st.builds(resized, st.integers(0, 6)),
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[RankEvidence], set[int]]:
    """A job with one or two faults, and the ranks that have them: a minority, whom the others can be held against."""
    programs = draw(layouts)
    most = 2 if len(programs) > 4 else 1
    faulty = draw(st.sets(st.sampled_from(sorted(programs)), min_size=1, max_size=most))
    return run(programs, {rank: draw(faults) for rank in faulty}), faulty


@given(jobs(), st.data())
def test_no_healthy_rank_is_accused_in_any_order_or_where_evidence_is_missing(
    job: tuple[list[RankEvidence], set[int]], data: st.DataObject
) -> None:
    evidence, faulty = job
    everything = judge(evidence)
    culprits = {one.rank for one in everything.culprits}
    assert culprits <= faulty
    assert judge(data.draw(st.permutations(evidence))) == everything

    fewer = judge(data.draw(st.lists(st.sampled_from(evidence), unique_by=lambda one: one.rank, min_size=1)))
    accused = {one.rank for one in fewer.culprits}
    assert accused <= culprits
    assert accused or not culprits or fewer.kind in ("cannot_decide", "not_stuck")


@given(layouts, st.integers(1, 60), st.integers(0, 9))
def test_a_job_that_moves_or_has_ended_is_not_stuck(programs: dict[int, Program], until: int, age_s: int) -> None:
    assert _of_a_job_that_moves(programs, until, age_s).kind in ("not_stuck", "slow")
