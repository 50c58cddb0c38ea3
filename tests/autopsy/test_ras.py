"""NCCL's RAS: its JSON from a file and over TCP, and what follows for a verdict."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from aorta.autopsy import report
from aorta.autopsy.judge import judge
from aorta.autopsy.report import read_ras
from aorta.commands import main
from aorta.errors import InputError
from tests.autopsy.hangs import ddp, run, stuck_in
from tests.autopsy.test_flight_recorder import dump, entry, write


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
