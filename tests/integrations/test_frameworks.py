"""`python -m benchmarks.frameworks`: its cases that need torch alone, and what its page prints."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks.frameworks.__main__ import CASES, MARK, SCRIPTS, judge, run
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
def test_recorded_as_trained(tmp_path):
    (case,) = (one for one in CASES if one.name == "fsdp2_async_save")
    plain, zero = (run(case, way, sys.executable, tmp_path / way).returncode for way in ("plain", "zero"))
    row = judge(case, "zero", tmp_path / "zero", tmp_path / "plain", zero, plain)
    wrong = [problem for problem in row["wrong"] if problem != "step length"]  # a time
    assert wrong == [], (tmp_path / "zero" / "output.txt").read_text()


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_page_prints_the_lines_that_were_run(heading):
    section = re.split(rf"^## {heading}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    script = (SCRIPTS / f"{SECTIONS[heading]}.py").read_text()
    marked = [line.partition("#")[0].strip().rstrip(",") for line in script.splitlines() if line.endswith(MARK)]
    assert [line for line in marked if line not in section and line != "import aorta"] == []
