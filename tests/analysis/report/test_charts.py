"""Pictures fit for a paper: no legend over data, units on every axis, colours that can be told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from aorta.analysis.report.charts import run_pictures
from aorta.analysis.report.charts.run_pictures import pictures
from aorta.analysis.report.figure_data import chosen_steps
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


def test_every_picture_is_drawn(drawn: dict[str, Figure]) -> None:
    assert set(drawn) == {
        *(f"{label}_{what}.png" for label in ("cuda", "rocm") for what in ("timeline", "streams", "breakdown")),
        "rocm_devices.png",
        "overlap_ratio.png",
    }


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
