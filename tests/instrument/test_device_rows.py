"""Lines of a device's rows, many steps at once, are those that the rows of each step give by themselves (W28, R3)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.records import ring_steps
from aorta.records.ring_steps import RingSteps
from tests.instrument.device_rows_by_hand import DeviceByHand
from tests.instrument.witness import witnessed

LENGTH_NS = 400


@st.composite
def drawn_steps(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Steps one behind another; the host is ahead of the device by more or less, and all lies in or round each step."""
    steps, begin_ns = [], 1_000
    for _ in range(draw(st.integers(1, 4))):
        end_ns = begin_ns + draw(st.integers(1, LENGTH_NS))
        ahead_ns = draw(st.sampled_from((1, 20, 900)))

        def mark(low: int = begin_ns - 5, high: int = end_ns + 60, ahead_ns: int = ahead_ns) -> tuple[int, int]:
            at_ns = draw(st.integers(low, high))
            return at_ns, at_ns - draw(st.integers(0, ahead_ns))

        def span(low: int = begin_ns - 5, high: int = end_ns + 60) -> tuple[tuple[int, int], tuple[int, int]]:
            first = mark(low, high)
            return first, mark(first[0], max(first[0], high))

        def some(most: int = 3) -> range:
            return range(draw(st.integers(0, most)))

        steps.append(
            {
                "window": (begin_ns, end_ns),
                "computed": [span() for _ in some(1)],
                "passes": [span() for _ in some()],
                "collectives": [
                    (
                        draw(st.integers(0, 3)),
                        draw(st.none() | st.integers(0, 2)),
                        *(span() if draw(st.integers(0, 9)) else (mark(), None)),
                        draw(st.booleans()),
                    )
                    for _ in some()
                ],
                "waits": [(*span(), draw(st.booleans())) for _ in some(2)],
                "gaps": [span() for _ in some(2)],
                "tails": [span() for _ in some(1)],
                "stalls": [span() for _ in some(1)],
                "copies": [
                    (
                        *(span() if draw(st.integers(0, 9)) else (None, None)),
                        draw(st.integers(0, 3)),
                        draw(st.booleans()),
                    )
                    for _ in some(2)
                ],
                "aux": [("optimizer", *span()) for _ in some(1)],
                "stages": [((begin_ns, begin_ns - 1), mark(begin_ns + 1, end_ns)) for _ in some(1)],
                "captured": draw(st.sampled_from((0, 0, 0, 2))),
            }
        )
        begin_ns = end_ns + draw(st.integers(0, 20))
    return steps


@pytest.mark.parametrize("together", [1, 2, 64])
@given(steps=drawn_steps())
def test_lines_of_many_steps_are_those_of_each(together: int, steps: list[dict[str, Any]]) -> None:
    hand = DeviceByHand()
    for one in steps:
        hand.add(one)
    encode = msgspec.json.Encoder().encode
    most, ring_steps.MOST = ring_steps.MOST, together  # type: ignore[misc]
    try:
        lines = RingSteps(hand.ring).take(late=True)
    finally:
        ring_steps.MOST = most  # type: ignore[misc]
    for line, witness in zip(lines, witnessed(hand.ring), strict=True):
        assert encode(line) == encode(witness)
