"""The kernels of traces: kernels with their slowdowns, GEMMs, gaps and counters as lines for a terminal, as data frames
of fixed columns, and by the command `aorta kernels`.

Must not compute a number, say a slowdown without its interval, or import pandas before a frame is asked for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from aorta.analysis.documents import as_json
from aorta.analysis.documents.traces import (
    CounterEntry,
    GemmEntry,
    KernelTotalEntry,
    SlowdownEntry,
    StreamGapsEntry,
    TraceEntries,
)
from aorta.analysis.formatting import TEXT
from aorta.analysis.load.engines import Local
from aorta.analysis.load.kernel_classifier import add_comm_pattern
from aorta.command_line import command, to_stdout
from aorta.errors import EXIT_OK, InputError
from aorta.terminal_style import PLAIN, Style, style_of, table, wrapped

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


KERNEL_TABLES: Final = {
    "kernels": (*KernelTotalEntry.__struct_fields__, *_COMPARED, "slowdown_reason"),
    "gemms": GemmEntry.__struct_fields__,
    "gaps": StreamGapsEntry.__struct_fields__,
    "counters": CounterEntry.__struct_fields__,
}
"""Table -> its columns."""
_WHOLE: Final = frozenset(
    {"rank", "device", "stream", "count", "kernels", "gaps", "gaps_known", "launch_bound", "batch", "m", "n", "k"}
    | {"alone_count", "overlapped_count", "partly_count"}
)
_WORDS: Final = frozenset({"name", "cls", "operator", "dtype", "counter", "derived_from", "reason", "slowdown_reason"})


def kernel_frames(traces: TraceEntries) -> dict[str, pd.DataFrame]:
    """Return every table of `KERNEL_TABLES`, one without rows too.

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
    """Return the totals of each device, each with its slowdown or why there is none."""
    slowdowns = {(row.rank, row.device, row.name): row for row in traces.slowdowns}
    rows = []
    for total in traces.kernels.totals:
        found = slowdowns.get((total.rank, total.device, total.name)) if total.cls == "compute" else None
        compared = {key: getattr(found, key) for key in _COMPARED} if found else {}
        why = found.reason if found else _NOT_COMPARED[total.cls]
        rows.append({**as_json(total), **compared, "slowdown_reason": why})
    return rows


def _kind(column: str) -> str:
    return "string" if column in _WORDS else "Int64" if column in _WHOLE else "float64"


SHOWN: Final = 3
_LEAST_NAME: Final = 24
_LEAST_HEAD: Final = 4
_KIND: Final = {"gemms": "GEMMs", "gaps": "gaps", "counters": "hardware counters"}


