"""Runs the command `aorta sweep` (`analysis/sweep_report.py`): a sweep's table, as text and CSV, and its heat maps.

A heat map of a sweep or a study over two keys has colour and number in every cell; empty ones say why.

Must not: leave a job out, give a number or a colour where there is none, import pandas or matplotlib before the
arguments are known to be good, or import pyplot at all.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from aorta.analysis.formatting import TEXT
from aorta.analysis.metrics import JOB_STEP, STEP_METRIC_NAMES, metric_named
from aorta.command_line import command
from aorta.errors import EXIT_OK, InputError
from aorta.experiments.journal import JobHistory, Sweep, read_sweep
from aorta.experiments.launch_medians import LaunchMedians, check_metric, read_medians
from aorta.terminal_style import WIDTH, csv_text, table

CSV_FILE: Final = "sweep.csv"
HEAT_FILE: Final = "heat_{metric}.png"
_ALWAYS: Final = ("overlap_ratio", JOB_STEP)


@dataclass(frozen=True)
class JobRow:
    """One job and what its run holds."""

    job: JobHistory
    result: LaunchMedians

    def value(self, metric: str) -> float | None:
        """Return the median over the rank-steps of the run; None where the job is not done or has none."""
        return self.result.of(metric)[0] if self.job.status == "done" else None

    def why_not(self, metric: str) -> str | None:
        """Return why there is no value."""
        if self.job.status != "done":
            reason = None if self.job.ended is None else self.job.ended.reason
            return self.job.status if reason is None else f"{self.job.status}: {reason}"
        return self.result.of(metric)[1]


@dataclass(frozen=True)
class SweepReport:
    """A sweep and every job of it in order, the runs of those that are done read."""

    sweep: Sweep
    rows: tuple[JobRow, ...]

    @classmethod
    def read(cls, sweep: Sweep) -> SweepReport:
        """Read the runs of a sweep."""
        unread = LaunchMedians({}, {}, readable=False)
        results = (read_medians(sweep.run_folder(job)) if job.status == "done" else unread for job in sweep.jobs)
        return cls(sweep, tuple(map(JobRow, sweep.jobs, results)))

    @property
    def emulated(self) -> bool:
        """Whether any job ran on an emulated network."""
        return any(row.result.fabric is not None for row in self.rows)

    def as_csv(self) -> str:
        """Return `job, status, rank_steps`, each swept key, the median of every metric any job has, and `reason` (why
        the sweep's own metric is missing). Unknown is an empty cell.
        """
        swept = self.sweep.swept
        metrics = [name for name in STEP_METRIC_NAMES if any(name in row.result.medians for row in self.rows)]
        lines: list[list[str | float | None]] = [["job", "status", "rank_steps", *swept, *metrics, "reason"]]
        for row in self.rows:
            steps = row.result.rank_steps if row.job.status == "done" else None
            keys = (row.job.keys.get(key) for key in swept)
            values = map(row.value, metrics)
            lines.append([row.job.name, row.job.status, steps, *keys, *values, row.why_not(self.sweep.asked.metric)])
        return csv_text(lines)

    def as_text(self, metrics: Sequence[str]) -> str:
        """Return what a terminal shows: one line a job, then everything that is missing and why."""
        asked, swept = self.sweep.asked, self.sweep.swept
        lines = [f"sweep {self.sweep.folder}: {len(self.rows)} jobs, {asked.nproc} rank(s) each, begun {asked.started}"]
        lines.append(f"  {' '.join(asked.words)}")
        if self.emulated:
            lines.append("  EMULATED FABRIC: times are the emulation's, not a network's")
        cells = [["job", *swept, *metrics, "status"]]
        for row in self.rows:
            numbers = [_shown(row.value(name), name) for name in metrics]
            cells.append([row.job.name, *(row.job.keys.get(key, "-") for key in swept), *numbers, row.job.status])
        lines += table(cells, right=range(1, len(cells[0]) - 1))
        lines.append("values: medians over the steps of each job, warm-up left out; one launch a job is no verdict")
        lines += [textwrap.fill(f"  ! {note}", WIDTH, subsequent_indent="    ") for note in self._notes(metrics)]
        return "\n".join(lines)

    def _notes(self, metrics: Sequence[str]) -> Iterator[str]:
        """Yield why values are missing, and what could not be read."""
        by_reason: dict[str, dict[str, None]] = {}
        for row in self.rows:
            for name in metrics:
                if (why := row.why_not(name)) is not None:
                    subject = row.job.name if row.job.status != "done" else f"{row.job.name} {name}"
                    by_reason.setdefault(why, {})[subject] = None
        yield from (f"{', '.join(subjects)}: {why}" for why, subjects in by_reason.items())
        yield from self.sweep.problems

    def heat_maps(self, metrics: Sequence[str], heat: Sequence[str] | None) -> tuple[list[HeatGrid], list[str]]:
        """Return what to draw, over the keys asked for or the two that were swept; or why nothing is drawn.

        Raises:
            InputError: keys that were asked for and do not serve.
        """
        keys = self.sweep.swept if heat is None else heat
        if len(keys) != 2:
            return [], [f"not drawn: a heat map takes two keys, {len(keys)} were swept; --heat X_KEY Y_KEY"]
        try:
            return [self.heat_map(metric, *keys) for metric in metrics], []
        except InputError as error:
            if heat is not None:
                raise
            return [], [f"not drawn: {error}"]

    def heat_map(self, metric: str, x_key: str, y_key: str) -> HeatGrid:
        """Return a metric over two keys.

        Raises:
            InputError: the keys do not serve.
        """
        points = [
            HeatPoint(row.job.keys, row.value(metric), NULL if row.job.status == "done" else row.job.status)
            for row in self.rows
        ]
        return arrange(points, metric, x_key, y_key)


def _shown(value: float | None, metric: str) -> str:
    return "-" if value is None else TEXT.number(value, metric_named(metric).unit)


@command()
def main(arguments: Sequence[str]) -> int:
    """Run `aorta sweep`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    sweep = read_sweep(Path(options.sweep))
    wanted = [check_metric(name, "--metric") for name in options.metric] or [sweep.asked.metric]
    output = Path(options.output or Path("reports", f"sweep-{sweep.folder.resolve().name}"))
    report = SweepReport.read(sweep)
    grids, not_drawn = report.heat_maps(wanted, options.heat)
    lines = [report.as_text(list(dict.fromkeys([*wanted, *_ALWAYS])))]
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / CSV_FILE).write_text(report.as_csv(), encoding="utf-8")
        lines.append(str(output / CSV_FILE))
        lines += [_drawn(grid, _title(report), output / HEAT_FILE.format(metric=grid.metric)) for grid in grids]
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{output}: cannot be written: {reason}; choose another with --output") from error
    sys.stdout.write("\n".join([*lines, *not_drawn]) + "\n")
    return EXIT_OK


