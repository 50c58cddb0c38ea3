"""Exports interval tables for other tools: frames with every row, a Chrome trace of merged lanes for Perfetto, and the
command `aorta traces` (`analysis/trace_tables.py`), which writes both.

Takes traces one at a time. `NULL` becomes a missing value, codes become names, times stay whole nanoseconds. Must not:
hold the rows of more than one trace, put times of different clocks on one axis, or import pandas before the arguments
are known to be good.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load import microseconds
from aorta.analysis.load.device_timelines import DeviceTimeline, device_timelines
from aorta.analysis.load.interval_table import NULL, IntervalClass, Trace
from aorta.analysis.load.kernel_classifier import add_comm_pattern
from aorta.analysis.load.trace_health import usable
from aorta.analysis.table_files import FORMATS, check_format, write_table
from aorta.command_line import command
from aorta.errors import EXIT_OK, InputError
from aorta.records.files import whole_file
from aorta.timeline.arrays import Spans
from aorta.timeline.classes import KINDS

if TYPE_CHECKING:
    import pandas as pd

_NUMBERS: Final = ("rank", "device", "stream", "seq", "bytes", "step", "operator")
_CLASSES: Final = [cls.name.lower() for cls in IntervalClass]
_COLORS: Final = {"compute": "thread_state_running", "copy": "thread_state_iowait", "aux": "generic_work"}
_COMM_COLOR: Final = "thread_state_uninterruptible"
"""Colours by their names in the Trace Event Format; other viewers ignore them."""


def interval_frame(trace: Trace) -> pd.DataFrame:
    """Return one row per interval, in the order of the table: `rank, device, stream, class, kind, group, seq, bytes,
    dtype, start_ns, end_ns, step, operator, name, source, clock`. Unknown values are missing; strings are categories.
    """
    import pandas as pd

    table = trace.intervals

    def numbers(name: str) -> pd.Series[int]:
        column = pd.Series(getattr(table, name).astype(np.int64)).astype("Int64")
        return column.mask(column == NULL)

    def words(codes: NDArray[Any], strings: Iterable[str]) -> pd.Categorical[str]:
        return pd.Categorical.from_codes(codes.astype(np.int64), categories=pd.Index(list(strings), dtype="object"))

    given = {name: numbers(name) for name in _NUMBERS}
    return pd.DataFrame(
        {
            **{name: given[name] for name in ("rank", "device", "stream")},
            "class": words(table.cls, _CLASSES),
            "kind": words(table.kind, KINDS),
            "group": words(table.group, table.groups),
            "seq": given["seq"],
            "bytes": given["bytes"],
            "dtype": words(table.dtype, table.dtypes),
            "start_ns": table.start_ns,
            "end_ns": table.end_ns,
            "step": given["step"],
            "operator": given["operator"],
            "name": words(table.name, table.names),
            "source": words(np.zeros(len(table)), [trace.path]),  # as objects: a path may be no UTF-8
            "clock": words(np.zeros(len(table)), [trace.clock]),
        }
    )


def write_lanes(traces: Iterable[Trace], path: Path) -> int:
    """Write one gzipped Chrome trace of merged lanes for https://ui.perfetto.dev: a process per rank and device, a
    thread per lane of its timeline (compute, copies, kinds of collectives, ...), and one for the steps.

    Every clock has its own zero, the first start on it. Returns the number of events.
    """
    lanes = [lane for trace in traces for lane in _lanes(trace)]
    zero: dict[str, int] = {}
    for _, clock, timeline in lanes:
        zero[clock] = min(zero.get(clock, timeline.whole[0]), timeline.whole[0])
    count = 0
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","otherData":')
        file.write(json.dumps({f"zero_ns_{clock}": str(instant) for clock, instant in sorted(zero.items())}))
        file.write(',"traceEvents":[')
        for process, (label, clock, timeline) in enumerate(lanes):
            for event in _events(process, label, timeline, zero[clock]):
                file.write((",\n" if count else "\n") + event)
                count += 1
        file.write("\n]}\n")
    return count


def _lanes(trace: Trace) -> Iterator[tuple[str, str, DeviceTimeline]]:
    # Times of an unknown clock cannot be compared with those of another trace.
    clock = trace.clock if trace.clock != "unknown" else f"of {trace.path}"
    for timeline in device_timelines(usable(trace)):
        who = f"rank {timeline.rank}" if timeline.rank != NULL else f"unknown rank ({trace.path})"
        where = f", device {timeline.device}" if timeline.device != NULL else ""
        # Drop the rows: they are no longer needed, and would keep the whole trace in memory.
        yield f"{who}{where}", clock, replace(timeline, rows=timeline.rows.take(slice(0)))


def _events(process: int, label: str, timeline: DeviceTimeline, zero: int) -> Iterator[str]:
    """Yield the events of one process as JSON, one by one."""
    yield _named("process_name", process, 0, label)
    threads: list[tuple[str, Spans, list[str] | None]] = [
        ("steps", timeline.windows, [f"step {number}" for number in timeline.steps.tolist()])
    ]
    threads += [(name, lane, None) for name, lane in timeline.lanes.items()]
    for thread, (name, lane, texts) in enumerate(threads):
        if not len(lane.start):
            continue
        yield _named("thread_name", process, thread, name)
        color = "" if texts else f',"cname":"{_COLORS.get(name, _COMM_COLOR)}"'
        for place, (start, end) in enumerate(zip(lane.start.tolist(), lane.end.tolist(), strict=True)):
            text = texts[place] if texts else name
            begin, length = (microseconds.as_text(each).decode() for each in (start - zero, end - start))
            yield (f'{{"ph":"X","pid":{process},"tid":{thread},"name":"{text}","ts":{begin},"dur":{length}{color}}}')


def _named(what: str, process: int, thread: int, name: str) -> str:
    return json.dumps({"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}})


LANES_FILE: Final = "lanes.json.gz"


@command()
def main(arguments: Sequence[str]) -> int:
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
    add_comm_pattern(parser)
    return parser


def _write(location: str, output: Path, form: str, comm_patterns: Sequence[str]) -> list[str]:
    """Write both files.

    Returns:
        Sentences about the files, and about what was left out.

    Raises:
        InputError: nothing there can be read, or `output` cannot be written.
    """
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
