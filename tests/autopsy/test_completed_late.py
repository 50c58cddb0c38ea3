"""Known answers where completions are noted late, as on a device: a host that is late is told from a device that is,
or the answer says that this cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from aorta.autopsy.evidence import RankEvidence, RankExit
from aorta.autopsy.judge import judge
from tests.autopsy.hangs import Program, clipped, ddp, ended_in, run, stuck_in

WORLD = tuple(range(4))


def noted_late(evidence: Iterable[RankEvidence], *unread: int) -> list[RankEvidence]:
    """Evidence in which each rank has not noted as many of its newest completions as `unread` says, in turn."""
    found = []
    for one in evidence:
        completed = [each for each in one.collectives if each.state == "completed"]
        left = unread[one.rank % len(unread)]
        for each in completed[len(completed) - left :]:
            each.state, each.completed_ns = "issued", None
        one.completed_late = True
        found.append(one)
    return found


LAYOUTS: dict[str, dict[int, Program]] = {"ddp": ddp(4), "sharded": clipped(4)}
UNREAD = [(2,), (3, 1), (0, 2, 3, 1)]


@pytest.mark.parametrize("unread", UNREAD)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_stuck_in_data_is_the_only_one_accused(layout: str, unread: tuple[int, ...]) -> None:
    for rank in WORLD:
        evidence = noted_late(run(LAYOUTS[layout], {rank: stuck_in("data")}), *unread)
        verdict = judge(evidence)
        assert [(one.rank, one.kind) for one in verdict.culprits] == [(rank, "stuck_outside")], verdict.summary


@pytest.mark.parametrize("unread", UNREAD)
@pytest.mark.parametrize("name", ["forward", "optimizer"])
def test_a_host_that_may_wait_for_its_device_is_a_suspect(name: str, unread: tuple[int, ...]) -> None:
    """In these phases a host may wait for the device, which may hang in what was not noted."""
    for rank in WORLD:
        verdict = judge(noted_late(run(clipped(4), {rank: stuck_in(name)}), *unread))
        assert {one.rank for one in verdict.culprits} <= {rank}, verdict.summary
        if not verdict.culprits:
            assert (verdict.kind, verdict.suspects) == ("cannot_decide", [rank])


def test_a_rank_that_writes_a_checkpoint_alone_is_a_suspect_until_its_collectives_were_noted() -> None:
    """To copy a parameter its host waits for the device, which may hang in the collective before."""
    evidence = noted_late(run(ddp(4), {0: stuck_in("data")}), 2)
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
    verdict = judge(noted_late(held, *(1 + more for more in unread)))
    assert (verdict.kind, verdict.culprits) == ("stuck_inside", []), verdict.summary
    oldest = len(held[0].collectives) - 1 - min(unread)  # that no rank has noted
    assert {wait.collective.number for wait in verdict.waits} == {oldest}


def test_a_rank_that_gave_up_was_waiting() -> None:
    evidence = run(clipped(4), {2: stuck_in("data")})
    evidence[0].state = "dead"
    evidence[0].exit = RankExit(exit_code=1, exception="RuntimeError: Timed out waiting 1800000ms for recv operation")
    (one,) = judge(evidence).culprits
    assert (one.rank, one.kind) == (2, "stuck_outside")


def test_a_loader_that_timed_out_is_a_cause_of_its_own() -> None:
    ending = RankExit(exit_code=1, exception="RuntimeError: DataLoader timed out after 60 seconds")
    (one,) = judge(run(clipped(4), {2: ended_in("data", ending)})).culprits
    assert (one.rank, one.kind) == (2, "dead")
