"""Pictures fit for a paper: no legend over data, units on every axis; and the step that shows a difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.report.charts import run_pictures
from aorta.analysis.report.charts.run_pictures import pictures
from aorta.analysis.report.charts.side_by_side import draw_side_by_side, typical_step
from aorta.analysis.report.figure_data import chosen_steps
from aorta.analysis.report.palette import light
from tests.analysis.attribution.records import dataset, made_step
from tests.analysis.attribution.test_attribute import two_ranks
from tests.analysis.builders import metrics, step
from tests.analysis.report.pages import two_runs


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figure]:
    """Every picture of two runs, as figures that were laid out."""
    folder = tmp_path_factory.mktemp("pictures")
    figures: dict[str, Figure] = {}
    patch = pytest.MonkeyPatch()

    def kept(figure: Figure, path: Path) -> None:
        figure.canvas.draw()
        figures[path.name] = figure

    patch.setattr(run_pictures, "save", kept)
    for name, draw in pictures(list(two_runs(folder).values())):
        draw(folder / name)
    patch.undo()
    return figures


def test_no_legend_lies_over_data(drawn: dict[str, Figure]) -> None:
    seen = 0
    for name, figure in drawn.items():
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
        for legend in legends:
            seen += 1
            box = legend.get_window_extent()
            for axes in figure.axes:
                assert not box.overlaps(axes.bbox), name
            assert box.x0 >= 0, name
            assert box.x1 <= figure.bbox.x1, name
    assert seen == len(drawn)


def test_every_axis_says_its_unit(drawn: dict[str, Figure]) -> None:
    told = {axes.get_ylabel() for figure in drawn.values() for axes in figure.axes} - {""}
    units = ("ms per step", "ratio", "MHz", ", W", "°C", ", %")
    assert all(any(unit in label for unit in units) for label in told), told
    below = {figure.axes[-1].get_xlabel() for name, figure in drawn.items() if "breakdown" not in name}
    assert all("ms since" in label or "global step" in label for label in below), below


def test_titles_name_the_run_its_platform_and_its_ranks(drawn: dict[str, Figure]) -> None:
    figure = drawn["rocm_streams.png"]
    assert figure.get_suptitle().startswith("rocm: global step")
    assert figure.axes[0].get_title(loc="left") == "cuda, ddp, 2 of 2 ranks"


def test_the_chosen_steps_are_the_median_the_slowest_and_the_fastest(tmp_path: Path) -> None:
    dataset = two_runs(tmp_path, ranks=2, steps=9)["cuda"]
    times = dataset.table("global_step", "step_ms").groupby("global_step")["step_ms"].max().sort_values()
    steps = {each.why: each for each in chosen_steps(dataset)}
    assert steps["slowest job step"].global_step == times.index[-1]
    assert steps["fastest job step"].global_step == times.index[0]
    median = steps["median job step"]
    assert (median.global_step, median.job_step_ms) == (times.index[2], times.iloc[2])  # of six, the lower middle


def exposed(folder: Path, label: str, by_rank: list[list[float | None]], first: int = 0) -> LabelledRun:
    """Steps whose exposed communication is that, in ms."""
    ranks = []
    for rank, values in enumerate(by_rank):
        lines = []
        for number, value in enumerate(values, start=first):
            told = {**metrics(100, 50, 60, 10), "exposed_comm_ms": value}
            lines.append(step(rank, len(by_rank), number, overlap=told))
        ranks.append(lines)
    return dataset(folder, label, ranks)


def test_the_step_nearest_to_the_mean_difference_is_shown_not_the_largest(tmp_path: Path) -> None:
    before = exposed(tmp_path / "a", "a", [[10, 10, 10, 10]])
    after = exposed(tmp_path / "b", "b", [[11, 50, 21, 14]])  # mean 24, so 14 more: the third step is at 11
    shown = typical_step(before, after)
    assert shown is not None
    assert (shown.reference_step, shown.candidate_step) == (2, 2)
    assert (shown.difference_ms, shown.mean_ms) == pytest.approx((11, 14))


def test_ranks_that_differ_most_come_first(tmp_path: Path) -> None:
    before = exposed(tmp_path / "a", "a", [[10], [10], [10]])
    after = exposed(tmp_path / "b", "b", [[12], [3], [10]])
    shown = typical_step(before, after)
    assert shown is not None
    assert shown.ranks == (1, 0, 2)


def test_without_a_common_step_each_side_shows_one_near_its_own_mean(tmp_path: Path) -> None:
    before = exposed(tmp_path / "a", "a", [[1, 2, 6]])
    after = exposed(tmp_path / "b", "b", [[8, 20, 17]], first=100)
    shown = typical_step(before, after)
    assert shown is not None
    assert (shown.reference_step, shown.candidate_step) == (1, 102)


def test_steps_that_a_rank_lacks_or_that_are_null_are_not_chosen(tmp_path: Path) -> None:
    before = exposed(tmp_path / "a", "a", [[10, 10, 10], [10, 10, 10]])
    after = exposed(tmp_path / "b", "b", [[20, 20, 90], [None, 20]])
    shown = typical_step(before, after)
    assert shown is not None
    assert shown.candidate_step == 1
    assert typical_step(before, exposed(tmp_path / "c", "c", [[None]])) is None


def colour(name: str) -> np.ndarray:
    return np.array([int(name[at : at + 2], 16) for at in (1, 3, 5)]) / 255


def test_the_picture_holds_both_sides_on_one_scale(tmp_path: Path) -> None:
    """In the candidate reduce-scatter takes three times as long, so its colour fills three times as much, and the
    exposed lane grows from 11 to 25 ms.
    """
    path = tmp_path / "side_by_side.png"
    assert draw_side_by_side(two_ranks(tmp_path / "a", "base"), two_ranks(tmp_path / "b", "new", slow=3), path) is None
    image = imread(path)[:, :, :3]
    middle = len(image) // 2
    counts = [
        [int((np.abs(part - colour(name)).max(axis=2) < 0.02).sum()) for part in (image[:middle], image[middle:-60])]
        for name in (light("reducescatter"), light("exposed"))
    ]
    assert counts[0][1] / counts[0][0] == pytest.approx(3, rel=0.2)
    assert counts[1][1] / counts[1][0] == pytest.approx(25 / 11, rel=0.3)


def test_why_there_is_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "none.png"
    null = exposed(tmp_path / "a", "a", [[None]])
    assert draw_side_by_side(null, null, path) == (
        "no step after warm-up that all ranks have, on both sides, with known exposed communication"
    )
    bare = dataset(tmp_path / "b", "b", [[made_step(0, 1, 0, 100, [], [])]])
    assert draw_side_by_side(bare, bare, path) == (
        "these steps hold no collective that could be drawn (steps of traces never do)"
    )
    assert not path.exists()


def test_labels_are_not_taken_for_mathematics(tmp_path: Path) -> None:
    sides = two_ranks(tmp_path / "a", "$x_{$"), two_ranks(tmp_path / "b", "b")
    assert draw_side_by_side(*sides, tmp_path / "x.png") is None
    for name, draw in pictures([replace(side, label=r"$\frac{$") for side in sides]):
        draw(tmp_path / name)
