"""NCCL's ring beside progress files of devices that nobody saw: what is scheduled, started and completed decides what
the files alone leave open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aorta.autopsy.evidence import CollectiveEvidence, RankEvidence
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.joining import join
from aorta.autopsy.judge import judge
from tests.autopsy.hangs import Program, clipped, ddp, run, stuck_in
from tests.autopsy.test_flight_recorder import CREATED_NS, dump, entry, write
from tests.autopsy.test_unseen import last_seen

BEFORE = 5
"""Collectives that torch counted before AORTA did, as of the wrapper of a model."""
NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "all_reduce"}
States = Callable[[int, CollectiveEvidence], str]


def rings(folder: Path, evidence: list[RankEvidence], state: States, **keep: Any) -> list[RankEvidence]:
    """What torch's Flight Recorder has of the same collectives, in these states; of each rank the newest `keep`."""
    newest = int(keep.get("newest", 1000))
    ranks = len(evidence)
    dumps = []
    for one in evidence:
        before = [entry(number, "completed", profiling_name="nccl:broadcast") for number in range(BEFORE)]
        rows = [_row(each, state(one.rank, each), ranks) for each in one.collectives]
        dumps.append(dump([*before, *rows][-newest:], ranks))
    return read_dumps([write(folder, dumps)])


