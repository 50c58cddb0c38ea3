"""A round with a new seed finds what the fixed profile does not, and says how to find it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import seeds

RARE = """
from hypothesis import given, strategies as st


@given(st.integers(0, 10**9))
def test_of_a_rare_number(number):
    assert number % 7 != SEVENTH
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose only property test the rounds are made of."""
    (tmp_path / "conftest.py").write_text((seeds.ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    monkeypatch.setenv("PYTHONPATH", str(seeds.ROOT))
    monkeypatch.setattr(seeds, "ROOT", tmp_path)
    monkeypatch.setattr(seeds, "files", lambda: [tmp_path / "test_rare.py"])
    return tmp_path


def test_a_failing_round_prints_its_seed_and_the_command(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_folder / "test_rare.py").write_text(RARE.replace("SEVENTH", "3"))
    assert seeds.main(["--seed", "12345"]) == 1
    said = capsys.readouterr().out
    assert "once more: python -m tests.seeds --seed 12345" in said
    assert "number=" in said


@pytest.mark.thorough
@pytest.mark.parametrize("continuous_integration", [False, True])
def test_rounds_have_seeds_of_their_own(
    in_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, continuous_integration: bool
) -> None:
    """Also where `CI` is set, which turns hypothesis' own default profile into one without chance."""
    monkeypatch.delenv("CI", raising=False)
    if continuous_integration:
        monkeypatch.setenv("CI", "true")
    (in_folder / "test_rare.py").write_text(
        RARE.replace("SEVENTH", "7")
        + f"    with open({str(in_folder / 'drawn')!r}, 'a') as file:\n        file.write(f'{{number}}\\n')\n"
    )
    assert seeds.main(["--seconds", "0"]) == 0
    first = (in_folder / "drawn").read_text()
    (in_folder / "drawn").unlink()
    assert seeds.main(["--seconds", "0"]) == 0
    assert (in_folder / "drawn").read_text() != first
    assert "1 round(s) of the property tests of 1 files" in capsys.readouterr().out


def test_no_property_test_at_all_is_an_error(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_folder / "test_rare.py").write_text("# hypothesis\ndef test_plain(): pass\n")
    assert seeds.main(["--seconds", "0"]) == seeds.NOTHING_FOUND
    assert "no property test was found" in capsys.readouterr().out
