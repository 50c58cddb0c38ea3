"""Which colour means what, in the pictures, on the page and in a sweep's heat map.

Colours are those of a light background; `DARK` has what each becomes on a dark one. Must not carry meaning by colour
alone: every use has a label, a dash or a place of its own beside it.
"""

from __future__ import annotations

from typing import Final

from aorta.timeline.classes import AUX, COMPUTE, COPY

# Okabe and Ito's palette, told apart by all common kinds of colour blindness (https://jfly.uni-koeln.de/color/).
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
)
GREY: Final = "#D9D9D9"
INK: Final = "#333333"
QUIET: Final = "#5A636D"
"""Text that is less important than other text: 6:1 on white."""
FAINT: Final = "#E4E4E4"
"""Lines of a grid."""

DARK: Final = {
    BLUE: "#4F9FDA",
    ORANGE: "#F2B233",
    GREEN: "#2FBF97",
    RED: "#F98A48",
    PURPLE: "#E0A0C4",
    SKY: "#9BD8FF",
    YELLOW: "#F5EC7A",
    GREY: "#4A4F57",
    INK: "#DDDDDD",
    QUIET: "#A8B1BB",
    FAINT: "#333A42",
}
"""On a dark background: the same hues, in the same order of lightness, with a contrast of 3:1 or more to #16191d."""

LANE_COLORS: Final = {
    COMPUTE: BLUE,
    "allreduce": ORANGE,
    "reducescatter": RED,
    "allgather": GREEN,
    COPY: SKY,
    AUX: PURPLE,
}
"""Lanes of a timeline; every other kind of collective is `OTHER_KIND`."""
OTHER_KIND: Final = YELLOW

SERIES: Final = ((BLUE, "-"), (RED, "--"), (GREEN, "-."), (PURPLE, ":"), (ORANGE, "-"), (SKY, "--"), (INK, "-."))
"""Colour and dash of the first dataset, the second, ..."""
