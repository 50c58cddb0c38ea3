"""The command `aorta sweep` (`analysis/sweep_report.py`): a sweep's table, as text and CSV, and its heat maps.

Must not import pandas or matplotlib before the arguments are known to be good.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aorta.analysis.metrics import JOB_STEP
from aorta.command_line import command
from aorta.errors import EXIT_OK, InputError
from aorta.experiments.run_medians import check_metric
from aorta.experiments.sweep_journal import Sweep, read_sweep

if TYPE_CHECKING:
    from aorta.experiments.heat_map import HeatGrid
    from aorta.experiments.sweep_table import JobRow

CSV_FILE: Final = "sweep.csv"
HEAT_FILE: Final = "heat_{metric}.png"
_ALWAYS: Final = ("overlap_ratio", JOB_STEP)


@command()
def main(arguments: Sequence[str]) -> int:
    """Run `aorta sweep`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    sweep = read_sweep(Path(options.sweep))
    wanted = [check_metric(name, "--metric") for name in options.metric] or [sweep.asked.metric]
    output = Path(options.output or Path("reports", f"sweep-{sweep.folder.resolve().name}"))
    sys.stdout.write(_report(sweep, wanted, options.heat, output) + "\n")
    return EXIT_OK


def _report(sweep: Sweep, wanted: list[str], heat: list[str] | None, output: Path) -> str:
    from aorta.experiments.sweep_table import as_csv, as_text, rows_of

    rows = rows_of(sweep)
    grids, not_drawn = _grids(sweep, rows, wanted, heat)
    lines = [as_text(sweep, rows, list(dict.fromkeys([*wanted, *_ALWAYS])))]
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / CSV_FILE).write_text(as_csv(sweep, rows), encoding="utf-8")
        lines.append(str(output / CSV_FILE))
        lines += [_drawn(grid, _title(sweep, rows), output / HEAT_FILE.format(metric=grid.metric)) for grid in grids]
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{output}: cannot be written: {reason}; choose another with --output") from error
    return "\n".join([*lines, *not_drawn])


def _grids(
    sweep: Sweep, rows: Sequence[JobRow], wanted: list[str], heat: list[str] | None
) -> tuple[list[HeatGrid], list[str]]:
    """What to draw, over the keys asked for or the two that were swept; or why nothing is drawn.

    Raises:
        InputError: keys that were asked for and do not serve.
    """
    from aorta.experiments.heat_map import arrange

    if heat is not None:
        return [arrange(rows, metric, *heat) for metric in wanted], []
    if len(sweep.swept) != 2:
        return [], [f"not drawn: a heat map takes two keys, {len(sweep.swept)} were swept; --heat X_KEY Y_KEY"]
    try:
        return [arrange(rows, metric, *sweep.swept) for metric in wanted], []
    except InputError as error:
        return [], [f"not drawn: {error}"]


def _drawn(grid: HeatGrid, title: str, path: Path) -> str:
    from aorta.experiments.heat_map import draw

    reason = draw(grid, title, path)
    if reason is None:
        return str(path)
    path.unlink(missing_ok=True)
    return f"not drawn: {path.name}: {reason}"


def _title(sweep: Sweep, rows: Sequence[JobRow]) -> str:
    emulated = ", EMULATED FABRIC" if any(row.result.emulated for row in rows) else ""
    ranks = f"{sweep.asked.nproc} rank{'s' if sweep.asked.nproc > 1 else ''}"
    return f"{sweep.folder.resolve().name}: median of each job\n{ranks}{emulated}"


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
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
        "--heat", nargs=2, metavar=("X_KEY", "Y_KEY"), help="axes; default: the keys of a sweep over exactly two"
    )
    words.add_argument("--output", metavar="DIR", help="default: reports/sweep-NAME/ where you are")
    return words
