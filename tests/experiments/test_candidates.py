"""`aorta ab` with several candidates: what is launched in turn against one reference, the table, the best of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import msgspec
import pytest

from aorta.documents.plans import Side
from aorta.errors import AortaError
from aorta.experiments.plan_command import parse
from aorta.experiments.plan_options import grid, read_plan
from aorta.records.run_files import KNOWN_VARIABLES, check_variable
from aorta.report.command import overlap_report
from tests.experiments.conftest import Bench

TWO_BY_TWO = ("--vary", "env.NCCL_ALGO=Ring,Tree", "--vary", "parallel.bucket_cap_mb=10,25")
MANY = (
    "--candidate",
    "a=2 env.NCCL_ALGO=Ring",
    "--candidate",
    "a=3",
    "--vary",
    "b=1,2",
    "env.NCCL_ALGO=Tree",
)


def test_every_candidate_and_every_combination_is_a_side(tmp_path: Path) -> None:
    reference, *candidates = read_plan(parse(["--output", "o", *MANY]), tmp_path).sides
    assert (reference.name, reference.words, reference.environment) == ("reference", (), {"NCCL_ALGO": "Tree"})
    assert [(side.name, side.words, side.environment) for side in candidates] == [
        ("candidate-1", ("a=2",), {"NCCL_ALGO": "Ring"}),
        ("candidate-2", ("a=3",), {"NCCL_ALGO": "Tree"}),
        ("candidate-3", ("b=1",), {"NCCL_ALGO": "Tree"}),
        ("candidate-4", ("b=2",), {"NCCL_ALGO": "Tree"}),
    ]


def test_the_last_key_varies_fastest_and_values_are_hydra_s() -> None:
    assert grid(["env.A=1,2", "b=range(0,2)"]) == [
        Side(words=(f"b={b}",), environment={"A": a}) for a, b in (("1", "0"), ("1", "1"), ("2", "0"), ("2", "1"))
    ]
    assert [setting.words for setting in grid(["+b=[1,2],'a,c'"])] == [("b=[1,2]",), ("b='a,c'",)]
    assert grid([]) == []


def test_a_file_has_candidates_and_what_is_varied(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "output: o\ncandidate: {environment: {X: 1}}\ncandidates: [a=1 b=2, [c=3]]\nvary: ['d=1,2']\n"
    )
    plan = read_plan(parse(["--plan", str(tmp_path / "plan.yaml"), "--candidate", "e=4"]), tmp_path)
    words = [side.words for side in plan.sides]
    assert words == [(), ("a=1", "b=2"), ("c=3",), ("e=4",), ("d=1",), ("d=2",)]
    assert [side.environment for side in plan.sides[1:]] == [{"X": "1"}] * 5


@pytest.mark.parametrize(("candidates", "launches"), [(1, 5), (6, 5), (7, 6), (64, 7)])
def test_so_many_are_launched_as_often_as_a_verdict_takes(tmp_path: Path, candidates: int, launches: int) -> None:
    words = [word for number in range(candidates) for word in ("--candidate", f"a={number}")]
    assert read_plan(parse(["--output", "o", *words]), tmp_path).launches == launches


def test_variables_take_the_values_of_their_manuals() -> None:
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
def test_a_side_of_commands_is_called_by_its_own(command: str, shared: str, said: str) -> None:
    own, other = (Side(command=tuple(shlex.split(words)), environment={"A": "2"}) for words in (command, shared))
    assert own.settings(msgspec.structs.replace(other, environment={})) == said


@pytest.mark.thorough
def test_the_best_candidate_is_named(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.acts(**{f"candidate-4_{number:02}": {"job_step_ms": 75 + number} for number in range(5)})
    code, out, _ = bench(*TWO_BY_TWO, "s=1", "--report")
    assert code == 0
    assert bench.launched[:10] == [
        *("reference/00", "candidate-1/00", "candidate-2/00", "candidate-3/00", "candidate-4/00"),
        *("candidate-4/01", "candidate-3/01", "candidate-2/01", "candidate-1/01", "reference/01"),
    ]
    launches = [call for call in bench.calls if call["call"] == "launch"]
    assert {call["name"].split("/")[0]: call["env"]["NCCL_ALGO"] for call in launches} == {
        "reference": None, "candidate-1": "Ring", "candidate-2": "Ring", "candidate-3": "Tree", "candidate-4": "Tree"
    }  # fmt: skip
    lines = out.splitlines()
    assert "reference: s=1" in lines
    assert "recommendation: NCCL_ALGO=Tree parallel.bucket_cap_mb=25" in lines
    found = json.loads(Path("reports/plan/candidates.json").read_text())
    assert found["alpha_each"] == pytest.approx(0.05 / 4)
    assert [each["comparison"]["verdict"] for each in found["candidates"]] == [*["equivalent"] * 3, "improvement"]
    assert found["candidates"][3]["changes"] == "NCCL_ALGO=Tree parallel.bucket_cap_mb=25"
    assert found["recommendation"] == "candidate-4"
    step = found["candidates"][3]["comparison"]["metrics"]["job_step_ms"]
    sides, p = [step[side]["value"] for side in ("reference", "candidate")], step["test"]["p"]
    assert (*sides, p) == (100, 77, pytest.approx(2 / 252))  # all apart

    # The same command launches nothing; a side that is gone is named, and the others are judged at the same level.
    assert bench(*TWO_BY_TWO, "s=1")[0] == 0
    assert len(bench.launched) == 25
    for folder in Path("plan/candidate-4").iterdir():
        (folder / "run.json").unlink()
    Path("plan/candidate-4").rename("plan/gone")
    assert overlap_report(["plan"]) == 0
    said = capsys.readouterr().out
    assert "NCCL_ALGO=Tree parallel.bucket_cap_mb=25: " in said
    assert "keep the reference: none of the 3 of 4 candidates that were compared is significantly faster" in said
    assert overlap_report(["plan", "--fail-on", "overlap_ratio<0"]) == 2
    assert "--fail-on: is about one side or two" in capsys.readouterr().err


def test_variables_of_a_command_are_varied_and_secrets_hidden(bench: Bench) -> None:
    words = ("--vary", "env.NCCL_ALGO=Ring,Tree", "--vary", "env.MY_TOKEN=a,b")
    code, out, _ = bench("--command", "run {output}", *words, "--dry-run")
    assert code == 0
    shown = "candidate-1/00: NCCL_ALGO=Ring MY_TOKEN=... run"
    assert out.splitlines()[1] == f"{shown} {bench.home}/plan/candidate-1/00"


@pytest.mark.parametrize("name", ["reference", "candidate-2"])
def test_the_first_launch_of_a_side_that_fails_ends_the_plan_with_its_error(bench: Bench, name: str) -> None:
    bench.acts(**{f"{name}_00": {"fail": 1}})
    code, out, err = bench("--launches", "5", "--candidate", "a=1", "--candidate", "a=2")
    assert (code, out) == (5, "")
    assert f"error: {name}/00: failed: exit code 7: RuntimeError: it broke here (" in err
    order = ["reference/00", "candidate-1/00", "candidate-2/00"]
    assert bench.launched == order[: order.index(f"{name}/00") + 1]
    assert bench.events("close")[-1]["failed"] == [f"{name}/00"]
