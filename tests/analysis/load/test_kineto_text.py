"""The text of Kineto traces: the same trace in every layout, cut into pieces anywhere, and broken ones."""

from __future__ import annotations

import io
import json

import pytest

from aorta.analysis.load import chrome_json
from aorta.analysis.load.interval_table import IntervalClass
from aorta.errors import InputError
from benchmarks.kineto_traces import Plan, rank_text
from tests.analysis.load.kineto_files import BASE_NS, GEMM, document, kernel, read_text


def test_the_layout_of_the_file_does_not_matter(monkeypatch):
    plan = Plan(megabytes=0.2, steps=2)
    expected = read_text(rank_text(plan, 0))
    assert len(expected.windows) == 2
    assert {int(code) for code in expected.intervals.cls} == {
        IntervalClass.COMPUTE,
        IntervalClass.COMM,
        IntervalClass.COPY,
    }
    loaded = json.loads(rank_text(plan, 0))
    texts = [
        json.dumps(loaded),
        json.dumps(loaded, separators=(",", ":")),
        json.dumps(loaded, indent=4),
        json.dumps(loaded, sort_keys=True),
        json.dumps({"traceEvents": loaded["traceEvents"], **loaded}),
        "\n\t " + rank_text(plan, 0) + "\n\n",
    ]
    for block in (4 << 20, 4096, 1500):
        monkeypatch.setattr(chrome_json, "BLOCK", block)
        for place, text in enumerate(texts):
            trace = read_text(text)
            for name in ("start_ns", "end_ns", "cls", "kind", "bytes", "seq", "step", "stream", "device"):
                assert getattr(trace.intervals, name).tolist() == getattr(expected.intervals, name).tolist(), (
                    place,
                    name,
                )
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


def test_the_reader_takes_any_stream_that_reads_short():
    class Short(io.BytesIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:37])

    from aorta.analysis.load.kineto import read_kineto
    from aorta.analysis.load.open import Peekable
    from aorta.analysis.load.trace_source import Source

    (trace,) = read_kineto(Source({"t.json": Peekable(Short(GOOD.encode()))}))
    assert len(trace.intervals) == 40
