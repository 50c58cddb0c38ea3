"""The kernels of traces: tables of kernels, of their slowdowns and of gaps, and the command `aorta kernels`.

Must not compute a number, or say a slowdown without its interval.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from aorta.command_line import command, to_stdout
from aorta.documents.kernels import SlowdownEntry, StreamGapsEntry, TraceEntries
from aorta.errors import EXIT_OK, InputError
from aorta.installation import checkout
from aorta.read.engines import Local
from aorta.read.locations import check_label, is_location, locate
from aorta.read.traces.interval_table import add_comm_pattern
from aorta.report.tables import Column, Table, text_lines
from aorta.terminal_style import PLAIN, Style, style_of, wrapped

SHOWN: Final = 10
"""Rows of a table that are read without asking for more."""
_ON_PAGE: Final = 40
"""Rows of a table on the page; all are in `summary.json`."""
_KINDS: Final = {"totals": "Kernels", "gaps": "Gaps"}


def place_of(row: SlowdownEntry | StreamGapsEntry) -> str:
    """Return the rank and device of a row."""
    rank = "unknown rank" if row.rank is None else f"rank\u00a0{row.rank}"
    return rank if row.device is None else f"{rank}, device\u00a0{row.device}"


_shown = partial(Column, why=lambda row: getattr(row, "reason", None))
_KERNEL: Final = _shown("name", "kernel", cut=True)
_PLACE: Final = _shown("of", unit="text", of=place_of)
_MEAN: Final = (_shown("mean_ms"), _shown("std_ms", "±", tip="sample standard deviation", drop=3))
_TOTALS: Final = (
    _KERNEL,
    _shown("cls", "class", drop=2),
    _shown("count"),
    _shown("total_ms"),
    *_MEAN,
    _shown("share", unit="ratio", tip="of the summed time of all kernels; shares add up to 100 %"),
)
_HALF: Final = "kernels that overlapped communication for at least half of their time"
_SLOWDOWNS: Final = (
    _KERNEL,
    _PLACE,
    _shown("alone_count", "n alone", tip="kernels that did not overlap communication", drop=3),
    _shown("overlapped_count", "n overlapped", tip=_HALF, drop=3),
    _shown("alone_median_ms", "alone", tip="median"),
    _shown("overlapped_median_ms", "overlapped", tip="median"),
    _shown("slowdown", unit="ratio", tip="median overlapped / median alone - 1"),
    _shown("excess_ms", "excess", tip="time of overlapped kernels beyond the median alone", drop=2),
)
_LATE: Final = "gaps that ended with a kernel launched after the one before it had ended"
_GAPS: Final = (
    _PLACE,
    *(_shown(key) for key in ("stream", "kernels", "busy_ms", "gaps")),
    _shown("gap_ms", "gaps"),
    _shown("gaps_known", "launch known", tip="gaps before a kernel whose launch is known", drop=1),
    _shown("launch_bound", "launch-bound", tip=_LATE),
    _shown("launch_bound_ms", "launch-bound"),
)


def kernel_tables(label: str, traces: TraceEntries) -> list[Table]:
    """Return the tables that people read, all devices together, and none without rows."""
    kernels = traces.kernels
    against = "kernels overlapped with communication vs. alone, the largest excess first"
    tables = (
        ("kernels", "kernels of all devices, the largest total first", _TOTALS, kernels.by_name),
        ("slowdowns", against, _SLOWDOWNS, traces.slowdowns),
        ("gaps", "gaps between the kernels of a stream", _GAPS, kernels.gaps),
    )
    return [
        Table(f"{key}-{label}", f"{label}: {caption}", columns, rows, limit=_ON_PAGE)
        for key, caption, columns, rows in tables
        if rows
    ]


def kernel_notes(traces: TraceEntries) -> list[str]:
    """Return why tables are missing, and how many rows of them."""
    kernels = traces.kernels
    notes = [f"{_KINDS[kind]}: {'; '.join(why)}." for kind, why in kernels.reasons.items()]
    if traces.slowdowns and all(row.slowdown is None for row in traces.slowdowns):
        why = list(dict.fromkeys(str(row.reason) for row in traces.slowdowns))[:2]
        notes.append(f"No kernel ran both alone and overlapped with communication: {'; '.join(why)}.")
    return [*notes, *(f"{count} rows of {kind} are not kept." for kind, count in kernels.left_out.items())]


def kernel_block(label: str, traces: TraceEntries, style: Style = PLAIN, shown: int = SHOWN) -> str:
    """Return the first rows of every table of kernels as lines of a terminal, and what the traces do not hold."""
    if not traces.kernels.by_name:
        return wrapped(
            [f"{label}: no kernels: {'; '.join(traces.kernels.reasons.get('totals', ['the traces are empty']))}"]
        )
    blocks = ["\n".join(text_lines(part, style, most=shown)) for part in kernel_tables(label, traces)]
    return "\n\n".join([*blocks, wrapped(kernel_notes(traces), style.width)])


@command()
def main(arguments: Sequence[str]) -> int:
    """Run `aorta kernels`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    if options.top < 1:
        raise InputError(f"--top {options.top}: at least 1")
    from aorta.read.traces.load import load_traces

    here, root = Path.cwd(), checkout() or Path.cwd()
    named = is_location(options.traces, here, root)
    folder = options.traces if named else locate([check_label(options.traces)], here, root)[options.traces]
    run = load_traces(str(folder), Local(), options.comm_pattern)
    traces = run.traces
    assert traces is not None, "load_traces gives them"
    block = kernel_block(options.traces, traces, style_of(sys.stdout), options.top)
    to_stdout("\n".join([block, *(f"  ! {note}" for note in run.health.notes)]))
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Return the arguments that the command takes."""
    parser = argparse.ArgumentParser(
        description="Kernels by total time, what communication slows down, and gaps between kernels (docs/traces.md).",
        epilog="Exit codes: 0 done, 2 bad input.",
    )
    parser.add_argument("traces", metavar="TRACES", help="a file, folder, glob or URL, or the label of a run")
    parser.add_argument(
        "--top", type=int, default=15, metavar="N", help="rows of each kind to print (default: %(default)s)"
    )
    add_comm_pattern(parser)
    return parser
