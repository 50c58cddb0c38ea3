"""The picture of a report: `{label}_timeline.png`, computation and communication over the global steps.

Everything else is drawn on the page. Pillow draws it, without a display: to import a plotting package takes as long as
the rest of a small report. Must not let a text or the legend cover data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from aorta.analysis.aggregate import LabelledRun
from aorta.documents.metrics import UNKNOWN
from aorta.report.page.charts import MARKED_STEPS, Curve, over_steps
from aorta.report.palette import BAND, GRID, INK, PAPER, QUIET, light
from aorta.report.tables import shortened

DPI: Final = 160
"""Sharp at the width of a column of a paper; 9 inches are 1,440 pixels. All lengths below are in pixels."""
_WIDTH, _HEIGHT = 1440, 960
_LEFT, _RIGHT = 120, 1416
_PANELS: Final = ((104, 424), (488, 808))
"""Top and bottom of each panel."""
_TITLE, _TEXT = 26, 20
"""Sizes of the letters."""
_FINER: Final = 2
"""Curves are drawn this many times as large, then reduced: Pillow's lines have hard edges."""
_LINE, _MARKER, _DASH, _GAP = 3.3, 4, 12, 6
_LINES: Final = (
    (("compute_ms", "compute", "compute"), ("comm_ms", "communication", "communication")),
    (("compute_comm_ms", "hidden communication", "hidden"), ("exposed_comm_ms", "exposed communication", "exposed")),
)
"""Of each panel, what ran, and what became of communication: metric, title, meaning of its colour. The second line is
dashed.
"""
_LONGEST_LABEL: Final = 60
_BAND_ALPHA: Final = 0.2


