"""Known answers where nobody asked devices lately what they have begun and completed: a host that is late is told from
a device that is, or the answer says that this cannot be told. And where devices were seen.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec import structs

from aorta.autopsy.evidence import RankEvidence, RankExit
from aorta.autopsy.job import WaitGraph
from aorta.autopsy.joining import join
from aorta.autopsy.judge import judge
from aorta.autopsy.processes import progress_evidence
from aorta.records.clocks import boot_id
from aorta.records.progress import LOOKED_WORD
from aorta.records.ring_file import BEGUN, DONE, ON_DEVICE, RANGE, UNMARKED, RingGroup
from tests.autopsy.hangs import STUCK, Group, Op, Program, call, clipped, ddp, ended_in, phase, run, stuck_in
from tests.records.test_progress import Rank, facts

WORLD = tuple(range(4))


def last_seen(evidence: Iterable[RankEvidence], *unread: int) -> list[RankEvidence]:
    """Evidence in which each rank has not seen as many of its newest completions as `unread` says, in turn."""
    found = []
    for one in evidence:
        completed = [each for each in one.collectives if each.state == "completed"]
        left = unread[one.rank % len(unread)]
        for each in completed[len(completed) - left :]:
            each.completed_ns = None
        for each in one.collectives:
            if each.completed_ns is None:
                each.state = "unseen"
        found.append(one)
    return found


LAYOUTS: dict[str, dict[int, Program]] = {"ddp": ddp(4), "sharded": clipped(4)}
UNREAD = [(2,), (3, 1), (0, 2, 3, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_stuck_in_data_is_the_only_one_accused_once_its_collectives_were_noted(layout: str) -> None:
    for rank in WORLD:
        verdict = judge(last_seen(run(LAYOUTS[layout], {rank: stuck_in("data")}), 0, 2, 3, 1))
        assert [(one.rank, one.kind) for one in verdict.culprits] == [(rank, "stuck_outside")], verdict.summary


@pytest.mark.parametrize("unread", UNREAD)
@pytest.mark.parametrize("name", ["data", "forward", "optimizer"])
def test_a_host_that_may_wait_for_its_device_is_a_suspect(name: str, unread: tuple[int, ...]) -> None:
    """To copy a batch, a value or a parameter: the device may hang in what was not noted."""
    for rank in WORLD:
        verdict = judge(last_seen(run(clipped(4), {rank: stuck_in(name)}), *unread))
        assert {one.rank for one in verdict.culprits} <= {rank}, verdict.summary
        if name == "data" and min(unread):
            assert verdict.culprits == []
        if not verdict.culprits:
            assert (verdict.kind, verdict.suspects) == ("cannot_decide", [rank])


def test_a_rank_that_writes_a_checkpoint_alone_is_a_suspect_until_its_collectives_were_noted() -> None:
    """To copy a parameter its host waits for the device, which may hang in the collective before."""
    evidence = last_seen(run(ddp(4), {0: stuck_in("data")}), 2)
    evidence[0].phase = "checkpoint"
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits, verdict.suspects) == ("cannot_decide", [], [0])

    for one in evidence[1].collectives[: len(evidence[0].collectives)]:
        one.state = "completed"
    (accused,) = judge(evidence).culprits
    assert (accused.rank, accused.kind, accused.phase) == (0, "stuck_outside", "checkpoint")


@pytest.mark.parametrize("unread", UNREAD)
def test_a_collective_that_hangs_on_all_devices_accuses_nobody(unread: tuple[int, ...]) -> None:
    """However many earlier ones each rank has read."""
    held = run(clipped(4), dict.fromkeys(WORLD, stuck_in("optimizer", step=2)))
    verdict = judge(last_seen(held, *(1 + more for more in unread)))
    assert (verdict.kind, verdict.culprits) == ("stuck_inside", []), verdict.summary
    oldest = len(held[0].collectives) - 1 - min(unread)  # that no rank has noted
    assert {wait.collective.number for wait in verdict.waits} == {oldest}


def test_messages_that_one_side_has_noted_are_not_held_against_the_other() -> None:
    line = Group("0", (0, 1))
    messages = [
        [Op("call", line, kind, 64, peer=1 - rank) for kind in kinds]
        for rank, kinds in enumerate((("send", "recv"), ("recv", "send")))
    ]
    evidence = last_seen(run({rank: [*each * 6, STUCK] for rank, each in enumerate(messages)}), 0)
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


def test_a_device_that_was_looked_at_before_the_others_began_is_not_behind() -> None:
    evidence = run(clipped(4), dict.fromkeys(WORLD, stuck_in("optimizer")))
    for one in evidence:
        one.collectives[-1].state, one.collectives[-1].completed_ns = "started", None
        one.collectives[-1].started_ns, one.device_seen_ns = 8, 900
    evidence[0].collectives[-1].state, evidence[0].collectives[-1].started_ns = "issued", None
    (late,) = judge(evidence).culprits
    assert late.rank == 0

    evidence[0].device_seen_ns = 6
    assert judge(evidence).culprits == []


def test_what_no_device_has_begun_is_not_stuck_inside_of_it() -> None:
    evidence = run(clipped(4), dict.fromkeys(WORLD, stuck_in("optimizer")))
    for one in evidence:
        one.collectives[-1].state, one.collectives[-1].completed_ns = "issued", None
        one.device_seen_ns = one.taken_ns
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits, verdict.suspects) == ("cannot_decide", [], list(WORLD))

    for one in evidence:
        one.collectives[-1].state = "started"
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits) == ("stuck_inside", [])

    evidence[2].collectives[-1].state = "issued"
    (late,) = judge(evidence).culprits
    assert (late.rank, late.kind) == (2, "rank_did_not_join")
    assert judge(evidence, stuck_after_s=1e6).kind == "not_stuck"  # hosts issue ahead: it is not known for how long


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
    (one,) = progress_evidence(tmp_path)
    assert [each.state for each in one.collectives] == states
    assert (one.device_seen_ns is None) == (states == UNSEEN)


def test_what_is_issued_behind_a_look_is_not_known(tmp_path: Path) -> None:
    process = structs.replace(facts(), host=socket.gethostname(), boot_id=boot_id())
    rank = Rank(tmp_path / "progress" / "rank_0.bin", process=process)
    rank.progress._words[LOOKED_WORD] = time.perf_counter_ns()
    rank.issue(0, flags=ON_DEVICE)
    assert [each.state for each in progress_evidence(tmp_path)[0].collectives] == ["unseen"]


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
    assert {"behind": one.behind, "unknown": one.unknown} == {"behind": set(), "unknown": set()} | {told: {1}}
