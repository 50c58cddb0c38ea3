"""Events out of text, however it is laid out and cut into chunks; broken text is named, never taken for whole."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.load import chrome_json
from aorta.analysis.load.chrome_json import NoEventArray, RawEvents
from aorta.errors import InputError
from tests.analysis.merge.traces import text, x

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
events = st.lists(st.dictionaries(st.text(max_size=5), json_values, max_size=4), max_size=6)


def scan(body: bytes, size: int = 1 << 20):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chrome_json, "BLOCK", size)
        return read_all(body)


class Short(io.BytesIO):
    """A stream that gives less than it is asked for."""

    def readinto(self, buffer):
        return super().readinto(memoryview(buffer)[:37])


def read_all(body: bytes):
    scanner = RawEvents(io.BufferedReader(Short(body)), "t.json")
    found = [{key: json.loads(bytes(value)) for key, value in event.items()} for event in scanner.events()]
    rest = {key: json.loads(bytes(value)) for key, value in (scanner.head | scanner.tail).items()}
    return found, rest


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


def test_a_list_alone_is_a_trace():
    assert scan(b' [ {"a": 1}, {"b": "},{"} ] ') == ([{"a": 1}, {"b": "},{"}], {})
    assert scan(b"[]")[0] == []


def test_an_event_full_of_what_looks_like_its_end():
    event = {"args": {"inner": [{"n": n} for n in range(1000)], "text": '"},{'}, "name": "x"}
    assert scan(json.dumps({"traceEvents": [event, event]}).encode(), 512)[0] == [event, event]


def test_the_digits_of_a_time_are_kept():
    (event,) = RawEvents(io.BufferedReader(io.BytesIO(b'[{"ts": 4400494438302.456}]')), "t.json").events()
    assert bytes(event["ts"]) == b"4400494438302.456"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "cut off"),
        (b"x", "expected { or"),
        (b'{"a": 1}', 'not a trace: it has no "traceEvents"'),
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
    with pytest.raises(InputError, match=rf"^t\.json: .*({words})"):
        scan(body, size)


def test_json_that_is_no_trace_is_told_apart_from_a_broken_trace():
    with pytest.raises(NoEventArray):
        scan(b'{"a": {"traceEvents": []}}')
    with pytest.raises(InputError) as caught:
        scan(b'{"traceEvents": ')
    assert not isinstance(caught.value, NoEventArray)


def test_a_value_that_never_ends_is_not_held(monkeypatch):
    monkeypatch.setattr(chrome_json, "LIMIT", 1 << 16)
    for start in (b'{"x": "', b'{"traceEvents": [{"x": "', b'{"traceEvents": [], "x": "'):
        with pytest.raises(InputError, match=r"t\.json: .*(no Chrome trace|bounded memory|behind the events)"):
            scan(start + b"a" * (1 << 18), 4096)
    with pytest.raises(InputError, match=r"t\.json: .*no Chrome trace"):
        scan(b" " * (1 << 18) + b"[{}]", 4096)