def draw_timeline(dataset: LabelledRun, path: Path) -> str | None:
    """Draw compute, communication, hidden and exposed milliseconds over the global steps to a PNG, replacing what is
    there: a line for the median of the ranks, a band from the lowest rank to the highest. Warm-up, which the numbers
    leave out, is shaded. Returns None, or why there is nothing to draw.
    """
    steps = dataset.run.steps
    numbers = np.unique(steps.global_step)
    if len(numbers) < 2:
        return "one step makes no curve; its numbers are in the tables" if len(numbers) else "no steps in the record"
    image = Image.new("RGB", (_WIDTH, _HEIGHT), PAPER)
    pen = ImageDraw.Draw(image)
    title, text = ImageFont.load_default(_TITLE), ImageFont.load_default(_TEXT)
    source, health = dataset.run.source, dataset.run.health
    emulated = "" if health.emulated_fabric is None else ", EMULATED FABRIC"
    name = shortened(dataset.label, _LONGEST_LABEL)
    pen.text((16, 20), f"{name}: time in computation and communication", INK, title)
    facts = f"{source.platform or UNKNOWN}, {source.parallel or UNKNOWN}, {health.ranks}{emulated}"
    pen.text((_LEFT, _PANELS[0][0] - 12), facts, QUIET, text, anchor="ls")

    low, high = float(numbers[0]) - 0.5, float(numbers[-1]) + 0.5
    warm = steps.global_step[steps.warmup]
    legend: list[tuple[str, str, bool | None]] = []
    for (top, bottom), lines in zip(_PANELS, _LINES, strict=True):
        curves = {
            (title, light(meaning), line_index > 0): over_steps(steps.global_step, steps.column(metric))
            for line_index, (metric, title, meaning) in enumerate(lines)
            if metric in dataset.metrics
        }
        curves = {look: curve for look, curve in curves.items() if not np.isnan(curve.middle).all()}
        most = max((float(np.nanmax(curve.high)) for curve in curves.values()), default=0.0) or 1.0
        panel = _Panel(image, top, bottom, (low, high), (0.0, 1.05 * most))
        if len(warm):
            pen.rectangle([panel.x(warm.min() - 0.5), top, panel.x(warm.max() + 0.5), bottom], BAND)
        last = bottom == _PANELS[-1][1]
        for tick, shown in ticks(low, high, 9, whole=True):
            pen.line([panel.x(tick), top, panel.x(tick), bottom], GRID, 2)
            if last:
                pen.text((panel.x(tick), bottom + 10), shown, INK, text, anchor="mt")
        for tick, shown in ticks(0.0, 1.05 * most, 5):
            pen.line([_LEFT, panel.y(tick), _RIGHT, panel.y(tick)], GRID, 2)
            pen.text((_LEFT - 10, panel.y(tick)), shown, INK, text, anchor="rm")
        for (_, color, dashed), curve in curves.items():
            panel.draw(curve, color, dashed=dashed)
        pen.line([_LEFT, top, _LEFT, bottom, _RIGHT, bottom], INK, 2)
        pen.text((_LEFT - 10, top - 12), "ms per step", INK, text, anchor="rs")
        legend += curves
    if "comm_ms" not in dataset.metrics or np.isnan(steps.column("comm_ms")).all():
        middle = (_LEFT + _RIGHT) // 2, sum(_PANELS[1]) // 2
        pen.text(middle, "communication has no values", INK, text, anchor="mm")
    below = "global step (line: median over ranks, band: lowest to highest rank)"
    pen.text(((_LEFT + _RIGHT) // 2, _HEIGHT - 94), below, INK, text, anchor="mm")
    _write_legend(pen, [*legend, *([("warm-up", BAND, None)] if len(warm) else [])], text)
    image.save(path, "PNG", compress_level=4, dpi=(DPI, DPI))
    return None


@dataclass(frozen=True)
class _Panel:
    """One pair of axes: global steps `across`, milliseconds `up`."""

    image: Image.Image
    top: int
    bottom: int
    across: tuple[float, float]
    up: tuple[float, float]

    def x(self, step: Any) -> Any:
        """Return where global steps are, in pixels of the picture."""
        low, high = self.across
        return _LEFT + (step - low) / (high - low) * (_RIGHT - _LEFT)

    def y(self, value: Any) -> Any:
        """Return where milliseconds are, in pixels of the picture."""
        low, high = self.up
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def draw(self, curve: Curve, color: str, *, dashed: bool) -> None:
        """Draw the line of a curve over its band; steps without a value are a gap."""
        size = _FINER * (_RIGHT - _LEFT), _FINER * (self.bottom - self.top)
        band, line = Image.new("L", size), Image.new("L", size)
        bands, lines = ImageDraw.Draw(band), ImageDraw.Draw(line)
        x = _FINER * (self.x(curve.x) - _LEFT)
        low, middle, high = (_FINER * (self.y(values) - self.top) for values in (curve.low, curve.middle, curve.high))
        known = np.flatnonzero(~np.isnan(middle))
        for run in np.split(known, np.flatnonzero(np.diff(known) > 1) + 1):
            points = np.column_stack((x[run], middle[run]))
            if len(run) > 1:
                outline = np.concatenate((np.column_stack((x, low))[run], np.column_stack((x, high))[run][::-1]))
                bands.polygon([*map(tuple, outline.tolist())], 255)
                for part in dashes(points, _FINER * _DASH, _FINER * _GAP) if dashed else [points]:
                    lines.line([*map(tuple, part.tolist())], 255, round(_FINER * _LINE), joint="curve")
            if len(curve.x) <= MARKED_STEPS:
                for index in points.tolist():
                    lines.circle(index, _FINER * _MARKER, 255)
        corner = _LEFT, self.top
        self.image.paste(color, corner, band.reduce(_FINER).point(lambda share: round(_BAND_ALPHA * share)))
        self.image.paste(color, corner, line.reduce(_FINER))


def dashes(points: np.ndarray, on: float, off: float) -> Iterator[np.ndarray]:
    """Yield the pieces of a line [points, 2] that are drawn: `on` long, `off` apart."""
    along = np.concatenate(([0.0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))))
    begins = np.arange(0.0, along[-1], on + off)
    ends = np.minimum(begins + on, along[-1])
    first, last = np.searchsorted(along, begins, side="right"), np.searchsorted(along, ends)
    pairs = np.stack([np.column_stack([np.interp(at, along, axis) for axis in points.T]) for at in (begins, ends)], 1)
    for pair, inner in zip(pairs, map(slice, first, last), strict=True):
        yield np.concatenate((pair[:1], points[inner], pair[1:]))


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[tuple[float, str]]:
    """Return at most `most` + 1 round numbers from `low` to `high`, and how they are written; `whole`: integers."""
    power = 10.0 ** np.floor(np.log10((high - low) / most))
    step = next(size * power for size in (1, 2, 5, 10) if size * power * most >= high - low)
    step = max(step, 1.0) if whole else step
    digits = max(0, -int(np.floor(np.log10(step) + 1e-9)))
    numbers = np.arange(np.ceil(low / step), np.floor(high / step) + 1)
    return [(number * step, f"{number * step + 0.0:.{digits}f}") for number in numbers.tolist()]


def _write_legend(pen: ImageDraw.ImageDraw, entries: Sequence[tuple[str, str, bool | None]], font: Any) -> None:
    """Write title, colour and whether it is dashed (None: an area) of each entry in one line below the panels."""
    swatch, space, gap, y = 44, 10, 32, _HEIGHT - 36
    widths = [swatch + space + font.getlength(title) for title, *_ in entries]
    x = (_WIDTH - sum(widths) - gap * (len(entries) - 1)) / 2
    for (title, color, dashed), width in zip(entries, widths, strict=True):
        if dashed is None:
            pen.rectangle([x, y - 8, x + swatch, y + 8], color)
        else:
            line = np.array([[x, y], [x + swatch, y]])
            for part in dashes(line, _DASH, _GAP) if dashed else [line]:
                pen.line([*map(tuple, part.tolist())], color, round(_LINE))
        pen.text((x + swatch + space, y), title, INK, font, anchor="lm")
        x += width + gap
