"""`python -m benchmarks.frameworks`: its cases that need torch alone, and what its page prints."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.frameworks.__main__ import CASES, MARK, SCRIPTS, Case, judge, run
from tests.runs import ROOT

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
@pytest.mark.parametrize("name", ["ddp", "ddp_raise", "fsdp2_async_save", "gan"])
def test_recorded_as_trained(name: str, tmp_path: Path) -> None:
    (case,) = (one for one in CASES if one.name == name)
    codes = {way: run(case, way, sys.executable, tmp_path / way).returncode for way in ("plain", "lines", "zero")}

    def wrong(case: Case, way: str) -> list[str]:
        row = judge(case, way, tmp_path / way, tmp_path / "plain", codes[way], codes["plain"])
        found: list[str] = row["wrong"]
        return found

    assert [wrong(case, way) for way in ("lines", "zero")] == [[], []], (tmp_path / "zero/output.txt").read_text()
    # and what is wrong is seen
    witness = tmp_path / "lines" / "watched" / "rank_1.json"
    seen = json.loads(witness.read_text())
    witness.write_text(json.dumps({"weights": "others", "collectives": seen["collectives"][::2]}))
    other = dataclasses.replace(case, steps=case.steps - 1, blocks=case.blocks[1:], fails=not case.fails)
    assert wrong(other, "lines") == ["blocks", "collectives", "exit code", "footer", "steps", "weights"]


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_page_prints_the_lines_that_were_run(heading: str) -> None:
    section = re.split(rf"^## {heading}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    script = (SCRIPTS / f"{SECTIONS[heading]}.py").read_text()
    marked = [line.partition("#")[0].strip().rstrip(",") for line in script.splitlines() if line.endswith(MARK)]
    assert [line for line in marked if line not in section and line != "import aorta"] == []
