"""Kineto traces by hand, with what is read of them: `kineto_cases.json`, written to show one rule each.

A case has a `trace` (or `text`, where it is no JSON that a parser would write), `patterns` of the command line, and
`expect`: of the answer what the rule is about. `columns` name what `rows` has of each row, times in ns from the base of
the trace; `devices` are measured over the whole trace, `steps` between their marks; `notes` are words of notes, of
which there is none where the list is empty, and `reasons` those of nulls; `refusal` is a pattern of the error.
Blocks of any size give the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aorta.documents import as_json
from aorta.errors import InputError
from aorta.read.traces import chrome_json
from aorta.read.traces.health import check_rows
from aorta.read.traces.interval_table import NULL, IntervalClass, Trace
from aorta.read.traces.kernels import kernel_totals, slowdowns, stream_gaps
from aorta.read.traces.tables import device_timelines
from aorta.timeline.arrays import interval_array
from aorta.timeline.classes import KINDS
from aorta.timeline.overlap import Overlap
from tests.read.kineto_files import read_text

CASES = json.loads((Path(__file__).parent / "kineto_cases.json").read_text())["cases"]
PARTS = ("compute_ns", "comm_ns", "hidden_ns", "copy_ns", "idle_ns")


def rows(trace: Trace, columns: list[str], base_ns: int) -> list[list[Any]]:
    table = trace.intervals

    def text(of: Any, code: int) -> str | None:
        return None if code == NULL else of[code]

    cells: dict[str, Callable[[int], Any]] = {
        "name": lambda at: table.names[table.name[at]],
        "class": lambda at: IntervalClass(int(table.cls[at])).name.lower(),
        "kind": lambda at: text(KINDS, table.kind[at]),
        "group": lambda at: text(table.groups, table.group[at]),
        "dtype": lambda at: text(table.dtypes, table.dtype[at]),
        "start": lambda at: int(table.start_ns[at]) - base_ns,
        "end": lambda at: int(table.end_ns[at]) - base_ns,
        **{
            name: lambda at, name=name: None if (value := getattr(table, name)[at]) == NULL else int(value)
            for name in ("stream", "device", "step", "bytes", "seq", "launch_ns")
        },
    }
    return [[cells[column](at) for column in columns] for at in range(len(table))]


def parts(overlap: Overlap) -> dict[str, Any]:
    return {name: getattr(overlap, name) for name in PARTS} | {"kinds": sorted(overlap.kinds)}


def found(trace: Trace, key: str, expect: dict[str, Any], base_ns: int) -> Any:
    """What a trace says of one thing that a case expects."""
    windows = trace.windows
    match key:
        case "columns":
            return expect["columns"]
        case "rows":
            return rows(trace, expect["columns"], base_ns)
        case "computation":
            seen = rows(trace, ["class", "name", "start", "end"], base_ns)
            return sorted((row[1:] for row in seen if row[0] == "compute"), key=lambda row: row[1])
        case "windows":
            times = (windows.start_ns - base_ns).tolist(), (windows.end_ns - base_ns).tolist()
            return [[*row] for row in zip(windows.step.tolist(), *times, strict=True)]
        case "devices":
            return {str(each.device): parts(each.measure(each.whole)[0]) for each in device_timelines(trace)}
        case "steps":
            (timeline,) = device_timelines(trace)
            spans = interval_array(list(zip(windows.start_ns.tolist(), windows.end_ns.tolist(), strict=True)))
            return [parts(each) for each in timeline.measure(spans)]
        case "counters":
            counted = check_rows(trace)[1].counters
            return {name: counted.get(name, 0) for name in expect[key]}
        case "kernels":
            return [[row.name, row.count, row.total_ms, row.max_ms] for row in kernel_totals(trace)]
        case "slowdowns":
            return {row.name: [row.alone_count, row.overlapped_count, row.alone_median_ms] for row in slowdowns(trace)}
        case "gaps":
            return as_json(stream_gaps(trace)[0])
        case "group_ranks":
            return {name: [*ranks] for name, ranks in trace.group_ranks.items()}
        case "reasons":
            (timeline,) = device_timelines(trace)
            said = timeline.measure(timeline.whole)[0].metrics()[1]
            return {name: words if words in said[name] else said[name] for name, words in expect[key].items()}
        case "either":
            table = trace.intervals
            return sorted({table.names[code] for code in table.name[table.second == IntervalClass.COMM]})
        case "notes":
            words = expect[key]
            return [each for each in words if any(each in note for note in trace.notes)] if words else [*trace.notes]
    return getattr(trace, key)


@pytest.mark.parametrize("block", [1 << 20, 256])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_trace_is_read_as_it_should_be(case: dict[str, Any], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_json, "BLOCK", block)
    text, expect = case["text"] if "text" in case else json.dumps(case["trace"]), case["expect"]
    if "refusal" in expect:
        with pytest.raises(InputError) as caught:
            read_text(text, patterns=case.get("patterns", ()))
        assert re.search(expect["refusal"], str(caught.value))
        return
    trace = read_text(text, patterns=case.get("patterns", ()))
    base_ns = case.get("trace", {}).get("baseTimeNanoseconds") or 0
    assert {key: found(trace, key, expect, base_ns) for key in expect} == expect
