"""`aorta autopsy`: what it prints, what it ends with, and that its JSON is what its schema says."""

from __future__ import annotations

import json
import pickle
import socket
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from aorta.autopsy.evidence import RankEvidence, RankExit, ThreadStack, Verdict
from aorta.autopsy.judge import judge
from aorta.autopsy.processes import progress_evidence
from aorta.autopsy.report import as_json, verdict_text
from aorta.commands import main
from aorta.records.clocks import boot_id
from aorta.records.ring_file import RingFile
from scripts.json_schemas import file_name
from tests.autopsy.hangs import clipped, ddp, resized, run, stuck_in
from tests.autopsy.test_flight_recorder import dump, entry, write
from tests.records.test_progress import facts as progress_facts

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"


WAITS = dump([entry(0, "completed"), entry(1, "started")], 3)


@pytest.mark.parametrize(
    ("dumps", "code", "said"),
    [
        (
            [WAITS, WAITS, dump([entry(0, "completed")], 3)],
            3,
            [
                "rank did not join rank 2 has not issued all_reduce 1 of the default group; ranks 0-1 wait",
                "ranks 0-1 wait for rank 2 in all_reduce 1 of the default group (400 bytes)",
            ],
        ),
        ([dump([entry(0, "completed")])] * 2, 0, ["not stuck nothing is stuck: no rank waits for longer than usual"]),
        ([dump([entry(0, "started")], 3)] * 2, 4, ["cannot decide", "suspected is rank 2", "no evidence of rank 2"]),
    ],
)
def test_the_exit_code_says_what_was_found(
    dumps: list[dict[str, Any]], code: int, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["autopsy", str(write(tmp_path, dumps))]) == code
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(said[0])
    assert all(part in text for part in said)


@pytest.mark.parametrize(
    "broken", [b"", b"\x80\x02J\x00", b'{"version": "3.0"}', b"{", b'{"version": "2.1", "entries": [7]}']
)
@pytest.mark.parametrize("kind", ["dumps", "run", "dumps of a run"])
def test_where_no_evidence_can_be_read_nothing_is_said_to_be_well(
    broken: bytes, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "progress" if kind == "run" else tmp_path
    folder.mkdir(exist_ok=True)
    for rank in range(2):
        (folder / (f"rank_{rank}.bin" if kind == "run" else f"trace_{rank}")).write_bytes(broken)
    if kind == "dumps of a run":  # one rank says that it is well, of the other nothing can be read
        (folder / "trace_0").write_bytes(pickle.dumps(dump([entry(0, "completed")], 2)))
    assert main(["autopsy", str(tmp_path)]) == (4 if kind == "dumps of a run" else 2)
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("cannot decide no evidence can be read: " if kind != "dumps of a run" else "cannot decide")
    assert "rank 1: " in text
    assert "nothing is stuck" not in text


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
        (
            ["ddp"],
            "ddp: neither a recorded run nor a dump of torch's Flight Recorder. Give the folder of a recorded run",
        ),
        (["ddp", "--live"], "--live looks at a recorded run of this host"),
        (["runs/dpp"], "runs/dpp: no such file or folder. Give one of the runs runs/ddp, runs/fsdp; or dumps of the"),
        (
            ["runs/dpp", "--live"],
            "runs/dpp: no such file or folder. Give one of the runs runs/ddp, runs/fsdp; or dumps",
        ),
        (["runs/kineto"], "runs/kineto: neither a recorded run nor a dump of torch's Flight Recorder. Give one of the"),
        (
            ["runs"],
            "runs: neither a recorded run nor a dump of torch's Flight Recorder. Give one of the runs runs/ddp, ",
        ),
        (["runs/" + 300 * "x"], "no such file or folder. Give one of the runs runs/ddp, "),
    ],
)
def test_without_evidence_it_says_what_it_takes_and_which_runs_there_are(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("ddp", "runs/kineto", "runs/ddp/progress", "runs/fsdp/progress"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert main(["autopsy", *words]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert said in text


def test_a_run_that_finished_needs_no_diagnosis_whatever_its_ranks_left_open() -> None:
    evidence = run(ddp(2), {})
    for each in evidence:
        each.state, each.exit = "dead", RankExit(exit_code=0)
        each.collectives[0].state = "issued"
    assert verdict_text(_verdict(evidence)).splitlines()[:2] == [
        "not stuck",
        "  the run finished normally; nothing to diagnose",
    ]
    evidence[1].exit = None
    assert _verdict(evidence).kind != "not_stuck"


def test_dumps_of_one_gloo_rank_decide_nothing(tmp_path: Path) -> None:
    """They list no ranks, so others may be missing."""
    alone = dump([entry(0, "scheduled", profiling_name="gloo:all_reduce")], comm_lib_version="", pg_status={})
    alone["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
    (tmp_path / "trace_0").write_bytes(pickle.dumps(alone))
    assert main(["autopsy", str(tmp_path)]) == 4


def test_the_json_is_what_its_schema_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads((SCHEMAS / file_name("autopsy")).read_text())
    assert main(["autopsy", str(write(tmp_path, [dump([entry(0, "started")]), dump([])])), "--json"]) == 3
    for text in (capsys.readouterr().out, as_json(judge([])), as_json(judge(run(clipped(4), {1: resized(5)})))):
        document = json.loads(text)
        jsonschema.validate(document, schema)
        assert document["autopsy_version"] == 1


def _verdict(evidence: list[RankEvidence]) -> Verdict:
    return judge(evidence, stuck_after_s=10)


def test_eight_ranks_fit_a_screen() -> None:
    text = verdict_text(_verdict(run(ddp(8), {3: stuck_in("data")})))
    lines = text.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert "  rank 3: running, in data, step 1, for 66 s" in lines
    told = " ".join(text.split())
    assert "ranks 0-2, 4-7: running, in all_reduce 2 of the default group, step 1, for 63 s" in told


def test_the_accused_leads_with_its_process() -> None:
    evidence = run(ddp(4), {3: stuck_in("data")})
    evidence[3].pid, evidence[3].host = 4711, "node3"
    text = " ".join(verdict_text(_verdict(evidence)).split())
    assert text.startswith(
        "stuck outside rank 3 (PID 4711 on node3) is in data and has not issued all_reduce 2 of the default group"
    )
    assert "`py-spy dump --pid 4711`" in text
    evidence[3].host = None
    assert "rank 3 (PID 4711) is in data" in _verdict(evidence).summary


def test_code_outside_of_timed_phases_is_the_users() -> None:
    evidence = run(ddp(2), {1: stuck_in("data")})
    evidence[1].phase = "step"
    assert "is in your code between collectives and has not issued" in _verdict(evidence).summary


def test_stacks_are_shown_where_they_are_asked_for() -> None:
    evidence = run(ddp(2), {1: stuck_in("data")})
    evidence[1].stacks = [
        ThreadStack(name="MainThread", frames=("loader.py:4 read", "train.py:9 loop")),
        ThreadStack(name="pin_memory", frames=("queue.py:7 get",)),
    ]
    verdict = _verdict(evidence)
    assert "loader.py:4 read" not in verdict_text(verdict)
    shown = "  rank 1\n    loader.py:4 read\n    train.py:9 loop\n  rank 1, thread pin_memory\n    queue.py:7 get"
    assert shown in verdict_text(verdict, stacks=True)
