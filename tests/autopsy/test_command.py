"""`aorta autopsy`: what it prints, what it ends with, that its JSON is what its schema says, and what it makes of the
answer of NCCL's RAS, from a file and over TCP.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from aorta.autopsy import report
from aorta.autopsy.evidence import RankExit, ThreadStack
from aorta.autopsy.judge import judge
from aorta.autopsy.processes import progress_evidence
from aorta.autopsy.report import as_json, read_ras, verdict_on, verdict_text
from aorta.commands import main
from aorta.errors import InputError
from aorta.records.clocks import boot_id
from aorta.records.process import pid_namespace, start_ticks
from aorta.records.ring_file import RingFile
from scripts.json_schemas import file_name
from tests.autopsy.hangs import clipped, ddp, resized, run, stuck_in
from tests.autopsy.test_flight_recorder import dump, entry, write
from tests.records.test_progress import facts as progress_facts

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"
BEFORE, WAITS = dump([entry(0, "completed")], 3), dump([entry(0, "completed"), entry(1, "started")], 3)


@pytest.mark.parametrize(
    ("dumps", "code", "answer", "said"),
    [
        ([WAITS, WAITS, BEFORE], 3, "rank did not join", "ranks 0-1 wait for rank 2 in all_reduce 1"),
        ([WAITS, WAITS], 4, "cannot decide", "suspected is rank 2"),
        ([WAITS] * 3, 3, "stuck inside", "ranks 0-2 wait in all_reduce 1 of the default group (400 bytes)"),
        ([dump([entry(0, "completed")])] * 2, 0, "not stuck", "no rank waits for longer than usual"),
    ],
)
def test_the_exit_code_says_what_was_found(
    dumps: list[dict[str, Any]], code: int, answer: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["autopsy", str(write(tmp_path, dumps))]) == code
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(answer)
    assert said in text
    assert ("no evidence of rank 2" in text) == (code == 4)


@pytest.mark.parametrize(
    "broken", [b"", b"\x80\x02J\x00", b'{"version": "3.0"}', b"{", b'{"version": "2.1", "entries": [7]}']
)
@pytest.mark.parametrize(
    ("name", "readable", "code"), [("trace_{}", 0, 2), ("progress/rank_{}.bin", 0, 2), ("trace_{}", 1, 4)]
)
def test_where_no_evidence_can_be_read_nothing_is_said_to_be_well(
    broken: bytes, name: str, readable: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        path = tmp_path / name.format(rank)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(dump([entry(0, "completed")])) if rank < readable else broken)
    assert main(["autopsy", str(tmp_path)]) == code
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("cannot decide no evidence can be read: " if code == 2 else "cannot decide the evidence")
    assert "rank 1: " in text


@pytest.mark.parametrize("name", ["private.json", "attempt_0/x/error.json", "attempt_0/0/error.json"])
def test_a_progress_file_shows_nothing_of_any_file_that_it_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = structs.replace(progress_facts(0), world_size=1, boot_id=boot_id(), start_ticks=1, error_file=str(path))
    RingFile.create(tmp_path / "progress" / "rank_0.bin", structs.replace(facts, host=socket.gethostname()))
    by_torchrun = {"message": {"message": "ValueError: ours", "extraInfo": {"timestamp": "1"}}}
    for content in ({"message": "private"}, {"message": {"message": "private"}}, by_torchrun):
        path.write_text(json.dumps(content))
        (one,) = progress_evidence(tmp_path)
        ours = content is by_torchrun and name == "attempt_0/0/error.json"
        assert one.exit == (RankExit(exception="ValueError: ours") if ours else None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ddp"], "ddp: neither a recorded run nor a dump.* the folder of a recorded run"),
        (["ddp", "--live"], r"ddp: neither a recorded run .* \(--live looks at a recorded run of this host\)"),
        (["runs/dpp"], "runs/dpp: no such file or folder.* one of the runs runs/ddp, runs/fsdp; or dumps of the"),
        (["runs/kineto"], "runs/kineto: neither a recorded run .* one of the runs runs/ddp, "),
        (["runs"], "runs: neither a recorded run .* one of the runs runs/ddp, "),
        (["runs/" + 300 * "x"], ": no such file or folder.* one of the runs runs/ddp, "),
    ],
)
def test_without_evidence_it_says_what_it_takes_and_which_runs_there_are(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("ddp", "runs/kineto", "runs/ddp/progress", "runs/fsdp/progress"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["autopsy", *words]) == 2
    assert re.match(f"error: .*{said}", capsys.readouterr().err)


def test_a_run_that_finished_needs_no_diagnosis_whatever_its_ranks_left_open() -> None:
    evidence = run(ddp(2), {})
    for each in evidence:
        each.state, each.exit = "dead", RankExit(exit_code=0)
        each.collectives[0].state = "issued"
    text = verdict_text(verdict_on(evidence, watched=False))
    assert text.startswith("not stuck\n  the run finished normally; nothing to diagnose\n")
    evidence[1].state = "running"
    assert "finished normally; what rank 1 did since is not" in verdict_on(evidence, watched=False).summary
    evidence[1].exit = None
    assert verdict_on(evidence, watched=False).kind != "not_stuck"


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_process_that_runs_on_has_left_its_recorded_program(tmp_path: Path, code: int) -> None:
    facts = structs.replace(progress_facts(0), world_size=1, boot_id=boot_id(), host=socket.gethostname())
    here = structs.replace(facts, pid=os.getpid(), start_ticks=start_ticks(os.getpid()), pid_namespace=pid_namespace())
    RingFile.create(tmp_path / "progress" / "rank_0.bin", here).progress.end(code)
    (one,) = progress_evidence(tmp_path)
    assert (one.state, one.exit) == ("running", RankExit(exit_code=code))


def test_the_json_is_what_its_schema_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads((SCHEMAS / file_name("autopsy")).read_text())
    assert main(["autopsy", str(write(tmp_path, [dump([entry(0, "started")]), dump([])])), "--json"]) == 3
    for text in (capsys.readouterr().out, as_json(judge([])), as_json(judge(run(clipped(4), {1: resized(5)})))):
        document = json.loads(text)
        jsonschema.validate(document, schema)
        assert document["autopsy_version"] == 1


def test_eight_ranks_fit_a_screen_and_the_accused_leads_with_its_process() -> None:
    evidence = run(ddp(8), {3: stuck_in("data")})
    evidence[3].pid, evidence[3].host = 4711, "node3"
    text = verdict_text(verdict_on(evidence, watched=False))
    lines = text.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert "  rank 3: running, in data, step 1, for 66 s" in lines
    told = " ".join(text.split())
    assert "ranks 0-2, 4-7: running, in all_reduce 2 of the default group, step 1, for 63 s" in told
    assert told.startswith("stuck outside rank 3 (PID 4711 on node3) is in data and has not issued all_reduce 2 of the")
    assert "`py-spy dump --pid 4711`" in told
    evidence[3].host, evidence[3].phase = None, "step"  # outside of the phases that are timed
    summary = verdict_on(evidence, watched=False).summary
    assert summary.startswith("rank 3 (PID 4711) is in your code between collectives and has not issued all_reduce 2")


def test_stacks_are_shown_where_they_are_asked_for() -> None:
    evidence = run(ddp(2), {1: stuck_in("data")})
    evidence[1].stacks = [
        ThreadStack(name="MainThread", frames=("loader.py:4 read", "train.py:9 loop")),
        ThreadStack(name="pin_memory", frames=("queue.py:7 get",)),
    ]
    verdict = verdict_on(evidence, watched=False)
    assert "loader.py:4 read" not in verdict_text(verdict)
    shown = "  rank 1\n    loader.py:4 read\n    train.py:9 loop\n  rank 1, thread pin_memory\n    queue.py:7 get"
    assert shown in verdict_text(verdict, stacks=True)


def answer(missing: dict[int, bool]) -> str:
    """RAS's answer for one communicator of three ranks: which are missing, and whether they are considered dead."""
    processes: list[dict[str, Any]] = [
        {"rank": rank, "host": "10.0.0.4", "pid": 100 + rank, "cuda_dev": rank, "nvml_dev": rank} for rank in range(3)
    ]
    absent = [
        processes[rank] | {"status": {"unresponsive": not dead, "considered_dead": dead}}
        for rank, dead in missing.items()
    ]
    there = [one | {"status": {"init_state": 0}} for one in processes if one["rank"] not in missing]
    communicator = {"hash": "0xa1", "secondary_hash": "0x1:0x2", "size": 3, "ranks": there, "missing_ranks": absent}
    return json.dumps({"nccl_version": "2.28.9", "communicators": [communicator]}, indent=2)