def _drawn(grid: HeatGrid, title: str, path: Path) -> str:
    reason = draw(grid, title, path)
    if reason is None:
        return str(path)
    path.unlink(missing_ok=True)
    return f"not drawn: {path.name}: {reason}"


def _title(report: SweepReport) -> str:
    nproc = report.sweep.asked.nproc
    ranks = f"{nproc} rank{'s' if nproc > 1 else ''}{', EMULATED FABRIC' if report.emulated else ''}"
    return f"{report.sweep.folder.resolve().name}: median of each job\n{ranks}"


def parser() -> argparse.ArgumentParser:
    """Return the arguments of the command."""
    words = argparse.ArgumentParser(
        description="A sweep made by python train.py -m: one row a job, and a metric over two keys as a heat map.",
        epilog="Files of an earlier report in the output folder are replaced. Exit codes: 0 done (jobs that failed are "
        "named), 2 bad input.",
    )
    words.add_argument("sweep", metavar="SWEEP_FOLDER", help="where sweep.jsonl is")
    words.add_argument(
        "--metric", action="append", default=[], metavar="NAME", help="default: the sweep's own; repeatable"
    )
    words.add_argument(
        "--heat", nargs=2, metavar=("X_KEY", "Y_KEY"), help="axes (default: the keys of a sweep over exactly two)"
    )
    words.add_argument("--output", metavar="DIR", help="default: reports/sweep-NAME/ where you are")
    return words


# cividis: one order of lightness for all kinds of colour vision (Nunez, Anderton, Renslow, PLOS ONE 13(7), 2018).
_COLORS: Final = "cividis"

MOST_VALUES: Final = 40
"""On one axis; more cannot be read in a picture, and belong to a continuous key."""
NO_JOB: Final = "no job"
NULL: Final = "null"


@dataclass(frozen=True)
class HeatPoint:
    """A job of a sweep or a cell of a study, by the values of its keys as they were written.

    Attributes:
        why: what to write where there is no value.
        below: a second line below the value.
    """

    keys: Mapping[str, str]
    value: float | None
    why: str = NULL
    below: str | None = None


@dataclass(frozen=True)
class HeatCell:
    """Points that share both values.

    Attributes:
        value: the median over the points that have one.
        jobs: how many those are.
        why: what to write where there is no value.
        below: a second line below the value of a single point.
    """

    value: float | None
    jobs: int
    why: str | None
    below: str | None = None


@dataclass(frozen=True)
class HeatGrid:
    """`cells[row of y][column of x]`; keys' values as they were written, numbers in order of size."""

    x_key: str
    y_key: str
    x: tuple[str, ...]
    y: tuple[str, ...]
    cells: tuple[tuple[HeatCell, ...], ...]
    metric: str

    @property
    def values(self) -> list[float]:
        """All values that are known."""
        return [cell.value for line in self.cells for cell in line if cell.value is not None]


