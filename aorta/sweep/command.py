"""Words of the command line -> a sweep's table and heat maps. `analysis/sweep_report.py` only calls into here.

Enters: arguments. Leaves: `sweep.csv`, `heat_<metric>.png`, text on stdout, `error: ...` on stderr, an exit code. Must
not: import pandas or matplotlib before the arguments are known to be good.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aorta.analysis.metrics import JOB_STEP
from aorta.errors import EXIT_OK, AortaError, InputError
from aorta.sweep.journal import Sweep, read_sweep
from aorta.sweep.result import check_metric

CSV_FILE: Final = "sweep.csv"
HEAT_FILE: Final = "heat_{metric}.png"
_ALWAYS: Final = ("overlap_ratio", JOB_STEP)


def sweep_report(arguments: Sequence[str]) -> int:
    """Run `analysis/sweep_report.py`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    try:
        sweep = read_sweep(Path(options.sweep))
        wanted = [check_metric(name, "--metric") for name in options.metric] or [sweep.asked.metric]
        output = Path(options.output or Path("reports", f"sweep-{sweep.folder.resolve().name}"))
        sys.stdout.write(_report(sweep, wanted, _heat_keys(options.heat, sweep), output) + "\n")
    except AortaError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return EXIT_OK


def _heat_keys(asked: list[str] | None, sweep: Sweep) -> tuple[str, str] | None:
    """The two axes: those asked for, otherwise the two keys of a sweep over exactly two."""
    if asked is not None:
        return asked[0], asked[1]
    return (sweep.swept[0], sweep.swept[1]) if len(sweep.swept) == 2 else None


def _report(sweep: Sweep, wanted: list[str], keys: tuple[str, str] | None, output: Path) -> str:
    from aorta.sweep.grid import MOST_VALUES, grid_of
    from aorta.sweep.heat import draw_heat
    from aorta.sweep.table import as_csv, as_text, rows_of

    rows = rows_of(sweep)
    shown = list(dict.fromkeys([*wanted, *_ALWAYS]))
    grids = [] if keys is None else [grid_of(rows, metric, *keys) for metric in wanted]
    emulated = ", EMULATED FABRIC" if any(row.result.emulated for row in rows) else ""
    ranks = f"{sweep.asked.nproc} rank{'s' if sweep.asked.nproc > 1 else ''}"
    title = f"{sweep.folder.resolve().name}: median of each job\n{ranks}{emulated}"
    lines = [as_text(sweep, rows, shown)]
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / CSV_FILE).write_text(as_csv(sweep, rows), encoding="utf-8")
        lines.append(str(output / CSV_FILE))
        for grid in grids:
            path = output / HEAT_FILE.format(metric=grid.metric)
            reason = draw_heat(grid, title, path)
            if reason is not None:
                path.unlink(missing_ok=True)
            lines.append(str(path) if reason is None else f"not drawn: {path.name}: {reason}")
    except OSError as error:
        raise InputError(f"{output}: cannot be written: {error.strerror or error}; choose another with --output") from error
    if keys is None:
        found = f"{len(sweep.swept)} keys were swept" if sweep.swept else "nothing was swept"
        lines.append(f"not drawn: a heat map takes two keys and {found}; --heat X_KEY Y_KEY ({MOST_VALUES} values at most)")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The words that the command takes."""
    words = argparse.ArgumentParser(
        prog="sweep_report.py",
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
