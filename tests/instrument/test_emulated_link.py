"""The emulated fabric at work: handles complete when it says so, with the backend's values and errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.config.schema import EmulatedFabric
from aorta.instrument.emulation.emulated_link import DelayedWork, HostLinks, Link, Tally, Transfer
from aorta.instrument.emulation.network import Arrivals, EmulatedNetwork
from aorta.instrument.in_flight import InFlight
from tests.instrument.taps import Tap
from tests.known_answers.again import attempted

MS = 1_000_000


def issued_now(kind: str = "allreduce", number: int | None = 0) -> InFlight:
    return InFlight(kind, "0", 0, 8, "float32", time.perf_counter_ns(), number)


def ended(transfer: Transfer) -> InFlight:
    transfer.gate.wait()
    return transfer.issued


@pytest.fixture
def arrivals(tmp_path: Path) -> tuple[Arrivals, Arrivals]:
    return Arrivals(tmp_path, "0", (0, 1), 0), Arrivals(tmp_path, "0", (0, 1), 1)


def test_a_transfer_begins_with_its_last_rank_and_waits_for_the_one_before(
    arrivals: tuple[Arrivals, Arrivals],
) -> None:
    link = Link(arrivals[0], Tally())
    first, second = (Transfer(issued_now(number=number), 20 * MS) for number in (0, 1))
    second.issued.issue_ns = first.issued.issue_ns
    begin = first.issued.issue_ns
    for number, transfer in enumerate((first, second)):
        arrivals[0].arrive(number, begin)
        arrivals[1].arrive(number, begin + 5 * MS)
        link.put(transfer)
    assert (ended(first).start, ended(first).end) == (begin, begin + 25 * MS)
    assert (ended(second).start, ended(second).end) == (begin + 25 * MS, begin + 45 * MS)
    assert time.perf_counter_ns() >= begin + 45 * MS
    assert first.issued.end_source == "emulated"
    link.close()


def test_a_backend_that_is_slower_keeps_its_own_end(arrivals: tuple[Arrivals, Arrivals]) -> None:
    tally = Tally()
    link = Link(arrivals[0], tally)
    transfer = Transfer(issued_now(), 1000, has_future=True)
    for table in arrivals:
        table.arrive(0, transfer.issued.issue_ns)
    link.put(transfer)
    assert not transfer.gate.done()
    time.sleep(0.01)
    transfer.backend_done(None)
    assert ended(transfer).end == transfer.backend_ns
    assert transfer.issued.end_source == "future"
    assert (tally.carried, tally.slow) == (1, 1)
    link.close()


def test_without_a_common_clock_the_backends_completion_stands_for_the_last_arrival() -> None:
    link = Link(None, Tally())
    transfer = Transfer(issued_now(), 3 * MS, has_future=True)
    link.put(transfer)
    transfer.backend_done(None)
    assert ended(transfer).end == transfer.backend_ns + 3 * MS
    link.close()


def test_without_a_future_the_last_rank_is_waited_for(arrivals: tuple[Arrivals, Arrivals]) -> None:
    link = Link(arrivals[0], Tally())
    transfer = Transfer(issued_now("reducescatter"), 2 * MS)
    arrivals[0].arrive(0, transfer.issued.issue_ns)
    link.put(transfer)
    time.sleep(0.01)
    assert not transfer.gate.done()
    late = time.perf_counter_ns()
    arrivals[1].arrive(0, late)
    assert ended(transfer).end == late + 2 * MS
    link.close()


def test_closing_waits_for_no_rank_that_never_came(arrivals: tuple[Arrivals, Arrivals]) -> None:
    link = Link(arrivals[0], Tally())
    transfer = Transfer(issued_now("reducescatter"), 1)
    link.put(transfer)
    link.close()
    assert transfer.gate.done()


class SlowWork:
    """A backend's handle without a future, whose wait takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.waits = seconds, 0

    def wait(self) -> bool:
        self.waits += 1
        time.sleep(self.seconds)
        return True


def test_a_wait_that_outlasts_the_emulation_is_the_end(arrivals: tuple[Arrivals, Arrivals]) -> None:
    tally = Tally()
    link = Link(arrivals[0], tally)
    transfer = Transfer(issued_now("reducescatter"), 200 * MS)
    for table in arrivals:
        table.arrive(0, transfer.issued.issue_ns)
    link.put(transfer)
    slow = SlowWork(0.3)
    assert DelayedWork(slow, transfer, tally).wait()  # type: ignore[arg-type]
    assert slow.waits == 1
    assert transfer.issued.end_source == "wait"
    assert transfer.issued.end - transfer.issued.issue_ns >= 300 * MS
    assert tally.slow == 1
    link.close()


# --- at the seam

LATENCY = {"inter_latency_us": 300_000.0, "inter_bandwidth_gb_per_s": 1e6, "emulated_world_size": 2}
"""An all-reduce takes 600 ms, every other collective 300 ms: gloo on a busy machine may need 30."""

CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(10), async_op=True),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(10), torch.ones(10), async_op=True),
}


@pytest.fixture
def seen(world_of_one: None, tmp_path: Path) -> Any:
    """Rows of collectives that pass a seam with an emulated fabric of two ranks, of which this is the only one."""
    tap = Tap(compiled=False, links=HostLinks(EmulatedNetwork(EmulatedFabric(**LATENCY), 0, 1, tmp_path)))
    yield tap.rows
    tap.close()
    tap.interceptor.close()


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # renamed in torch 2.13, not before
@pytest.mark.parametrize("name", CALLS)
def test_every_handle_completes_at_the_emulated_end(seen: list[InFlight], name: str) -> None:
    attempted(f"{name} on the emulated fabric", lambda: completes_at_the_emulated_end(seen, name))


def completes_at_the_emulated_end(seen: list[InFlight], name: str) -> None:
    seen.clear()
    work = CALLS[name]()
    assert not work.is_completed()
    with suppress(RuntimeError):  # gloo's reduce-scatter has none, with and without the fabric
        assert not work.get_future().done()
    assert work.wait()
    (row,) = seen
    assert work.is_completed()
    assert time.perf_counter_ns() >= row.end == row.issue_ns + (600 if name == "all_reduce" else 300) * MS
    assert (row.start, row.end_source) == (row.issue_ns, "emulated")


def test_a_failed_collective_fails_its_future_in_c_plus_plus_too() -> None:
    inner: torch.futures.Future[Any] = torch.futures.Future()

    class Failing:
        def get_future(self) -> Any:
            return inner.then(lambda _: 1 / 0)

    transfer = Transfer(issued_now(), 0, has_future=True)
    handed = DelayedWork(Failing(), transfer, Tally()).get_future()  # type: ignore[arg-type]
    inner.set_result(None)
    transfer.gate.set_result(None)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        handed.then(lambda future: future.value()).wait()


def test_the_run_says_when_the_backend_was_slower(
    world_of_one: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # One rank alone costs nothing: no backend is as fast.
    tap = Tap(compiled=False, links=HostLinks(EmulatedNetwork(EmulatedFabric(), 0, 1, tmp_path)))
    dist.all_reduce(torch.ones(10))
    tap.close()
    tap.interceptor.close()
    assert tap.rows[0].end_source == "future"
    assert "the backend was slower than the emulation in 1 of 1 collectives" in caplog.text
