"""`aorta demo` in a folder that holds a different demo, as after an update: it goes on, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from aorta.errors import AnotherPlan
from aorta.experiments import plan_command
from aorta.experiments.launch_plan import Plan


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that launches were started in, by a stand-in that refuses one in which another plan lies."""
    found: list[Path] = []

    def launch_all(plan: Plan) -> int:
        if (plan.output / "plan.json").exists():
            raise AnotherPlan(f"{plan.output / 'plan.json'} holds another plan")
        found.append(plan.output)
        return 130  # stopped: no report

    monkeypatch.setattr(plan_command, "launch_all", launch_all)
    return found


def test_a_different_demo_is_kept_beside_the_new_one(
    tmp_path: Path, launched: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    for content in ("first", "second"):
        folder.mkdir()
        (folder / "plan.json").write_text(content)
        assert plan_command.demo(["--output", str(folder)]) == 130
    assert launched == [folder, folder]
    assert (tmp_path / "demo-earlier" / "plan.json").read_text() == "first"
    assert (tmp_path / "demo-earlier-2" / "plan.json").read_text() == "second"
    assert f"it is now {tmp_path / 'demo-earlier'}" in capsys.readouterr().err


def test_a_folder_that_cannot_move_is_named(
    tmp_path: Path, launched: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "plan.json").write_text("first")

    def refused(_path: Path, _target: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "rename", refused)
    assert plan_command.demo(["--output", str(folder)]) == 1
    assert launched == []
    assert "holds another plan" in capsys.readouterr().err
