"""The picture of a run, by its pixels: curves stand at their values, gaps are gaps, and axes have round numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aorta.analysis.aggregate import LabelledRun
from aorta.report.page.charts import POINTS, over_steps
from aorta.report.palette import BAND, INK, light
from aorta.report.picture import dashes, draw_timeline, ticks
from tests.analysis.attribution.records import dataset
from tests.analysis.builders import metrics, step


def made(folder: Path, label: str, exposed: list[float | None], warmup: int = 0) -> LabelledRun:
    """One rank that computes 50 ms and communicates 60 ms in every step."""
    lines = [
        step(0, 1, at, overlap={**metrics(100, 50, 60, 20), "exposed_comm_ms": value}, warmup=at < warmup)
        for at, value in enumerate(exposed)
    ]
    return dataset(folder, label, [lines])


def drawn(run: LabelledRun, path: Path) -> np.ndarray:
    """The pixels, [height, width, 3]."""
    assert draw_timeline(run, path) is None
    image = Image.open(path)
    assert image.format == "PNG"
    return np.asarray(image.convert("RGB"))


def where(pixels: np.ndarray, color: str) -> np.ndarray:
    """Which pixels have exactly that colour."""
    found: np.ndarray = (pixels == [int(color[at : at + 2], 16) for at in (1, 3, 5)]).all(axis=2)
    return found


def test_curves_stand_at_their_values(tmp_path: Path) -> None:
    pixels = drawn(made(tmp_path / "a", "a", [40.0] * 200), tmp_path / "a.png")
    rows = np.flatnonzero(where(pixels, INK).sum(axis=1) > 1000)
    bottoms = rows[np.flatnonzero(np.diff(rows, prepend=-9) > 1)]
    assert len(bottoms) == 2
    heights = {}
    for name, bottom in (("compute", 0), ("communication", 0), ("hidden", 1), ("exposed", 1)):
        above = where(pixels, light(name))[: bottoms[bottom]]
        (middle, _) = np.nonzero(above[bottoms[bottom] - 330 :])
        heights[name] = 330 - np.median(middle)
    assert heights["compute"] / heights["communication"] == pytest.approx(50 / 60, abs=0.01)
    assert heights["hidden"] / heights["exposed"] == pytest.approx(20 / 40, abs=0.01)
    # The highest has room above it, and a dash carries what a colour alone must not.
    assert heights["communication"] == pytest.approx(320 / 1.05, abs=2)
    columns = {name: where(pixels, light(name))[:430].any(axis=0).sum() for name in ("compute", "communication")}
    assert columns["compute"] > 1200
    assert 0.5 < columns["communication"] / columns["compute"] < 0.8


def test_steps_without_a_value_are_a_gap_and_warm_up_is_shaded(tmp_path: Path) -> None:
    whole: list[float | None] = [40.0] * 100
    pixels = drawn(made(tmp_path / "a", "a", [*whole, *([None] * 100), *whole], warmup=150), tmp_path / "a.png")
    columns = np.flatnonzero(where(pixels, light("exposed"))[430:860].any(axis=0))
    assert 380 < np.diff(columns).max() < 480  # a third of 1,296 pixels
    shaded = np.flatnonzero(where(pixels, BAND)[110:420].any(axis=0))
    assert len(shaded) == pytest.approx(1296 / 2, abs=15)


def test_what_cannot_be_drawn_says_why_and_any_label_can(tmp_path: Path) -> None:
    assert draw_timeline(made(tmp_path / "one", "one", [1.0]), tmp_path / "one.png") is not None
    assert not (tmp_path / "one.png").exists()
    drawn(made(tmp_path / "long", r"$\frac{$" + "\u00e9\u4e2d" + 300 * "x", [1.0, 2.0]), tmp_path / "long.png")


def test_points_of_a_curve_are_the_medians_and_ends_of_their_values() -> None:
    generator = np.random.default_rng(3)
    steps = generator.integers(0, 3 * POINTS, 8000)
    values = np.where(generator.random(8000) < 0.5, np.nan, generator.random(8000))
    curve, unique = over_steps(steps, values), np.unique(steps)
    together = -(-len(unique) // POINTS)
    for at in range(0, len(curve.x), 97):
        own = unique[at * together : (at + 1) * together]
        found = values[np.isin(steps, own)]
        found = found[~np.isnan(found)]
        assert curve.x[at] == own.mean()
        expected = [found.min(), np.median(found), found.max()] if len(found) else [np.nan] * 3
        np.testing.assert_array_equal([curve.low[at], curve.middle[at], curve.high[at]], expected)


@pytest.mark.parametrize(
    ("low", "high", "whole", "written"),
    [
        (0.0, 33.6, False, ["0", "10", "20", "30"]),
        (0.0, 0.0021, False, ["0.0000", "0.0005", "0.0010", "0.0015", "0.0020"]),
        (-0.5, 3.5, True, ["0", "1", "2", "3"]),
        (999_999.5, 1_002_000.5, True, [f"{each}" for each in range(1_000_000, 1_002_001, 500)]),
    ],
)
def test_axes_have_round_numbers(low: float, high: float, whole: bool, written: list[str]) -> None:
    assert [text for _, text in ticks(low, high, 5, whole=whole)] == written


def test_dashes_follow_the_line() -> None:
    points = np.array([[0.0, 0.0], [10.0, 0.0], [10.0, 10.0]])
    pieces = [piece.tolist() for piece in dashes(points, 12, 6)]
    assert pieces == [[[0, 0], [10, 0], [10, 2]], [[10, 8], [10, 10]]]