def _row(one: CollectiveEvidence, state: str, ranks: int) -> dict[str, Any]:
    assert one.bytes is not None
    assert one.issued_ns is not None
    whole = [[one.bytes // 4]]
    share = [[one.bytes // 4 // ranks]]
    return entry(
        one.number + BEFORE,
        state,
        profiling_name=f"nccl:{NAMES[one.kind]}",
        time_created_ns=CREATED_NS + one.issued_ns,
        input_sizes=share if one.kind == "all_gather" else whole,
        output_sizes=share if one.kind == "reduce_scatter" else whole,
    )


def reached(front: int, states: Mapping[int, str]) -> States:
    """Completed below a number; that one in this state on each rank; behind it scheduled."""
    return lambda rank, one: "completed" if one.number < front else states[rank] if one.number == front else "scheduled"


LAYOUTS: dict[str, dict[int, Program]] = {"ddp": ddp(4), "sharded": clipped(4)}


@pytest.mark.parametrize("name", ["data", "forward", "optimizer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_never_enqueues_is_accused_in_any_phase(layout: str, name: str, tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / str(rank)).mkdir()
        evidence = last_seen(run(LAYOUTS[layout], {rank: stuck_in(name)}), 2, 3)
        front = len(evidence[rank].collectives)
        ring = rings(tmp_path / str(rank), evidence, reached(front, dict.fromkeys(range(4), "started")))
        (one,) = judge([*evidence, *ring]).culprits
        assert (one.rank, one.kind, one.phase) == (rank, "stuck_outside", name)
        assert one.collective is not None
        assert one.collective.number == front


@pytest.mark.parametrize("newest", [1000, 4])
@pytest.mark.parametrize("stream", range(4))
def test_a_rank_whose_stream_is_stuck_before_the_collective_is_accused(
    stream: int, newest: int, tmp_path: Path
) -> None:
    """Its host is as far as the others', so that the files alone show nothing."""
    evidence = last_seen(run(clipped(4), dict.fromkeys(range(4), stuck_in("optimizer", step=2))), 3, 2)
    assert judge(evidence).culprits == []
    states = {rank: "scheduled" if rank == stream else "started" for rank in range(4)}
    verdict = judge([*evidence, *rings(tmp_path, evidence, reached(6, states), newest=newest)])
    assert [(one.rank, one.kind) for one in verdict.culprits] == [(stream, "rank_did_not_join")]
    assert "its device has not begun it" in verdict.culprits[0].reason
    assert {rank for wait in verdict.waits for rank in wait.ranks} == set(range(4)) - {stream}


def test_a_kernel_that_is_stuck_on_all_ranks_accuses_nobody(tmp_path: Path) -> None:
    evidence = last_seen(run(clipped(4), dict.fromkeys(range(4), stuck_in("optimizer", step=2))), 4, 2)
    ring = rings(tmp_path, evidence, reached(7, dict.fromkeys(range(4), "started")))
    verdict = judge([*evidence, *ring])
    assert (verdict.kind, verdict.culprits, verdict.contradictions) == ("stuck_inside", [], [])
    assert [(wait.ranks, wait.collective.number) for wait in verdict.waits] == [([0, 1, 2, 3], 7)]


def test_a_rank_alone_in_a_kernel_is_accused(tmp_path: Path) -> None:
    evidence = last_seen(run(clipped(4), dict.fromkeys(range(4), stuck_in("optimizer", step=2))), 4)
    states = {0: "completed", 1: "completed", 2: "started", 3: "completed"}
    (one,) = judge([*evidence, *rings(tmp_path, evidence, reached(7, states))]).culprits
    assert (one.rank, one.kind, one.rule) == (2, "stuck_inside", "unfinished_alone")


def test_rows_have_what_both_sources_know_and_the_numbers_of_ours(tmp_path: Path) -> None:
    evidence = last_seen(run(clipped(4), {1: stuck_in("forward")}), 2)
    ring = rings(tmp_path, evidence, reached(3, dict.fromkeys(range(4), "started")))
    job = join([*evidence, *ring])
    rank = job.ranks[0]
    assert [one.number for one in rank.collectives] == [0, 1, 2, 3]
    assert [one.state for one in rank.collectives] == ["completed"] * 3 + ["started"]
    newest = rank.collectives[-1]
    assert (newest.issued_ns, newest.issued_by) == (evidence[0].collectives[3].issued_ns, "/home/me/loop.py:7 step")
    assert newest.input_sizes == ((125,),)
    assert len(rank.sources) == 2
    assert job.notes == ()


def test_what_the_ring_denies_is_said(tmp_path: Path) -> None:
    evidence = run(clipped(2), {1: stuck_in("data", step=2)})
    ring = rings(tmp_path, evidence, reached(5, {0: "started", 1: "completed"}))
    verdict = judge([*evidence, *ring])
    assert verdict.contradictions == [
        "rank 0: the progress file says all_reduce 5 of 0 is completed, the Flight Recorder says started"
    ]
    assert [one.rank for one in verdict.culprits] == [1]


@pytest.mark.parametrize(("kept", "states"), [(3, {"unseen"}), (4, {"started", "issued"})])
def test_what_a_full_ring_has_dropped_is_completed_only_where_a_row_behind_it_has_begun(
    kept: int, states: set[str], tmp_path: Path
) -> None:
    evidence = last_seen(run(clipped(2), dict.fromkeys(range(2), stuck_in("optimizer", step=2))), 4)
    (front, *_), before = [one.number for one in evidence[0].collectives[-4:]], evidence[0].collectives[:-4]
    ring = rings(tmp_path, evidence, reached(front, dict.fromkeys(range(2), "started")), newest=kept)
    rank = join([*evidence, *ring]).ranks[0]
    assert {one.state for one in rank.collectives[-4:]} == states
    assert {one.state for one in before} == {"completed"}


def test_what_was_issued_after_the_file_was_read_is_no_contradiction(tmp_path: Path) -> None:
    evidence = run(clipped(2), {1: stuck_in("data", step=2)})
    ring = rings(tmp_path, evidence, reached(9, {}))
    newest = evidence[0].collectives.pop()
    assert newest.issued_ns is not None
    for read_ns, said in ((newest.issued_ns + 1, 1), (newest.issued_ns - 1, 0)):
        evidence[0].taken_ns = read_ns
        denied = [each for each in join([*evidence, *ring]).contradictions if "rank 0" in each]
        assert len(denied) == said


def test_a_ring_of_other_collectives_is_not_mixed_in(tmp_path: Path) -> None:
    evidence = last_seen(run(clipped(3), {1: stuck_in("data")}), 1)
    ring = rings(tmp_path, evidence, reached(3, dict.fromkeys(range(3), "started")))
    for one in ring[2].collectives:
        one.kind = "broadcast"
    job = join([*evidence, *ring])
    assert job.contradictions == ("rank 2: the progress file and the Flight Recorder saw different collectives of 0",)
    assert [one.kind for one in job.ranks[2].collectives][:2] == ["all_gather", "reduce_scatter"]
    assert [one.rank for one in judge([*evidence, *ring]).culprits] == [1]


def test_a_rank_whose_ring_is_missing_is_not_held_to_its_device(tmp_path: Path) -> None:
    """Its file cannot say that its device has not begun what those of the others have."""
    evidence = last_seen(run(clipped(4), dict.fromkeys(range(4), stuck_in("optimizer", step=2))), 2)
    ring = rings(tmp_path, evidence, reached(7, dict.fromkeys(range(4), "started")))
    verdict = judge([*evidence, *(one for one in ring if one.rank != 1)])
    assert (verdict.kind, verdict.culprits) == ("stuck_inside", [])
