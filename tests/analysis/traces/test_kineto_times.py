"""Times of Kineto traces: exact to the nanosecond, at any size and in any notation (docs/measuring.md, W7, W14)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.traces.kineto import chunks
from aorta.analysis.traces.kineto.times import from_digits, from_floats
from aorta.analysis.traces.table import Class
from tests.analysis.traces.kineto_files import BASE_NS, GEMM, document, kernel, read, read_text, rows


def test_nanoseconds_of_a_trace_are_exact_with_and_without_a_base():
    based = read([kernel(GEMM, 4400494439461.467, 0.001)])
    assert rows(based, Class.COMPUTE) == [(GEMM, BASE_NS + 4400494439461467, BASE_NS + 4400494439461468)]
    assert based.clock == "REALTIME"
    # Without a base: microseconds from 1970. float64 cannot hold the digits; a neighbour would be 128 ns away (W14).
    events = [kernel(GEMM, "TS", 3.25), kernel(GEMM, 1682725898082230, 2)]
    text = json.dumps(document(events, baseTimeNanoseconds=None)).replace('"TS"', "1682725898082228.123")
    old = read_text(text)
    assert rows(old, Class.COMPUTE) == [
        (GEMM, 1682725898082228123, 1682725898082231373),
        (GEMM, 1682725898082230000, 1682725898082232000),
    ]
    assert (old.clock, old.resolution_ns) == ("REALTIME", 1)
    whole_us = read([kernel(GEMM, 1682725898082228, 3)], baseTimeNanoseconds=None)
    assert (whole_us.clock, whole_us.resolution_ns) == ("REALTIME", 1000)
    assert read([kernel(GEMM, 12.5, 3)], baseTimeNanoseconds=None).clock == "unknown"


def test_digits_are_kept_where_a_trace_without_a_base_comes_in_several_pieces(monkeypatch):
    monkeypatch.setattr(chunks, "BLOCK", 256)
    first = 1682725898082228123
    starts = [first + 1_000_001 * number for number in range(12)]
    for separators in ((",", ":"), (" , ", ": ")):
        text = json.dumps(document([kernel(GEMM, f"T{at}T", 3) for at in starts], baseTimeNanoseconds=None))
        text = json.dumps(json.loads(text), separators=separators)
        for at in starts:
            text = text.replace(f'"T{at}T"', f"{at // 1000}.{at % 1000:03d}")
        assert [start for _, start, _ in rows(read_text(text), Class.COMPUTE)] == starts


@given(st.integers(-(2**43) * 1000 + 1, 2**43 * 1000 - 1))
def test_every_nanosecond_below_2_to_the_43_microseconds_survives_float64(ns):
    sign, size = "-" if ns < 0 else "", abs(ns)
    text = f"{sign}{size // 1000}.{size % 1000:03d}"
    assert from_floats([float(text)]).tolist() == [ns]
    assert from_digits(text.encode()) == ns


@given(st.integers(-(2**62) + 1, 2**62 - 1))
def test_digits_are_exact_at_any_size_and_in_any_notation(ns):
    sign, size = "-" if ns < 0 else "", abs(ns)
    text = f"{sign}{size // 1000}.{size % 1000:03d}"
    assert from_digits(text.encode()) == ns
    assert from_digits(f"{ns}e-3".encode()) == ns


@pytest.mark.parametrize("text", [b"null", b"1e400", b'"1"', b"1e18", b"", b"-", b"1.2.3"])
def test_digits_that_no_clock_shows_are_refused(text):
    assert from_digits(text) is None
