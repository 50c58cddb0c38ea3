"""Kineto traces: by hand, each to show one rule (`kineto_cases.json`), and of odd layout, text or device
(docs/dev/measuring.md, W12-W16).

A case has a `trace` (or `text`, where it is no JSON that a parser would write), `patterns` of the command line, and
`expect`: of the answer what the rule is about. `columns` name what `rows` has of each row, times in ns from the base of
the trace; `devices` are measured over the whole trace, `steps` between their marks; `notes` are words of notes, of
which there is none where the list is empty, and `reasons` those of nulls; `refusal` is a pattern of the error.
Blocks of any size give the same, and so does any order of the members of a trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aorta.documents import as_json
from aorta.errors import InputError
from aorta.read.traces import chrome_json
from aorta.read.traces.files import find_units
from aorta.read.traces.health import check_rows
from aorta.read.traces.interval_table import IntervalClass, Trace
from aorta.read.traces.kernels import kernel_totals, slowdowns, stream_gaps
from aorta.read.traces.tables import UNTIMED, by_launch, device_timelines, read_trace_tables
from aorta.timeline.arrays import interval_array
from aorta.timeline.overlap import Overlap
from tests.read.kineto_files import BASE_NS, GEMM, document, event, kernel, read, read_text, step
from tests.read.tables import rows

CASES = json.loads((Path(__file__).parent / "kineto_cases.json").read_text())["cases"]
PARTS = ("compute_ns", "comm_ns", "hidden_ns", "copy_ns", "idle_ns")


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


@pytest.mark.parametrize(("block", "order"), [(1 << 20, list), (256, reversed)], ids=["facts first", "events first"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_trace_is_read_as_it_should_be(
    case: dict[str, Any], block: int, order: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome_json, "BLOCK", block)
    text = case["text"] if "text" in case else json.dumps(dict(order(case["trace"].items())))
    expect = case["expect"]
    if "refusal" in expect:
        with pytest.raises(InputError) as caught:
            read_text(text, patterns=case.get("patterns", ()))
        assert re.search(expect["refusal"], str(caught.value))
        return
    trace = read_text(text, patterns=case.get("patterns", ()))
    base_ns = case.get("trace", {}).get("baseTimeNanoseconds") or 0
    assert {key: found(trace, key, expect, base_ns) for key in expect} == expect


GOOD = json.dumps(document([kernel(GEMM, number * 10, 5) for number in range(40)]))


@pytest.mark.parametrize("block", [1 << 20, 700])
@pytest.mark.parametrize(
    ("text", "words", "read"),
    [
        (GOOD[:-300], "cut off", True),
        (GOOD.replace('"dur": 5', '"dur": 1e999', 1), "events that are not JSON are left out", True),
        (GOOD.replace('"ts": 10,', '"ts": [10],', 1), "events that are not JSON are left out", True),
        (GOOD.replace('"name": "Cijk', '"name": {}, "x": "Cijk', 1), "events that are not JSON are left out", True),
        ('{"traceEvents": []}', "none of them work", False),
        (re.sub('"ts": (\\d+)', r'"ts": "\1"', GOOD), "40 have no time that can be read", False),
        (GOOD.replace(str(BASE_NS), str(2**80), 1), "traceEvents|no clock", False),
        (GOOD.replace(str(BASE_NS), str(2**62), 1), "no clock", False),
        (json.dumps([1, 2, 3]), "Expected", False),
    ],
)
def test_damaged_rows_are_left_out_and_a_broken_trace_is_an_error(text, words, read, block, monkeypatch):
    monkeypatch.setattr(chrome_json, "BLOCK", block)
    if read:
        damaged = read_text(text)
        assert 0 < len(damaged.intervals) < 40
        assert any(words in note for note in damaged.notes)
        return
    with pytest.raises(InputError, match=rf"(?s)^t\.json: .*({words})") as caught:
        read_text(text)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("at_us", "doubtful"), [(20_000, [2]), (150_000, [2]), (343_000, [2, 3]), (600_000, [3])])
def test_where_a_device_lags_a_row_without_a_launch_is_of_a_step_that_it_may_belong_to(at_us, doubtful):
    """The host is two steps ahead; a profiler that starts then sees kernels whose launches it did not see."""
    events = [step(2, 0, 50_000), step(3, 50_000, 50_000)]
    for number in range(8):
        issued, ran = 1_000 + 12_000 * number, 100_000 + 50_000 * number
        events.append(event("cuda_runtime", "cudaLaunchKernel", issued, 5, 4242, 4242, correlation=number + 10))
        events.append(kernel(GEMM, ran, 40_000, correlation=number + 10))
    trace = by_launch(read([*events, kernel(GEMM, at_us, 5_000, correlation=1)]))
    assert (trace.windows.start_ns - BASE_NS).tolist() == [100_000_000, 350_000_000]
    why = "the device lags behind the steps, and rows without a launch belong to an unknown one"
    assert [gap.step for gap in trace.gaps if gap.why == why] == doubtful


def test_steps_of_the_host_are_not_those_of_a_device_whose_rows_have_no_length(tmp_path):
    """A trace that was exported while the next profiler session began has kernels of time 0 (torch 2.11, CUDA 13)."""
    events = [step(2, 0, 50_000), step(3, 50_000, 50_000), *[kernel(GEMM, 0.0, 0.0) for _ in range(8)]]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document(events)))
    ((unit,), *_) = find_units(str(path))
    (trace,) = read_trace_tables(unit)
    (device,) = trace.devices
    assert np.isnan(device.tables.steps.metrics["window_ms"]).all()
    assert {reasons["window_ms"] for reasons in device.tables.steps.reasons} == {UNTIMED}
