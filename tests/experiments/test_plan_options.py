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
from aorta.errors import AnotherPlan, AortaError, ConfigError
from aorta.experiments import plan_command
from aorta.experiments.launch_engine import FAILED, LOST, STOPPED, Closed, Ended, PlanOpened, Started
from aorta.experiments.plan import PLACEHOLDERS, SIDES, Plan, PlanFile, grid, read_plan
from aorta.experiments.plan_command import parse
from aorta.records.run_files import KNOWN_VARIABLES, check_variable
from aorta.report.command import overlap_report
from tests.docs.pages import fenced
from tests.runs import ROOT


def read(folder: Path, *words: str) -> Plan:
    return read_plan(parse(words), folder)


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


FILE = """\
output: o
launches: 3
nproc_per_node: 4
timeout_s: 60
words: [s=1, 'x=${oc.env:HOME}']
environment: {BOTH: 1}
reference: {words: a=1 b=2}
candidate: {words: [a=2], launcher: "numactl -N 0 {torchrun}", environment: {NCCL_ALGO: Ring}}
"""
SEVERAL = "output: o\ncandidate: {environment: {X: 1}}\ncandidates: [a=1 b=2, [c=3]]\nvary: ['d=1,2']\n"


@pytest.mark.parametrize(
    ("file", "words", "shared", "sides"),
    [
        pytest.param(
            "",
            ["--reference", "a=1 'b=x y'", "s=1", "--candidate", "a=2 c=3 env.MINE=Ring=2", "t=2"],
            ("s=1", "t=2"),
            [(("a=1", "b=x y"), {}), (("a=2", "c=3"), {"MINE": "Ring=2"})],
            id="command line",
        ),
        pytest.param("", ["a=1"], ("a=1",), [((), {})], id="repeats"),
        pytest.param("", ["a=1", "--", "--config", "x"], ("a=1", "--config", "x"), [((), {})], id="two hyphens"),
        pytest.param("", ["--aa", "--reference", "a=1"], (), [(("a=1",), {})] * 2, id="A/A"),
        pytest.param("output: o\ncandidate: {}\n", [], (), [((), {})] * 2, id="an empty candidate is one"),
        pytest.param(
            "",
            ["--candidate", "a=2 env.X=1", "--candidate", "a=3", "--vary", "b=1,2", "env.X=2"],
            (),
            [((), {"X": "2"}), (("a=2",), {"X": "1"}), *(((word,), {"X": "2"}) for word in ("a=3", "b=1", "b=2"))],
            id="every candidate and every combination",
        ),
        pytest.param(
            FILE,
            ["t=2", "--candidate", "c=3"],
            ("s=1", "x=${oc.env:HOME}", "t=2"),
            [(("a=1", "b=2"), {"BOTH": "1"}), (("a=2", "c=3"), {"BOTH": "1", "NCCL_ALGO": "Ring"})],
            id="file, and what the command line changes",
        ),
        pytest.param(
            SEVERAL,
            ["--candidate", "e=4"],
            (),
            [((), {}), *((words, {"X": "1"}) for words in (("a=1", "b=2"), ("c=3",), ("e=4",), ("d=1",), ("d=2",)))],
            id="file of several",
        ),
    ],
)
def test_shared_words_and_those_and_variables_of_each_side(tmp_path, file, words, shared, sides):
    (tmp_path / "plan.yaml").write_text(file)
    plan = read(tmp_path, *(["--plan", str(tmp_path / "plan.yaml")] if file else ["--output", "o"]), *words)
    assert (plan.output, plan.folder, plan.words) == (tmp_path / "o", tmp_path, shared)
    assert [(side.words, dict(side.environment)) for side in plan.sides] == sides
    names = ["candidate"] if len(sides) == 2 else [f"candidate-{number}" for number in range(1, len(sides))]
    assert [side.name for side in plan.sides] == ["reference", *names]
    assert {(side.python, side.tree) for side in plan.sides} == {(sys.executable, str(ROOT))}


def test_the_command_line_changes_what_a_file_says(tmp_path):
    (tmp_path / "plan.yaml").write_text(FILE)
    plan = read(tmp_path, "--plan", str(tmp_path / "plan.yaml"), "--launches", "5")
    assert (plan.launches, plan.nproc_per_node, plan.timeout_s) == (5, 4, 60.0)
    assert plan.sides[1].launcher == ("numactl", "-N", "0", "{torchrun}")


