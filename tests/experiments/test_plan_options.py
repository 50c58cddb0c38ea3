"""Command line and YAML file -> a plan and its launches, or one message that says what is wrong; the demo's plan."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from aorta.documents.plans import Side
from aorta.errors import AnotherPlan, AortaError, ConfigError, InputError
from aorta.experiments import plan_command
from aorta.experiments.launch_journal import FAILED, LOST, STOPPED, Closed, Ended, PlanOpened, Started
from aorta.experiments.launch_plan import PLACEHOLDERS, SIDES, Plan
from aorta.experiments.plan_command import parse
from aorta.experiments.plan_options import PlanFile, grid, read_plan
from aorta.records.run_files import KNOWN_VARIABLES, check_variable
from aorta.report.command import overlap_report
from tests.docs.pages import fenced
from tests.runs import ROOT


def read(folder: Path, *words: str) -> Plan:
    return read_plan(parse(words), folder)


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def test_an_ab_plan_on_the_command_line(tmp_path):
    words = ("--output", "o", "--reference", "a=1 'b=x y'", "s=1", "--candidate", "a=2 c=3 env.MINE=Ring=2", "t=2")
    plan = read(tmp_path, *words, "--launches", "4")
    assert (plan.output, plan.folder, plan.launches) == (tmp_path / "o", tmp_path, 4)
    assert plan.words == ("s=1", "t=2")
    reference, candidate = plan.sides
    assert (reference.name, reference.words, reference.environment) == ("reference", ("a=1", "b=x y"), {})
    assert (candidate.name, candidate.words) == ("candidate", ("a=2", "c=3"))
    assert candidate.environment == {"MINE": "Ring=2"}
    assert reference.python == candidate.python == sys.executable
    assert reference.tree == str(ROOT)


def test_options_behind_two_hyphens_repeats_and_aa(tmp_path):
    assert read(tmp_path, "--output", "o", "a=1", "--", "--config", "x.yaml").words == ("a=1", "--config", "x.yaml")
    assert [side.name for side in read(tmp_path, "--output", "o", "a=1").sides] == ["reference"]
    left, right = read(tmp_path, "--output", "o", "--aa", "--reference", "a=1").sides
    assert (left.name, right.name) == ("reference", "candidate")
    assert [side.words for side in (left, right)] == [("a=1",)] * 2
    (tmp_path / "plan.yaml").write_text("output: o\ncandidate: {}\n")
    assert len(read(tmp_path, "--plan", str(tmp_path / "plan.yaml")).sides) == 2, "an empty candidate is one"


def test_a_file_and_what_the_command_line_changes(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(
        "output: o\nlaunches: 3\nnproc_per_node: 4\ntimeout_s: 60\n"
        "words: [s=1, 'x=${oc.env:HOME}']\nenvironment: {BOTH: 1}\n"
        "reference:\n  words: a=1 b=2\n"
        "candidate:\n  words: [a=2]\n  launcher: numactl -N 0 {torchrun}\n  environment: {NCCL_ALGO: Ring}\n"
    )
    plan = read(tmp_path, "--plan", str(file), "--launches", "5", "t=2", "--candidate", "c=3")
    assert (plan.output, plan.launches, plan.nproc_per_node, plan.timeout_s) == (
        tmp_path / "o", 5, 4, 60.0,
    )  # fmt: skip
    assert plan.words == ("s=1", "x=${oc.env:HOME}", "t=2")
    reference, candidate = plan.sides
    assert reference.words == ("a=1", "b=2")
    assert candidate.words == ("a=2", "c=3")
    assert candidate.launcher == ("numactl", "-N", "0", "{torchrun}")
    assert (dict(reference.environment), dict(candidate.environment)) == (
        {"BOTH": "1"},
        {"BOTH": "1", "NCCL_ALGO": "Ring"},
    )


def test_relative_programs_and_trees_are_the_caller_s(tmp_path):
    tool = tmp_path / "env" / "python"
    tool.parent.mkdir()
    tool.symlink_to(sys.executable)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").touch()
    plan = read(tmp_path, "--output", "o", "--candidate", "python=env/python tree=other")
    assert plan.sides[1].python == str(tool)  # the link itself: it is what makes it an environment's interpreter
    assert plan.sides[1].tree == str(tmp_path / "other")


REFUSED = json.loads((Path(__file__).parent / "refused_plans.json").read_text())
"""Words of `aorta ab`, or a file, that make no plan; PYTHON is this interpreter."""


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join(case["words"])[:80])
def test_what_makes_no_plan_is_refused_with_the_reason(tmp_path, case):
    words = [word.replace("PYTHON", sys.executable) for word in case["words"]]
    if "file" in case:
        (tmp_path / "plan.yaml").write_text(case["file"])
        words = ["--plan", str(tmp_path / "plan.yaml")]
    with pytest.raises(AortaError) as caught:
        read(tmp_path, *words)
    assert case["says"] in str(caught.value)
    assert caught.value.exit_code == case.get("code", 1)
    assert "file" not in case or str(tmp_path / "plan.yaml") in str(caught.value)


def test_a_plan_needs_a_folder_and_is_started_outside_torchrun(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no folder for the plan: give --output"):  # exit code 2
        read(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ConfigError, match="outside torchrun"):
        read(tmp_path, "--output", "o")


def test_the_file_that_the_page_shows(tmp_path):
    text, _workflow = fenced(ROOT / "docs" / "compare.md", "yaml")
    (tmp_path / "plan.yaml").write_text(text)
    plan = read(tmp_path, "--plan", str(tmp_path / "plan.yaml"))
    assert (plan.launches, plan.nproc_per_node) == (5, 8)
    command = plan.command(list(plan.order())[1])
    assert command[:2] == ["docker", "run"]
    assert "/home/me/aorta:/home/me/aorta" in command
    assert command[command.index("torchrun") :][:4] == ["torchrun", "--standalone", "--nproc_per_node", "8"]


def test_the_page_names_every_key_placeholder_and_event():
    page = (ROOT / "docs" / "compare.md").read_text()
    names = [name for name in PlanFile.__struct_fields__ if name not in (*SIDES, "name")]
    events = [each.__struct_config__.tag for each in (PlanOpened, Started, Ended, Closed)]
    marks = [*PLACEHOLDERS, *events, FAILED, STOPPED, LOST]
    assert [name for name in [*names, *marks] if f"`{name}`" not in page] == []


def side(name: str, **changes: Any) -> Side:
    fields = {"words": (f"only.{name}=1",), "python": "/bin/py", "launcher": (), "environment": {}, "tree": "/tree"}
    return Side(name=name, **fields | changes)


def plan(*sides: Side, **changes: Any) -> Plan:
    fields = {"output": Path("/out"), "folder": Path("/here"), "launches": 4}
    return Plan(sides=sides, **fields | changes)


@pytest.mark.parametrize(
    ("launches", "letters"), [(1, "AB"), (2, "ABBA"), (3, "ABBAAB"), (4, "ABBAABBA"), (5, "ABBAABBAAB")]
)
def test_two_sides_are_interleaved(launches, letters):
    order = list(plan(side("reference"), side("candidate"), launches=launches).order())
    assert "".join("A" if one.side.name == "reference" else "B" for one in order) == letters
    assert [one.order for one in order] == list(range(2 * launches))
    for name in ("reference", "candidate"):
        assert [one.number for one in order if one.side.name == name] == list(range(launches))
    alone = [one.name for one in plan(side("reference"), launches=launches).order()]
    assert alone == [f"reference/0{number}" for number in range(launches)]


def test_the_command_line_of_a_launch():
    asked = plan(side("reference"), words=("shared=1",), nproc_per_node=3)
    assert asked.command(next(asked.order())) == [
        *("/bin/py", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"),
        *("/tree/train.py", "shared=1", "only.reference=1"),
        *("training.output_dir=/out/reference/00", "label=null"),
    ]


def test_a_launcher_is_filled():
    words = ("docker", "run", "-v", "{plan}:{plan}", "--name", "{side}-{launch}", "{{.ID}}", "image", "torchrun")
    asked = plan(side("candidate", launcher=words))
    command = asked.command(list(asked.order())[2])
    assert command[:9] == ["docker", "run", "-v", "/out:/out", "--name", "candidate-02", "{{.ID}}", "image", "torchrun"]
    assert command[9] == "--standalone"
    prefixed = plan(side("reference", launcher=("numactl", "-N", "0", "{torchrun}", "--max-restarts", "0")))
    words = ["numactl", "-N", "0", "/bin/py", "-m", "torch.distributed.run", "--max-restarts", "0", "--standalone"]
    assert prefixed.command(next(prefixed.order()))[:9] == words


def test_a_command_is_launched_as_it_stands(tmp_path):
    own = "torchrun --nproc_per_node 8 'my job.py' --out={output} --seed {launch}"
    asked = read(tmp_path, "--output", "o", "--command", own, "--candidate", "env.NCCL_ALGO=Tree", "--launches", "2")
    reference, candidate = asked.sides
    assert not reference.uses_python
    assert candidate.environment == {"NCCL_ALGO": "Tree"}
    last = list(asked.order())[-1]
    words = ["torchrun", "--nproc_per_node", "8", "my job.py", f"--out={tmp_path}/o/reference/01", "--seed", "01"]
    assert asked.command(last) == words
    assert asked.as_json()["sides"]["candidate"]["command"] == (
        *("torchrun", "--nproc_per_node", "8", "my job.py", "--out={output}", "--seed", "{launch}"),
    )


def test_each_side_may_have_a_command_of_its_own_and_without_a_folder_it_is_recorded(tmp_path):
    commands = ("--reference", "command='{torchrun} my.py'", "--candidate", "command='srun python b.py {output}'")
    asked = read(tmp_path, "--output", "o", *commands)
    first, second = list(asked.order())[:2]
    by_aorta = [sys.executable, "-m", "aorta", "record", f"{tmp_path}/o/reference/00", "--"]
    assert asked.command(first) == [*by_aorta, sys.executable, "-m", "torch.distributed.run", "my.py"]
    assert asked.command(second) == ["srun", "python", "b.py", f"{tmp_path}/o/candidate/00"]


@pytest.mark.parametrize("path", ["/a/b-c_d.e", "/a b/c", "/it's", "/back\\slash", "/b\\'q", "/x=1,2{}[]", "/ends\\"])
def test_hydra_reads_the_folder_back(path):
    asked = plan(side("reference"), output=Path(path))
    word = asked.command(next(asked.order()))[-2]
    assert OverridesParser.create().parse_override(word).value() == f"{path}/reference/00"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("-eHF_TOKEN=a=b", "--env", "MY_API_KEY=abc"), ["-eHF_TOKEN=...", "--env", "MY_API_KEY=..."]),
        (("run", "--password", "abc", "torchrun"), ["run", "--password", "...", "torchrun"]),
        (("mine.py", "--api-key=abc", "wandb.password=x"), ["mine.py", "--api-key=...", "wandb.password=..."]),
        (("--password", "--rm", "-e", "NCCL_ALGO=Ring"), ["--password", "--rm", "-e", "NCCL_ALGO=Ring"]),
    ],
)
def test_a_plan_is_kept_without_secrets(words, shown):
    kept = plan(side("reference", launcher=words), words=words).as_json()
    assert kept["words"] == list(kept["sides"]["reference"]["launcher"]) == shown
    secret = side("candidate", environment={"HF_TOKEN": "abc", "NCCL_ALGO": "Ring"})
    assert plan(secret).as_json()["sides"]["candidate"]["environment"] == {"HF_TOKEN": "...", "NCCL_ALGO": "Ring"}


@pytest.fixture
def launched(monkeypatch):
    """Folders that launches were started in, by a stand-in that refuses one in which another plan lies."""
    found: list[Path] = []

    def launch_all(plan: Plan) -> int:
        if (plan.output / "plan.json").exists():
            raise AnotherPlan(f"{plan.output / 'plan.json'} holds another plan")
        found.append(plan.output)
        return 130  # stopped: no report

    monkeypatch.setattr(plan_command, "launch_all", launch_all)
    return found


def test_a_different_demo_is_kept_beside_the_new_one(tmp_path, launched, monkeypatch, capsys):
    folder = tmp_path / "artifacts" / "demo"
    monkeypatch.chdir(tmp_path)
    for content in ("first", "second"):
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(content)
        assert plan_command.demo([]) == 130
    assert launched == [folder, folder]
    assert (folder.parent / "demo-earlier" / "plan.json").read_text() == "first"
    assert (folder.parent / "demo-earlier-2" / "plan.json").read_text() == "second"
    assert f"it is now {folder.parent / 'demo-earlier'}" in capsys.readouterr().err
    folder.mkdir()
    (folder / "plan.json").write_text("third")
    monkeypatch.setattr(Path, "rename", Mock(side_effect=PermissionError))
    assert plan_command.demo([]) == 1
    assert launched == [folder, folder], "a folder that cannot move is named"
    assert "holds another plan" in capsys.readouterr().err


# --- several candidates


TWO_BY_TWO = ("--vary", "env.NCCL_ALGO=Ring,Tree", "--vary", "parallel.bucket_cap_mb=10,25")


def test_every_candidate_and_every_combination_is_a_side(tmp_path):
    many = ("--candidate", "a=2 env.NCCL_ALGO=Ring", "--candidate", "a=3", "--vary", "b=1,2", "env.NCCL_ALGO=Tree")
    sides = read_plan(parse(["--output", "o", *many]), tmp_path).sides
    assert [(side.name, side.words, side.environment["NCCL_ALGO"]) for side in sides] == [
        ("reference", (), "Tree"),
        ("candidate-1", ("a=2",), "Ring"),
        ("candidate-2", ("a=3",), "Tree"),
        ("candidate-3", ("b=1",), "Tree"),
        ("candidate-4", ("b=2",), "Tree"),
    ]


def test_the_last_key_varies_fastest_and_values_are_hydra_s():
    assert grid(["env.A=1,2", "b=range(0,2)"]) == [
        Side(words=(f"b={b}",), environment={"A": a}) for a, b in (("1", "0"), ("1", "1"), ("2", "0"), ("2", "1"))
    ]
    assert [setting.words for setting in grid(["+b=[1,2],'a,c'"])] == [("b=[1,2]",), ("b='a,c'",)]
    assert grid([]) == []


def test_a_file_has_candidates_and_what_is_varied(tmp_path):
    (tmp_path / "plan.yaml").write_text(
        "output: o\ncandidate: {environment: {X: 1}}\ncandidates: [a=1 b=2, [c=3]]\nvary: ['d=1,2']\n"
    )
    plan = read_plan(parse(["--plan", str(tmp_path / "plan.yaml"), "--candidate", "e=4"]), tmp_path)
    words = [side.words for side in plan.sides]
    assert words == [(), ("a=1", "b=2"), ("c=3",), ("e=4",), ("d=1",), ("d=2",)]
    assert [side.environment for side in plan.sides[1:]] == [{"X": "1"}] * 5


@pytest.mark.parametrize(("candidates", "launches"), [(1, 5), (6, 5), (7, 6), (64, 7)])
def test_so_many_are_launched_as_often_as_a_verdict_takes(tmp_path, candidates, launches):
    words = [word for number in range(candidates) for word in ("--candidate", f"a={number}")]
    assert read_plan(parse(["--output", "o", *words]), tmp_path).launches == launches


def test_variables_take_the_values_of_their_manuals():
    with pytest.raises(AortaError, match="a whole number from 1 to 32"):
        check_variable("CUDA_DEVICE_MAX_CONNECTIONS", "33")
    for name, value in (("NCCL_ALGO", "ring"), ("NCCL_ALGO", "^Tree"), ("NCCL_MIN_NCHANNELS", "112"), ("MY_OWN", "x")):
        check_variable(name, value)
    for name, known in KNOWN_VARIABLES.items():
        check_variable(name, str(known[0]))
        with pytest.raises(AortaError, match=f"{name}=-1: must be "):
            check_variable(name, "-1")


@pytest.mark.parametrize(
    ("command", "shared", "said"),
    [
        ("run my.py --bucket 50", "", "A=2 run my.py --bucket 50"),
        ("run my.py --bucket 50", "run my.py --bucket 25", "A=2 --bucket 50"),
        ("run my.py --bucket=50 --x", "run my.py --bucket=25 --x", "A=2 --bucket=50"),
        ("run 'my own.py'", "run other.py", "A=2 'my own.py'"),
        ("run my.py", "run my.py --x", "A=2 run my.py"),
        ("run my.py", "run my.py", "A=2"),
    ],
)
def test_a_side_of_commands_is_called_by_its_own(command, shared, said):
    own, other = (Side(command=tuple(shlex.split(words)), environment={"A": "2"}) for words in (command, shared))
    assert own.settings(msgspec.structs.replace(other, environment={})) == said


def test_candidates_are_launched_in_turn_and_back(tmp_path):
    plan = read_plan(parse(["--output", "o", "--launches", "2", *TWO_BY_TWO]), tmp_path)
    there = ["reference/00", "candidate-1/00", "candidate-2/00", "candidate-3/00", "candidate-4/00"]
    assert [launch.name for launch in plan.order()] == [*there, *(name.replace("00", "01") for name in there[::-1])]


@pytest.mark.thorough
def test_the_best_candidate_is_named_and_one_that_is_gone(bench, capsys):
    words = ("--launches", "5", "--vary", "env.NCCL_ALGO=Ring,Tree", "s=1")
    bench.acts(**{f"candidate-2_{number:02}": {"job_step_ms": 75 + number} for number in range(5)})
    code, out, _ = bench(*words, "--report")
    assert code == 0
    assert {"reference: s=1", "recommendation: NCCL_ALGO=Tree"} <= set(out.splitlines())
    found = json.loads(Path("reports/plan/candidates.json").read_text())
    assert (found["alpha_each"], found["recommendation"]) == (pytest.approx(0.05 / 2), "candidate-2")
    assert [each["comparison"]["verdict"] for each in found["candidates"]] == ["equivalent", "improvement"]
    assert found["candidates"][1]["changes"] == "NCCL_ALGO=Tree"
    step = found["candidates"][1]["comparison"]["metrics"]["job_step_ms"]
    sides, p = [step[side]["value"] for side in ("reference", "candidate")], step["test"]["p"]
    assert (*sides, p) == (100, 77, pytest.approx(2 / 252))  # all apart
    for folder in Path("plan/candidate-2").iterdir():
        (folder / "run.json").unlink()
    Path("plan/candidate-2").rename("plan/gone")
    assert overlap_report(["plan"]) == 0
    assert "the 1 of 2 candidates that were compared is" in capsys.readouterr().out
    assert overlap_report(["plan", "--fail-on", "overlap_ratio<0"]) == 2
    assert "--fail-on: is about one side or two" in capsys.readouterr().err


def test_variables_of_a_command_are_varied_and_secrets_hidden(bench):
    words = ("--vary", "env.NCCL_ALGO=Ring,Tree", "--vary", "env.MY_TOKEN=a,b")
    code, out, _ = bench("--command", "run {output}", *words, "--dry-run")
    assert code == 0
    shown = "candidate-1/00: NCCL_ALGO=Ring MY_TOKEN=... run"
    assert out.splitlines()[1] == f"{shown} {bench.home}/plan/candidate-1/00"


@pytest.mark.parametrize("name", ["reference", "candidate-2"])
def test_the_first_launch_of_a_side_that_fails_ends_the_plan_with_its_error(bench, name):
    bench.acts(**{f"{name}_00": {"fail": 1}})
    code, out, err = bench("--launches", "5", "--candidate", "a=1", "--candidate", "a=2")
    assert (code, out) == (5, "")
    assert f"error: {name}/00: failed: exit code 7: RuntimeError: it broke here (" in err
    order = ["reference/00", "candidate-1/00", "candidate-2/00"]
    assert bench.launched == order[: order.index(f"{name}/00") + 1]
    assert bench.events("close")[-1]["failed"] == [f"{name}/00"]