@contextmanager
def served(text: str, pause_s: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """A server that speaks RAS's protocol: its address, and the lines that it was sent. `pause_s`: before each byte."""
    lines: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            lines.append(self.rfile.readline().decode())
            self.wfile.write(b"OK\n")
            lines.append(self.rfile.readline().decode())
            with suppress(OSError):
                for piece in text if pause_s else [text]:
                    time.sleep(pause_s)
                    self.wfile.write(piece.encode())

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", lines
        finally:
            server.shutdown()
            thread.join()


def test_the_port_is_asked_for_json_and_the_comma_that_nccl_2_28_leaves_out_is_put_in() -> None:
    broken = answer({1: False, 2: True}).replace('"nvml_dev": 1,', '"nvml_dev": 1')
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(broken)
    with served(broken) as (place, lines):
        evidence = read_ras(place)
    assert lines == ["SET FORMAT json\n", "STATUS\n"]
    assert [(one.state, one.torn) for one in evidence] == [
        ("running", None),
        ("unknown", "no answer to RAS"),
        ("dead", None),
    ]


def test_a_rank_that_ras_calls_dead_and_others_wait_for_is_accused(tmp_path: Path) -> None:
    write(tmp_path, [dump([entry(0, "started")], 3)] * 2)
    (tmp_path / "ras.txt").write_text(answer({2: True}))
    assert main(["autopsy", str(tmp_path)]) == 4
    assert main(["autopsy", str(tmp_path), "--ras", str(tmp_path / "ras.txt")]) == 3


def test_a_rank_that_does_not_answer_is_the_one_that_others_wait_for(tmp_path: Path) -> None:
    path = tmp_path / "ras.txt"
    path.write_text(answer({1: False}))
    hung = run(ddp(3), {1: stuck_in("data")})
    (one,) = judge([*hung[::2], *read_ras(str(path))]).culprits
    assert one.rank == 1
    assert "does not answer NCCL's RAS" in one.reason
    path.write_text(answer({0: True}))  # which its progress file denies
    verdict = judge([*hung, *read_ras(str(path))])
    assert [one.rank for one in verdict.culprits] == [1]
    assert verdict.contradictions == ["rank 0: the progress file says running, RAS says dead"]


def test_ranks_of_communicators_are_found_by_host_and_pid(tmp_path: Path) -> None:
    evidence = run(ddp(4), {})
    for one in evidence:
        one.host, one.pid = "10.0.0.4", 103 - one.rank
    path = tmp_path / "ras.txt"
    path.write_text(answer({}))
    assert [(one.rank, one.pid) for one in read_ras(str(path), evidence)] == [(1, 102), (2, 101), (3, 100)]


@pytest.mark.parametrize("place", ["none.json", "localhost:none", "127.0.0.1:1"])
def test_nobody_there_is_bad_input(place: str) -> None:
    with pytest.raises(InputError, match=place):
        read_ras(place)


def test_an_answer_that_comes_byte_by_byte_has_a_limit_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_ANSWER_S", 0.3)
    with served(answer({}), pause_s=0.01) as (place, _), pytest.raises(InputError, match="no answer: "):
        read_ras(place)


def test_text_instead_of_json_is_bad_input() -> None:
    with served("NCCL version 2.24 ...") as (place, _), pytest.raises(InputError, match=r"2\.28\.7"):
        read_ras(place)
