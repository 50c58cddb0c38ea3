"""The command `aorta traces` (`analysis/trace_tables.py`): the interval tables of traces, as files.

Must not import pandas before the arguments are known to be good.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from aorta.analysis.table_files import FORMATS, check_format, write_table
from aorta.command_line import command
from aorta.errors import EXIT_OK, InputError
from aorta.records.files import whole_file

LANES_FILE: Final = "lanes.json.gz"


@command()
def trace_tables(arguments: Sequence[str]) -> int:
    """Run `aorta traces`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    check_format(options.format)
    written = _write(options.traces, Path(options.output), options.format, options.comm_pattern)
    sys.stdout.write("".join(f"{line}\n" for line in written))
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Return the arguments that the command takes."""
    parser = argparse.ArgumentParser(
        description="Every interval of traces as a table, and their classified lanes as one small trace for Perfetto.",
        epilog="Exit codes: 0 done, 2 bad input.",
    )
    parser.add_argument("traces", metavar="TRACES", help="a file, folder, glob or URL")
    parser.add_argument("--output", metavar="DIR", default="tables", help="where to write (default: tables/)")
    parser.add_argument("--format", choices=FORMATS, default="csv", help="parquet needs pyarrow (default: csv)")
    parser.add_argument(
        "--comm-pattern",
        action="append",
        default=[],
        metavar="REGEX",
        help="kernels whose names match are communication too; repeatable, unanchored, case ignored",
    )
    return parser


def _write(location: str, output: Path, form: str, comm_patterns: Sequence[str]) -> list[str]:
    """Write both files.

    Returns:
        Sentences about the files, and about what was left out.

    Raises:
        InputError: nothing there can be read, or `output` cannot be written.
    """
    from aorta.analysis.load.interval_export import interval_frame, write_lanes
    from aorta.analysis.load.interval_table import Trace
    from aorta.analysis.load.rank_inference import headers_near
    from aorta.analysis.load.trace_files import find_units, read_unit

    units, said = find_units(location, comm_patterns, headers_near(location))
    broken: dict[str, str] = {}

    def traces() -> Iterator[Trace]:
        """Yield every trace that can be read; a damaged file is left out with a note, unless it is the only one."""
        for unit in units:
            try:
                yield from read_unit(unit)
            except InputError as error:
                if len(units) == 1:
                    raise
                broken[unit.files[0]] = str(error)

    table, lanes = output / f"intervals.{form}", output / LANES_FILE
    try:
        output.mkdir(parents=True, exist_ok=True)
        with whole_file(table) as part:
            rows = write_table(map(interval_frame, traces()), part)
            if len(broken) == len(units):
                raise InputError(
                    f"{location}: none of its {len(units)} trace(s) can be read: {'; '.join(broken.values())}"
                )
        with whole_file(lanes) as part:
            events = write_lanes(traces(), part)
    except OSError as error:
        raise InputError(f"{error.filename or output}: cannot be written: {error.strerror or error}") from error
    said += [f"left out: {reason}" for reason in broken.values()]
    return [*(f"note: {note}" for note in said), f"{table}: {rows} rows", f"{lanes}: {events} events"]