def kernel_block(label: str, traces: TraceEntries, style: Style = PLAIN, shown: int = SHOWN, more: str = "") -> str:
    """Return the kernels with the largest totals, what communication slows down most, GEMMs, gaps and counters; what a
    trace does not hold with the reason. `more`: a command that shows more.
    """
    found = traces.kernels
    if not found.by_name:
        return wrapped([f"{label}: no kernels: {'; '.join(found.reasons.get('totals', ['the traces are empty']))}"])
    lines = [f"{label}: kernels, all devices together; share of their summed time"]
    lines += _totals(found.by_name[:shown], style)
    lines += _more(found.by_name, shown, "kernels")
    compared = [row for row in traces.slowdowns if row.mean_ratio is not None]
    if compared:
        lines.append("  overlapped with communication vs. alone, ratio of means with its 95 % interval:")
        names = shortened_apart([row.name for row in compared[:shown]], style.terminal_width - 6)
        lines += [line for row in compared[:shown] for line in (_slowdown(row), f"      {names[row.name]}")]
        lines += _more(compared, shown, "kernels that can be compared")
    elif traces.slowdowns:
        lines.append(f"  no kernel ran both alone and overlapped with communication: {_why_not(traces.slowdowns)}")
    if found.by_shape:
        lines.append("  GEMMs, batch x [m, k] x [k, n]:")
        lines += [_gemm(row) for row in found.by_shape[:shown]]
        lines += _more(found.by_shape, shown, "shapes")
    lines += [_gap(row) for row in found.gaps[:shown]] + _more(found.gaps, shown, "streams")
    names = shortened_apart([row.name for row in found.counters[:shown]], style.terminal_width // 2)
    lines += [f"{_counter(row)}: {names[row.name]}" for row in found.counters[:shown]]
    lines += _more(found.counters, shown, "counters of kernels")
    lines += [f"  {_KIND[kind]}: {'; '.join(why)}" for kind, why in found.reasons.items() if kind in _KIND]
    lines += [f"  {count} rows of {kind} are not kept" for kind, count in found.left_out.items()]
    text = wrapped(lines, style.terminal_width)
    return f"{text}\n  more: {more}" if more else text  # to be copied: in one line


def shortened(name: str, width: int) -> str:
    """Return a kernel's name on one line: what cannot be printed as `?`, of a long one its beginning and end."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in name) or "(no name)"
    if len(plain) <= width:
        return plain
    end = (width - 3) // 3
    return f"{plain[: width - 3 - end]}...{plain[-end:]}"


def shortened_apart(names: Sequence[str], width: int) -> dict[str, str]:
    """Return the names of at most `width` characters each; those that would look the same are cut where they differ."""
    cut = {name: shortened(name, width) for name in names}
    head = width // 4
    for text in set(cut.values()):
        alike = [name for name in cut if cut[name] == text]
        if len(alike) > 1 and head >= _LEAST_HEAD:
            same = sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*alike, strict=False)))
            ends = shortened_apart([name[same:] for name in alike], width - head - 3)
            cut |= {name: f"{shortened(name[:head], head)}...{ends[name[same:]]}" for name in alike}
    return cut


def place_of(row: SlowdownEntry | StreamGapsEntry | CounterEntry) -> str:
    """Return the rank and device of a row."""
    rank = "unknown rank" if row.rank is None else f"rank {row.rank}"
    return rank if row.device is None else f"{rank}, device {row.device}"


def _totals(rows: Sequence[KernelTotalEntry], style: Style) -> list[str]:
    """Return a table of totals; names have what room the numbers leave."""
    cells = [("count", "total ms", "mean ms", "± ms", "share", "class", "kernel")]
    for row in rows:
        numbers = TEXT.number(row.total_ms, "ms"), TEXT.number(row.mean_ms, "ms"), _spread(row.std_ms)
        cells.append((str(row.count), *numbers, TEXT.percent(row.share), row.cls, ""))
    right = range(5)
    taken = max(map(len, table(cells[1:], right=right, indent="  "))) + 2
    names = shortened_apart([row.name for row in rows], max(_LEAST_NAME, style.terminal_width - taken))
    filled = [(*each[:-1], names[row.name]) for each, row in zip(cells[1:], rows, strict=True)]
    return table([cells[0], *filled], right=right, indent="  ")


def _slowdown(row: SlowdownEntry) -> str:
    return (
        f"    x{row.mean_ratio:.3f} [{row.mean_ratio_low:.3f}, {row.mean_ratio_high:.3f}] "
        f"{row.alone_count} alone {row.alone_mean_ms:.3f} ms, {row.overlapped_count} overlapped "
        f"{row.overlapped_mean_ms:.3f} ms, {place_of(row)}"
    )


def _gemm(row: GemmEntry) -> str:
    rate = "no rate: no time" if row.tflops is None else f"{row.tflops:.3f} TFLOP/s"
    return (
        f"    {row.count:>6} {shape_of(row)}: mean {TEXT.number(row.mean_ms, 'ms')} ± "
        f"{_spread(row.std_ms)} ms, {rate} ({row.operator})"
    )


def shape_of(row: GemmEntry) -> str:
    """Return the type and sides of a product."""
    sides = f"[{row.m}, {row.k}] x [{row.k}, {row.n}]"
    batch = "" if row.batch == 1 else f"{row.batch} x "
    return f"{shortened(row.dtype, 20) if row.dtype else 'unknown type'} {batch}{sides}"


def _gap(row: StreamGapsEntry) -> str:
    text = f"{row.gaps} gaps of {TEXT.number(row.gap_ms, 'ms')} ms"
    if not row.gaps:
        text = "no gaps"
    elif row.launch_bound is None:
        text += f"; launch-bound not known: {row.reason}"
    else:
        text += (
            f"; launch-bound {row.launch_bound} of {row.gaps_known} with a known launch, "
            f"{TEXT.number(row.launch_bound_ms, 'ms')} ms"
        )
    busy = TEXT.number(row.busy_ms, "ms")
    return f"  {place_of(row)}, stream {row.stream}: {row.kernels} kernels in {busy} ms, {text}"


def _counter(row: CounterEntry) -> str:
    share = "" if row.comm_share is None else f", {TEXT.percent(row.comm_share)} overlapped with communication"
    derived = "" if row.derived_from is None else " (derived)"
    return (
        f"  {shortened(row.counter, 32)}{derived} {row.mean:.6g} ({row.min:.6g} to {row.max:.6g}) of {row.count}{share}"
    )


def _spread(value: float | None) -> str:
    return "-" if value is None else TEXT.number(value, "ms")


def _why_not(rows: Sequence[SlowdownEntry]) -> str:
    return "; ".join(list(dict.fromkeys(str(row.reason) for row in rows))[:2])


def _more(rows: Sequence[object], shown: int, what: str) -> list[str]:
    return [f"  and {len(rows) - shown} more {what}"] if len(rows) > shown else []


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
