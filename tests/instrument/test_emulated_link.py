"""The emulated fabric at work: handles complete when it says so, with the backend's values and errors;
groups that share a rank's link take turns on it, and all ranks agree on whose turn it is.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from aorta.config.schema import EmulatedFabric, Sharing
from aorta.instrument.emulation.emulated_link import DelayedWork, HostLinks, Link, Tally, Transfer
from aorta.instrument.emulation.network import SLOTS, Arrivals, EmulatedNetwork, SharedLinks
from aorta.instrument.timed_work import InFlight
from aorta.records.progress import MOVED_WORD
from tests.instrument.taps import SeenCollective, Tap
from tests.known_answers.again import attempted, undisturbed
from tests.runs import HANGS_S

MS = 1_000_000


def issued_now(kind: str = "allreduce", number: int | None = 0) -> InFlight:
    return InFlight(kind, "0", 0, 8, time.perf_counter_ns(), number)


def ended(transfer: Transfer) -> InFlight:
    transfer.gate.wait()
    return transfer.issued


@pytest.fixture
def arrivals(tmp_path: Path) -> tuple[Arrivals, Arrivals]:
    return Arrivals(tmp_path, "0", (0, 1), 0), Arrivals(tmp_path, "0", (0, 1), 1)


def both_arrive(arrivals: tuple[Arrivals, Arrivals], number: int, at_ns: int, later_ns: int = 0) -> None:
    arrivals[0].arrive(number, at_ns)
    arrivals[1].arrive(number, at_ns + later_ns)


@pytest.fixture
def link(arrivals: tuple[Arrivals, Arrivals]) -> Iterator[Link]:
    """Of rank 0, in a group of two."""
    link = Link(arrivals[0], Tally())
    yield link
    link.close()


def test_a_transfer_begins_with_its_last_rank_and_waits_for_the_one_before(link, arrivals):
    first, second = (Transfer(issued_now(number=number), 20 * MS) for number in (0, 1))
    begin = second.issued.issue_ns = first.issued.issue_ns
    for number, transfer in enumerate((first, second)):
        both_arrive(arrivals, number, begin, 5 * MS)
        link.put(transfer)
    assert (ended(first).start, ended(first).end) == (begin, begin + 25 * MS)
    assert (ended(second).start, ended(second).end) == (begin + 25 * MS, begin + 45 * MS)
    assert time.perf_counter_ns() >= begin + 45 * MS
    assert first.issued.end_source == "emulated"


def test_without_a_common_clock_the_backends_completion_stands_for_the_last_arrival() -> None:
    link = Link(None, Tally())
    transfer = Transfer(issued_now(), 3 * MS, has_future=True)
    link.put(transfer)
    transfer.backend_done(None)
    assert ended(transfer).end == transfer.backend_ns + 3 * MS
    link.close()


def test_without_a_future_the_last_rank_is_waited_for(link: Link, arrivals: tuple[Arrivals, Arrivals]) -> None:
    transfer, never = (Transfer(issued_now("reducescatter", number), 2 * MS) for number in (0, 1))
    arrivals[0].arrive(0, transfer.issued.issue_ns)
    link.put(transfer)
    time.sleep(0.01)
    assert not transfer.gate.done()
    late = time.perf_counter_ns()
    arrivals[1].arrive(0, late)
    assert ended(transfer).end == late + 2 * MS
    link.put(never)
    link.close()
    assert never.gate.done()  # closing waits for no rank that never came


def test_a_wait_that_outlasts_the_emulation_is_the_end(link: Link, arrivals: tuple[Arrivals, Arrivals]) -> None:
    transfer, slow = Transfer(issued_now("reducescatter"), 200 * MS), Mock()
    slow.wait.side_effect = lambda: time.sleep(0.3) or True  # a backend's handle without a future
    both_arrive(arrivals, 0, transfer.issued.issue_ns)
    link.put(transfer)
    assert DelayedWork(slow, transfer, link._tally).wait()
    slow.wait.assert_called_once()
    assert transfer.issued.end_source == "wait"
    assert transfer.issued.end - transfer.issued.issue_ns >= 300 * MS
    assert link._tally.slow == 1


# --- at the seam

LATENCY = {"inter_latency_us": 300_000.0, "inter_bandwidth_gb_per_s": 1e6, "emulated_world_size": 2}
"""An all-reduce takes 600 ms, every other collective 300 ms: gloo on a busy machine may need 30."""

CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(10), async_op=True),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(10), torch.ones(10), async_op=True),
}


@pytest.fixture
def tapped(world_of_one: None, tmp_path: Path) -> Iterator[Callable[..., Tap]]:
    """Collectives that pass a seam with an emulated fabric of which this is the only real rank."""
    taps: list[Tap] = []

    def tap(folder: Path = tmp_path, **settings: Any) -> Tap:
        taps.append(Tap(compiled=False, links=HostLinks(EmulatedNetwork(EmulatedFabric(**settings), 0, 1, folder))))
        return taps[-1]

    yield tap
    for opened in taps:
        opened.close()
        opened.interceptor.close()


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # renamed in torch 2.13, not before
@pytest.mark.parametrize("name", CALLS)
def test_every_handle_completes_at_the_emulated_end(tapped: Callable[..., Tap], name: str) -> None:
    seen = tapped(**LATENCY)
    attempted(f"{name} on the emulated fabric", lambda: completes_at_the_emulated_end(seen, name))


def completes_at_the_emulated_end(seen: Tap, name: str) -> None:
    seen.rows.clear()
    work = CALLS[name]()
    assert not work.is_completed()
    with suppress(RuntimeError):  # gloo's reduce-scatter has none, with and without the fabric
        assert not work.get_future().done()
    assert work.wait()
    (row,) = seen.hand_over()
    assert work.is_completed()
    assert time.perf_counter_ns() >= row.end == row.issue_ns + (600 if name == "all_reduce" else 300) * MS
    assert (row.start, row.end_source) == (row.issue_ns, "emulated")


def test_a_backend_that_was_slower_is_told_and_an_end_that_only_a_future_waits_for_is_progress_of_the_rank(
    tapped: Callable[..., Tap], caplog: pytest.LogCaptureFixture
) -> None:
    """DDP keeps the future alone; without the end an autopsy would take the collective for one that never completes."""
    tap = tapped()  # one rank alone costs nothing: no backend is as fast
    CALLS["all_reduce"]().get_future().wait()
    (row,) = tap.hand_over()
    assert row.end is not None
    assert row.end == tap.ring._words[MOVED_WORD]
    assert row.end_source == "future"
    tap.close()
    tap.interceptor.close()
    assert "the backend was slower than the emulated link in 1 of 1 collectives" in caplog.text


def test_a_failed_collective_fails_its_future_in_c_plus_plus_too() -> None:
    inner: torch.futures.Future[Any] = torch.futures.Future()

    class Failing:
        def get_future(self) -> Any:
            return inner.then(lambda _: 1 / 0)

    transfer = Transfer(issued_now(), 0, has_future=True)
    handed = DelayedWork(Failing(), transfer, Tally()).get_future()
    inner.set_result(None)
    transfer.gate.set_result(None)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        handed.then(lambda future: future.value()).wait()


Opened = Callable[[int], list[SharedLinks]]


@pytest.fixture
def of_ranks(tmp_path: Path) -> Iterator[Opened]:
    """The links as each of so many ranks sees them."""
    opened: list[SharedLinks] = []

    def of(world_size: int) -> list[SharedLinks]:
        opened.extend(SharedLinks(tmp_path, rank, world_size) for rank in range(world_size))
        return opened

    yield of
    for links in opened:
        links.close()


# Who asks for which number of which group of which ranks, issued when and for how long; between which times it is held.
TURNS: dict[str, list[tuple[Any, ...]]] = {
    "groups of the same ranks, asked for in other orders": [
        (0, "a", 0, (0, 1), 100, 50, (0, 150)),
        (1, "b", 0, (0, 1), 110, 30, (150, 180)),
        (1, "a", 0, (0, 1), 100, 50, (0, 150)),
        (0, "b", 0, (0, 1), 110, 30, (150, 180)),
    ],
    "the links of all its ranks and no others": [
        (0, "a", 0, (0, 1), 0, 100, (0, 100)),
        (2, "b", 0, (2, 3), 0, 40, (0, 40)),
        (3, "c", 0, (1, 3), 0, 10, (40, 110)),
        (1, "c", 0, (1, 3), 0, 10, (100, 110)),
    ],
    "without a number": [(0, "a", None, (0, 1), 0, 100, (0, 100)), (1, "a", None, (0, 1), 0, 100, (0, 100))],
    "a slot that is used again": [
        (0, "a", 0, (0, 1), 0, 100, (0, 100)),
        (0, "a", SLOTS, (0, 1), 0, 100, (100, 200)),
        (1, "a", SLOTS, (0, 1), 0, 100, (100, 200)),
    ],
}


@pytest.mark.parametrize("asked", TURNS.values(), ids=TURNS)
def test_links_are_held_in_turns(of_ranks: Opened, asked: list[tuple[Any, ...]]) -> None:
    links = of_ranks(4)
    for rank, group, number, ranks, issued_ns, length_ns, held in asked:
        assert links[rank].hold(group, number, ranks, issued_ns, length_ns, between_nodes=True) == held


def test_links_inside_a_node_are_others_than_those_between_and_without_a_common_host_the_own_is_held(of_ranks):
    (alone,), apart = of_ranks(1), SharedLinks(None, 1, 2)
    assert alone.hold("a", 0, (0,), 0, 100, between_nodes=True).end_ns == 100
    assert alone.hold("b", 0, (0,), 0, 100, between_nodes=False) == (0, 100)
    assert apart.hold("a", 0, (0, 1), 0, 100, between_nodes=True) == (0, 100)
    assert apart.hold("b", 0, (0, 1), 0, 100, between_nodes=True) == (100, 200)


def test_a_slower_backend_prolongs_its_own_rank(of_ranks: Opened) -> None:
    zero, one = of_ranks(2)
    zero.hold("a", 0, (0, 1), 0, 100, between_nodes=True)
    one.prolong(170, between_nodes=True)
    one.prolong(120, between_nodes=True)  # earlier than it was known to be: nothing changes
    assert zero.hold("b", 0, (0, 1), 0, 10, between_nodes=True) == (100, 180)


def _hold_all(folder: str, rank: int, results: Any) -> None:
    links, found = SharedLinks(Path(folder), rank, 2), {}
    groups = ("a", "b") if rank == 0 else ("b", "a")
    for number in range(200):
        for group in groups:
            found[group, number] = links.hold(group, number, (0, 1), 0, 10, between_nodes=True).end_ns
    links.close()
    results.put((rank, found))


def test_processes_that_ask_at_once_in_other_orders_agree_and_no_time_is_given_twice(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_hold_all, args=(str(tmp_path), rank, results)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=HANGS_S) for _ in ranks)
    for rank in ranks:
        rank.join(HANGS_S)
    assert found[0] == found[1]
    assert sorted(found[0].values()) == [10 * (place + 1) for place in range(400)]


def test_a_rank_whose_backend_was_slow_is_not_told_an_end_before_its_link_was_free(of_ranks, arrivals):
    """The other rank decided when it could not know."""
    zero, one = of_ranks(2)
    now = time.perf_counter_ns()
    link = Link(arrivals[1], Tally(), one, spans_nodes=True)
    slow, behind = (
        Transfer(InFlight("allreduce", "0", number, 8, now, number), MS, (0, 1), has_future=True) for number in (0, 1)
    )
    for number in (0, 1):
        both_arrive(arrivals, number, now)
        zero.hold("0", number, (0, 1), now, MS, between_nodes=True)
    for transfer, backend_ns in ((slow, now + 20 * MS), (behind, now + 1)):
        transfer.backend_ns = backend_ns
        transfer.backend.set()
        link.put(transfer)
    behind.gate.wait()
    link.close()
    assert (slow.issued.end, slow.issued.end_source) == (now + 20 * MS, "future")
    assert (behind.issued.start, behind.issued.end) == (now + 20 * MS, now + 21 * MS)
    assert zero.hold("1", 0, (0, 1), now, 0, between_nodes=True).end_ns == now + 21 * MS


@pytest.mark.parametrize("sharing", list(Sharing))
def test_at_the_seam_two_groups_run_at_once_or_in_turns(tapped, tmp_path_factory, sharing):
    """An all-reduce takes 600 ms; both groups issue theirs within a few, and gloo needs less unless it is held up."""

    def of_two_groups(folder: Path) -> list[SeenCollective]:
        """The rows of one all-reduce of each, in the order of their ends."""
        tap = tapped(folder, sharing=sharing, **LATENCY)
        other = dist.new_group([0])
        works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in (None, other)]
        for work in works:
            work.wait()
        tap.close()
        return sorted(tap.hand_over(), key=lambda row: int(row.end or 0))

    def holds(rows: list[SeenCollective]) -> None:
        first, second = rows
        assert first.group != second.group
        assert int(first.end or 0) == first.issue_ns + 600 * MS
        begin = first.end if sharing is Sharing.link else second.issue_ns
        assert (second.start, second.end) == (begin, int(begin or 0) + 600 * MS)

    holds(undisturbed(tmp_path_factory, f"seam_{sharing.value}", of_two_groups, holds))
