"""The tables of where time goes: the parts of the mean step, of each rank, what changed, where communication is
exposed; and of traces their kernels, what slows these down, and the gaps between them.

Must not compute anything, sum up parts without naming them, or say a slowdown without its interval.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from aorta.analysis.account import ANY_PHASE, COMPUTATION, EXPOSED, HIDES, IDLE, MOST, OUTSIDE, is_unexplained
from aorta.analysis.findings import LARGE_SHARE
from aorta.documents import known
from aorta.documents.comparison import SIDES, AccountChange, Comparison
from aorta.documents.dataset import DatasetEntry
from aorta.documents.explanations import Account, AccountPart, ExposedBreakdown, Straggler
from aorta.documents.formatting import TEXT, rough_ms
from aorta.documents.kernels import SlowdownEntry, StreamGapsEntry, TraceEntries
from aorta.report.tables import Column, Table, text_column


def named_ranks(entry: DatasetEntry) -> list[Straggler]:
    """Return the ranks of a run that hold the others up."""
    stragglers = known(entry.stragglers)
    return [] if stragglers is None else stragglers.ranks


def rank_table(label: str, entry: DatasetEntry) -> Table | None:
    """Return where the mean step of each rank goes, those that hold the others up first, or why none is named; None for
    one rank.
    """
    late, stragglers = {straggler.rank for straggler in named_ranks(entry)}, known(entry.stragglers)
    rows = sorted(known(entry.rank_times) or (), key=lambda row: (row.rank not in late, row.rank))
    columns = (
        text_column("rank", of=lambda row: f"rank {row.rank}", tone=lambda row: "bad" if row.rank in late else None),
        Column("step_ms"),
        Column("computation_ms"),
        Column("exposed_ms"),
        Column("outside_ms", "optimizer, data", tip="work outside the blocks: optimizer, clipping, data, copies"),
        Column("idle_ms"),
    )
    of = "" if entry.shown_launch is None else f" in launch {entry.shown_launch}"
    note = None if stragglers is None or stragglers.reason is None else f"No rank is named{of}: {stragglers.reason}."
    caption = f"{label}: the mean step of each rank"
    return Table(f"ranks-{label}", caption, columns, rows, note) if len(rows) > 1 else None


LEAST_PART: Final = 0.01
"""Of the step: smaller parts are one row."""


def account_rows(account: Account | None, most: int | None = None) -> list[dict[str, Any]]:
    """Return the parts of the mean step in the order of a step, in a user's words; they add up to it. What is below
    `LEAST_PART` of it, or beyond the `most` largest, is one row.
    """
    if account is None or account.reason is not None:
        return []
    rows: list[dict[str, Any]] = []
    parts = {part.name: part for part in account.parts}
    outside = {part.name: part for part in (parts[OUTSIDE].parts if OUTSIDE in parts else ())}

    def add(name: str, part: AccountPart, note: str = "") -> None:
        rows.append({"part": name, "ms": part.ms, "share": part.share, "note": note})

    if "data" in outside:
        add("data", outside.pop("data"), "waiting for the DataLoader")
    for part in sorted(
        parts[COMPUTATION].parts if COMPUTATION in parts else (), key=lambda part: part.name != "forward"
    ):
        hidden = sum(below.ms for below in part.parts if below.name == HIDES)
        name = COMPUTATION if part.name == ANY_PHASE else part.name
        add(name, part, f"hides {rough_ms(hidden)} of communication" if hidden else "")
    for part in parts[EXPOSED].parts if EXPOSED in parts else ():
        add(f"exposed {part.name}", part, ", ".join(f"{rough_ms(below.ms)} {below.name}" for below in part.parts))
    for name, part in outside.items():
        add(name, part)
    if IDLE in parts:
        add("idle", parts[IDLE], _idle_note(parts[IDLE]))
    largest = sorted(rows, key=lambda row: -row["ms"])[:most]
    small = [row for row in rows if row["share"] < LEAST_PART or row not in largest]
    if len(small) > 1:
        rows = [row for row in rows if row not in small]
        rest = {name: sum(row[name] for row in small) for name in ("ms", "share")}
        rows.append({"part": "other", "note": ", ".join(row["part"] for row in small)} | rest)
    return [{"part": "step", "ms": account.step_ms, "share": 1.0, "note": ""}, *rows]


def _idle_note(idle: AccountPart) -> str:
    """Return what idle time is; where it is `LARGE_SHARE` of the step, how much of it nothing explains."""
    known_parts = [f"{rough_ms(part.ms)} in {part.name}" for part in idle.parts if not is_unexplained(part.name)]
    unexplained = [part for part in idle.parts if is_unexplained(part.name)]
    rest_ms = sum(part.ms for part in unexplained)
    longest = max(unexplained, key=lambda part: part.ms, default=None)
    where = "" if longest is None else f"between {' and '.join(longest.name.split(' .. '))}"
    most = f"most of it {where}" if longest is not None and longest.ms >= MOST * rest_ms else ""
    if idle.share < LARGE_SHARE or rest_ms < LEAST_PART * idle.ms:
        return "; ".join(known_parts) or most
    part = "" if longest is None else f"{rough_ms(longest.ms)} of it {where}"
    return "; ".join([*known_parts, f"{rough_ms(rest_ms)} unexplained, {most or part}"])


def account_table(label: str, entry: DatasetEntry, most: int | None = None) -> Table | None:
    """Return where the mean step goes, the `most` largest parts; None where that is not known."""
    account = known(entry.account)
    rows = account_rows(account, most)
    columns = (
        text_column("part", "mean step"),
        Column("ms", "ms", ""),
        Column("share", unit="ratio"),
        text_column("note", "of it"),
    )
    over = "" if account is None or account.reason else f" over {TEXT.count(account.rank_steps, 'rank-step')}"
    return Table(f"account-{label}", f"{label}: where the mean step goes{over}", columns, rows) if rows else None


def change_table(comparison: Comparison) -> Table | None:
    """Return by how much each part of the mean step changed; None where that is not known."""
    account = known(comparison.account)
    if account is None or account.reason is not None:
        return None
    columns = [
        text_column("name", "mean step", tone=lambda row: "bad" if row.cause else None),
        *(Column(f"{side}_ms", comparison.label(side)) for side in SIDES),
        Column("change_ms", signed=True),
        text_column("interval", "95 % interval", of=_interval),
        text_column("cause", "cause", of=lambda row: "<-" if row.cause else ""),
    ]
    rows = [account.step]
    for part in account.parts:
        rows += [part, *(replace(below, name=f"  {below.name}") for below in part.parts if below.cause)]
    return Table("account", "What makes the step longer or shorter: means over rank-steps and launches", columns, rows)


def _interval(part: AccountChange) -> str:
    if part.low_ms is None or part.high_ms is None:
        return ""
    return f"{TEXT.number(part.low_ms, 'ms', signed=True)} to {TEXT.number(part.high_ms, 'ms', signed=True)}"


_DIMENSIONS: Final = {
    "group": "Process group",
    "collective": "Collective",
    "order": "Collective, and which of its kind in the step",
    "region": "Region of the step",
    "part": "Transfer or waiting",
    "rank": "Rank",
    "computing": "Region that computes",
}


def exposed_tables(label: str, breakdown: ExposedBreakdown | None) -> list[Table]:
    """Return where communication is exposed, or of a comparison where that differs, in every dimension that is known:
    mean ms per step and rank.
    """
    if breakdown is None or breakdown.reason is not None:
        return []
    compared = known(breakdown.difference_ms) is not None
    columns = [Column("ms", "candidate" if compared else "exposed", "ms")]
    if compared:
        columns = [Column("reference_ms", "reference"), *columns, Column("difference_ms", "difference", signed=True)]
    share = Column("share", unit="ratio")
    return [
        Table(
            f"exposed-{name}-{label}",
            title,
            [text_column("what", "part"), *columns, *([] if name == "computing" else [share])],
            rows,
        )
        for name, title in _DIMENSIONS.items()
        if (rows := breakdown.dimensions.get(name)) and (compared or breakdown.exposed_ms)
    ]


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
    _shown("excess_ms", "excess", tip="difference of the medians, for all overlapped kernels together", drop=2),
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
