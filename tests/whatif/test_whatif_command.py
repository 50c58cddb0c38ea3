"""`aorta whatif` from a record to its answer."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aorta import whatif
from aorta.analysis.compare.launch_set import read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.documents import as_json
from aorta.errors import InputError
from aorta.read.record import load_run
from aorta.report import summary as room
from aorta.report.run_commands import whatif_command
from aorta.report.summary import LAST_STEPS, most_to_gain, summarize, write_report
from aorta.terminal_style import Style
from aorta.whatif.prediction import base_of, gains
from aorta.whatif.read_program import network_of, program_of
from tests.analysis.builders import simulated_run, strict_json
from tests.report.pages import text_of
from tests.runs import once
from tests.scripts.test_json_schemas import published
from tests.whatif.simulated_job import Job
from tests.whatif.simulated_record import record, truth

DDP, FSDP = Job("ddp"), Job("fsdp", ranks=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of three strategies, and of the first on two slower networks."""
    narrow = replace(DDP.network, gb_per_s=DDP.network.gb_per_s / 3)
    jobs = {"ddp": DDP, "fsdp": FSDP, "hsdp": replace(FSDP, strategy="hsdp"), "narrow": replace(DDP, network=narrow)}
    jobs["slow"] = replace(DDP, network=replace(narrow, latency_us=2 * narrow.latency_us))

    def make(folder: Path) -> None:
        for name, job in jobs.items():
            record(job, folder / name)

    return once(tmp_path_factory, "runs of what-ifs", make)


def test_a_prediction_is_printed_with_its_interval_its_check_and_its_notes(runs, capsys):
    assert whatif_command([str(runs / "ddp"), "--set", "network.bandwidth=x2", "--set", "ranks=64"]) == 0
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
def test_a_change_has_one_answer_however_it_is_asked_for(runs, run, capsys):
    """In the list, as a marginal cost, as a bound, in a report, and as the answer to its own --set."""

    def asked(*words: str) -> dict[str, Any]:
        assert whatif_command([str(runs / run), "--json", *words]) == 0
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


