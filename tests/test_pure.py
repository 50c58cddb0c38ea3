"""The pure tests: enough of them, and nothing that they import brings torch or draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import pure
from tests.runs import ROOT, environment


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import json\nfrom aorta.timeline import intervals", True),
        ("from aorta.errors import InputError", True),
        ("import torch", False),
        ("def test_something():\n    from time import sleep", False),
        ("from tests.runs import train", False),
        ("from aorta.distributed.topology import read_topology", False),
        ("from aorta.analysis.report.report_folder import write_report", False),
    ],
)
def test_what_a_file_imports_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: bool
) -> None:
    path = ROOT / "tests" / "timeline" / "test_not_there.py"
    own = pure._imports
    (tmp_path / "test_file.py").write_text(text)
    monkeypatch.setattr(pure, "_imports", lambda asked: own(tmp_path / "test_file.py" if asked == path else asked))
    assert pure.is_pure(path) is expected


@pytest.mark.thorough
def test_the_pure_tests_load_neither_torch_nor_what_draws() -> None:
    names = [str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in pure.files()]
    program = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "print(sorted({'torch', 'matplotlib', 'bokeh'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
