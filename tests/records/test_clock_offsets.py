"""Corrections of a clock: exact, monotone, and bounds that say what is not known."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.errors import InputError
from aorta.records.clocks import ClockSync, OffsetSample, RankClock, encode, read_clock_sync

T0 = 1_790_000_000_000_000_000
instants = st.integers(T0 - 10**13, T0 + 10**13)


@st.composite
def clocks(draw):
    """Measured twice, up to an hour apart, offset up to a minute, drift up to 1000 ppm."""
    apart = draw(st.integers(1, 3600 * 10**9))
    first = draw(st.integers(-60 * 10**9, 60 * 10**9))
    gained = draw(st.integers(-apart // 1000, apart // 1000))
    bounds = draw(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)))
    start = OffsetSample(T0, first, 2 * bounds[0], bounds[0], 32)
    end = OffsetSample(T0 + apart, first + gained, 2 * bounds[1], bounds[1], 32)
    return RankClock(1, "h", "b", start, end)


@given(clocks(), instants, instants)
@pytest.mark.spec("C14")
def test_the_order_of_two_instants_never_changes(clock, a, b):
    low, high = sorted((a, b))
    assert clock.to_reference(low) <= clock.to_reference(high)


@given(clocks(), instants)
@pytest.mark.spec("C14")
def test_the_correction_is_the_line_through_both_measurements_to_the_nanosecond(clock, t):
    drift = Fraction(clock.end.offset_ns - clock.start.offset_ns, clock.end.at_ns - clock.start.at_ns)
    exact = t - (clock.start.offset_ns + drift * (t - clock.start.at_ns))
    assert abs(clock.to_reference(t) - exact) <= Fraction(1, 2)


@given(clocks(), st.integers(0, 10**12))
@pytest.mark.spec("C12")
def test_the_bound_grows_outside_what_was_measured(clock, beyond):
    ends = (clock.start.bound_ns, clock.end.bound_ns)
    assert clock.bound_ns(clock.start.at_ns) == ends[0]
    assert clock.bound_ns(clock.end.at_ns) == ends[1]
    middle = clock.bound_ns((clock.start.at_ns + clock.end.at_ns) // 2)
    assert min(ends) <= middle <= max(ends)
    slope = Fraction(sum(ends), clock.end.at_ns - clock.start.at_ns)
    assert abs(clock.bound_ns(clock.end.at_ns + beyond) - (ends[1] + slope * beyond)) <= 1
    assert abs(clock.bound_ns(clock.start.at_ns - beyond) - (ends[0] + slope * beyond)) <= 1


@pytest.mark.spec("C12")
def test_by_hand():
    # 1 ms ahead at first, 1.8 ms ten seconds later: 80 ppm. After 5 s it is 1.4 ms ahead.
    begin, end = (
        OffsetSample(T0, 1_000_000, 200_000, 100_000, 32),
        OffsetSample(T0 + 10**10, 1_800_000, 10**5, 50_000, 32),
    )
    clock = RankClock(1, "h", "b", begin, end)
    assert (clock.drift_ppm, clock.drift_bound_ppm) == (80.0, 15.0)
    assert clock.to_reference(T0 + 5 * 10**9) == T0 + 5 * 10**9 - 1_400_000
    assert clock.bound_ns(T0 + 5 * 10**9) == 75_000
    # Ten seconds after the last measurement: 50 us and 15 ppm of 10 s.
    assert clock.bound_ns(T0 + 2 * 10**10) == 200_000


def test_a_clock_that_was_measured_once_has_an_offset_and_no_bound_and_one_that_was_not_is_not_guessed():
    first = OffsetSample(T0, 500, 20, 10, 32)
    for measured in ((first,), (None, first), (first, first)):
        clock = RankClock(1, "h", "b", *measured)
        assert (clock.to_reference(T0 + 7), clock.bound_ns(T0), clock.drift_bound_ppm) == (T0 - 493, None, None)
    assert RankClock(1, "h", "b", first).worst_bound_ns() is None
    assert RankClock(1, "h", "b", first, OffsetSample(T0 + 9, 500, 80, 40, 32)).worst_bound_ns() == 40
    with pytest.raises(ValueError, match="rank 4: its clock was not measured"):
        RankClock(4, "h", "b").to_reference(T0)


def test_the_file_comes_back_and_a_foreign_one_is_refused(tmp_path):
    path = tmp_path / "clock_sync.json"
    sync = ClockSync(1, "r", 0, 0, "CLOCK_REALTIME", "s", True, [RankClock(0, "h", "b", OffsetSample(T0, 0, 0, 0, 1))])
    path.write_bytes(encode(sync))
    assert read_clock_sync(path) == sync
    for text, words in ((b"[", "not a clock_sync.json"), (encode(sync).replace(b'"version": 1', b'"version": 9'), "9")):
        path.write_bytes(text)
        with pytest.raises(InputError, match=words):
            read_clock_sync(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_clock_sync(tmp_path / "none.json")
