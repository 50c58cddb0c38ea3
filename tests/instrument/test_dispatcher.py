"""Interception is transparent, sees every kind, and is gone when closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from aorta.instrument.dispatcher import Coalescing, DispatcherHook, all_groups, issued_by
from aorta.instrument.operators import OPERATORS
from aorta.instrument.timed_work import KeptAlive, TimedWork
from aorta.records import ring_file as rf
from aorta.records.schema import STALL_CUTOFF_NS
from tests.instrument.taps import CPU, Answer, SeenCollective, Tap, answering
from tests.runs import HANGS_S, until

pytestmark = [
    pytest.mark.usefixtures("world_of_one"),
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),  # renamed in torch 2.13, not before
]
GLOO_LETS_GO_S = 0.005
THREADS, CALLS_OF_EACH = 4, 50


@pytest.fixture(params=["python", "native"])
def watched(world_of_one: None, request: pytest.FixtureRequest) -> Iterator[Tap]:
    """Both ways to look, which must tell the same."""
    watched = Tap(compiled=request.param == "native")
    yield watched
    watched.close()
    watched.interceptor.close()


def seen(watched: Tap) -> list[SeenCollective]:
    """Its rows so far, with the ends that are known."""
    rows = watched.hand_over()
    for row in rows:
        row.look()
    return rows


CALLS: list[tuple[Callable[[], Any], str, int]] = [
    (lambda: dist.all_reduce(torch.ones(10)), "allreduce", 40),
    (lambda: dist.all_gather([torch.empty(10)], torch.ones(10)), "allgather", 40),
    (lambda: dist.reduce_scatter_tensor(torch.empty(10), torch.ones(10)), "reducescatter", 40),
    (dist.barrier, "barrier", 0),
]
"""One tensor, a list, what has no future, and no tensor; `every_collective` has every form, on two ranks."""


@pytest.mark.parametrize(("call", "kind", "size"), CALLS, ids=[kind for _, kind, _ in CALLS])
def test_each_kind_is_seen_with_its_bytes(watched: Tap, call: Callable[[], Any], kind: str, size: int) -> None:
    before, begin_ns = issued_by(all_groups()[0]), time.perf_counter_ns()
    call()
    after, end_ns = issued_by(all_groups()[0]), time.perf_counter_ns()
    (row,) = seen(watched)
    assert (row.kind, row.bytes) == (kind, size)
    assert after == before + 1
    assert begin_ns <= row.issue_ns <= row.end <= end_ns
    assert all(begin_ns <= low <= high <= end_ns for low, high in watched.stalls)
    assert watched.groups[row.group].ranks == (0,)
    assert watched.groups[row.group].lanes >= 1


def test_values_and_handles_are_the_backends(watched: Tap) -> None:
    tensor = torch.arange(4.0)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert torch.equal(tensor, torch.arange(4.0))
    value = dist.all_reduce(tensor, async_op=True).get_future().wait()
    assert torch.equal(value[0], torch.arange(4.0))
    assert [row.seq for row in seen(watched)] == [0, 1]


def test_exceptions_are_the_backends(watched: Tap) -> None:
    def wrong() -> None:
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(2))

    with pytest.raises(Exception) as intercepted:  # noqa: PT011  whatever it is, it must not change
        wrong()
    watched.close()
    with pytest.raises(type(intercepted.value)) as plain:
        wrong()
    assert str(plain.value).splitlines()[0] == str(intercepted.value).splitlines()[0]


def test_a_wait_that_times_out_is_a_stall_and_no_end(watched: Tap) -> None:
    with answering(backend := Answer(fails=1)):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait()
        watched.hand_over()
        assert not watched.rows[0].look()
        assert watched.stalls[-1][0] > watched.rows[0].issue_ns
        work.wait()
        work.wait()
    assert backend.waits == 2
    assert watched.rows[0].look()
    assert watched.rows[0].end_source == "wait"


def test_a_wait_for_what_has_ended_is_no_stall(watched: Tap) -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    until(lambda: any(row.look() for row in seen(watched)))  # gloo's thread stamps the end a moment later
    work.wait()
    watched.hand_over()
    assert watched.stalls == []


def test_without_a_future_the_wait_says_when_it_ended(watched: Tap) -> None:
    for _ in range(2):  # the second time it is known that there is none
        gathered = torch.empty(4)
        work = dist.reduce_scatter_tensor(gathered, torch.arange(4.0), async_op=True)
        watched.hand_over()
        assert watched.rows[-1].look() is False
        work.wait()
        assert watched.rows[-1].look()
        assert watched.rows[-1].end_source == "wait"
        assert gathered.tolist() == [0, 1, 2, 3]


def test_the_backend_is_waited_for_once(watched: Tap) -> None:
    """gloo's reduce-scatter copies its result out inside its wait (R6): a second one would undo what came between."""
    reduced = torch.empty(4)
    work = dist.reduce_scatter_tensor(reduced, torch.arange(4.0), async_op=True)
    work.wait()
    reduced.zero_()
    work.wait()
    work.synchronize()
    assert reduced.tolist() == [0, 0, 0, 0]


