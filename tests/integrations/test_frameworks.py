"""`python -m benchmarks.frameworks`: its cases that need torch alone, and what its page prints."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.frameworks.__main__ import CASES, MARK, SCRIPTS, Case, judge, main, run
from tests.runs import ROOT, record

PAGE = (ROOT / "docs" / "frameworks.md").read_text()
SECTIONS = {
    "Transformers": "transformers_ddp",
    "Lightning": "lightning_ddp",
    "Accelerate": "accelerate_ddp",
    "Ray Train": "ray_ddp",
    "DeepSpeed": "deepspeed_zero",
}


@pytest.mark.dist
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ddp", "fsdp2_async_save"])
def test_recorded_as_trained(name: str, tmp_path: Path) -> None:
    (case,) = (one for one in CASES if one.name == name)
    codes = {way: run(case, way, sys.executable, tmp_path / way).returncode for way in ("plain", "lines", "zero")}

    def wrong(case: Case, way: str) -> list[str]:
        row = judge(case, way, tmp_path / way, tmp_path / "plain", codes[way], codes["plain"])
        return [problem for problem in row["wrong"] if problem != "step length"]  # a time

    assert [wrong(case, way) for way in ("lines", "zero")] == [[], []], (tmp_path / "zero/output.txt").read_text()
    # and what is wrong is seen
    witness = tmp_path / "lines" / "watched" / "rank_1.json"
    seen = json.loads(witness.read_text())
    early = [at - 100_000_000 for at in seen["stepped"]]
    evaluations = [["evaluation", at - 60_000_000, at - 50_000_000] for at in seen["stepped"]]
    others = {"weights": "others", "collectives": seen["collectives"][::2], "stepped": early, "loads": early}
    witness.write_text(json.dumps(others | {"pauses": evaluations}))
    other = dataclasses.replace(case, steps=case.steps - 1, blocks=case.blocks[1:], fails=not case.fails)
    lined = ["an evaluation in a step", "blocks", "collectives", "exit code", "footer", "steps", "weights"]
    assert wrong(other, "lines") == lined
    # under `aorta record` also a step that does not say that it begins behind an evaluation, or that lacks its data
    witness = tmp_path / "zero" / "watched" / "rank_1.json"
    seen = json.loads(witness.read_text())
    between = [step.t_end_ns + 1_000 for step in record(tmp_path / "zero" / "artifacts/mine", 1).steps]
    witness.write_text(json.dumps(seen | {"pauses": [["evaluation", at, at + 1_000] for at in between]}))
    assert wrong(case, "zero") == ["boundaries", "collectives with lines"]
    witness.write_text(json.dumps(seen | {"loads": between}))
    assert wrong(case, "zero") == ["a step without its data", "collectives with lines"]  # whose witness lies


def test_a_folder_that_is_not_empty_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ddp").mkdir()
    monkeypatch.setattr(sys, "argv", ["frameworks", "--output", str(tmp_path), "ddp"])
    assert main() == 2
    assert capsys.readouterr().err == f"{tmp_path}: not an empty folder; remove it, or give another with --output\n"


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_page_prints_the_lines_that_were_run(heading: str) -> None:
    section = re.split(rf"^## {heading}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    script = (SCRIPTS / f"{SECTIONS[heading]}.py").read_text()
    marked = [line.partition("#")[0].strip().rstrip(",") for line in script.splitlines() if line.endswith(MARK)]
    assert [line for line in marked if line not in section and line != "import aorta"] == []
