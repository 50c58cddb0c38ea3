"""`aorta whatif` from a record to its answer."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aorta import whatif
from aorta.documents import as_json
from aorta.errors import InputError
from aorta.read.record import load_run
from aorta.report.summary import most_to_gain
from aorta.report.whatif_command import main
from aorta.whatif.read_program import network_of
from tests.read.kineto_files import ALLREDUCE, GEMM, document, kernel
from tests.whatif.simulated_job import Job
from tests.whatif.simulated_record import record, truth

DDP, FSDP = Job("ddp"), Job("fsdp", ranks=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, job in (("ddp", DDP), ("fsdp", FSDP), ("hsdp", replace(FSDP, strategy="hsdp"))):
        record(job, folder / name)
    return folder


def test_a_prediction_is_printed_with_its_interval_its_check_and_its_notes(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(runs / "ddp"), "--set", "network.bandwidth=x2", "--set", "ranks=64"]) == 0
    said = capsys.readouterr().out
    wanted = truth(replace(DDP, network=replace(DDP.network, gb_per_s=2 * DDP.network.gb_per_s, world=64)))
    longer = re.search(r"job step +(\d+) ms \((\d+) to (\d+)\) longer, [\d.]+ % of (\d+) ms$", said, re.MULTILINE)
    assert longer is not None
    loss, low, high, base = map(float, longer.groups())
    assert low < loss < high
    assert base + loss == pytest.approx(wanted.step_ms, rel=0.01)
    assert "apart" not in said, "a check that holds by construction is no evidence"
    assert "note: at 64 ranks: groups of all ranks follow the network's formula" in said


@pytest.mark.parametrize("run", ["ddp", "hsdp"])
def test_a_change_has_one_answer_however_it_is_asked_for(
    runs: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the list, as a marginal cost, as a bound, in a report, and as the answer to its own --set."""

    def asked(*words: str) -> dict[str, Any]:
        assert main([str(runs / run), "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    listed, report = asked(), as_json(most_to_gain(load_run(runs / run)))
    stated = [entry for said in (listed, report) for part in ("gains", "marginals", "bounds") for entry in said[part]]
    answers = {each["change"]: asked("--set", each["change"]) for each in stated if each["change"] is not None}
    assert len(answers) > 3
    for each in stated:
        if each["change"] is not None:
            answer = answers[each["change"]]
            assert [each["gain_ms"], each["low_ms"], each["high_ms"]] == pytest.approx(list(answer["gain_ms"].values()))
            now, step = answer["identity"]["replayed_ms"], answer["job_step_ms"]
            left = [now - answer["gain_ms"][end] for end in ("value", "high", "low")]
            assert list(step.values()) == pytest.approx(left)
    assert (listed["check"], report["check"]) == (None, None)


def test_without_a_change_it_says_what_there_is_to_gain(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs / "fsdp"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["gains"][0]["change"] == "network.bandwidth=x2"
    assert said["marginals"][0]["gain_ms"] > 0
    assert main([str(runs / "fsdp"), "--last", "3"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"A replay of the last 3\s+steps .*\ntwice the bandwidth +[\d.]+ ms ", said, re.DOTALL)
    assert re.search(r"\nallgather +[\d.]+ ms .* +comm\.kind\.allgather=free\n", said)


def test_what_is_asked_twice_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs / "ddp"), "--set", "comm=x2", "--set", "comm=x2"]) == 2
    assert "a change is given twice" in capsys.readouterr().err


def on_real_network(folder: Path, job: Job, **fabric: str) -> Path:
    record(job, folder)
    manifest = json.loads((folder / "run.json").read_text())
    manifest["config"]["fabric"] = fabric or {"kind": "none"}
    (folder / "run.json").write_text(json.dumps(manifest))
    return folder


def test_on_a_real_network_a_prediction_is_an_upper_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(on_real_network(tmp_path / "run", DDP))
    assert main([run, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["gains"][0]["change"] == "network.bandwidth=x2"
    assert all(entry["upper_bound"] and ": at most " in entry["sentence"] for entry in listed["gains"])
    for change, upper_bound in (("network.bandwidth=x2", True), ("rank.1.late_ms=9", False)):
        assert main([run, "--set", change, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["upper_bound"] == upper_bound
    assert main([run, "--set", "network.bandwidth=x2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"job step at most [\d.]+ ms \([^)]+\) shorter, [\d.]+ % of \d+ ms, contention ignored", said)
    assert main([run, "--set", "rank.1.late_ms=9"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"job step [\d.]+ ms \([^)]+\) longer, [\d.]+ % of \d+ ms, contention ignored", said)


def test_groups_that_share_links_are_refused(tmp_path: Path) -> None:
    run = on_real_network(tmp_path / "run", DDP, kind="emulated", sharing="link")
    with pytest.raises(InputError, match=r"its process groups share links \(fabric.sharing=link\); record with"):
        whatif.read_program(run)


def edited(folder: Path, run: Path, edit: object) -> Path:
    """A copy of a run in which a function has changed each line of rank 0."""
    shutil.copytree(run, folder)
    path = folder / "rank_0_metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        edit(line)  # type: ignore[operator]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def without_waits(line: dict[str, object]) -> None:
    line.pop("waits", None)


def missed(line: dict[str, object]) -> None:
    if line.get("global_step") == 5:
        line["coverage"] = {"seen": 1, "issued": 2, "complete": False, "reason": "one was missed"}


def point_to_point(line: dict[str, object]) -> None:
    for row in line.get("collectives", ()):  # type: ignore[attr-defined]
        row[0] = "send"


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (without_waits, "does not say who waited for which collective"),
        (missed, "coverage not complete: one was missed"),
        (point_to_point, "sends and receives"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_reason(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: object, match: str
) -> None:
    folder = edited(tmp_path / "edited", runs / "ddp", edit)
    with pytest.raises(InputError, match=match):
        whatif.read_program(folder)


def test_traces_are_refused_as_they_say_nothing_of_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        events = [kernel(GEMM, 0, 50), kernel(ALLREDUCE, 50, 20)]
        info = {"backend": "nccl", "rank": rank, "world_size": 2}
        (tmp_path / f"rank{rank}.pt.trace.json").write_text(json.dumps(document(events, distributedInfo=info)))
    assert main([str(tmp_path)]) == 2
    assert (
        "it takes AORTA's own record of the run, and these are traces (kineto). Record the run with aorta"
        in capsys.readouterr().err
    )


def test_a_record_is_read_once_and_gives_the_program_of_its_lines_read_again(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs / "ddp", folder)
    path = folder / "rank_0_metrics.jsonl"
    head, *lines = path.read_text().splitlines(keepends=True)
    path.write_text(head + "".join(sorted(lines, key=lambda line: '"global_step":7,' not in line)))  # out of order
    again = whatif.program_of(load_run(folder))
    run = load_run(folder, spans=True)
    shutil.rmtree(folder)
    once = whatif.program_of(run)
    assert once.layouts == again.layouts
    for mine, other in zip(once.steps, again.steps, strict=True):
        assert mine.layouts == other.layouts
        for name in ("host_ns", "wake_ns", "cost_ns"):
            assert np.array_equal(getattr(mine, name), getattr(other, name))
        for name, column in vars(mine.spans).items():
            assert np.array_equal(column, getattr(other.spans, name))


def test_a_step_whose_contents_violate_the_schema_is_left_out_with_a_note(runs: Path, tmp_path: Path) -> None:
    def beyond(line: dict[str, object]) -> None:
        if line.get("global_step") == 5:
            line["compute"] = [["block", "forward", 0, 1 << 62]]

    run = load_run(edited(tmp_path / "edited", runs / "ddp", beyond), spans=True)
    assert 5 not in run.ranks[0].steps.global_step
    assert any("not a line of this schema" in problem for problem in run.health.problems)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ranks_per_node", 0),
        ("inter_bandwidth_gb_per_s", 0),
        ("intra_bandwidth_gb_per_s", "x"),
        ("inter_latency_us", -1),
        ("slow_factor", 0),
        ("emulated_world_size", -3),
    ],
)
def test_a_network_that_is_none_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        network_of({"kind": "emulated", field: value}, world_size=2)


def test_a_backend_that_decides_much_is_flagged(tmp_path: Path) -> None:
    job = replace(DDP, backend_ns=20_000_000)
    record(job, tmp_path / "run")
    found = whatif.predict(whatif.read_program(tmp_path / "run"), whatif.parse_changes(["network.bandwidth=x2"]))
    assert any("of the collectives gloo was slower than the emulated link" in note for note in found.notes)
