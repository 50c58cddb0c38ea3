"""A failed test is run again once; what fails twice fails, and what fails in numbers is not tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import run_again

pytestmark = pytest.mark.thorough

TEST = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", {names})
def test_of(name):
    ran = Path(__file__).with_name(name)
    count = len(ran.read_text()) if ran.exists() else 0
    ran.write_text("x" * (count + 1))
    assert name.startswith("good") or name.startswith("once") and count == 1
"""


def run(folder: Path, *names: str) -> tuple[int, dict[str, int]]:
    """The exit code, and how often each test ran."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(TEST.format(names=names))
    code = run_again.main([str(folder)])
    return code, {name: len((folder / name).read_text()) for name in names}


def test_what_was_disturbed_passes_and_is_named_and_what_fails_twice_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, "good", "bad", "once") == (1, {"good": 1, "bad": 2, "once": 2})
    assert capfd.readouterr().out.endswith(
        "== 1 test(s) passed only when run again, alone:\n   test_it.py::test_of[once]\n"
    )


def test_many_failures_are_no_disturbance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"once{number}" for number in range(run_again.MOST + 1)]
    assert run(tmp_path, *names) == (1, dict.fromkeys(names, 1))
