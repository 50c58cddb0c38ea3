"""The picture of a run, by its pixels; and colours that can be told apart and read by everybody, in both themes, the
same in pictures and on the page.
"""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aorta.analysis.aggregate import LabelledRun
from aorta.report.page.charts import POINTS, over_steps
from aorta.report.page.page_content import for_scripts, variables
from aorta.report.page.timelines import BUBBLES, COPIES, EXPOSED, OTHER_WORK, color_of
from aorta.report.palette import BAND, INK, MEANINGS, SERIES, SURFACES, contrast, light, text_on
from aorta.report.picture import draw_timeline, ticks
from aorta.timeline.classes import COMPUTE, KINDS
from tests.analysis.builders import metrics, step
from tests.analysis.run_builders import dataset


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


def test_curves_stand_at_their_values(tmp_path):
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


def test_steps_without_a_value_are_a_gap_and_warm_up_is_shaded(tmp_path):
    whole: list[float | None] = [40.0] * 100
    pixels = drawn(made(tmp_path / "a", "a", [*whole, *([None] * 100), *whole], warmup=150), tmp_path / "a.png")
    columns = np.flatnonzero(where(pixels, light("exposed"))[430:860].any(axis=0))
    assert 380 < np.diff(columns).max() < 480  # a third of 1,296 pixels
    shaded = np.flatnonzero(where(pixels, BAND)[110:420].any(axis=0))
    assert len(shaded) == pytest.approx(1296 / 2, abs=15)


def test_what_cannot_be_drawn_says_why_and_any_label_can(tmp_path):
    assert draw_timeline(made(tmp_path / "one", "one", [1.0]), tmp_path / "one.png") is not None
    assert not (tmp_path / "one.png").exists()
    drawn(made(tmp_path / "long", r"$\frac{$" + "\u00e9\u4e2d" + 300 * "x", [1.0, 2.0]), tmp_path / "long.png")


def test_points_of_a_curve_are_the_medians_and_ends_of_their_values():
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
def test_axes_have_round_numbers(low, high, whole, written):
    assert [text for _, text in ticks(low, high, 5, whole=whole)] == written


# What a colour becomes to somebody without one kind of cones: Machado, Oliveira, Fernandes, "A Physiologically-based
# Model for Simulation of Color Vision Deficiency", IEEE TVCG 15(6), 2009, table for severity 1.0 (on linear RGB).
VISIONS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
_BARS = ("forward", "compute", "backward", "other-work", "exposed", "named")
TOGETHER = {
    "timeline": (*_BARS, "allreduce", "reducescatter", "allgather", "alltoall", "other-kind"),
    "parts of a step": ("hidden", "compute", "exposed", "other-work", "idle"),
    "lines over steps": ("compute", "communication", "hidden", "exposed"),
    "runs": ("reference", "candidate", "run-3", "run-4", "run-5", "run-6", "run-7"),
    "verdicts": ("better", "worse", "equal", "undecided"),
}
"""Meanings that stand in one chart."""


LINEAR_TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
CONES_TO_OKLAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def perceived(color: str, vision: str) -> np.ndarray:
    """In Oklab (https://bottosson.github.io/posts/oklab/), lightness 0 to 100; a difference of 2 is just seen."""
    parts = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISIONS[vision]) @ linear, 0.0, 1.0)
    found: np.ndarray = 100 * np.array(CONES_TO_OKLAB) @ np.cbrt(np.array(LINEAR_TO_CONES) @ seen)
    return found


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_what_stands_in_one_chart_is_told_apart_by_everybody(vision, theme):
    seen = {name: perceived(shade[theme], vision) for name, shade in MEANINGS.items()}
    near = {
        (chart, one, other): float(np.linalg.norm(seen[one] - seen[other]))
        for chart, names in TOGETHER.items()
        for one, other in combinations(names, 2)
    }
    assert {pair: distance for pair, distance in near.items() if distance < 6.5} == {}


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_is_legible_on_everything_that_it_stands_on(theme):
    """WCAG 2.1 AA: 4.5 for text, 3 for lines and marks (bars have outlines and labels)."""
    grounds = {name: SURFACES[name][theme] for name in ("page", "panel")}
    verdicts = {name: MEANINGS[name][theme] for name in TOGETHER["verdicts"]}
    texts = {name: SURFACES[name][theme] for name in ("ink", "quiet", "link")} | verdicts
    pairs = {(name, ground): contrast(color, grounds[ground]) for name, color in texts.items() for ground in grounds}
    for verdict in verdicts:
        soft = SURFACES[f"{verdict}-soft"][theme]
        pairs[verdict, "soft"] = contrast(verdicts[verdict], soft)
        pairs["ink", f"{verdict}-soft"] = contrast(texts["ink"], soft)
    for name, shade in MEANINGS.items():
        pairs["label", name] = contrast(text_on(shade[theme]), shade[theme])
    assert {pair: found for pair, found in pairs.items() if found < 4.5} == {}
    lines = [*TOGETHER["runs"], *TOGETHER["lines over steps"]]
    thin = {name: contrast(MEANINGS[name][theme], grounds["page"]) for name in lines}
    assert {name: found for name, found in thin.items() if found < 3} == {}


def test_a_span_has_the_colour_of_what_it_is():
    meanings = {
        **{(phase, COMPUTE): phase for phase in ("forward", "backward")},
        **{(phase, COMPUTE): "compute" for phase in (COMPUTE, "recomputation")},
        **{(kind, lane): kind for kind in (*KINDS[:3], "alltoall") for lane in ("group world", kind)},
        ("broadcast", "group world"): "other-kind",
        (EXPOSED, EXPOSED): "exposed",
        ("sgd", OTHER_WORK): "other-work",
        (COPIES, COPIES): "other-work",
        (BUBBLES, BUBBLES): "idle",
    }
    assert {span: color_of(*span) for span in meanings} == {span: light(name) for span, name in meanings.items()}


def test_the_page_gets_its_colours_from_the_palette():
    blocks = [dict(re.findall(r"--([\w-]+): (#\w+);", block)) for block in variables().split("}\n") if "--" in block]
    light_theme, dark_theme, system_dark = blocks
    for theme, block in enumerate((light_theme, dark_theme)):
        shades = {name: shade[theme] for name, shade in {**MEANINGS, **SURFACES}.items()}
        assert block == shades | {f"on-{name}": text_on(shades[name]) for name in TOGETHER["parts of a step"]}
    assert dark_theme == system_dark
    dark = for_scripts()["dark"]
    assert all(dark[shade.light.lower()] == shade.dark for shade in MEANINGS.values())
    assert len({color for color, _ in SERIES}) == len(SERIES)
