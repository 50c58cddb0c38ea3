"""Known answers where nobody asked devices lately what they have begun and completed: a host that is late is told from
a device that is, or the answer says that this cannot be told. Where devices were seen, and where NCCL's ring says what
was scheduled, started and completed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import structs

from aorta.autopsy.evidence import RankEvidence, RankExit
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.job import WaitGraph
from aorta.autopsy.joining import join
from aorta.autopsy.judge import judge
from aorta.autopsy.processes import progress_evidence
from aorta.records.clocks import boot_id
from aorta.records.progress import LOOKED_WORD
from aorta.records.ring_file import BEGUN, DONE, ON_DEVICE, RANGE, UNMARKED, RingGroup
from tests.autopsy.hangs import STUCK, Group, Program, call, clipped, ddp, ended_in, message, phase, run, stuck_in
from tests.autopsy.test_flight_recorder import CREATED_NS, dump, entry, write
from tests.records.test_progress import Rank, facts

WORLD = tuple(range(4))
STARTED = dict.fromkeys(WORLD, "started")
BEFORE = 5
"""Collectives that torch counted before AORTA did, as of the wrapper of a model."""
NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "all_reduce"}


def rings(
    folder: Path, evidence: list[RankEvidence], front: int, states: Mapping[int, str], newest: int = 1000
) -> list[RankEvidence]:
    """What torch's Flight Recorder has of the same collectives: completed below the number `front`, which is in these
    states, and scheduled behind it; of each rank the `newest`.
    """
    dumps = []
    for one in evidence:
        rows = [entry(number, "completed", profiling_name="nccl:broadcast") for number in range(BEFORE)]
        for each in one.collectives:
            state = "completed" if each.number < front else "scheduled" if each.number > front else states[one.rank]
            shapes = {"whole": [[(each.bytes or 0) // 4]], "share": [[(each.bytes or 0) // 4 // len(evidence)]]}
            rows.append(
                entry(
                    each.number + BEFORE,
                    state,
                    profiling_name=f"nccl:{NAMES[each.kind]}",
                    time_created_ns=CREATED_NS + (each.issued_ns or 0),
                    input_sizes=shapes["share" if each.kind == "all_gather" else "whole"],
                    output_sizes=shapes["share" if each.kind == "reduce_scatter" else "whole"],
                )
            )
        dumps.append(dump(rows[-newest:], len(evidence)))
    return read_dumps([write(folder, dumps)])


def last_seen(evidence: list[RankEvidence], *unread: int) -> list[RankEvidence]:
    """Evidence in which each rank has not seen as many of its newest completions as `unread` says, in turn."""
    for one in evidence:
        completed = [each for each in one.collectives if each.state == "completed"]
        for each in completed[len(completed) - unread[one.rank % len(unread)] :]:
            each.completed_ns = None
        for each in one.collectives:
            if each.completed_ns is None:
                each.state = "unseen"
    return evidence


LAYOUTS: dict[str, dict[int, Program]] = {"ddp": ddp(4), "sharded": clipped(4)}


@pytest.mark.parametrize("unread", [(2,), (3, 1), (0, 2, 3, 1)])
@pytest.mark.parametrize("name", ["data", "checkpoint", "forward", "optimizer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_host_that_may_wait_for_its_device_is_a_suspect_and_accused_where_its_ring_denies_that(
    layout: str, name: str, unread: tuple[int, ...], tmp_path: Path
) -> None:
    """To copy a batch, a value or a parameter: the device may hang in what was not noted."""
    for rank in WORLD:
        evidence = last_seen(run(LAYOUTS[layout], {rank: stuck_in("data" if name == "checkpoint" else name)}), *unread)
        evidence[rank].phase = name
        verdict = judge(evidence)
        assert {(one.rank, one.kind) for one in verdict.culprits} <= {(rank, "stuck_outside")}, verdict.summary
        if name in ("data", "checkpoint"):
            assert bool(verdict.culprits) == (min(unread) == 0)
        if not verdict.culprits:
            assert (verdict.kind, verdict.suspects) == ("cannot_decide", [rank])

        front = len(evidence[rank].collectives)
        (one,) = judge([*evidence, *rings(tmp_path, evidence, front, STARTED)]).culprits
        assert (one.rank, one.kind, one.phase) == (rank, "stuck_outside", name)
        assert one.collective is not None
        assert one.collective.number == front


def test_messages_that_one_side_has_noted_are_not_held_against_the_other() -> None:
    line = Group("0", (0, 1))
    first, second = ([message(line, kind, 1 - rank) for kind in ("send", "recv")] for rank in (0, 1))
    evidence = last_seen(run({0: [*first * 6, STUCK], 1: [*second[::-1] * 6, STUCK]}), 0)
    received = [one for one in evidence[0].collectives if one.kind == "recv"]
    sent = [one for one in evidence[1].collectives if one.kind == "send"]
    for one in (*received[-1:], *sent[-3:]):  # rank 0 has seen two more of them
        one.state, one.completed_ns = "unseen", None
    assert not judge(evidence).culprits


def test_a_rank_whose_device_waits_is_not_accused_of_the_phase_its_host_is_in() -> None:
    """What both have issued hangs on the devices; one copies a batch, the other has gone on to another group."""
    first, second = Group("0", (0, 1)), Group("1", (0, 1))
    both = [call(first, "all_reduce", 400, blocking=False), phase("data")]
    evidence = run({0: [*both, STUCK], 1: [*both, call(second, "all_gather", 80)]})
    for one in evidence:
        one.collectives[0].state, one.collectives[0].completed_ns = "started", None
    (accused,) = judge(evidence).culprits
    assert accused.rank == 0  # of hosts, where nothing says that they wait for devices

    for one in evidence:
        one.device_seen_ns = one.taken_ns
    assert judge(evidence).culprits == []


def in_the_last_collective(states: list[str]) -> list[RankEvidence]:
    """Ranks whose newest collective is in these states, on devices that were looked at."""
    evidence = run(clipped(4), dict.fromkeys(WORLD, stuck_in("optimizer")))
    for one, state in zip(evidence, states, strict=True):
        newest = one.collectives[-1]
        newest.state, newest.completed_ns, one.device_seen_ns = state, None, one.taken_ns
        newest.started_ns = 8 if state == "started" else None
    return evidence


def test_a_device_that_was_looked_at_before_the_others_began_is_not_behind() -> None:
    evidence = in_the_last_collective(["issued", "started", "started", "started"])
    (late,) = judge(evidence).culprits
    assert (late.rank, late.kind) == (0, "rank_did_not_join")
    assert judge(evidence, stuck_after_s=1e6).kind == "not_stuck"  # hosts issue ahead: it is not known for how long
    evidence[0].device_seen_ns = 6
    assert judge(evidence).culprits == []


def test_what_no_device_has_begun_is_not_stuck_inside_of_it() -> None:
    for state, kind, suspects in (("issued", "cannot_decide", list(WORLD)), ("started", "stuck_inside", [])):
        verdict = judge(in_the_last_collective([state] * 4))
        assert (verdict.kind, verdict.culprits, verdict.suspects) == (kind, [], suspects)


UNSEEN = ["completed", "unseen", "unseen", "unseen", "issued"]


@pytest.mark.parametrize(
    ("looked_s_ago", "host", "states"),
    [
        pytest.param(0.0, socket.gethostname(), ["completed", "started", "issued", "unseen", "started"], id="now"),
        pytest.param(60.0, socket.gethostname(), UNSEEN, id="long ago"),
        pytest.param(None, socket.gethostname(), UNSEEN, id="never"),
        pytest.param(0.0, "elsewhere", UNSEEN, id="by the clock of another host"),
    ],
)
def test_what_a_look_at_the_device_says_holds_for_a_while(
    tmp_path: Path, looked_s_ago: float | None, host: str, states: list[str]
) -> None:
    process = structs.replace(facts(), host=host, boot_id=boot_id())
    rank = Rank(tmp_path / "progress" / "rank_0.bin", process=process)
    for number, more in enumerate((DONE, BEGUN, 0, UNMARKED)):
        rank.issue(number, flags=ON_DEVICE | more)
    rank.issue(4)  # of tensors on the host
    if looked_s_ago is not None:
        rank.progress._words[LOOKED_WORD] = time.perf_counter_ns() - int(looked_s_ago * 1e9)
    rank.issue(5, flags=ON_DEVICE)  # behind the look
    (one,) = progress_evidence(tmp_path)
    assert [each.state for each in one.collectives] == [*states, "unseen"]
    assert (one.device_seen_ns is None) == (states == UNSEEN)


def test_a_rank_that_gave_up_was_waiting_and_a_loader_that_timed_out_is_a_cause() -> None:
    evidence = run(clipped(4), {2: stuck_in("data")})
    evidence[0].state = "dead"
    evidence[0].exit = RankExit(exit_code=1, exception="RuntimeError: Timed out waiting 1800000ms for recv operation")
    ending = RankExit(exit_code=1, exception="RuntimeError: DataLoader timed out after 60 seconds")
    loader = run(clipped(4), {2: ended_in("data", ending)})
    for found, kind in ((evidence, "stuck_outside"), (loader, "dead")):
        (one,) = judge(found).culprits
        assert (one.rank, one.kind) == (2, kind)


SLOTS = 16


@pytest.mark.parametrize(
    ("issues", "more_rows", "told"),
    [
        pytest.param(True, SLOTS, "unknown", id="overwritten, and perhaps open"),
        pytest.param(False, SLOTS, "behind", id="it has never used the group"),
        pytest.param(True, SLOTS - 2, "behind", id="its last one is seen, and the next one is not there"),
    ],
)
def test_a_rank_whose_rows_were_overwritten_is_not_said_to_be_behind(
    tmp_path: Path, issues: bool, more_rows: int, told: str
) -> None:
    for number in range(2):
        rank = Rank(tmp_path / "progress" / f"rank_{number}.bin", SLOTS, structs.replace(facts(number), host="here"))
        rank.progress.begin_step(0)
        if number == 0 or issues:
            group = rank.ring.group(RingGroup("dp", 1, False, (0, 1)))
            rank.rows.complete(rank.issue(0, group=group), 9, by_wait=False)
        if number == 0:
            rank.issue(1, group=group)
        for _ in range(more_rows if number else 0):
            rank.rows.append(RANGE)
    (one,) = WaitGraph.of(join(progress_evidence(tmp_path))).open
    assert (one.rank, one.collective.number) == (0, 1)
    assert (one.behind, one.unknown) == (({1}, set()) if told == "behind" else (set(), {1}))


@pytest.mark.parametrize(
    ("unread", "front", "states", "kind", "culprits", "waiting"),
    [
        pytest.param(3, 6, STARTED | {1: "scheduled"}, "rank_did_not_join", [1], [0, 2, 3], id="a stream is stuck"),
        pytest.param(4, 7, STARTED, "stuck_inside", [], [0, 1, 2, 3], id="a kernel is stuck on all ranks"),
        pytest.param(2, 7, STARTED | {1: ""}, "stuck_inside", [], [0, 1, 2, 3], id="of a rank there is no ring"),
        pytest.param(4, 7, dict.fromkeys(WORLD, "completed") | {2: "started"}, "stuck_inside", [2], [2], id="alone"),
    ],
)
def test_hosts_that_are_equally_far_are_told_apart_by_their_devices(
    unread: int, front: int, states: dict[int, str], kind: str, culprits: list[int], waiting: list[int], tmp_path: Path
) -> None:
    evidence = last_seen(run(clipped(4), dict.fromkeys(WORLD, stuck_in("optimizer", step=2))), unread, 2)
    files, oldest = judge(evidence), len(evidence[0].collectives) - 2  # that no rank has noted
    assert (files.kind, files.culprits) == ("stuck_inside", []), files.summary
    assert {wait.collective.number for wait in files.waits} == {oldest}
    ring = [one for one in rings(tmp_path, evidence, front, states) if states[one.rank]]
    verdict = judge([*evidence, *ring])
    assert (verdict.kind, [one.rank for one in verdict.culprits], verdict.contradictions) == (kind, culprits, [])
    assert [(wait.ranks, wait.collective.number) for wait in verdict.waits] == [(waiting, front)]


def test_rows_have_what_both_sources_know_and_the_numbers_of_ours(tmp_path: Path) -> None:
    evidence = last_seen(run(clipped(4), {1: stuck_in("forward")}), 2)
    ring = rings(tmp_path, evidence, 3, STARTED)
    job = join([*evidence, *ring])
    rank = job.ranks[0]
    assert [one.number for one in rank.collectives] == [0, 1, 2, 3]
    assert [one.state for one in rank.collectives] == ["completed"] * 3 + ["started"]
    newest = rank.collectives[-1]
    assert (newest.issued_ns, newest.issued_by) == (evidence[0].collectives[3].issued_ns, "/home/me/loop.py:7 step")
    assert newest.input_sizes == ((125,),)
    assert len(rank.sources) == 2
    assert job.notes == ()


def test_what_the_ring_denies_is_said_unless_it_was_issued_after_the_file_was_read(tmp_path: Path) -> None:
    evidence = run(clipped(2), {1: stuck_in("data", step=2)})
    ring = rings(tmp_path, evidence, 5, {0: "started", 1: "completed"})
    verdict = judge([*evidence, *ring])
    assert verdict.contradictions == [
        "rank 0: the progress file says all_reduce 5 of 0 is completed, the Flight Recorder says started"
    ]
    assert [one.rank for one in verdict.culprits] == [1]
    newest = evidence[0].collectives.pop()
    assert newest.issued_ns is not None
    for read_ns, more in ((newest.issued_ns + 1, 1), (newest.issued_ns - 1, 0)):
        evidence[0].taken_ns = read_ns
        assert len(join([*evidence, *ring]).contradictions) == 1 + more


@pytest.mark.parametrize(("kept", "states"), [(3, {"unseen"}), (4, {"started", "issued"})])
def test_what_a_full_ring_has_dropped_is_completed_only_where_a_row_behind_it_has_begun(
    kept: int, states: set[str], tmp_path: Path
) -> None:
    evidence = last_seen(run(clipped(2), dict.fromkeys(range(2), stuck_in("optimizer", step=2))), 4)
    (front, *_), before = [one.number for one in evidence[0].collectives[-4:]], evidence[0].collectives[:-4]
    ring = rings(tmp_path, evidence, front, STARTED, newest=kept)
    rank = join([*evidence, *ring]).ranks[0]
    assert {one.state for one in rank.collectives[-4:]} == states
    assert {one.state for one in before} == {"completed"}


def test_a_ring_of_other_collectives_is_not_mixed_in(tmp_path: Path) -> None:
    evidence = last_seen(run(clipped(3), {1: stuck_in("data")}), 1)
    ring = rings(tmp_path, evidence, 3, STARTED)
    for one in ring[2].collectives:
        one.kind = "broadcast"
    job = join([*evidence, *ring])
    assert job.contradictions == ("rank 2: the progress file and the Flight Recorder saw different collectives of 0",)
    assert [one.kind for one in job.ranks[2].collectives][:2] == ["all_gather", "reduce_scatter"]
    assert [one.rank for one in judge([*evidence, *ring]).culprits] == [1]
