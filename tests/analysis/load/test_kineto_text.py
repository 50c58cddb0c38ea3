"""The text of Kineto traces: the same trace in every layout, cut into pieces anywhere, and broken ones."""

from __future__ import annotations

import json

import pytest

from aorta.analysis.load import chrome_json
from aorta.analysis.load.interval_table import IntervalClass
from aorta.errors import InputError
from benchmarks.kineto_traces import Plan, rank_text
from tests.analysis.load.kineto_files import BASE_NS, GEMM, document, event, kernel, read_text


def test_the_layout_of_the_file_does_not_matter(monkeypatch):
    plan = Plan(megabytes=0.2, steps=2)
    expected = read_text(rank_text(plan, 0))
    assert len(expected.windows) == 2
    assert set(expected.intervals.cls.tolist()) == {IntervalClass.COMPUTE, IntervalClass.COMM, IntervalClass.COPY}
    text = rank_text(plan, 0)
    loaded = json.loads(text)
    reordered = {"traceEvents": loaded["traceEvents"], **loaded}
    texts = [json.dumps(loaded, separators=(",", ":")), json.dumps(loaded, indent=4, sort_keys=True)]
    texts += [json.dumps(reordered), f"\n\t {text}\n\n"]
    columns = ("start_ns", "end_ns", "cls", "kind", "bytes", "seq", "step", "stream", "device")
    for block in (4 << 20, 4096, 1500):
        monkeypatch.setattr(chrome_json, "BLOCK", block)
        for place, written in enumerate(texts):
            trace = read_text(written)
            for name in columns:
                found = getattr(trace.intervals, name).tolist()
                assert found == getattr(expected.intervals, name).tolist(), (place, name)
            assert trace.counters == expected.counters


GOOD = json.dumps(document([kernel(GEMM, number * 10, 5) for number in range(40)]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD[:-300], "cut off"),
        (GOOD.replace('"dur": 5', '"dur": 1e999', 1), "events that are not JSON are left out"),
        (GOOD.replace('"ts": 10,', '"ts": [10],', 1), "events that are not JSON are left out"),
        (GOOD.replace('"name": "Cijk', '"name": {}, "x": "Cijk', 1), "events that are not JSON are left out"),
    ],
)
@pytest.mark.parametrize("block", [1 << 20, 700])
def test_a_damaged_row_is_left_out_and_said(text, words, block, monkeypatch):
    monkeypatch.setattr(chrome_json, "BLOCK", block)
    whole, damaged = read_text(GOOD), read_text(text)
    assert 0 < len(damaged.intervals) < len(whole.intervals)
    assert any(words in note for note in damaged.notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"traceEvents": []}', "none of them work"),
        (GOOD.replace(str(BASE_NS), str(2**80), 1), "traceEvents|no clock"),
        (GOOD.replace(str(BASE_NS), str(2**62), 1), "no clock"),
        (json.dumps([1, 2, 3]), "Expected"),
    ],
)
@pytest.mark.parametrize("block", [1 << 20, 700])
def test_a_broken_trace_is_an_error_that_says_where(text, words, block, monkeypatch):
    monkeypatch.setattr(chrome_json, "BLOCK", block)
    with pytest.raises(InputError, match=rf"(?s)^t\.json: .*({words})") as caught:
        read_text(text)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 1000


def test_an_event_that_only_some_decoders_refuse_is_left_out_beside_broken_ones():
    odd = [event("ac2g", "x", 0, 1) | {"pid": {}}, *[event("of a new kind", "x", 0, 1)] * 5]
    text = json.dumps(document([*odd, kernel(GEMM, 0, 5), event("kernel", "broken", 0, 1)]))
    trace = read_text(text.replace('"broken"', "broken"))
    assert len(trace.intervals) == 1
    assert any("left out" in note for note in trace.notes)


def test_an_operator_of_impossible_length_is_counted_where_operators_are_the_work():
    events = [event("cpu_op", "aten::mm", 0, 5), event("cpu_op", "aten::mm", 9, {})]
    trace = read_text(json.dumps(document(events, distributedInfo=None, deviceProperties=[{"id": 0}])))
    assert (len(trace.intervals), trace.counters["without_times"]) == (1, 1)