def test_without_a_change_it_says_what_there_is_to_gain(runs, capsys):
    assert whatif_command([str(runs / "fsdp"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["gains"][0]["change"] == "network.bandwidth=x2"
    assert said["marginals"][0]["gain_ms"] > 0
    assert whatif_command([str(runs / "fsdp"), "--last", "3"]) == 0
    said = capsys.readouterr().out
    assert "A replay of the last 3 steps " in " ".join(said.split())
    assert re.search(r"^twice the bandwidth +[\d.]+ ms ", said, re.MULTILINE)
    assert re.search(r"\nallgather +[\d.]+ ms .* +comm\.kind\.allgather=free\n", said)


def on_network(folder: Path, job: Job = DDP, **fabric: str) -> Path:
    """A run on this network, whatever it was recorded on."""
    record(job, folder)
    manifest = json.loads((folder / "run.json").read_text())
    manifest["config"]["fabric"] = fabric
    (folder / "run.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(("speed", "upper_bound"), [(5.0, True), (1.0, False)])
def test_on_a_real_network_a_prediction_is_an_upper_bound_unless_collectives_queue(
    tmp_path, capsys, speed, upper_bound
):
    network = replace(DDP.network, gb_per_s=speed * DDP.network.gb_per_s, latency_us=0)
    job, twice = (replace(DDP, network=replace(network, gb_per_s=by * network.gb_per_s)) for by in (1, 2))
    run = str(on_network(tmp_path / "run", job, kind="none"))

    def said(*words: str) -> str:
        assert whatif_command([run, *words]) == 0
        return " ".join(capsys.readouterr().out.split())

    listed = json.loads(said("--json"))
    free = listed["bounds"][0]
    assert (free["name"], free["upper_bound"]) == ("all communication free", True)
    for entry in [*listed["gains"], *listed["bounds"][1:]]:
        assert (entry["upper_bound"], ": at most " in entry["sentence"]) == (upper_bound, upper_bound)
    faster, later = ("--set", "network.bandwidth=x2"), ("--set", "rank.1.late_ms=9")
    predicted = json.loads(said(*faster, "--json"))
    assert predicted["upper_bound"] == upper_bound
    assert (truth(job).step_ms - truth(twice).step_ms <= predicted["gain_ms"]["high"]) == upper_bound
    assert json.loads(said(*later, "--json"))["upper_bound"] is False
    for change, words in ((faster, "at most " * upper_bound + r"[\d.]+ ms \([^)]+\) shorter"), (later, ".* longer")):
        assert re.search(rf"job step {words}, [\d.]+ % of \d+ ms, contention ignored", said(*change))


def test_groups_that_share_links_are_refused(tmp_path):
    run = on_network(tmp_path / "run", kind="emulated", sharing="link")
    with pytest.raises(InputError, match=r"its process groups share links \(fabric.sharing=link\); record with"):
        whatif.read_program(run)


def without_waits(line: dict[str, Any]) -> None:
    line.pop("waits", None)


def missed(line: dict[str, Any]) -> None:
    if line.get("global_step") == 5:
        line["coverage"] = {"seen": 1, "issued": 2, "complete": False, "reason": "one was missed"}


def point_to_point(line: dict[str, Any]) -> None:
    for row in line.get("collectives", ()):
        row[0] = "send"


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (without_waits, "does not say who waited for which collective"),
        (missed, "coverage not complete: one was missed"),
        (point_to_point, "sends and receives"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_reason(runs, tmp_path, edit, match):
    shutil.copytree(runs / "ddp", tmp_path / "run")
    path = tmp_path / "run" / "rank_0_metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        edit(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match=match):
        whatif.read_program(tmp_path / "run")


def test_a_record_is_read_once_and_gives_the_program_of_its_lines_read_again(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs / "ddp", folder)
    path = folder / "rank_0_metrics.jsonl"
    head, *lines = path.read_text().splitlines(keepends=True)
    path.write_text(head + "".join(sorted(lines, key=lambda line: '"global_step":7,' not in line)))  # out of order
    again = whatif.program_of(load_run(folder))
    run = load_run(folder, spans=True)
    shutil.rmtree(folder)
    changes = whatif.parse_changes(["network.bandwidth=x3"])
    assert whatif.predict(whatif.program_of(run), changes) == whatif.predict(again, changes)


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
def test_a_network_that_is_none_is_refused(field, value):
    with pytest.raises(InputError, match=field):
        network_of("run", {"kind": "emulated", field: value}, world_size=2)


def test_a_backend_that_decides_much_is_flagged(tmp_path):
    job = replace(DDP, backend_ns=20_000_000)
    record(job, tmp_path / "run")
    found = whatif.predict(whatif.read_program(tmp_path / "run"), whatif.parse_changes(["network.bandwidth=x2"]))
    assert any("of the collectives gloo was slower than the emulated link" in note for note in found.notes)


# --- what would gain most, in the summary, the text and the page of a report


def test_values_are_those_of_whatif(runs, tmp_path):
    report = write_report(
        {"fast": runs / "ddp", "slow": runs / "slow"}, tmp_path, "fast", "slow", style=Style(width=80)
    )
    program = program_of(load_run(runs / "slow"), LAST_STEPS)
    dataset = report.summary["datasets"]["slow"]
    assert not dataset["stragglers"]["ranks"]
    wanted = gains(base_of(program), no_straggler=dataset["stragglers"]["reason"])
    assert "every rank as fast as the typical one" not in str([*wanted.gains, *wanted.bounds])
    assert dataset["stragglers"]["reason"] in str(dataset["what_if"]["notes"])
    found = dataset["what_if"]
    assert (found["reason"], found["steps"], found["check"]) == (None, len(program.steps), None)
    assert (found["gains"], found["bounds"]) == (as_json(wanted.gains), as_json(wanted.bounds))
    assert found["gains"][0]["gain_ms"] > 0
    assert found["marginals"][0] == as_json(wanted.marginals[0])
    published("summary").validate(strict_json(report.files[0]))


def test_what_the_comparison_measured_is_not_predicted(runs):
    subjects = read_subjects({"fast": runs / "ddp", "narrow": runs / "narrow"}, Rules())
    for entry in summarize(subjects, "fast", "narrow").datasets.values():
        assert all(gain.change != "network.bandwidth=x2" for gain in entry.what_if.gains)
        said = "twice the bandwidth: not predicted, because this comparison measured fabric.inter_bandwidth_gb_per_s"
        assert said in entry.what_if.notes
        assert "significant" not in str(entry.what_if), "a word of tests over launches"


def test_without_waits_the_reason_stands_in_its_place(tmp_path):
    sources = {"old": simulated_run(tmp_path / "old", label="old", ranks=2, steps=6)}
    report = write_report(sources, tmp_path / "out")
    found = report.summary["datasets"]["old"]["what_if"]
    assert set(found) == {"reason"}
    assert f"old: what would gain most: no prediction: {found['reason']}" in " ".join(report.text.split())
    page = next(path for path in report.files if path.name == "report.html").read_text(encoding="utf-8")
    assert f"no prediction: {found['reason']}" in text_of(page)


def test_a_rank_that_is_missing_is_said(runs, tmp_path):
    shutil.copytree(runs / "ddp", tmp_path / "run")
    (tmp_path / "run" / "rank_1_metrics.jsonl").unlink()
    assert as_json(most_to_gain(load_run(tmp_path / "run"))) == {"reason": "1 of 2 ranks are missing"}


def test_of_many_ranks_less_is_replayed_or_nothing(tmp_path, monkeypatch):
    record(replace(DDP, steps=14), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert most_to_gain(run).steps == 12
    monkeypatch.setattr(room, "RANK_STEPS", 16)
    assert most_to_gain(run).steps == 8
    monkeypatch.setattr(room, "RANK_STEPS", 15)
    assert "2 ranks are too many to be replayed for a report; ask aorta whatif" in str(most_to_gain(run).reason)
