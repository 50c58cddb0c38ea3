"""Which colour means what: in the pictures and on the page. Nothing else defines a colour.

`MEANINGS` has an entry for what a colour stands for, `SURFACES` for backgrounds, lines and text: a pair, on white and
on the dark page. The colours were chosen by a search that keeps what stands in one chart apart for normal vision and
for the three common kinds of colour blindness; `tests/report/test_pictures.py` holds the distances and the
contrasts. Must not carry meaning by colour alone: every use has a label, a dash, a shape or a place of its own beside
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Final, NamedTuple


class Shade(NamedTuple):
    """A colour on a white and on a dark background."""

    light: str
    dark: str


MEANINGS: Final[Mapping[str, Shade]] = {
    # Computation: one hue. Forward is light, backward dark; between them what has no phase.
    "forward": Shade("#9DC2E2", "#A2D4FA"),
    "compute": Shade("#4196DC", "#62B5F6"),
    "backward": Shade("#2159B1", "#4170BC"),
    # Collectives: a hue for each kind, one for all other kinds, and one for all kinds together.
    "allreduce": Shade("#F7A421", "#FBBD53"),
    "reducescatter": Shade("#9F659F", "#A683C1"),
    "allgather": Shade("#498B6A", "#68A47A"),
    "alltoall": Shade("#513224", "#92573E"),
    "other-kind": Shade("#EED541", "#FFF18D"),
    "communication": Shade("#671D75", "#A063B9"),
    # What becomes of communication, and the rest of a step.
    "hidden": Shade("#0E796B", "#75AB97"),
    "exposed": Shade("#DC4929", "#E97139"),
    "other-work": Shade("#9B9FA8", "#7C8086"),
    "named": Shade("#F0E5C8", "#DDD1B9"),
    "idle": Shade("#D9C2EC", "#5B4870"),
    # Who: the reference (or the only run) is neutral, the candidate is not; further runs follow.
    "reference": Shade("#363941", "#E1E4EC"),
    "candidate": Shade("#B10275", "#F36FA8"),
    "run-3": Shade("#139EA6", "#6DD4CF"),
    "run-4": Shade("#A67E22", "#CCB451"),
    "run-5": Shade("#6E46DA", "#7677C7"),
    "run-6": Shade("#176301", "#A3ED9A"),
    "run-7": Shade("#DB7672", "#C58266"),
    # Verdicts; they are text, and each has a sign as well. Worse is also a warning.
    "better": Shade("#005D33", "#98E3B4"),
    "worse": Shade("#A50D18", "#ED7B73"),
    "equal": Shade("#213A59", "#7BACD5"),
    "undecided": Shade("#6B685D", "#B9B5AE"),
}

SURFACES: Final[Mapping[str, Shade]] = {
    "page": Shade("#FFFFFF", "#16191D"),
    "panel": Shade("#F6F7F9", "#1F2429"),
    "line": Shade("#D8DCE1", "#3A424B"),
    "grid": Shade("#E6E8EB", "#2E353D"),
    "band": Shade("#E2E5E9", "#343C45"),
    "ink": Shade("#1C2127", "#E9ECEF"),
    "quiet": Shade("#5A636D", "#A8B1BB"),
    "link": Shade("#005A94", "#7CC0EE"),
    "focus": Shade("#0072B2", "#7CC0EE"),
    "better-soft": Shade("#E3F4EA", "#15301F"),
    "worse-soft": Shade("#FCEBEA", "#3A1D1B"),
    "equal-soft": Shade("#E8EEF5", "#1D2B39"),
    "undecided-soft": Shade("#F1F0EC", "#2B2A27"),
}
"""`band` lies behind data (warm-up, a margin); `-soft` behind text of that verdict."""


def light(name: str) -> str:
    """Return the colour of a meaning or a surface on white."""
    return (MEANINGS.get(name) or SURFACES[name]).light


INK: Final = light("ink")
PAPER: Final = light("page")
QUIET: Final = light("quiet")
"""Text that is less important than other text: 6:1 on white."""
GRID: Final = light("grid")
BAND: Final = light("band")
_RUNS: Final = ("reference", "candidate", *(name for name in MEANINGS if name.startswith("run-")))
SERIES: Final = tuple(zip(map(light, _RUNS), cycle(("solid", "dashed", "dashdot", "dotted")), strict=False))
"""Colour and dash of the first dataset, the second, ..."""


def luminance(color: str) -> float:
    """Return the luminance of `#RRGGBB`, 0 to 1 (WCAG 2.1, https://www.w3.org/TR/WCAG21/#dfn-relative-luminance)."""
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, other: str) -> float:
    """Return the contrast of two colours, 1 to 21 (WCAG 2.1); text needs 4.5."""
    high, low = sorted((luminance(first), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def text_on(color: str) -> str:
    """Return black or white, whichever is easier to read on a colour."""
    return max(("#000000", "#FFFFFF"), key=lambda text: contrast(text, color))
