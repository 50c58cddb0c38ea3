"""The host's clock as a clock of marks; those of devices are in tests/gpu/test_clock.py."""

from __future__ import annotations

import pytest

from aorta.instrument.event_clock import HostClock


@pytest.mark.spec("D6")
def test_host_marks_are_their_own_readings() -> None:
    host = HostClock()
    mark = host.mark()
    assert host.read_ns(mark) == mark
    assert host.mark() >= mark
    assert host.facts() is None
