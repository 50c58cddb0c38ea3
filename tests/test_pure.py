"""The pure tests: there are many, and nothing that they import loads torch or draws."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import pure
from tests.runs import ROOT, environment

pytestmark = pytest.mark.thorough


def test_the_pure_tests_load_neither_torch_nor_what_draws() -> None:
    names = [str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in pure.files()]
    assert len(names) > 30
    program = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "print(sorted({'torch', 'matplotlib', 'bokeh'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