@pytest.mark.spec("D7")
def test_closing_puts_torch_back_and_numbers_go_on_where_they_were(watched: Tap) -> None:
    dist.all_reduce(torch.ones(2))
    watched.hand_over()
    assert len(watched.hand_over()) == 1  # once
    watched.close()
    dist.all_reduce(torch.ones(2))
    assert len(watched.hand_over()) == 1
    again = watched.interceptor.open(CPU, lambda: None)
    dist.all_reduce(torch.ones(2, dtype=torch.bfloat16))
    watched.hand_over()
    watched.end()
    dist.all_reduce(torch.ones(2))  # between two steps it is counted, and not noted down
    watched.begin()
    dist.all_reduce(torch.ones(2))
    again.close()
    rows = [(row.seq, row.number, row.bytes, row.dtype) for row in watched.hand_over()]
    assert rows == [(0, 0, 8, "float32"), (1, 1, 4, "bfloat16"), (3, 3, 8, "float32")]


def test_many_threads_at_once(watched: Tap) -> None:
    """Each with a group of its own, as a backward pass beside a checkpoint's thread would have."""
    groups = [dist.new_group([0]) for _ in range(THREADS)]

    def collectives(group: Any) -> None:
        for _ in range(CALLS_OF_EACH):
            dist.all_reduce(torch.ones(2), group=group)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(collectives, group) for group in groups]:
            future.result()
    watched.hand_over()
    assert len(watched.rows) == THREADS * CALLS_OF_EACH
    for group in groups:
        assert [row.seq for row in watched.rows if row.group == group.group_name] == list(range(CALLS_OF_EACH))
    assert [row.issue_ns for row in watched.rows] == sorted(row.issue_ns for row in watched.rows)


def test_a_long_call_is_no_wait_and_those_of_other_threads_hold_up_no_computation(watched: Tap) -> None:
    def issue() -> Any:
        return dist.all_reduce(torch.ones(2), async_op=True)

    with answering(Answer(), lambda: time.sleep(2 * STALL_CUTOFF_NS / 1e9)):
        thread = threading.Thread(target=lambda: issue().wait())
        thread.start()
        thread.join()
        (row,) = seen(watched)
        assert row.end_source == "wait"
        assert (watched.taken.calls, watched.taken.waits) == ([], [])
        issue()
    watched.hand_over()
    assert [end - begin >= 2 * STALL_CUTOFF_NS for begin, end in watched.taken.calls] == [True]
    assert watched.taken.waits == []


def test_backends_may_be_ahead_by_what_is_issued_while_they_are_asked(watched: Tap) -> None:
    dist.all_reduce(torch.ones(2))
    watched.meanwhile = partial(dist.all_reduce, torch.ones(2))
    watched.begin()
    watched.end()
    rows, _ = watched.ring.rows_since(0)
    (summary,) = rows[rows["kind"] == rf.SUMMARY]
    assert (summary["a2"], summary["b2"]) == (1, 1)


def test_what_is_dropped_is_counted_and_in_no_row(watched: Tap) -> None:
    interceptor = watched.interceptor
    for _ in range(2):
        dist.all_reduce(torch.ones(2))
    assert interceptor.abandon() == 2
    dist.all_reduce(torch.ones(2))  # while no step is open
    assert watched.begin() == 0
    dist.all_reduce(torch.ones(2))
    watched.end()
    dist.all_reduce(torch.ones(2))
    assert watched.begin(rf.CONTINUES) == 0
    assert watched.begin() == 1
    watched.begin()
    dist.all_reduce(torch.ones(2))
    assert [row.seq for row in seen(watched)] == [5]