def arrange(points: Sequence[HeatPoint], metric: str, x_key: str, y_key: str) -> HeatGrid:
    """Put points into cells by the values of two keys.

    Raises:
        InputError: a key that no job was given, twice the same, or one with too many values for a picture.
    """
    known = list(dict.fromkeys(key for point in points for key in point.keys))
    for key in (x_key, y_key):
        if key not in known:
            raise InputError(f"--heat {key}: no job of this sweep was given that key; there are {', '.join(known)}")
    if x_key == y_key:
        raise InputError(f"--heat {x_key} {y_key}: give two different keys")
    x, y = (_values(points, key) for key in (x_key, y_key))
    lines = []
    for at_y in y:
        here = [[point for point in points if (_at(point, x_key), _at(point, y_key)) == (at_x, at_y)] for at_x in x]
        lines.append(tuple(_cell(found) for found in here))
    return HeatGrid(x_key, y_key, x, y, tuple(lines), metric)


def _at(point: HeatPoint, key: str) -> str:
    return point.keys.get(key, "(default)")


def _values(points: Sequence[HeatPoint], key: str) -> tuple[str, ...]:
    values = list(dict.fromkeys(_at(point, key) for point in points))
    if len(values) > MOST_VALUES:
        raise InputError(f"--heat {key}: {len(values)} values; a heat map takes at most {MOST_VALUES} on one axis")
    try:
        return tuple(sorted(values, key=float))
    except ValueError:
        return tuple(values)


def _cell(points: Sequence[HeatPoint]) -> HeatCell:
    values = [point.value for point in points if point.value is not None]
    if values:
        return HeatCell(median(values), len(values), None, points[0].below if len(points) == 1 else None)
    if not points:
        return HeatCell(None, 0, NO_JOB)
    return HeatCell(None, 0, min({point.why for point in points} - {NULL}, default=NULL))


def draw(grid: HeatGrid, title: str, path: Path) -> str | None:
    """Write a PNG. Returns None, or why nothing was drawn: no cell has a value."""
    import matplotlib
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    from aorta.analysis.report.charts.style import new_figure, save
    from aorta.analysis.report.palette import INK, text_on

    known = grid.values
    if not known:
        return f"{grid.metric} has no value in any job"
    metric = metric_named(grid.metric)
    # Lighter is better where a direction is; otherwise lighter is more.
    colors = matplotlib.colormaps[f"{_COLORS}_r" if metric.better == "lower" else _COLORS]
    low, high = min(known), max(known)
    scale = matplotlib.colors.Normalize(low, high if high > low else low + 1e-12)
    width = 1.9 if any(cell.below for line in grid.cells for cell in line) else 1.1
    figure = new_figure(max(4.5, width * len(grid.x) + 2.6), max(3.2, 0.62 * len(grid.y) + 1.9))
    axes = figure.subplots()
    for row, line in enumerate(grid.cells):
        for column, cell in enumerate(line):
            corner = (column - 0.5, row - 0.5)
            if cell.value is None:
                axes.add_patch(Rectangle(corner, 1, 1, facecolor="white", edgecolor="#B0B0B0", hatch="////", lw=0))
                text, ink = str(cell.why), INK
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            else:
                color = colors(scale(cell.value))
                axes.add_patch(Rectangle(corner, 1, 1, facecolor=color, lw=0))
                text, ink = TEXT.number(cell.value, metric.unit, fewer=1), text_on(to_hex(color))
                text += f"\n{cell.jobs} jobs" if cell.jobs > 1 else ""
                text += f"\n{cell.below}" if cell.below else ""
                box = None
            axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=9, bbox=box)
    for row in range(1, len(grid.y)):  # hatched cells have no edge of their own
        axes.axhline(row - 0.5, color="white", lw=2)
    for column in range(1, len(grid.x)):
        axes.axvline(column - 0.5, color="white", lw=2)
    axes.set_xlim(-0.5, len(grid.x) - 0.5)
    axes.set_ylim(-0.5, len(grid.y) - 0.5)
    axes.set_xticks(range(len(grid.x)), grid.x)
    axes.set_yticks(range(len(grid.y)), grid.y)
    if max(map(len, grid.x)) * len(grid.x) > 60:
        axes.tick_params(axis="x", rotation=45)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(grid.x_key)
    axes.set_ylabel(grid.y_key)
    better = {"lower": ", lower is better", "higher": ", higher is better", None: ""}[metric.better]
    unit = "" if metric.unit == "ratio" else f" ({metric.unit})"
    bar = figure.colorbar(matplotlib.cm.ScalarMappable(scale, colors), ax=axes)
    bar.set_label(f"{grid.metric}{unit}{better}")
    bar.outline.set_visible(False)
    figure.suptitle(title, fontsize=11)
    save(figure, path)
    return None
