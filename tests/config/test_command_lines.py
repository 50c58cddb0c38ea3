"""Command lines of `train.py` and what becomes of them: `command_lines.json`, a line each.

`words` (FOLDER is where the files are) on so many `ranks`, with `files` beside; the exit `code`; what is said, as a
pattern (`match`) or as words (`says`); `values` of the configuration that would run. A refusal runs nothing, imports
nothing that it names, and says its rule, not Hydra's.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.config.conftest import Door

LINES = json.loads((Path(__file__).parent / "command_lines.json").read_text())
CASES = [
    pytest.param(
        line,
        id=f"{line['kind']}: {line.get('ranks', 1)} {' '.join(line['words'])}",
        marks=[pytest.mark.thorough] * line.get("thorough", False),
    )
    for line in LINES
]
NOISE = ("Traceback", "base_", "To append", "searchpath", "HYDRA_FULL_ERROR")
CALLED = "called_by_aorta"
"""A module that a file names, to be imported by nobody."""


@pytest.mark.spec("D53")
@pytest.mark.parametrize("line", CASES)
def test_a_command_line_runs_or_is_refused(
    door: Door, line: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {f"{CALLED}.py": "", **line.get("files", {})}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    if "ranks" in line:
        monkeypatch.setenv("WORLD_SIZE", str(line["ranks"]))
    answer = door(*(word.replace("FOLDER", str(tmp_path)) for word in line["words"]))
    assert (answer.code, CALLED in sys.modules) == (line["code"], False), answer.err
    if line["code"]:
        assert (answer.jobs, answer.out) == ([], "")
        assert answer.err.startswith("error: ")
        assert [noise for noise in NOISE if noise in answer.err and noise not in str(line)] == []
    assert re.search(line.get("match", ""), answer.err, re.MULTILINE), answer.err
    assert [words for words in line.get("says", ()) if words not in answer.err] == []
    for key, value in line.get("values", {}).items():
        assert OmegaConf.select(OmegaConf.create(answer.job.plain), key) == value
