"""The text of Kineto traces: the same trace in every layout, cut into pieces anywhere, and broken ones."""

from __future__ import annotations

import io
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aorta.analysis.load import chrome_json
from aorta.analysis.load.device_timelines import device_timelines
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


def test_events_are_cut_between_events_whatever_strings_and_values_hold(monkeypatch):
    monkeypatch.setattr(chrome_json, "BLOCK", 256)
    tricky = ['},{"ph"', '"},{', "]}", '],"traceName":"x"}', "\\", '\\"},{\\"', "},\n  {", "é}, {", '"traceEvents":[']
    random_ = random.Random(3)
    events = []
    for number in range(300):
        made = kernel(random_.choice(tricky) + str(number), number * 10, 5)
        made["args"]["nested"] = [{"a": random_.choice(tricky)}, {"b": [{}, {"c": {}}]}, {}]
        events.append(made)
    facts = {"note": '"traceEvents": [', "more": [{"x": "},{"}, {"y": 1}]}
    for text in (
        json.dumps(document(events, **facts)),
        json.dumps(document(events, **facts), indent=1),
        json.dumps({**document(events), "after": [{"x": 1}, {"y": ["},{", "]"]}]}),
        json.dumps(events),
    ):
        trace = read_text(text)
        assert len(trace.intervals) == 300
        assert sorted(trace.intervals.names) == sorted(made["name"] for made in events)


GOOD = json.dumps(document([kernel(GEMM, number * 10, 5) for number in range(40)]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "traceEvents"),
        ("{}", "traceEvents"),
        ('{"traceEvents": 3}', "traceEvents"),
        ('{"traceEvents": []}', "none of them work"),
        (GOOD[:-300], "cut off"),
        (GOOD[: GOOD.index("traceEvents") + 5], "traceEvents"),
        (GOOD + "}", "follows the events"),
        (GOOD.replace('"dur": 5', '"dur": NaN', 1), "malformed"),
        (GOOD.replace('"dur": 5', '"dur": 1e999', 1), "out of range"),
        (GOOD.replace('"ts": 10,', '"ts": [10],', 1), "Expected"),
        (GOOD.replace('"name": "Cijk', '"name": {}, "x": "Cijk', 1), "Expected"),
        (GOOD.replace('"args": {', '"args": ' + "[" * 100_000, 1), "nested too deeply"),
        (GOOD.replace(str(BASE_NS), str(2**80), 1), "traceEvents|no clock"),
        (GOOD.replace(str(BASE_NS), str(2**62), 1), "no clock"),
        (json.dumps([1, 2, 3]), "Expected"),
        (GOOD.encode().replace(b"Cijk", b"\xff\xfe", 1), "utf-8|UTF-8|malformed"),
    ],
)
@pytest.mark.parametrize("block", [1 << 20, 700])
def test_a_broken_trace_is_an_error_that_says_where(text, words, block, monkeypatch):
    monkeypatch.setattr(chrome_json, "BLOCK", block)
    with pytest.raises(InputError, match=rf"(?s)^t\.json: .*({words})") as caught:
        read_text(text)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 1000


@settings(max_examples=100)
@given(st.data())
def test_a_damaged_trace_is_read_or_refused_and_nothing_else(data):
    text = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        trace = read_text(bytes(text))
    except InputError:
        return
    for timeline in device_timelines(trace):
        timeline.measure(timeline.whole)


def test_no_time_of_a_large_trace_is_lost_between_pieces(monkeypatch):
    """Every kernel of the text, found by a regular expression, is in the table, to the nanosecond."""
    monkeypatch.setattr(chrome_json, "BLOCK", 5000)
    text = rank_text(Plan(megabytes=0.15, steps=2), 0)
    pattern = re.compile(r'"cat": "(?:kernel|gpu_memcpy)".*?"ts": (\d+)\.(\d{3}), "dur": (\d+)\.(\d{3})', re.DOTALL)
    expected = [(int(a + b), int(a + b) + int(c + d)) for a, b, c, d in pattern.findall(text)]
    table = read_text(text).intervals
    seen = zip((table.start_ns - BASE_NS).tolist(), (table.end_ns - BASE_NS).tolist(), strict=True)
    assert list(seen) == expected
    assert len(expected) > 50


def test_the_reader_takes_any_stream_that_reads_short():
    class Short(io.BytesIO):
        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:37])

    from aorta.analysis.load.kernel_classifier import NameClassifier
    from aorta.analysis.load.kineto.kineto_reader import read_kineto
    from aorta.analysis.load.open import Peekable

    assert len(read_kineto(Peekable(Short(GOOD.encode())), "t.json", NameClassifier()).intervals) == 40
