"""Every hypothesis strategy of the test suite, in one file.

Intervals on a range small enough to enumerate, and any line of the record. Must not: choose how many examples are drawn
(`tests/conftest.py` does).
"""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from aorta.records.schema import Anchor, Calibration, Footer, Header, Step
from aorta.redaction import redact
from aorta.timeline.classes import KINDS

RANGE = range(-3, 41)
"""Nanoseconds in which small intervals lie: few enough to hold as a set, enough to abut, nest and coincide."""

BASES = (0, -17, 1_800_000_000_000_000_001)
"""Added to small intervals. The last is the wall clock of our days: float64 would round it by up to 128 ns (W14)."""

intervals = st.tuples(st.sampled_from(RANGE), st.sampled_from(RANGE)).map(lambda pair: (min(pair), max(pair)))
interval_lists = st.lists(intervals, max_size=8)
collectives = st.dictionaries(st.sampled_from(KINDS), interval_lists, max_size=4)
bases = st.sampled_from(BASES)
stream_rows = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 30), st.integers(1, 8)), min_size=1, max_size=12
)
"""Rows (device, stream, start, length) that often collide."""


def shifted(spans: list[tuple[int, int]], base: int) -> list[tuple[int, int]]:
    """Intervals, moved by one of `BASES`."""
    return [(start + base, end + base) for start, end in spans]


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type used in `aorta.records.schema`, within what it allows (integers of 63 bits, finite floats)."""
    simple = {
        bool: st.booleans(),
        int: st.integers(1 - 2**62, 2**62 - 1),
        float: st.floats(-1e300, 1e300),
        str: st.text(max_size=12).filter(lambda text: redact(text) == text),  # others are not written as they are
        type(None): st.none(),
        msgspec.UnsetType: st.just(msgspec.UNSET),
    }
    if hint in simple:
        return simple[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.builds(
            hint, **{name: of_type(field) for name, field in get_type_hints(hint, include_extras=True).items()}
        )
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        base, limits = arguments
        if base is float:
            return st.floats(limits.ge, limits.le)
        least = limits.gt + 1 if limits.ge is None else limits.ge
        return st.integers(least, limits.lt - 1 if limits.le is None else limits.le)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(of_type, arguments))
    if origin is dict:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=3)
    if origin is tuple and Ellipsis not in arguments:
        return st.tuples(*map(of_type, arguments))
    if origin in (list, tuple):
        return st.lists(of_type(arguments[0]), max_size=3).map(origin)
    raise NotImplementedError(f"no strategy for {hint!r}: add one to {__name__}")


headers, steps, anchors, calibrations, footers = (of_type(line) for line in (Header, Step, Anchor, Calibration, Footer))
