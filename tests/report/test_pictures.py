"""Pictures fit for a paper: no legend over data, units on every axis; and the step that shows a difference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from aorta.analysis.aggregate import LabelledRun
from aorta.report.palette import light
from aorta.report.picture import SIDE_BY_SIDE_FILE, draw_side_by_side, pictures, typical_step
from tests.analysis.attribution.records import dataset, made_step
from tests.analysis.attribution.test_attribute import two_ranks
from tests.analysis.builders import metrics, step
from tests.report.pages import two_runs


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figure]:
    """Every picture of two runs, as figures that were laid out."""
    folder = tmp_path_factory.mktemp("pictures")
    figures: dict[str, Figure] = {}
    patch = pytest.MonkeyPatch()

    def kept(figure: Figure, path: Path, **_: object) -> None:
        figure.canvas.draw()
        figures[path.name] = figure

    patch.setattr(Figure, "savefig", kept)
    runs = list(two_runs(folder).values())
    for name, draw in pictures(runs, (runs[0], runs[1])):
        draw(folder / name)
    patch.undo()
    return figures


def test_no_text_lies_over_data_or_other_text_and_all_of_it_is_inside(drawn: dict[str, Figure]) -> None:
    for name, figure in drawn.items():
        (legend,) = figure.legends
        boxes = [legend.get_window_extent(), *(text.get_window_extent() for text in figure.texts)]
        for axes in figure.axes:
            boxes += [axes._left_title.get_window_extent(), axes.xaxis.label.get_window_extent()]
            low, high = sorted(axes.get_ylim())
            ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
            boxes += [each.get_window_extent() for at, each in ticks if each.get_text() and low <= at <= high]
        for at, box in enumerate(boxes):
            assert box.x0 >= 0, name
            assert box.x1 <= figure.bbox.x1, name
            assert not any(box.overlaps(axes.bbox) for axes in figure.axes), name
            assert not any(box.overlaps(other) for other in boxes[:at] if box.width and other.width), name


def test_axes_say_their_unit_and_titles_the_run(drawn: dict[str, Figure]) -> None:
    assert set(drawn) == {"cuda_timeline.png", "rocm_timeline.png", SIDE_BY_SIDE_FILE}
    for name, figure in drawn.items():
        below = "ms since" if name == SIDE_BY_SIDE_FILE else "global step"
        beside = "" if name == SIDE_BY_SIDE_FILE else "ms per step"
        assert figure.axes[-1].get_xlabel().startswith(below)
        assert {axes.get_ylabel() for axes in figure.axes} == {beside}
    assert drawn["rocm_timeline.png"].texts[0].get_text().startswith("rocm: ")
    assert drawn["rocm_timeline.png"].axes[0].get_title(loc="left") == "cuda, ddp, 2 of 2 ranks"
    sides = [axes.get_title(loc="left") for axes in drawn[SIDE_BY_SIDE_FILE].axes]
    assert [side.partition(":")[0] for side in sides] == ["reference cuda", "candidate rocm"]


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


@pytest.mark.parametrize(
    ("before", "after", "first", "steps", "ranks"),
    [  # the step nearest to the mean difference, not the largest: mean 24, so 14 more, and the third is at 11
        ([[10, 10, 10, 10]], [[11, 50, 21, 14]], 0, (2, 2), (0,)),
        ([[10], [10], [10]], [[12], [3], [10]], 0, (0, 0), (1, 0, 2)),  # ranks that differ most come first
        ([[1, 2, 6]], [[8, 20, 17]], 100, (1, 102), (0,)),  # no common step: each side near its own mean
    ],
)
def test_the_step_that_is_drawn(before: Any, after: Any, first: int, steps: Any, ranks: Any, tmp_path: Path) -> None:
    shown = typical_step(exposed(tmp_path / "a", "a", before), exposed(tmp_path / "b", "b", after, first))
    assert shown is not None
    assert ((shown.reference_step, shown.candidate_step), shown.ranks) == (steps, ranks)


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
    """Colours fill as much as their spans are long."""
    path = tmp_path / "side_by_side.png"
    reference, candidate = two_runs(tmp_path, steps=8).values()
    assert draw_side_by_side(reference, candidate, path) is None
    image = imread(path)[:, :, :3]
    # Above the second panel's title is one side, below it the other; the legend is cut off.
    filled = (np.abs(image - colour(light("exposed"))).max(axis=2) < 0.02).sum(axis=1)
    parts = filled[: len(image) // 2], filled[len(image) // 2 : -150]
    shown = typical_step(reference, candidate)
    assert shown is not None
    steps = shown.reference_step, shown.candidate_step
    lengths = [
        side.table("global_step", "exposed_comm_ms").groupby("global_step")["exposed_comm_ms"].sum()[at]
        for side, at in zip((reference, candidate), steps, strict=True)
    ]
    assert parts[1].sum() / parts[0].sum() == pytest.approx(lengths[1] / lengths[0], rel=0.05)


def test_why_there_is_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "none.png"
    null = exposed(tmp_path / "a", "a", [[None]])
    assert draw_side_by_side(null, null, path) == (
        "no step after warm-up that all ranks have, on both sides, with known exposed communication"
    )
    bare = dataset(tmp_path / "b", "b", [[made_step(0, 1, 0, 100, [], [])]])
    assert draw_side_by_side(bare, bare, path) == "these steps hold no collective that could be drawn"
    assert not path.exists()


def test_labels_are_not_taken_for_mathematics(tmp_path: Path) -> None:
    sides = two_ranks(tmp_path / "a", "$x_{$"), two_ranks(tmp_path / "b", r"$\frac{$")
    for name, draw in pictures(sides, sides):
        assert draw(tmp_path / name) is None


def test_matplotlib_is_loaded_for_a_picture_alone(tmp_path: Path) -> None:
    """The page and its charts are written without it, and without the package bokeh."""
    run = two_runs(tmp_path, ranks=1, steps=1)["cuda"].run.location
    code = (
        "import sys; from pathlib import Path; from aorta.report.files import write_report;"
        f"write_report({{'x': Path({run!r})}}, Path({str(tmp_path / 'out')!r}));"
        "print(sorted({'matplotlib', 'bokeh'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
