"""`scripts/mutants` notices what the tests notice, shows what they do not, and draws the same for the same seed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.mutation import operators, run

MODULE = '''
def largest(values, start=0, *, absolute=False):
    """The largest of some values, or the first of `start` on."""
    best = values[start]
    for value in values[start:]:
        if value > best:
            best = value
    return best
'''
TEST = """
from aorta.small import largest

def test_largest():
    assert largest([1, 3, 2]) == 3
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one module and one test, which the commands take for this one."""
    for name, text in {"aorta/__init__.py": "", "aorta/small.py": MODULE, "tests/test_small.py": TEST}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    monkeypatch.setattr(operators, "ROOT", tmp_path)
    run.tests_of.cache_clear()
    run._imports.cache_clear()
    yield tmp_path
    run.tests_of.cache_clear()
    run._imports.cache_clear()


def outcome(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what is printed, and the object in the last line."""
    code = run.main([*words, "--workers", "1"])
    said = capsys.readouterr().out
    return code, said, json.loads(said.splitlines()[-1])


def test_what_the_tests_notice_is_counted_and_what_they_do_not_is_shown(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, account = outcome(capsys, "--only", "negate|> becomes >=", "--seed", "7")
    assert (code, account["seed"], account["run"], account["noticed"], account["share"]) == (1, 7, 2, 1, 0.5)
    assert "noticed  aorta/small.py:6: negate a condition" in said
    assert account["unnoticed"] == ["aorta/small.py:6: > becomes >="]
    assert "-        if value > best:\n+        if value >= best:" in said
    assert (tree / "aorta/small.py").read_text() == MODULE


def test_nothing_is_said_where_the_tests_fail_anyway(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "tests/test_small.py").write_text(TEST.replace("== 3", "== 4"))
    code, said, account = outcome(capsys, "--only", "negate")
    assert (code, account["run"], account["share"]) == (2, 0, None)
    assert account["not_tested"] == ["aorta/small.py:6: negate a condition"]
    assert "its tests fail on the code as it is: tests/test_small.py" in said


def test_a_seed_draws_the_same_again() -> None:
    population = list(operators.mutants("aorta.timeline.intervals"))
    assert run._drawn(population, 5, 3) == run._drawn(population, 5, 3) != run._drawn(population, 5, 4)
    assert len(run._drawn(population, 5, 3)) == 5


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("f(x)", {"pass"}),
        ('"""Words."""', set()),
        ("x: int = f[1:]", {"x: int = f[2:]", "x: int = f[0:]"}),
        ("def f(): return x", {"def f():\n    return None"}),
        ("y = 1 if x else z", {"y = 1 if not x else z", "y = 2 if x else z", "y = 0 if x else z"}),
        ("y = [x for x in z if x]", {"y = [x for x in z if True]"}),
        ("y = x is not z", {"y = x is z"}),
        ("y = a < b <= c", {"y = a <= b <= c", "y = a < b < c"}),
        ("y = a and (b)", {"y = a or b", "y = a", "y = b"}),
        ("y = a // b", {"y = a / b"}),
        ("y = min(a, key=b)", {"y = max(a, key=b)", "y = min(a)"}),
        ("y = f(a=b, *c)", {"y = f(*c)"}),
        ("y = -x, True", {"y = (x, True)", "y = (-x, False)"}),
        ("raise E(1)", {"pass"}),
        ("y = f'ü{1}', 2", {"y = (f'ü{1}', 3)", "y = (f'ü{1}', 1)"}),
        ("@d(a=1)\ndef f(): pass", set()),
    ],
)
def test_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: set[str]) -> None:
    monkeypatch.setattr(operators, "ROOT", tmp_path)
    (tmp_path / "small.py").write_text(source)
    assert {mutant.source() for mutant in operators.mutants("small")} == expected
