"""The kernels of traces: tables of kernels, of their slowdowns, of GEMMs, gaps and counters, and the command
`aorta kernels`.

Must not compute a number, or say a slowdown without its interval.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from aorta.analysis.documents.dataset import (
    CounterEntry,
    GemmEntry,
    KernelTotalEntry,
    SlowdownEntry,
    StreamGapsEntry,
    TraceEntries,
)
from aorta.analysis.load.engines import Local
from aorta.analysis.load.interval_table import add_comm_pattern
from aorta.analysis.report.tables import IN_FILE, PEOPLE, Column, Table, shortened, text_lines
from aorta.command_line import command, to_stdout
from aorta.errors import EXIT_OK, InputError
from aorta.terminal_style import PLAIN, Style, style_of, wrapped

SHOWN: Final = 10
"""Rows of a table that are read without asking for more."""
_ON_PAGE: Final = 40
"""Rows of a table on the page; all are in `summary.json`, and `--tables` writes them."""
_COMPARED: Final = (
    *("alone_count", "overlapped_count", "partly_count", "alone_mean_ms", "overlapped_mean_ms", "mean_ratio"),
    *("mean_ratio_low", "mean_ratio_high", "alone_median_ms", "overlapped_median_ms", "slowdown", "excess_ms"),
)
_NOT_COMPARED: Final = {
    "comm": "communication is not compared with itself",
    "copy": "copies are not compared",
    "compute": "not among the kernels that were compared",
    "unknown": "whether it is computation is not known",
}
_COUNTS: Final = frozenset(
    {"rank", "device", "stream", "count", "kernels", "gaps", "gaps_known", "launch_bound", "batch", "m", "n", "k"}
    | {"alone_count", "overlapped_count", "partly_count"}
)
_TEXTS: Final = frozenset({"name", "cls", "operator", "dtype", "counter", "derived_from", "reason"})
_KERNEL: Final = Column("name", "kernel", "text", media=PEOPLE, cut=True)
_KINDS: Final = {"totals": "Kernels", "gemms": "GEMMs", "gaps": "Gaps", "counters": "Hardware counters"}


def place_of(row: SlowdownEntry | StreamGapsEntry | CounterEntry) -> str:
    """Return the rank and device of a row."""
    rank = "unknown rank" if row.rank is None else f"rank\u00a0{row.rank}"
    return rank if row.device is None else f"{rank}, device\u00a0{row.device}"


def shape_of(row: GemmEntry) -> str:
    """Return the type and sides of a product."""
    sides = f"[{row.m}, {row.k}] x [{row.k}, {row.n}]"
    batch = "" if row.batch == 1 else f"{row.batch} x "
    return f"{shortened(row.dtype, 20) if row.dtype else 'unknown type'} {batch}{sides}"


def _reason(row: Any) -> str | None:
    return getattr(row, "reason", None)


def _count(key: str, title: str | None = None, tip: str | None = None, drop: int = 0) -> Column:
    return Column(key, title, "count", tip=tip, why=_reason, media=PEOPLE, drop=drop)


def _ms(key: str, title: str | None = None, tip: str | None = None, drop: int = 0) -> Column:
    return Column(key, title, "ms", tip=tip, why=_reason, media=PEOPLE, drop=drop)


def _in_files(keys: Sequence[str]) -> tuple[Column, ...]:
    """Return the columns of a file, with the values of rows under the same names."""
    return tuple(Column(key, unit=_unit(key), media=(IN_FILE,)) for key in keys)


def _unit(key: str) -> str:
    return "count" if key in _COUNTS else "text" if key in _TEXTS or key.endswith("_reason") else ""


_PLACE: Final = Column("of", "of", "text", place_of, media=PEOPLE)
_MEAN: Final = (_ms("mean_ms"), _ms("std_ms", "±", "sample standard deviation", 3))
_TOTALS: Final = (
    _KERNEL,
    Column("cls", "class", "text", media=PEOPLE, drop=2),
    _count("count"),
    _ms("total_ms"),
    *_MEAN,
    Column("share", unit="ratio", media=PEOPLE, tip="of the summed time of all kernels; shares add up to 100 %"),
)
_SLOWDOWNS: Final = (
    _KERNEL,
    _PLACE,
    _count("alone_count", "n alone", "kernels that did not overlap communication", 3),
    _count(
        "overlapped_count", "n overlapped", "kernels that overlapped communication for at least half of their time", 3
    ),
    _ms("alone_mean_ms", "alone", "mean"),
    _ms("overlapped_mean_ms", "overlapped", "mean"),
    Column("mean_ratio", "ratio", "", tip="mean overlapped / mean alone", media=PEOPLE),
    Column("mean_ratio_low", "from", "", tip="95 % interval of the ratio", media=PEOPLE),
    Column("mean_ratio_high", "to", "", tip="95 % interval of the ratio", media=PEOPLE),
    _ms("excess_ms", "excess", "time of overlapped kernels beyond the median alone", 2),
)
_GEMMS: Final = (
    Column("product", None, "text", shape_of, media=PEOPLE),
    Column("operator", None, "text", media=PEOPLE),
    _count("count"),
    _ms("total_ms", drop=2),
    *_MEAN,
    Column("tflops", "TFLOP/s", "", media=PEOPLE, tip="2 x batch x m x n x k / mean"),
    *_in_files(GemmEntry.__struct_fields__),
)
_GAPS: Final = (
    _PLACE,
    _count("stream"),
    _count("kernels"),
    _ms("busy_ms"),
    _count("gaps"),
    _ms("gap_ms", "gaps"),
    _count("gaps_known", "launch known", "gaps before a kernel whose launch is known", 1),
    _count("launch_bound", "launch-bound", "gaps that ended with a kernel launched after the one before it had ended"),
    _ms("launch_bound_ms", "launch-bound"),
    *_in_files(StreamGapsEntry.__struct_fields__),
)
_COUNTERS: Final = (
    _KERNEL,
    _PLACE,
    Column("counter", unit="text", media=PEOPLE),
    Column("derived_from", "derived from", "text", media=PEOPLE, drop=3),
    _count("count", "kernels"),
    *(Column(key, unit="", media=PEOPLE) for key in ("mean", "min", "max")),
    Column("comm_share", "overlapped", "ratio", media=PEOPLE, tip="share of these kernels' time"),
    *_in_files(CounterEntry.__struct_fields__),
)


class _Kernel(NamedTuple):
    """A kernel on one device, with its slowdown where it is computation."""

    total: KernelTotalEntry
    slowdown: SlowdownEntry | None

    @property
    def slowdown_reason(self) -> str | None:
        return _NOT_COMPARED[self.total.cls] if self.slowdown is None else self.slowdown.reason


_KERNELS: Final = (
    *(Column(key, unit=_unit(key), of=f"total.{key}", media=(IN_FILE,)) for key in KernelTotalEntry.__struct_fields__),
    *(Column(key, unit=_unit(key), of=f"slowdown.{key}", media=(IN_FILE,)) for key in _COMPARED),
    Column("slowdown_reason", media=(IN_FILE,)),
)


def kernel_files(traces: TraceEntries) -> dict[str, Table]:
    """Return the tables that files have, ones without rows too: the totals of each device with their slowdowns, or why
    there are none; GEMMs, gaps and counters of each device.

    Args:
        traces: the entry `traces` of a dataset in `summary.json`.
    """
    slowdowns = {(row.rank, row.device, row.name): row for row in traces.slowdowns}
    totals = [
        _Kernel(total, slowdowns.get((total.rank, total.device, total.name)) if total.cls == "compute" else None)
        for total in traces.kernels.totals
    ]
    found = {"kernels": (_KERNELS, totals)} | {
        name: (columns, getattr(traces.kernels, name))
        for name, columns in (("gemms", _GEMMS), ("gaps", _GAPS), ("counters", _COUNTERS))
    }
    return {name: Table(name, name, columns, rows) for name, (columns, rows) in found.items()}


def kernel_tables(label: str, traces: TraceEntries) -> list[Table]:
    """Return the tables that people read, all devices together, and none without rows."""
    found = traces.kernels
    told = (
        ("kernels", "kernels of all devices, the largest total first", _TOTALS, found.by_name),
        (
            "slowdowns",
            "kernels overlapped with communication vs. alone, the largest excess first",
            _SLOWDOWNS,
            traces.slowdowns,
        ),
        ("gemms", "GEMMs, batch x [m, k] x [k, n]", _GEMMS, found.by_shape),
        ("gaps", "gaps between the kernels of a stream", _GAPS, found.gaps),
        ("counters", "hardware counters by kernel", _COUNTERS, found.counters),
    )
    return [
        Table(f"{key}-{label}", f"{label}: {caption}", columns, rows, limit=_ON_PAGE)
        for key, caption, columns, rows in told
        if rows
    ]


def kernel_notes(traces: TraceEntries) -> list[str]:
    """Return why tables are missing, and how many rows of them."""
    found = traces.kernels
    notes = [f"{_KINDS[kind]}: {'; '.join(why)}." for kind, why in found.reasons.items()]
    if traces.slowdowns and all(row.mean_ratio is None for row in traces.slowdowns):
        why = list(dict.fromkeys(str(row.reason) for row in traces.slowdowns))[:2]
        notes.append(f"No kernel ran both alone and overlapped with communication: {'; '.join(why)}.")
    return [*notes, *(f"{count} rows of {kind} are not kept." for kind, count in found.left_out.items())]


def kernel_block(label: str, traces: TraceEntries, style: Style = PLAIN, shown: int = SHOWN) -> str:
    """Return the first rows of every table of kernels as lines of a terminal, and what the traces do not hold."""
    if not traces.kernels.by_name:
        return wrapped(
            [f"{label}: no kernels: {'; '.join(traces.kernels.reasons.get('totals', ['the traces are empty']))}"]
        )
    blocks = ["\n".join(text_lines(told, style, most=shown)) for told in kernel_tables(label, traces)]
    return "\n\n".join([*blocks, wrapped(kernel_notes(traces), style.width)])


TOP: Final = 15


@command()
def main(arguments: Sequence[str]) -> int:
    """Run `aorta kernels`; returns its exit code (argparse itself ends with 0 or 2)."""
    options = parser().parse_args(arguments)
    if options.top < 1:
        raise InputError(f"--top {options.top}: at least 1")
    from aorta.analysis.load.traces import load_traces

    run = load_traces(options.traces, Local(), options.comm_pattern)
    traces = run.traces
    assert traces is not None, "load_traces gives them"
    blocks = [kernel_block(options.traces, traces, style_of(sys.stdout), options.top)]
    blocks.append("\n".join(f"  ! {note}" for note in run.health.notes()))
    to_stdout("\n".join(filter(None, blocks)))
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Return the arguments that the command takes."""
    parser = argparse.ArgumentParser(
        description="Kernels by total time, what communication slows down, GEMMs with their rates, gaps "
        "between kernels, and hardware counters (docs/traces.md). As tables: aorta report TRACES --tables csv.",
        epilog="Exit codes: 0 done, 2 bad input.",
    )
    parser.add_argument("traces", metavar="TRACES", help="a file, folder, glob or URL")
    parser.add_argument(
        "--top", type=int, default=TOP, metavar="N", help="rows of each kind to print (default: %(default)s)"
    )
    add_comm_pattern(parser)
    return parser
