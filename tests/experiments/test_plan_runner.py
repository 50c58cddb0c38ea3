"""A plan carried out with a stand-in for torchrun: order, folders, failures, resuming, refusing, the
report, and the noise floor of an A/A plan against the standard library's statistics.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from aorta.experiments import launch_folder
from aorta.experiments.noise_floor import variation
from aorta.experiments.process import MARK
from aorta.installation import commit_of
from aorta.read.record import load_run
from aorta.report import command as report_command
from tests.runs import ROOT, finished

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())

AB = ("--launches", "2", "--reference", "a=1", "--candidate", "a=2", "s=1")
ORDER = ["reference/00", "candidate/00", "candidate/01", "reference/01"]


def test_every_launch_in_its_order_folder_and_journal_and_then_only_what_is_missing(bench):
    code, out, err = bench(*AB)
    assert code == 0
    assert bench.launched == ORDER
    first, *lines = err.splitlines()
    assert first == "note: --launches 2: too few for a significance test; a verdict takes 4 a side"
    assert [line.split(":")[0] for line in lines] == [f"[{n}/4] {name}" for n, name in enumerate(ORDER, 1)]
    assert ("left" in lines[0], "left" in lines[-1]) == (True, False)
    plan = bench.home / "plan"
    assert out.splitlines()[-1] == "Next: aorta report plan"
    kept = json.loads((plan / "plan.json").read_text())
    assert kept["versions"]["candidate"]["torch"] == "2.13.0"
    assert kept["asked"]["sides"]["candidate"]["words"] == ["a=2"]
    calls = [call for call in bench.calls if call["call"] == "launch"]
    assert [call["argv"] for call in calls] == [line["command"][1:] for line in kept["order"]]
    assert {call["cwd"] for call in calls} == {str(bench.home)}
    assert "launch reference/00, start 0" in (plan / "logs" / "reference" / "00.log").read_text()
    events = [json.loads(line)["event"] for line in (plan / "journal.jsonl").read_text().splitlines()]
    assert events == ["open", *["start", "end"] * 4, "close"]
    ends = bench.events("end")
    assert [end["launch"] for end in ends] == ORDER
    assert {(end["outcome"], end["exit_code"], end["left_behind"]) for end in ends} == {("done", 0, 0)}
    assert all(end["seconds"] > 0 for end in ends)
    assert [end["run_id"] for end in ends] == [load_run(plan / name).source.run_id for name in ORDER]
    code, out, _ = bench(*AB)
    assert (code, bench.launched, "Next: aorta report" in out) == (0, ORDER, True)
    (plan / "candidate" / "01" / "run.json").unlink()
    code, _, err = bench(*AB)
    assert (code, bench.launched) == (0, [*ORDER, "candidate/01"])
    assert err.splitlines()[1].startswith("[4/4] candidate/01: done")
    assert (plan / "aside" / "candidate" / "01.lost" / "rank_0_metrics.jsonl").exists()


def test_what_fails_is_repeated_once_in_its_place_and_what_fails_twice_is_named(bench):
    bench.acts(candidate_01={"fail": 2}, reference_01={"fail": 1})
    code, out, err = bench(*AB, "--report")
    assert (code, out) == (5, "")
    assert not (bench.home / "reports").exists()
    assert bench.launched == [*ORDER[:2], *["candidate/01"] * 2, *["reference/01"] * 2]
    assert "[2/4] reference/01: failed: exit code 7" in err
    last = "1 of 4 launches failed twice:\n  candidate/01: failed: exit code 7: RuntimeError: it broke here ("
    assert f"error: {last}" in err
    plan, first = bench.home / "plan", [end for end in bench.events("end") if end["outcome"] == "failed"][-1]
    assert (first["exit_code"], first["attempt"], first["run_id"]) == (7, 0, None)
    assert (plan / "aside/reference/01.failed/half").read_text() == "half"
    assert first["kept"] == "aside/reference/01.failed"
    assert "RuntimeError: it broke here" in first["last_lines"]
    assert "it broke here" in (plan / "logs/reference/01.log").read_text()
    assert "start 1" in (plan / "logs/reference/01-2.log").read_text()
    close = bench.events("close")[-1]
    assert (close["exit_code"], close["failed"]) == (5, ["candidate/01"])
    assert (bench(*AB)[0], bench.launched[6:]) == (0, ["candidate/01"])  # the third start is good
    aside = sorted(path.name for path in (plan / "aside/candidate").iterdir())
    assert aside == ["01.failed", "01.failed-2"]


@pytest.mark.parametrize(("words", "said", "last"), CASES["failed"])
def test_a_launch_has_failed_without_every_record_or_a_program(bench, words, said, last):
    bench.acts(reference_00={"ranks": 1})
    code, _, err = bench("--launches", "1", *words)
    assert code == 5
    assert all(each in err for each in said)
    assert last is None or bench.events("end")[0]["last_lines"] == last


@pytest.mark.thorough
def test_another_plan_machine_or_environment_is_refused_by_key_and_both_values(bench):
    """An incomplete plan, taken up by another command, and on another machine with another torch."""
    bench.monkeypatch.delenv("NCCL_ALGO", raising=False)
    bench.acts(candidate_01={"fail": 2})
    bench(*AB)
    launched, here = bench.launched, launch_folder.host()

    def refuses(words: tuple[str, ...], *said: str) -> None:
        code, _, err = bench(*words)
        assert (code, "another --output" in err, bench.launched) == (1, True, launched)
        assert [line for line in said if line not in err] == []
        assert "kernel" not in err

    refuses(
        ("--launches", "3", *AB[2:5], "a=3 env.A=1", "s=2", "--nproc_per_node", "4"),
        *("launches: 2 there, 3 now", "words: ['s=1'] there, ['s=2'] now", "nproc_per_node: 2 there, 4 now"),
        *("sides.candidate.words: ['a=2'] there, ['a=3'] now", "environment.A: nothing there, '1' now"),
    )
    refuses((*AB[:4], "s=1"), "sides.candidate.words: ['a=2'] there, nothing now")
    with bench.monkeypatch.context() as patch:
        patch.setenv("FAKE_TORCH", "2.14.0")
        patch.setenv("NCCL_ALGO", "Ring")
        keys = ("name", "machine", "cpus")
        patch.setattr(launch_folder, "host", lambda: here | dict.fromkeys(keys, "another") | {"kernel": "newer"})
        versions = "versions.reference.torch: '2.13.0' there, '2.14.0' now"
        hosts = (f"host.{key}: {here[key]!r} there, 'another' now" for key in keys)
        refuses(AB, versions, "environment.NCCL_ALGO: nothing there, 'Ring' now", *hosts)
    bench.monkeypatch.setattr(launch_folder, "host", lambda: here | {"kernel": "newer"})
    assert bench(*AB)[0] == 0


def test_other_local_changes_are_another_checkout(tmp_path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "train.py").write_text("a = 1\n")
    git("add", ".")
    git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-m", "x")
    found = [commit_of(tmp_path)]
    for text in ("a = 2", "a = 3", "a = 2"):
        (tmp_path / "train.py").write_text(text)
        found.append(commit_of(tmp_path))
    assert (len(set(found)), found[1]) == (3, found[3])
    assert re.fullmatch(rf"{found[0]}-dirty-[0-9a-f]{{8}}", str(found[1]))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("mine", "mine", "not empty, and no plan's"),
        *(("plan.json", text, "not a plan (") for text in ("{", "[]", '{"plan_version": 1}', '{"plan_version": 9}')),
    ],
)
def test_a_folder_of_something_else_is_left_alone(bench, name, text, said):
    (bench.home / "plan").mkdir()
    (bench.home / "plan" / name).write_text(text)
    code, _, err = bench(*AB)
    assert code == 1
    assert said in err
    assert "choose another --output" in err
    assert [(path.name, path.read_text()) for path in (bench.home / "plan").iterdir()] == [(name, text)]
    assert bench.launched == []


def test_wrong_words_or_an_interpreter_without_torch_end_a_plan_before_it_starts(bench):
    assert bench("--launches", "4", "--candidate", "wrong.word=1", "--dry-run")[0] == 1
    code, _, err = bench("--launches", "4", "--candidate", "wrong.word=1 ALGO=Tree")
    assert (code, bench.launched) == (1, [])
    assert err == (
        "error: candidate: train.py does not take wrong.word=1 ALGO=Tree:\nno key wrong.word=1\n"
        "  for a variable write env.ALGO=Tree\n"
    )
    assert not (bench.home / "plan").exists()
    tool = bench.home / "bare"
    tool.write_text('#!/bin/sh\n[ "$1" != -c ] || { echo no torch here >&2; exit 1; }\n')
    tool.chmod(0o755)
    code, _, err = bench("--launches", "1", f"python={tool}")
    assert code == 1
    assert "cannot tell its torch (no torch here)" in err


def test_interpreters_environment_and_checkouts_of_each_side(bench):
    bench.monkeypatch.setenv("RANK", "3")  # of another torchrun; what a side was given it keeps
    other = bench.program("other")
    tree = bench.home / "tree"
    tree.mkdir()
    (tree / "train.py").touch()
    code, _, _ = bench(
        *("--launches", "1", f"python={bench.python}", "env.NCCL_ALGO=Tree"),
        *("--candidate", f"python={other} env.NCCL_ALGO=Ring env.RANK=5 tree=tree"),
    )
    assert code == 0
    left, right = [call for call in bench.calls if call["call"] == "launch"]
    assert (left["env"]["FAKE_NAME"], right["env"]["FAKE_NAME"]) == ("fake", "other")
    assert (left["env"]["NCCL_ALGO"], right["env"]["NCCL_ALGO"]) == ("Tree", "Ring")
    assert (left["env"]["RANK"], right["env"]["RANK"]) == (None, "5")
    assert str(ROOT / "train.py") in left["argv"]
    assert str(tree / "train.py") in right["argv"]


def test_a_container_launches_in_place_of_torchrun(bench):
    bench.program("docker")
    launcher = f"{bench.home}/docker run -e {MARK} -e NCCL_ALGO=Ring -v {{plan}}:{{plan}} image torchrun"
    words = ("--candidate", f"launcher='{launcher}' tree=/inside/aorta")
    code, _, _ = bench("--launches", "1", *words)
    assert code == 0
    _, right = [call for call in bench.calls if call["call"] == "launch"]
    plan = bench.home / "plan"
    assert right["argv"][5:9] == ["-v", f"{plan}:{plan}", "image", "torchrun"]
    assert right["argv"][12] == "/inside/aorta/train.py"
    assert right["env"][MARK] == bench.events("start")[1]["id"], "the mark by which its ranks are found"
    versions = json.loads((plan / "plan.json").read_text())["versions"]["candidate"]
    assert versions["torch"] is None
    assert "manifest of each run" in versions["reason"]


def test_the_plan_folder_may_be_the_caller_s(bench, tmp_path, monkeypatch):
    (inside := tmp_path / "inside").mkdir()
    monkeypatch.chdir(inside)
    code, out, _ = bench("--launches", "1", "--output", ".")
    assert code == 0
    assert f"aorta report {inside}/reference --output reports/inside" in out.splitlines()[-1]


@pytest.mark.thorough
def test_of_two_plans_that_begin_at_once_the_first_counts(bench, monkeypatch):
    assert bench(*AB[:-1], "s=2", "--output", "other")[0] == 0
    other = (bench.home / "other" / "plan.json").read_text()
    link = os.link

    def late(part: Path, path: Path) -> None:
        path.write_text(other)
        link(part, path)

    monkeypatch.setattr(os, "link", late)
    code, _, err = bench(*AB)
    assert code == 1
    assert "words: ['s=2'] there, ['s=1'] now" in err
    assert [path.name for path in (bench.home / "plan").iterdir()] == ["plan.json"]
    assert (bench.home / "plan" / "plan.json").read_text() == other


def test_a_plan_whose_comparison_would_be_refused_starts_no_launch(bench):
    words = ("--reference", "workload.model_dim=64", "--candidate", "workload.model_dim=96 workload.num_layers=2")
    for more in ((), ("--dry-run",), ("--allow-unlike", "workload.num_layers")):
        code, _, err = bench(*words, "--launches", "1", *more)
        assert code == 1
        assert "  workload.model_dim: 64 in the reference, 96 in candidate\n" in err
        assert ("--allow-unlike workload.model_dim --allow-unlike workload.num_layers\n" in err) == (len(more) < 2)
        assert (bench.launched, (bench.home / "plan").exists()) == ([], False)
    sample = ("--launches", "1", "--candidate", "instrument.every=10")
    code, _, err = bench(*sample)
    assert (code, "  header.observed_steps: all in the reference, a sample in candidate\n" in err) == (1, True)
    assert not bench.launched
    assert bench(*words, "--launches", "1", "--allow-unlike", "workload")[0] == 0
    assert len(bench.launched) == 2
    assert bench("--output", "cost", *sample, "--reference", "instrument.mode=off")[0] == 0


@pytest.mark.parametrize(("words", "code", "said"), CASES["wrong plans"])
def test_what_is_wrong_with_a_plan_is_said_before_it_starts(bench, words, code, said):
    (bench.home / "run").mkdir()
    for name in ("run/run.json", "there.py"):
        (bench.home / name).touch()
    returned, _, err = bench(*words, "--dry-run")
    assert (returned, err.endswith(said.replace("{home}", str(bench.home)))) == (code, True), err


def test_the_report_s_exit_code_is_passed_on(bench, monkeypatch):
    asked: list[list[str]] = []
    monkeypatch.setattr(report_command, "overlap_report", lambda words: asked.append(words) or 4)
    (bench.home / "aorta").mkdir()  # of another project, whose code must not run
    (bench.home / "aorta" / "__main__.py").write_text("raise SystemExit(99)")
    assert bench(*AB, "--report")[0] == 4
    assert asked == [["plan"]]


def test_help_is_quick_and_shows_the_examples(bench):
    code = (
        "import sys; from aorta.experiments.plan_command import parser; parser().print_help(); "
        "sys.exit({'torch', 'pandas', 'matplotlib', 'numpy', 'omegaconf', 'psutil', 'tqdm'} & set(sys.modules) or 0)"
    )
    done = finished([sys.executable, "-c", code], folder=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("two configurations", "two interpreters", "--aa --launches 8", "repeats of one configuration"):
        assert words in done.stdout


STEPS = {"reference_00": 100.0, "candidate_00": 104.0, "candidate_01": 98.0, "reference_01": 101.0}


def test_the_noise_floor_of_known_launches(bench):
    bench.acts(**{name: {"job_step_ms": value} for name, value in STEPS.items()})
    code, out, _ = bench("--aa", "--launches", "2")
    assert code == 0
    floor = json.loads((bench.home / "plan" / "noise_floor.json").read_text())
    assert (floor["launches"], floor["order"], floor["fabric"]) == (4, ORDER, None)
    step = floor["metrics"]["job_step_ms"]
    values = list(STEPS.values())
    assert step["launch_medians"] == values
    assert step["sd"] == pytest.approx(statistics.stdev(values))
    assert step["relative_sd"] == pytest.approx(statistics.stdev(values) / statistics.fmean(values))
    assert (step["min"], step["max"], step["range"]) == (98.0, 104.0, 6.0)
    assert step["side_difference"] == pytest.approx((104 + 98) / 2 - (100 + 101) / 2)
    ratio = floor["metrics"]["overlap_ratio"]  # 1/8 of 1/4 in every launch
    assert (ratio["unit"], ratio["median"], ratio["sd"], ratio["relative_sd"]) == ("ratio", 0.5, 0.0, 0.0)
    (line,) = [line for line in out.splitlines() if line.startswith("job_step_ms")]
    assert " ".join(line.split()) == "job_step_ms 100 ms 2.5 ms 2.5 % 98 ms 104 ms +0.5 ms"
    assert "Next: aorta report" in out


@pytest.mark.parametrize(
    ("medians", "sd", "relative_sd", "reason"),
    [
        ([5.0], None, None, "1 launch; a variation needs two"),
        ([None, None], None, None, "unknown in every launch"),
        ([0.0, 0.0], 0.0, None, "the mean is 0"),
        ([-1.0, -3.0], 2**0.5, 2**0.5 / 2, None),
        ([2.0, None, 4.0], 2**0.5, 2**0.5 / 3, None),
    ],
)
def test_what_is_not_known_is_null_with_a_reason(medians, sd, relative_sd, reason):
    found = variation(medians, ["reference"] * len(medians), "ms")
    assert found["sd"] == (None if sd is None else pytest.approx(sd))
    assert found["relative_sd"] == (None if relative_sd is None else pytest.approx(relative_sd))
    assert (found["reason"], found["side_difference"]) == (reason, None)
