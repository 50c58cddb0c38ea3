"""When the training thread of a CPU run was blocked on a collective: in the call, in the wait, or not at all.

Time is set by hand: the host's clock of the interceptor stands still unless the backend is at work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.instrument import cpu_interceptor, in_flight
from aorta.instrument.cpu_interceptor import CpuInterceptor
from aorta.instrument.event_clock import HostClock
from aorta.instrument.in_flight import InFlight
from tests.instrument.taps import Seen

pytestmark = pytest.mark.usefixtures("world_of_one")
US = 1000


class SetTime:
    """In the place of `time`."""

    def __init__(self) -> None:
        self.now_ns = 10**9

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def pass_us(self, length_us: float) -> None:
        self.now_ns += round(length_us * US)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetTime:
    clock = SetTime()
    for module in (cpu_interceptor, in_flight):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Tap(Seen):
    """An interceptor, what it saw, and the stalls, in microseconds from the issue of the first collective."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        super().__init__()
        self._tap = CpuInterceptor(HostClock(), {}, self, shortest_call_ns=100 * US)  # type: ignore[arg-type]
        self._member = self._tap._member(world)

    def issue(self, call: Callable[[], dist._Work | None]) -> dist._Work | None:
        """One all-reduce whose backend's call gives back `call`'s handle; gives back the caller's."""

        def original() -> Any:
            self._backends = call()  # a handle made in Python has to outlive its boxed half
            return None if self._backends is None else self._backends.boxed()

        issued = InFlight("allreduce", self._member.name, 0, 4, "float32", cpu_interceptor.time.perf_counter_ns())
        self.rows.append(issued)
        boxed = self._tap._on_host("allreduce_", issued, original, early=False)
        return None if boxed is None else dist._Work.unbox(boxed)

    @property
    def stalls_us(self) -> list[tuple[float, float]]:
        return self._us([(wait.begin, wait.end) for wait in self.waits if wait.blocked])

    @property
    def calls_us(self) -> list[tuple[float, float]]:
        """Calls of the backend that may be stalls: which are depends on the host's cut-off (test_stall_cutoff)."""
        return self._us(self.calls)

    def _us(self, intervals: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        zero = self.rows[0].issue_ns
        return [((begin - zero) / US, (end - zero) / US) for begin, end in intervals]


@pytest.fixture
def tap(clock: SetTime) -> Tap:
    group = dist.group.WORLD
    assert group is not None
    return Tap(group)


def ended() -> dist._Work:
    """The handle of a collective of one rank, which has ended."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()
    return work


class Works(dist._Work):
    """A handle of the backend's whose wait takes some time; it tells nobody before that it ended."""

    def __init__(self, clock: SetTime, wait_us: float, fails: bool = False) -> None:
        super().__init__()
        self._clock, self._wait_us, self._fails = clock, wait_us, fails

    def wait(self, _timeout: Any = None) -> bool:
        self._clock.pass_us(self._wait_us)
        if self._fails:
            raise RuntimeError("the peer is gone")
        return True

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> Any:
        raise RuntimeError("no future")


@pytest.mark.parametrize(("call_us", "told"), [(0, False), (95, False), (100, False), (101, True), (5000, True)])
def test_a_call_longer_than_the_shortest_is_told_from_its_issue(
    clock: SetTime, tap: Tap, call_us: float, told: bool
) -> None:
    def call() -> dist._Work:
        clock.pass_us(call_us)
        return ended()

    tap.issue(call)
    assert tap.calls_us == ([(0, call_us)] if told else [])
    assert tap.stalls_us == []


def test_a_wait_is_a_stall_as_long_as_it_takes_and_the_end_where_nobody_else_saw_it(clock: SetTime, tap: Tap) -> None:
    handle = tap.issue(lambda: Works(clock, 700))
    clock.pass_us(100)
    assert handle is not None
    assert handle.wait()
    assert tap.stalls_us == [(100, 800)]
    assert (tap.rows[0].end, tap.rows[0].end_source) == (tap.rows[0].issue_ns + 800 * US, "wait")


def test_a_wait_for_what_has_ended_is_no_stall(clock: SetTime, tap: Tap) -> None:
    handle = tap.issue(ended)
    while not tap.rows[0].look():  # gloo's thread stamps the end a moment later
        pass
    clock.pass_us(100)
    assert handle is not None
    assert handle.wait()
    assert tap.stalls_us == []


def test_a_wait_that_fails_is_a_stall_and_no_end(clock: SetTime, tap: Tap) -> None:
    handle = tap.issue(lambda: Works(clock, 700, fails=True))
    assert handle is not None
    with pytest.raises(RuntimeError, match="the peer is gone"):
        handle.wait()
    assert tap.stalls_us == [(0, 700)]
    assert tap.rows[0].end is None


def test_what_leaves_no_handle_is_over_when_its_call_returns(clock: SetTime, tap: Tap) -> None:
    def call() -> None:
        clock.pass_us(900)

    assert tap.issue(call) is None
    assert tap.calls_us == [(0, 900)]
    assert tap.rows[0].end == tap.rows[0].issue_ns + 900 * US
