"""The command `aorta kernels`: the kernels of traces on the terminal, and as tables.

Must not import pandas before the arguments are known to be good.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aorta.analysis.documents.traces import TraceEntries
from aorta.analysis.load.engines import Local
from aorta.analysis.report.kernel_text import KERNEL_TABLES, kernel_block, kernel_frames
from aorta.analysis.table_files import FORMATS, check_format, write_table
from aorta.command_line import command, to_stdout
from aorta.errors import EXIT_OK, InputError
from aorta.records.files import whole_file
from aorta.terminal_style import style_of

TOP: Final = 15


@command()
def main(arguments: Sequence[str]) -> int:
    """Run `aorta kernels`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    if options.top < 1:
        raise InputError(f"--top {options.top}: at least 1")
    if options.jobs is not None and options.jobs < 1:
        raise InputError(f"--jobs {options.jobs}: at least 1")
    check_format(options.format)
    from aorta.analysis.load.traces import load_traces

    run = load_traces(options.traces, Local(options.jobs), options.comm_pattern)
    traces: TraceEntries = run.extras["traces"]
    blocks = [kernel_block(options.traces, traces, style_of(sys.stdout), options.top)]
    blocks.append("\n".join(f"  ! {note}" for note in run.health.notes()))
    if options.output is not None:
        blocks.append("\n".join(_write(traces, Path(options.output), options.format)))
    to_stdout("\n".join(filter(None, blocks)))
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """The arguments that the command takes."""
    parser = argparse.ArgumentParser(
        description="Kernels by total time, what communication slows down, GEMMs with their rates, gaps "
        "between kernels, and hardware counters (docs/traces.md).",
        epilog="Exit codes: 0 done, 2 bad input.",
    )
    parser.add_argument("traces", metavar="TRACES", help="a file, folder, glob or URL")
    parser.add_argument(
        "--top", type=int, default=TOP, metavar="N", help="rows of each kind to print (default: %(default)s)"
    )
    parser.add_argument("--output", metavar="DIR", help=f"write {', '.join(KERNEL_TABLES)} as tables there")
    parser.add_argument("--format", choices=FORMATS, default="csv", help="parquet needs pyarrow (default: csv)")
    parser.add_argument(
        "--comm-pattern",
        action="append",
        default=[],
        metavar="REGEX",
        help="kernels whose names match are communication too; repeatable, unanchored, case ignored",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that read (default: one a core)")
    return parser


def _write(traces: TraceEntries, output: Path, form: str) -> list[str]:
    """Write every table, one without rows too; returns a line for each.

    Raises:
        InputError: `output` cannot be written.
    """
    lines = []
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, frame in kernel_frames(traces).items():
            path = output / f"{name}.{form}"
            with whole_file(path) as part:
                write_table([frame], part)
            lines.append(f"{path}: {len(frame)} rows")
    except OSError as error:
        raise InputError(f"{error.filename or output}: cannot be written: {error.strerror or error}") from error
    return lines