def test_each_side_may_have_a_command_of_its_own(tmp_path):
    commands = ("--reference", "command='{torchrun} my.py'", "--candidate", "command='srun b.py {output}'")
    sides = read(tmp_path, "--output", "o", *commands).sides
    assert [side.command for side in sides] == [("{torchrun}", "my.py"), ("srun", "b.py", "{output}")]
    assert not any(side.uses_python for side in sides)


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


def test_a_plan_is_started_outside_torchrun(tmp_path, monkeypatch):
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
    ("sides", "launches", "order"),
    [
        ("A", 3, "A0 A1 A2"),
        ("AB", 1, "A0 B0"),
        ("AB", 4, "A0 B0 B1 A1 A2 B2 B3 A3"),
        ("AB", 5, "A0 B0 B1 A1 A2 B2 B3 A3 A4 B4"),
        ("ABC", 2, "A0 B0 C0 C1 B1 A1"),
    ],
)
def test_sides_are_launched_in_turn_and_back(sides, launches, order):
    found = list(plan(*map(side, sides), launches=launches).order())
    assert " ".join(f"{one.side.name}{one.number}" for one in found) == order
    assert [one.order for one in found] == list(range(len(found)))


@pytest.mark.parametrize(
    ("own", "command"),
    [
        (
            {},
            "/bin/py -m torch.distributed.run --standalone --nproc_per_node 3 /tree/train.py shared=1 only.candidate=1 "
            "training.output_dir=/out/candidate/01 label=null",
        ),
        (
            {"launcher": "docker run -v {plan}:{plan} --name {side}-{launch} {{.ID}} image torchrun"},
            "docker run -v /out:/out --name candidate-01 {{.ID}} image torchrun --standalone",
        ),
        (
            {"launcher": "numactl -N 0 {torchrun} --max-restarts 0"},
            "numactl -N 0 /bin/py -m torch.distributed.run --max-restarts 0 --standalone",
        ),
        (
            {"command": "torchrun 'my job.py' --out={output} --seed {launch}"},
            "torchrun 'my job.py' --out=/out/candidate/01 --seed 01",
        ),
        (  # without a folder it is recorded
            {"command": "{torchrun} my.py"},
            f"{sys.executable} -m aorta record /out/candidate/01 -- /bin/py -m torch.distributed.run my.py",
        ),
    ],
)
def test_the_command_line_of_a_launch(own, command):
    own = {name: tuple(shlex.split(words)) for name, words in own.items()}
    asked, wanted = plan(side("candidate", **own), words=("shared=1",), nproc_per_node=3), shlex.split(command)
    assert asked.command(list(asked.order())[1])[: len(wanted)] == wanted


def test_a_plan_is_kept_without_secrets():
    words = ("-eHF_TOKEN=a=b", "--env", "MY_API_KEY=abc", "--password", "abc", "--api-key=abc", "-e", "NCCL_ALGO=Ring")
    shown = ["-eHF_TOKEN=...", "--env", "MY_API_KEY=...", "--password", "...", "--api-key=...", "-e", "NCCL_ALGO=Ring"]
    own = side("candidate", launcher=words, environment={"HF_TOKEN": "abc", "NCCL_ALGO": "Ring"})
    kept = plan(own, words=words).as_json()
    assert kept["words"] == list(kept["sides"]["candidate"]["launcher"]) == shown
    assert kept["sides"]["candidate"]["environment"] == {"HF_TOKEN": "...", "NCCL_ALGO": "Ring"}


@pytest.mark.parametrize("path", ["/a/b-c_d.e", "/a b/c", "/it's", "/back\\slash", "/b\\'q", "/x=1,2{}[]", "/ends\\"])
def test_hydra_reads_the_folder_back(path):
    asked = plan(side("reference"), output=Path(path))
    word = asked.command(next(asked.order()))[-2]
    assert OverridesParser.create().parse_override(word).value() == f"{path}/reference/00"


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


def test_the_last_key_varies_fastest_and_values_are_hydra_s():
    assert grid(["env.A=1,2", "b=range(0,2)"]) == [
        Side(words=(f"b={b}",), environment={"A": a}) for a, b in (("1", "0"), ("1", "1"), ("2", "0"), ("2", "1"))
    ]
    assert [setting.words for setting in grid(["+b=[1,2],'a,c'"])] == [("b=[1,2]",), ("b='a,c'",)]
    assert grid([]) == []


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
    if name != "reference":
        assert overlap_report(["plan", "--fail-on", "overlap_ratio<0"]) == 2
        assert "--fail-on: is about one side or two" in bench.capsys.readouterr().err
