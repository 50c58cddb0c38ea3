"""NCCL's ring beside progress files of devices that nobody saw: what is scheduled, started and completed decides what
the files alone leave open. NCCL's RAS: its JSON from a file and over TCP, and what follows for a verdict.
"""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from aorta.autopsy import report
from aorta.autopsy.evidence import CollectiveEvidence, RankEvidence
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.joining import join
from aorta.autopsy.judge import judge
from aorta.autopsy.report import read_ras
from aorta.commands import main
from aorta.errors import InputError
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


def process(rank: int, **status: bool) -> dict[str, Any]:
    known = status or {"init_state": 0, "async_error": 0, "abort_flag": False}
    return {"rank": rank, "host": "10.0.0.4", "pid": 100 + rank, "cuda_dev": rank, "nvml_dev": rank, "status": known}


def answer(*missing: dict[str, Any], size: int = 3) -> dict[str, Any]:
    """RAS's answer for one communicator of all ranks, some of them missing."""
    absent = [one["rank"] for one in missing]
    there = [process(rank) | {"collective_counts": {"AllReduce": 4}} for rank in range(size) if rank not in absent]
    communicator = {"hash": "0xa1", "secondary_hash": "0x1:0x2", "size": size, "ranks": there, "missing_ranks": missing}
    return {"nccl_version": "2.28.9", "communicators_count": 1, "communicators": [communicator], "ras": {}}


@contextmanager
def served(text: str, pause_s: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """A server that speaks RAS's protocol: its address, and the lines that it was sent. `pause_s`: before each byte."""
    lines: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline().decode().strip():
                lines.append(line)
                if line == "STATUS":
                    with suppress(OSError):
                        for at in range(len(text)) if pause_s else ():
                            time.sleep(pause_s)
                            self.wfile.write(text[at].encode())
                        self.wfile.write(b"" if pause_s else text.encode())
                    return
                self.wfile.write(b"OK\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", lines
        finally:
            server.shutdown()
            thread.join()


def test_the_port_is_asked_for_json() -> None:
    with served(json.dumps(answer(process(1, unresponsive=True, considered_dead=False)))) as (place, lines):
        evidence = read_ras(place)
    assert lines == ["SET FORMAT json", "STATUS"]
    assert [(one.rank, one.state, one.torn) for one in evidence] == [
        (0, "running", None),
        (1, "unknown", "no answer to RAS"),
        (2, "running", None),
    ]


def test_the_comma_that_nccl_2_28_leaves_out_is_put_in(tmp_path: Path) -> None:
    path = tmp_path / "ras.json"
    broken = json.dumps(answer(process(1, unresponsive=False, considered_dead=True)), indent=2)
    path.write_text(broken.replace('"nvml_dev": 1,', '"nvml_dev": 1'))
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(path.read_text())
    assert [one.state for one in read_ras(str(path))] == ["running", "dead", "running"]


def test_a_rank_that_ras_calls_dead_and_others_wait_for_is_accused(tmp_path: Path) -> None:
    write(tmp_path, [dump([entry(0, "started")], 3)] * 2)
    (tmp_path / "ras.txt").write_text(json.dumps(answer(process(2, unresponsive=True, considered_dead=True))))
    assert main(["autopsy", str(tmp_path)]) == 4
    assert main(["autopsy", str(tmp_path), "--ras", str(tmp_path / "ras.txt")]) == 3


def test_a_rank_that_does_not_answer_is_the_one_that_others_wait_for(tmp_path: Path) -> None:
    path = tmp_path / "ras.txt"
    path.write_text(json.dumps(answer(process(1, unresponsive=True, considered_dead=False))))
    evidence = [one for one in run(ddp(3), {1: stuck_in("data")}) if one.rank != 1]
    (one,) = judge([*evidence, *read_ras(str(path))]).culprits
    assert one.rank == 1
    assert "does not answer NCCL's RAS" in one.reason


def test_what_ras_and_the_progress_files_say_differently_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "ras.txt"
    path.write_text(json.dumps(answer(process(0, unresponsive=True, considered_dead=True))))
    verdict = judge([*run(ddp(3), {1: stuck_in("data")}), *read_ras(str(path))])
    assert [one.rank for one in verdict.culprits] == [1]
    assert verdict.contradictions == ["rank 0: the progress file says running, RAS says dead"]


def test_ranks_of_communicators_are_found_by_host_and_pid(tmp_path: Path) -> None:
    evidence = run(ddp(4), {})
    for one in evidence:
        one.host, one.pid = "10.0.0.4", 100 + one.rank
    path = tmp_path / "ras.txt"
    path.write_text(json.dumps(answer(size=2)))
    assert [one.rank for one in read_ras(str(path), evidence)] == [0, 1]


@pytest.mark.parametrize("place", ["none.json", "localhost:none", "127.0.0.1:1"])
def test_nobody_there_is_bad_input(place: str) -> None:
    with pytest.raises(InputError, match=place):
        read_ras(place)


def test_an_answer_that_comes_byte_by_byte_has_a_limit_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_ANSWER_S", 0.3)
    with served(json.dumps(answer()), pause_s=0.01) as (place, _), pytest.raises(InputError, match="no answer: "):
        read_ras(place)


def test_text_instead_of_json_is_bad_input() -> None:
    with served("NCCL version 2.24 ...") as (place, _), pytest.raises(InputError, match=r"2\.28\.7"):
        read_ras(place)
