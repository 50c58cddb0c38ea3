"""The cells of docs/notebook.md, run in order on the sample run."""

from __future__ import annotations

import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from tests.docs.pages import ROOT, fenced

SAMPLE = ROOT / "tests" / "samples" / "two_gloo_ranks"


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the cells leave behind, run where both of the guide's runs are."""
    for name in ("two", "sharded"):
        shutil.copytree(SAMPLE, tmp_path / "artifacts" / name)
    monkeypatch.chdir(tmp_path)
    left: dict[str, object] = {}
    for number, cell in enumerate(fenced(ROOT / "docs" / "notebook.md", "python")):
        exec(compile(cell, f"docs/notebook.md, cell {number}", "exec"), left)
    plt.close("all")
    return left


def test_the_cells_run_and_find_what_is_in_the_run(
    cells: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    steps, used, reduces, medians = (cells[name] for name in ("steps", "used", "reduces", "medians"))
    assert isinstance(steps, pd.DataFrame)
    assert isinstance(used, pd.DataFrame)
    assert isinstance(reduces, pd.DataFrame)
    assert isinstance(medians, pd.DataFrame)
    assert (len(steps), len(used)) == (12, 6), "two ranks of six steps, half of them warm-up"
    assert reduces.groupby("instance")["rank"].nunique().eq(2).all()
    assert (reduces.wait_ms + reduces.transfer_ms - reduces.duration_ms).abs().max() < 1e-9
    assert medians.loc["two"].equals(medians.loc["sharded"]), "here both are the same run"
    for picture in ("steps.png", "collectives.png"):
        assert Path(picture).stat().st_size > 3_000
