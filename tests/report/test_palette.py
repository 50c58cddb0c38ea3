"""Colours that can be told apart and read: by everybody, in both themes, and the same in pictures and on the page."""

from __future__ import annotations

import math
import re
from itertools import combinations

import pytest

from aorta.report.page.page_content import for_scripts, variables
from aorta.report.page.timelines import BUBBLES, COPIES, EXPOSED, OTHER_WORK, color_of
from aorta.report.palette import MEANINGS, SERIES, SURFACES, contrast, light, text_on
from aorta.timeline.classes import COMPUTE, KINDS

# What a colour becomes to somebody without one kind of cones: Machado, Oliveira, Fernandes, "A Physiologically-based
# Model for Simulation of Color Vision Deficiency", IEEE TVCG 15(6), 2009, table for severity 1.0 (on linear RGB).
VISIONS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
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


def perceived(color: str, vision: str) -> tuple[float, float, float]:
    """In Oklab (https://bottosson.github.io/posts/oklab/), lightness 0 to 100; a difference of 2 is just seen."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    red, green, blue = (
        min(1.0, max(0.0, sum(weight * part for weight, part in zip(row, linear, strict=True))))
        for row in VISIONS[vision]
    )
    long, middle, short = (
        each ** (1 / 3)
        for each in (
            0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue,
            0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue,
            0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue,
        )
    )
    return (
        100 * (0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short),
        100 * (1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short),
        100 * (0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short),
    )


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("chart", TOGETHER)
def test_what_stands_in_one_chart_is_told_apart_by_everybody(chart: str, vision: str, theme: int) -> None:
    near = {
        (one, other): math.dist(perceived(MEANINGS[one][theme], vision), perceived(MEANINGS[other][theme], vision))
        for one, other in combinations(TOGETHER[chart], 2)
    }
    assert {pair: distance for pair, distance in near.items() if distance < 6.5} == {}


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_is_legible_on_everything_that_it_stands_on(theme: int) -> None:
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


def test_a_span_has_the_colour_of_what_it_is() -> None:
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


def test_the_page_gets_its_colours_from_the_palette() -> None:
    blocks = [dict(re.findall(r"--([\w-]+): (#\w+);", block)) for block in variables().split("}\n") if "--" in block]
    light_theme, dark_theme, system_dark = blocks
    for theme, block in enumerate((light_theme, dark_theme)):
        shades = {name: shade[theme] for name, shade in {**MEANINGS, **SURFACES}.items()}
        assert block == shades | {f"on-{name}": text_on(shades[name]) for name in TOGETHER["parts of a step"]}
    assert dark_theme == system_dark
    dark = for_scripts()["dark"]
    assert all(dark[shade.light.lower()] == shade.dark for shade in MEANINGS.values())
    assert len({color for color, _ in SERIES}) == len(SERIES)
