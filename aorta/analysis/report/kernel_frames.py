"""The kernels of traces as data frames of fixed columns: kernels with their slowdowns, matrix products, gaps, counters.

Must not compute a number, or import pandas before a frame is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from aorta.analysis.documents import as_json
from aorta.analysis.documents.traces import TraceEntries
from aorta.analysis.load.kernel_totals import CounterMean, GemmRate, KernelTotal, StreamGaps

if TYPE_CHECKING:
    import pandas as pd

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


def _columns(row: type) -> tuple[str, ...]:
    return tuple(row.__dataclass_fields__)  # type: ignore[attr-defined]


KERNEL_TABLES: Final = {
    "kernels": (*_columns(KernelTotal), *_COMPARED, "slowdown_reason"),
    "gemms": _columns(GemmRate),
    "gaps": _columns(StreamGaps),
    "counters": _columns(CounterMean),
}
"""Table -> its columns."""
_WHOLE: Final = frozenset(
    {"rank", "device", "stream", "count", "kernels", "gaps", "gaps_known", "launch_bound", "batch", "m", "n", "k"}
    | {"alone_count", "overlapped_count", "partly_count"}
)
_WORDS: Final = frozenset({"name", "cls", "operator", "dtype", "counter", "derived_from", "reason", "slowdown_reason"})


def kernel_frames(traces: TraceEntries) -> dict[str, pd.DataFrame]:
    """Every table of `KERNEL_TABLES`, one without rows too.

    Args:
        traces: the entry `traces` of a dataset in `summary.json`.
    """
    others = {name: as_json(getattr(traces.kernels, name)) for name in KERNEL_TABLES if name != "kernels"}
    rows = {"kernels": _kernel_rows(traces)} | others
    return {name: _frame(each, KERNEL_TABLES[name]) for name, each in rows.items()}


def _frame(rows: Sequence[Mapping[str, Any]], columns: tuple[str, ...]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=list(columns)).astype({column: _kind(column) for column in columns})


def _kernel_rows(traces: TraceEntries) -> list[dict[str, Any]]:
    """The totals of each device, each with its slowdown or why there is none."""
    slowdowns = {(row.rank, row.device, row.name): row for row in traces.slowdowns}
    rows = []
    for total in traces.kernels.totals:
        found = slowdowns.get((total.rank, total.device, total.name)) if total.cls == "compute" else None
        told = {key: getattr(found, key) for key in _COMPARED} if found else {}
        why = found.reason if found else _NOT_COMPARED[total.cls]
        rows.append({**as_json(total), **told, "slowdown_reason": why})
    return rows


def _kind(column: str) -> str:
    return "string" if column in _WORDS else "Int64" if column in _WHOLE else "float64"
