"""The kernels of traces, as tables of the page.

Must not compute a number, or show a slowdown without its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aorta.analysis.documents.traces import SlowdownEntry, TraceEntries
from aorta.analysis.formatting import PAGE
from aorta.analysis.report.html.page_tables import Cell, Column, Table, value, word
from aorta.analysis.report.kernel_text import place_of, shape_of, shortened

SHOWN: Final = 40
"""Rows of a table; all are in `summary.json`, and `aorta kernels` writes them as tables."""
_NAME: Final = 60
_NO_BREAK: Final = "\u00a0"
_KIND: Final = {
    "totals": "Kernels",
    "gemms": "GEMMs",
    "gaps": "Gaps",
    "counters": "Hardware counters",
}


@dataclass(frozen=True)
class PageKernels:
    """The section of one dataset: tables, and why others are missing."""

    label: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def page_kernels(label: str, traces: TraceEntries) -> PageKernels | None:
    """What the page says of `traces` of a dataset; None where it was not read from traces."""
    if not traces:
        return None
    found = traces.kernels
    made = (
        _table(f"kernels-{label}", "Kernels of all devices, the largest total first", _TOTALS, found.by_name),
        _table(
            f"slowdowns-{label}",
            "Kernels overlapped with communication vs. alone, the largest excess first",
            _SLOWDOWNS,
            traces.slowdowns,
        ),
        _table(f"gemms-{label}", "GEMMs of all devices by shape", _GEMMS, found.by_shape),
        _table(f"gaps-{label}", "Gaps between the kernels of a stream", _GAPS, found.gaps),
        _table(f"counters-{label}", "Hardware counters by kernel", _COUNTERS, found.counters),
    )
    notes = [f"{_KIND[kind]}: {'; '.join(why)}." for kind, why in found.reasons.items()]
    notes += [f"{count} rows of {kind} are not kept." for kind, count in found.left_out.items()]
    return PageKernels(label, tuple(table for table in made if table.rows), tuple(notes))


_Cells = tuple[tuple[Column, Callable[[Any], Cell]], ...]


def _table(key: str, caption: str, columns: _Cells, rows: Sequence[Any]) -> Table:
    cells = tuple(tuple(cell(row) for _, cell in columns) for row in rows[:SHOWN])
    note = f"The first {SHOWN} of {len(rows)} rows; `aorta kernels` writes all." if len(rows) > SHOWN else None
    return Table(key, caption, tuple(column for column, _ in columns), cells, note)


def _name(row: Any) -> Cell:
    return word(shortened(row.name, _NAME), shortened(row.name, 1000))


def _shown(found: float | None, text: str, tip: str | None = None) -> Cell:
    return Cell(PAGE.unknown if found is None else text, found, tip)


def _ms(key: str) -> Callable[[Any], Cell]:
    return lambda row: value(getattr(row, key), "ms", getattr(row, "reason", None))


def _count(key: str) -> Callable[[Any], Cell]:
    return lambda row: _shown(getattr(row, key), str(getattr(row, key)), getattr(row, "reason", None))


def _share(key: str) -> Callable[[Any], Cell]:
    return lambda row: Cell(PAGE.percent(getattr(row, key)), getattr(row, key))


def _ratio(key: str) -> Callable[[Any], Cell]:
    return lambda row: value(getattr(row, key), "ratio", row.reason)


def _interval(row: SlowdownEntry) -> Cell:
    low, high = row.mean_ratio_low, row.mean_ratio_high
    if low is None:
        return Cell(PAGE.unknown, None, row.reason)
    return Cell(f"{PAGE.number(low, 'ratio')} to {PAGE.number(high, 'ratio')}", low)


def _plain(key: str) -> Callable[[Any], Cell]:
    return lambda row: _shown(getattr(row, key), f"{getattr(row, key) or 0:,.6g}")


_PLACE: Final = (Column("of"), lambda row: word(place_of(row).replace(" ", _NO_BREAK)))
_KERNEL: Final = (Column("kernel"), _name)
_MEAN: Final = (Column("mean, ms", True), _ms("mean_ms"))
_STD: Final = (Column("± ms", True, "sample standard deviation"), _ms("std_ms"))
_TOTAL: Final = (Column("total, ms", True), _ms("total_ms"))
_TOTALS: Final[_Cells] = (
    _KERNEL,
    (Column("class"), lambda row: word(row.cls)),
    (Column("count", True), _count("count")),
    _TOTAL,
    _MEAN,
    _STD,
    (Column("share", True, "of the summed time of all kernels; shares add up to 100 %"), _share("share")),
)
_SLOWDOWNS: Final[_Cells] = (
    _KERNEL,
    _PLACE,
    (Column("n alone", True, "kernels during which nothing communicated"), _count("alone_count")),
    (
        Column("n overlapped", True, "kernels of which at least half overlapped with communication"),
        _count("overlapped_count"),
    ),
    (Column("alone, ms", True, "mean"), _ms("alone_mean_ms")),
    (Column("overlapped, ms", True, "mean"), _ms("overlapped_mean_ms")),
    (Column("ratio", True, "mean beside / mean alone"), _ratio("mean_ratio")),
    (Column("95 % interval", True, "of the ratio"), _interval),
    (Column("excess, ms", True, "what the kernels beside took beyond the median of those alone"), _ms("excess_ms")),
)
_GEMMS: Final[_Cells] = (
    (Column("product"), lambda row: word(shape_of(row))),
    (Column("operator"), lambda row: word(row.operator)),
    (Column("count", True), _count("count")),
    _TOTAL,
    _MEAN,
    _STD,
    (Column("TFLOP/s", True, "2 x batch x m x n x k / mean"), _plain("tflops")),
)
_GAPS: Final[_Cells] = (
    _PLACE,
    (Column("stream", True), _count("stream")),
    (Column("kernels", True), _count("kernels")),
    (Column("busy, ms", True), _ms("busy_ms")),
    (Column("gaps", True), _count("gaps")),
    (Column("gaps, ms", True), _ms("gap_ms")),
    (Column("launch known", True, "gaps before a kernel whose launch is known"), _count("gaps_known")),
    (
        Column("launch-bound", True, "gaps that ended with a kernel launched after the one before it had ended"),
        _count("launch_bound"),
    ),
    (Column("launch-bound, ms", True), _ms("launch_bound_ms")),
)
_COUNTERS: Final[_Cells] = (
    _KERNEL,
    _PLACE,
    (Column("counter"), lambda row: word(shortened(row.counter, _NAME))),
    (Column("derived from"), lambda row: word(row.derived_from or "")),
    (Column("kernels", True), _count("count")),
    (Column("mean", True), _plain("mean")),
    (Column("min", True), _plain("min")),
    (Column("max", True), _plain("max")),
    (Column("overlapped with communication", True, "share of these kernels' time"), _share("comm_share")),
)