def test_a_collective_of_a_backward_pass_that_nobody_watches_is_told_apart(watched: Tap) -> None:
    def reduced(gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient)
        return gradient

    layer = torch.nn.Linear(2, 2)
    for watching in (False, True):
        if watching:
            watched.interceptor.ranges.watch_backward(layer)
        x = torch.ones(1, 2, requires_grad=True)
        out = layer(x * 1)
        x.register_hook(reduced)
        dist.all_reduce(torch.ones(2))
        out.sum().backward()
        told = watched.end()
        watched.begin()
        assert (len(told.collectives), told.unwatched) == (2, 0 if watching else 1)


def test_what_is_being_captured_is_left_to_torch() -> None:
    captured = []
    capturing = DispatcherHook(
        OPERATORS, CPU, lambda name, args, original: pytest.fail(name), lambda: captured.append(1), lambda: True
    )
    try:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        dist.barrier()
    finally:
        capturing.close()
    assert len(captured) == 2


class _InFlight(dist._Work):
    def is_completed(self) -> bool:
        return False


def _handle(kept: KeptAlive, tensor: torch.Tensor, **how: Any) -> TimedWork:
    """Of a collective that has completed."""
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return TimedWork(work, lambda inner: inner(), kept, **how)


@pytest.mark.parametrize("waiters", [1, 3])
def test_a_handle_is_kept_until_the_last_of_its_waiters_has_waited(waiters: int) -> None:
    """A functional collective of several tensors: each tensor's first use waits for the one handle."""
    kept = KeptAlive()
    timed = _handle(kept, torch.ones(1), waiters=waiters)
    assert [len(kept), *(timed.wait() and len(kept) for _ in range(waiters))] == [1] * waiters + [0]


def test_beyond_the_capacity_the_oldest_that_have_completed_go_and_no_others() -> None:
    completed, in_flight = KeptAlive(capacity=2), KeptAlive(capacity=1)
    works = [_InFlight() for _ in range(9)]
    for work in works:
        _handle(completed, torch.ones(1), in_place=True)
        TimedWork(work, lambda inner: inner(), in_flight, in_place=True)
    assert (len(completed), len(in_flight)) == (3, 9)


def test_a_handle_that_nobody_in_python_has_lets_go_of_its_outputs_when_it_has_completed() -> None:
    kept = KeptAlive()
    tensor = torch.ones(1)
    before = tensor._use_count()
    _handle(kept, tensor, in_place=True)
    time.sleep(GLOO_LETS_GO_S)
    held_by_one = tensor._use_count() - before
    assert held_by_one > 0
    mine = _handle(kept, tensor, in_place=True)
    deadline = time.monotonic() + HANGS_S
    while tensor._use_count() - before > held_by_one and time.monotonic() < deadline:
        mine = _handle(kept, tensor, in_place=True)  # looks at those before it
        time.sleep(GLOO_LETS_GO_S)  # its thread may hold on to a collective a little longer than until it has completed
    assert tensor._use_count() - before <= held_by_one
    for _ in range(3):
        _handle(kept, tensor, in_place=True)
    assert torch.equal(mine.result()[0], tensor)  # somebody has it: nothing of it is gone


def test_a_handle_whose_wait_moves_data_keeps_the_backends_work() -> None:
    kept = KeptAlive()
    for _ in range(2):
        _handle(kept, torch.ones(1), in_place=False)
    oldest = next(iter(kept._completed.values()))
    assert oldest.result()[0].numel() == 1
    assert oldest.wait()


def test_a_handle_answers_all_that_the_backends_work_answers() -> None:
    """What it inherits would answer for no work: a receive from any rank asks where it came from."""
    work = Mock(spec=dist.Work)
    work._source_rank.return_value = 3
    assert TimedWork(work, lambda inner: inner(), KeptAlive())._source_rank() == 3
    asked = {name for name in dir(dist.Work) if not name.startswith(("__", "_pybind11"))} - {"boxed", "unbox"}
    assert asked <= vars(TimedWork).keys()


def test_a_devices_wait_is_repeated_for_every_stream_that_asks() -> None:
    calls = []
    work = dist.all_reduce(torch.ones(1), async_op=True)
    timed = TimedWork(work, lambda inner: calls.append(inner()) or True, KeptAlive(), repeatable=True)
    timed.wait()
    timed.wait()
    assert calls == [True, True]


def test_batches_of_sends_and_receives_are_as_before_once_nobody_looks() -> None:
    """Their methods bind the group again: a function of the class would be called without it."""
    before = {name: vars(dist.ProcessGroup)[name] for name in ("_start_coalescing", "_end_coalescing")}
    Coalescing(lambda _group: None, lambda _group, launch: launch()).close()
    for name, method in before.items():
        assert vars(dist.ProcessGroup)[name] is method
