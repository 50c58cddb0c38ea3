"""The text of Chrome traces: events however they are laid out and cut into chunks, broken text named and never taken
for whole; times exact to the nanosecond, at any size and in any notation (docs/dev/measuring.md, W7, W14).
"""

from __future__ import annotations

import io
import json
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.errors import InputError
from aorta.read.traces import chrome_json
from aorta.read.traces.chrome_json import (
    Exact,
    NoEventArray,
    RawEvents,
    ns_as_text,
    ns_of_numbers,
    ns_of_text,
    ns_of_texts,
    ns_of_value,
)
from tests.merge.traces import text, x
from tests.read.kineto_files import BASE_NS, GEMM, document, kernel, read, read_text
from tests.read.tables import rows

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
events = st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=4), max_size=6)


class Short(io.BytesIO):
    """A stream that gives less than it is asked for."""

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:37])


def scan(body: bytes, size: int = 1 << 20):
    """The events, and what stands around them, read in blocks of a size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chrome_json, "BLOCK", size)
        scanner = RawEvents(io.BufferedReader(Short(body)), "t.json")
        found = [{key: json.loads(bytes(value)) for key, value in event.items()} for event in scanner.events()]
        return found, {key: json.loads(bytes(value)) for key, value in (scanner.head | scanner.tail).items()}


@given(events, st.dictionaries(st.text(max_size=4), json_values, max_size=3), st.integers(1, 40), st.booleans())
def test_it_reads_what_json_reads(inside, around, size, compact):
    whole = {**{f"a{key}": value for key, value in around.items()}, "traceEvents": inside, "z": around}
    body = json.dumps(whole, separators=(",", ":")) if compact else json.dumps(whole, indent=1, ensure_ascii=False)
    found, rest = scan(body.encode(), size)
    assert found == inside
    assert {**rest, "traceEvents": found} == whole


@given(events, st.integers(1, 40), st.data())
def test_a_text_that_is_cut_off_is_never_taken_for_whole(inside, size, data):
    body = json.dumps({"traceEvents": inside, "z": 1}).encode()
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(InputError, match=r"t\.json: "):
        scan(body[:cut], size)


def test_a_list_alone_and_an_event_full_of_what_looks_like_its_end():
    assert scan(b' [ {"a": 1}, {"b": "},{"} ] ') == ([{"a": 1}, {"b": "},{"}], {})
    assert scan(b"[]")[0] == []
    event = {"args": {"inner": [{"n": n} for n in range(1000)], "text": '"},{'}, "name": "x"}
    assert scan(json.dumps({"traceEvents": [event, event]}).encode(), 512)[0] == [event, event]


NOT_A_TRACE = 'not a trace: it has no "traceEvents"'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "cut off"),
        (b"x", "expected { or"),
        (b'{"a": {"traceEvents": []}}', NOT_A_TRACE),
        (b'{"traceEvents": 3}', r"expected \["),
        (b'{"traceEvents": [3]}', "not a trace event: Expected"),
        (b'{"traceEvents": [{"a": nan}]}', "not a trace event: JSON is malformed"),
        (b'{"traceEvents": [{"a": 1} {"a": 1}]}', "not a trace event: JSON is malformed"),
        (b'{"traceEvents": []} trailing', "what follows the events is not JSON"),
        (b'{"traceEvents": [], }', "what follows the events is not JSON"),
        (b'{"traceEvents": [], "traceEvents": []}', "what follows the events is not JSON"),
        (b'{"traceEvents": []', "cut off behind its events"),
        (b"[{}] trailing", "more text behind the list"),
        (b'{"traceEvents": [], "a": tru}', "what follows the events is not JSON"),
        (b'{"a": tru, "traceEvents": []}', "what stands before it is not JSON"),
        (b'{"a": "x', 'cut off before its "traceEvents"'),
        (b'{"x": [' + b'{"traceEvents": []}, ' * 100, "stands 33 times in it"),
        (b'{"traceEvents": [{"name": "\xff"}]}', "not UTF-8: byte 0xff"),
        (b'{"host_name": "\xff", "traceEvents": []}', "its host_name is not UTF-8"),
        (b'{"traceEvents": [{"a": ' + b"[" * 100_000, "nested too deeply"),
        (text([x("a", 1, 1)])[:-30], "cut off"),
    ],
)
@pytest.mark.parametrize("size", [1 << 20, 7])
def test_what_is_wrong_and_where(body, words, size):
    with pytest.raises(InputError, match=rf"^t\.json: .*({words})") as caught:
        scan(body, size)
    assert isinstance(caught.value, NoEventArray) == (words == NOT_A_TRACE), "no trace, or a broken one"


@pytest.mark.parametrize("start", [b'{"x": "', b'{"traceEvents": [{"x": "', b'{"traceEvents": [], "x": "', b" "])
def test_a_value_that_never_ends_is_not_held(start, monkeypatch):
    monkeypatch.setattr(chrome_json, "LIMIT", 1 << 16)
    with pytest.raises(InputError, match=r"t\.json: .*(no Chrome trace|bounded memory|behind the events)"):
        scan(start + (b"a" if start.strip() else b" ") * (1 << 18) + b"[{}]", 4096)


def test_nanoseconds_of_a_trace_are_exact_with_and_without_a_base():
    based = read([kernel(GEMM, 4400494439461.467, 0.001)])
    assert rows(based, ("start", "end")) == [[BASE_NS + 4400494439461467, BASE_NS + 4400494439461468]]
    assert based.clock == "REALTIME"
    # Without a base: microseconds from 1970. float64 cannot hold the digits; a neighbour would be 128 ns away (W14).
    events = [kernel(GEMM, "TS", 3.25), kernel(GEMM, 1682725898082230, 2)]
    text = json.dumps(document(events, baseTimeNanoseconds=None)).replace('"TS"', "1682725898082228.123")
    old = read_text(text)
    assert rows(old, ("start", "end")) == [
        [1682725898082228123, 1682725898082231373],
        [1682725898082230000, 1682725898082232000],
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
        assert rows(read_text(text), ("start",)) == [[start] for start in starts]


def in_decimals(ns: int) -> str:
    return ns_as_text(ns).decode()


def of_column(text: str) -> int | None:
    """Of a column of this text alone."""
    found, known = ns_of_texts([text.encode()])
    return int(found[0]) if known[0] else None


@given(st.integers(-(2**43) * 1000 + 1, 2**43 * 1000 - 1))
def test_every_nanosecond_below_2_to_the_43_microseconds_survives_float64(ns):
    assert ns_of_numbers([float(in_decimals(ns))])[0].tolist() == [ns]
    assert ns_of_text(in_decimals(ns).encode()) == of_column(in_decimals(ns)) == ns


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
    for written, ns, is_known in zip(texts, found.tolist(), known.tolist(), strict=True):
        alone = ns_of_text(written)
        in_range = alone is not None and abs(alone) < 2**62
        assert (is_known, ns) == (in_range, alone if in_range else 0), written


def test_decoding_refuses_numbers_of_which_it_would_lose_a_digit():
    decoder = msgspec.json.Decoder(list[Exact])
    whole = [1682725898082228, 2**62 // 1000 - 1]
    assert ns_of_numbers(decoder.decode(json.dumps(whole)))[0].tolist() == [us * 1000 for us in whole]
    for lost in (2**62 // 1000 + 1, 10**400, 1682725898082228.0):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(json.dumps([lost, 1.5]))
    found, known = ns_of_numbers(decoder.decode('[1, 2.5, null, "soon"]'))
    assert (found.tolist(), known.tolist()) == ([1000, 2500, 0, 0], [True, True, False, False])


def test_what_no_clock_shows_is_not_known_and_what_is_no_time_is_refused_at_once():
    for written in ("null", "1e400", '"1"', "1e18", "-", "1.2.3", "[1]", "9" * 16, "9" * 19, "9" * 5000):
        assert of_column(written) is None
    for written in ("null", "1e999999999", "-", "1.2.3", "NaN", "9" * 5000):
        with pytest.raises(ValueError, match="not a number of microseconds"):
            ns_of_value(written.encode())


@given(st.integers(-(10**19), 10**19))
def test_C14_a_time_goes_through_text_without_losing_a_digit(ns):
    assert ns_of_value(ns_as_text(ns)) == ns_of_value(b'"%b"' % ns_as_text(ns)) == ns


@given(st.decimals(-(10**12), 10**12, places=5), st.sampled_from(["f", "e"]))
def test_C14_a_time_in_any_form_is_read_to_the_nearest_nanosecond(value, form):
    assert abs(ns_of_value(format(value, form).encode()) - Fraction(value) * 1000) <= Fraction(1, 2)
