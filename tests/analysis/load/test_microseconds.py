"""Times of Kineto traces: exact to the nanosecond, at any size and in any notation (docs/dev/measuring.md, W7, W14)."""

from __future__ import annotations

import json
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.load import chrome_json
from aorta.analysis.load.chrome_json import Exact, ns_as_text, ns_of_numbers, ns_of_text, ns_of_texts, ns_of_value
from aorta.analysis.load.interval_table import IntervalClass
from tests.analysis.load.kineto_files import BASE_NS, GEMM, document, kernel, read, read_text, rows


def test_nanoseconds_of_a_trace_are_exact_with_and_without_a_base():
    based = read([kernel(GEMM, 4400494439461.467, 0.001)])
    assert rows(based, IntervalClass.COMPUTE) == [(GEMM, BASE_NS + 4400494439461467, BASE_NS + 4400494439461468)]
    assert based.clock == "REALTIME"
    # Without a base: microseconds from 1970. float64 cannot hold the digits; a neighbour would be 128 ns away (W14).
    events = [kernel(GEMM, "TS", 3.25), kernel(GEMM, 1682725898082230, 2)]
    text = json.dumps(document(events, baseTimeNanoseconds=None)).replace('"TS"', "1682725898082228.123")
    old = read_text(text)
    assert rows(old, IntervalClass.COMPUTE) == [
        (GEMM, 1682725898082228123, 1682725898082231373),
        (GEMM, 1682725898082230000, 1682725898082232000),
    ]
    assert old.clock == "REALTIME"
    assert read([kernel(GEMM, 12.5, 3)], baseTimeNanoseconds=None).clock == "unknown"


def test_digits_are_kept_where_a_trace_without_a_base_comes_in_several_pieces(monkeypatch):
    monkeypatch.setattr(chrome_json, "BLOCK", 256)
    first = 1682725898082228123
    starts = [first + 1_000_001 * number for number in range(12)]
    for separators in ((",", ":"), (" , ", ": ")):
        text = json.dumps(document([kernel(GEMM, f"T{at}T", 3) for at in starts], baseTimeNanoseconds=None))
        text = json.dumps(json.loads(text), separators=separators)
        for at in starts:
            text = text.replace(f'"T{at}T"', f"{at // 1000}.{at % 1000:03d}")
        assert [start for _, start, _ in rows(read_text(text), IntervalClass.COMPUTE)] == starts


def in_decimals(ns: int) -> str:
    return ns_as_text(ns).decode()


def one(text: str) -> int | None:
    """Of a column of one."""
    found, known = ns_of_texts([text.encode()])
    return int(found[0]) if known[0] else None


@given(st.integers(-(2**43) * 1000 + 1, 2**43 * 1000 - 1))
def test_every_nanosecond_below_2_to_the_43_microseconds_survives_float64(ns):
    assert ns_of_numbers([float(in_decimals(ns))])[0].tolist() == [ns]
    assert ns_of_text(in_decimals(ns).encode()) == one(in_decimals(ns)) == ns


@given(st.lists(st.integers(-(2**62) + 1, 2**62 - 1), max_size=20), st.data())
def test_digits_are_exact_at_any_size_and_in_any_notation(all_ns, data):
    texts = [data.draw(st.sampled_from([in_decimals(ns), f"{ns}e-3", in_decimals(ns).rstrip("0")])) for ns in all_ns]
    texts = [text + "0" if text.endswith(".") else text for text in texts]
    found, known = ns_of_texts([text.encode() for text in texts])
    assert (found.tolist(), known.tolist()) == (all_ns, [True] * len(all_ns))
    assert [ns_of_text(text.encode()) for text in texts] == all_ns


@given(st.lists(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(), st.none())))
def test_a_column_of_anything_reads_each_value_as_it_reads_it_alone(values):
    texts = [json.dumps(value).encode() for value in values]
    found, known = ns_of_texts(texts)
    for text, ns, is_known in zip(texts, found.tolist(), known.tolist(), strict=True):
        alone = ns_of_text(text)
        in_range = alone is not None and abs(alone) < 2**62
        assert (is_known, ns) == (in_range, alone if in_range else 0), text


def test_decoding_refuses_numbers_of_which_it_would_lose_a_digit():
    decoder = msgspec.json.Decoder(list[Exact])
    whole = [1682725898082228, 2**62 // 1000 - 1]
    assert ns_of_numbers(decoder.decode(json.dumps(whole)))[0].tolist() == [us * 1000 for us in whole]
    for lost in (2**62 // 1000 + 1, 10**400, 1682725898082228.0):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(json.dumps([lost, 1.5]))
    found, known = ns_of_numbers(decoder.decode('[1, 2.5, null, "soon"]'))
    assert (found.tolist(), known.tolist()) == ([1000, 2500, 0, 0], [True, True, False, False])


@pytest.mark.parametrize("text", ["null", "1e400", '"1"', "1e18", "-", "1.2.3", "[1]", "9" * 16, "9" * 19, "9" * 5000])
def test_what_no_clock_shows_is_not_known_and_what_is_no_time_is_refused_at_once(text):
    assert one(text) is None
    for none in ("null", "1e999999999", "-", "1.2.3", "NaN", "9" * 5000):
        with pytest.raises(ValueError, match="not a number of microseconds"):
            ns_of_value(none.encode())


@given(st.integers(-(10**19), 10**19))
def test_C14_a_time_goes_through_text_without_losing_a_digit(ns):
    assert ns_of_value(ns_as_text(ns)) == ns_of_value(b'"%b"' % ns_as_text(ns)) == ns


@given(st.decimals(-(10**12), 10**12, places=5), st.sampled_from(["f", "e"]))
def test_C14_a_time_in_any_form_is_read_to_the_nearest_nanosecond(value, form):
    assert abs(ns_of_value(format(value, form).encode()) - Fraction(value) * 1000) <= Fraction(1, 2)
