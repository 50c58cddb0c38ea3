"""What the page says of the sources of its numbers: health, coverage, versions, configuration; and of traces, kernels.

Must not repair, guess or compute anything, or show a slowdown without its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.cautions import cautions, cutoff_line
from aorta.analysis.devices import device_line, device_notes
from aorta.analysis.documents.comparison import Comparison
from aorta.analysis.documents.dataset import DatasetEntry
from aorta.analysis.documents.traces import SlowdownEntry, TraceEntries
from aorta.analysis.formatting import PAGE
from aorta.analysis.load.run_facts import config_of
from aorta.analysis.report.html.page_tables import Cell, Column, Table, facts_table, value, word
from aorta.analysis.report.kernels import place_of, shape_of
from aorta.analysis.straggler import sentences
from aorta.records.run_files import flatten

_ENVIRONMENT: Final = ("versions", "environment", "environment_differences", "host_facts", "devices", "plan", "command")
_FINE: Final = "Complete: every rank was read, every collective was seen."
_FINE_TRACES: Final = "Every trace was read. Whether every collective is in them is not known."
_NO_MANIFEST: Final = "there is no manifest (run.json) beside its records"


def left_out(comparison: Comparison | None) -> list[str]:
    """Return the launches that do not count."""
    sides = comparison.left_out or {} if comparison else {}
    return [f"{side}: {each.path}: {each.reason}" for side, found in sides.items() for each in found]


def health_of(dataset: LabelledRun, entry: DatasetEntry) -> dict[str, Any]:
    """Return what was read of a run, and everything that is wrong with it."""
    health, steps, source = dataset.run.health, entry.steps, entry.source
    notes = [
        *health.notes(),
        *cautions(entry),
        *device_notes(entry.devices),
        *sentences(entry),
    ]
    if entry.reason:
        notes.insert(0, f"nothing to measure: {entry.reason}")
    calibrated = steps.rank_steps_left_out_as_calibration
    facts: dict[str, Any] = {
        "folder": source.path,
        "run": source.run_id,
        "platform": source.platform,
        "strategy": source.parallel,
        "backend": source.backend,
        "instrument mode": ", ".join(health.instrument_modes),
        "hosts": source.hosts,
        "ranks read": health.ranks,
        "used": PAGE.steps_used(entry),
        "left out as warm-up": PAGE.count(steps.rank_steps_left_out_as_warmup, "record"),
        **({"measured by kernels": PAGE.count(calibrated, "record")} if calibrated else {}),
        "coverage": _coverage(dataset, entry),
    }
    if entry.launches:
        facts |= {"launches": entry.launches, "this launch": entry.representative}
    devices = device_line(entry.devices)
    facts |= {"devices": devices} if devices else {}
    cutoff = cutoff_line(entry)
    facts |= {"stalls": cutoff} if cutoff else {}
    fine = _FINE_TRACES if entry.traces else _FINE
    return {"label": dataset.label, "notes": notes, "fine": fine, "facts": facts}


def of_launches(entries: Mapping[str, DatasetEntry]) -> str:
    """Return which launch stands for each launch set where the page shows one; empty without a set."""
    stated = [
        f"{label}: of {PAGE.count(entry.launches, 'launch')} this is \u2026/{Path(entry.representative).name}"
        for label, entry in entries.items()
        if entry.launches
    ]
    rules = dict.fromkeys(entry.representative_rule for entry in entries.values() if entry.launches)
    return f"One launch of each set is drawn, {'; '.join(rules)}. {', '.join(stated)}." if stated else ""


def _coverage(dataset: LabelledRun, entry: DatasetEntry) -> str:
    uncovered = dataset.run.health.uncovered_steps
    if entry.traces:
        return "not known: a trace does not count what was issued"
    return f"{sum(uncovered.values())} gaps" if uncovered else "complete"


def environment_of(datasets: Mapping[str, LabelledRun]) -> dict[str, Any]:
    """Return what the manifests say, side by side, and what they warn of."""
    facts: dict[str, dict[str, object]] = {}
    config: dict[str, dict[str, object]] = {}
    notes = []
    for label, dataset in datasets.items():
        manifest = dataset.run.manifest
        if manifest is None:
            notes.append(f"{label}: {_NO_MANIFEST}")
        stated = manifest or {}
        facts[label] = dict(flatten({name: stated[name] for name in _ENVIRONMENT if name in stated}))
        config[label] = dict(flatten(config_of(manifest)))
        others = stated.get("environment_differences")
        if isinstance(others, dict) and others:
            notes.append(f"{label}: another environment than that of rank 0 on rank {', '.join(others)}")
        warned = stated.get("warnings")
        notes += [f"{label}: {warning}" for warning in (warned if isinstance(warned, list) else ())]
    both = len(datasets) > 1
    return {
        "notes": notes,
        "facts": facts_table("environment", "Versions, variables, hosts, devices", facts, mark=both),
        "config": facts_table("configuration", "Resolved configuration", config, mark=both),
    }


SHOWN: Final = 40
"""Rows of a table; all are in `summary.json`, and `aorta kernels` writes them as tables."""
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
    """Return what the page says of `traces` of a dataset; None where it was not read from traces."""
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


def _shown(number: float | None, text: str, tip: str | None = None) -> Cell:
    return Cell(PAGE.unknown if number is None else text, number, tip)


def _ms(key: str) -> Callable[[Any], Cell]:
    return lambda row: value(getattr(row, key), "ms", getattr(row, "reason", None))


def _count(key: str) -> Callable[[Any], Cell]:
    return lambda row: _shown(getattr(row, key), str(getattr(row, key)), getattr(row, "reason", None))


def _share(key: str) -> Callable[[Any], Cell]:
    return lambda row: Cell(PAGE.percent(getattr(row, key)), getattr(row, key))


def _interval(row: SlowdownEntry) -> Cell:
    low, high = row.mean_ratio_low, row.mean_ratio_high
    if low is None:
        return Cell(PAGE.unknown, None, row.reason)
    return Cell(f"{PAGE.number(low)} to {PAGE.number(high)}", low)


def _plain(key: str) -> Callable[[Any], Cell]:
    return lambda row: _shown(getattr(row, key), f"{getattr(row, key) or 0:,.6g}")


_PLACE: Final = (Column("of"), lambda row: word(place_of(row).replace(" ", _NO_BREAK)))
_KERNEL: Final = (Column("kernel"), lambda row: word(row.name))
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
        Column("n overlapped", True, "kernels of which at least half ran during communication"),
        _count("overlapped_count"),
    ),
    (Column("alone, ms", True, "mean"), _ms("alone_mean_ms")),
    (Column("overlapped, ms", True, "mean"), _ms("overlapped_mean_ms")),
    (Column("ratio", True, "mean overlapped / mean alone"), lambda row: value(row.mean_ratio, "", row.reason)),
    (Column("95 % interval", True, "of the ratio"), _interval),
    (Column("excess, ms", True, "what the overlapped kernels took beyond the median of those alone"), _ms("excess_ms")),
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
    (Column("counter"), lambda row: word(row.counter)),
    (Column("derived from"), lambda row: word(row.derived_from or "")),
    (Column("kernels", True), _count("count")),
    (Column("mean", True), _plain("mean")),
    (Column("min", True), _plain("min")),
    (Column("max", True), _plain("max")),
    (Column("overlapped", True, "share of these kernels' time"), _share("comm_share")),
)
