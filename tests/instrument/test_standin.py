"""Collectives without a network, and a network without a step: against the real collectives, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aorta.instrument.emulation.rehearsal import Rehearsal, Replay, ReplayedCall, ReplayedWait, Shape
from aorta.instrument.emulation.stand_in import COPIES, StandInRank
from aorta.instrument.operators import OPERATORS
from tests.runs import program, succeeded


def test_every_operator_that_is_seen_can_be_replaced() -> None:
    assert set(COPIES) == set(OPERATORS)


@pytest.mark.parametrize(("root", "expected"), [(1, [5.0, 6.0, 5.0, 6.0]), (0, [0.0] * 4)])
def test_a_gather_into_one_tensor_fills_that_of_the_root(root: int, expected: list[float]) -> None:
    """torch 2.15 has it, for backends other than gloo."""
    output, copy = torch.zeros(4), COPIES["gather_into_tensor_"]
    assert copy is not None
    copy((output, torch.tensor([5.0, 6.0]), None, root), StandInRank(1, 2))
    assert output.tolist() == expected


@pytest.mark.dist
def test_every_collective_is_recorded_and_answered_on_two_ranks() -> None:
    succeeded(program("tests.instrument.every_collective"))


# --- streams, with stand-ins for a device -----------------------------------------------------------------------------


class Device:
    """Names of streams, one of which is current."""

    current = "compute"


def rehearsed(calls: list[tuple[str, str, torch.Tensor]]) -> list[ReplayedCall | ReplayedWait]:
    """What a rehearsal notes of (operator, stream, tensor), each waited for at once on the same stream."""
    device = Device()
    rehearsal = Rehearsal(torch.device("cpu"), current_stream=lambda: device.current)
    for name, stream, tensor in calls:
        device.current = stream
        work = torch._C._distributed_c10d._create_work_from_future(done())
        rehearsal(name, ([tensor],), lambda work=work: work.boxed())
    return rehearsal.events


def done() -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([torch.ones(1)])
    return future


def test_a_collective_of_anothers_result_comes_after_it_on_its_own_stream() -> None:
    shard, other = torch.ones(4), torch.ones(4)
    events = rehearsed(
        [("allreduce_", "scatter", shard), ("allreduce_", "scatter", other), ("allreduce_", "reduce", shard)]
    )
    issued = [event for event in events if isinstance(event, ReplayedCall)]
    assert [(call.stream, call.after) for call in issued] == [("scatter", ()), ("scatter", ()), ("reduce", (0,))]


def test_memory_serves_again_only_once_it_was_waited_for() -> None:
    def call(stream: Any = None) -> ReplayedCall:
        return ReplayedCall(
            "allreduce_", ([Shape(7, torch.device("cpu"), torch.float32, (200,), (1,), 0)],), stream, ()
        )

    def pointers(events: list[ReplayedCall | ReplayedWait]) -> list[int]:
        return [entry[1][0][0].data_ptr() for entry in Replay(events)._events if not isinstance(entry, ReplayedWait)]

    first, second = pointers([call(), ReplayedWait(0, None), call()])
    assert first == second
    first, second = pointers([call(), call()])
    assert first != second


def tensors_of(call: ReplayedCall) -> tuple[Any, ...]:
    """What a replay of one call hands over."""
    ((_, args),) = [entry for entry in Replay([call])._events if not isinstance(entry, ReplayedWait)]
    return args


@pytest.mark.parametrize("offset", [0, 3, 130, 1000])
def test_parts_of_one_storage_lie_as_they_lay_and_a_transposed_tensor_keeps_its_strides(offset: int) -> None:
    storage = torch.zeros(2000, dtype=torch.float32)
    whole, part = storage[offset : offset + 600].view(20, 30), storage[offset + 300 : offset + 600]
    args = tensors_of(ReplayedCall("_allgather_base_", (Shape.of(whole), Shape.of(part), "group", 3), None, ()))
    assert [tuple(t.shape) for t in args[:2]] == [(20, 30), (300,)]
    assert args[1].data_ptr() - args[0].data_ptr() == 1200
    assert args[2:] == ("group", 3)
    assert not args[0].any()
    turned = torch.ones(3, 5, dtype=torch.float16).t()
    ((sent,),) = tensors_of(ReplayedCall("send", ([Shape.of(turned)],), None, ()))
    assert (sent.stride(), sent.dtype) == (turned.stride(), torch.float16)


@pytest.mark.parametrize("name", ["_allgather_base_", "_reduce_scatter_base_"])
def test_empty_tensors_are_no_error(name: str) -> None:
    output, source = torch.empty(0, 4), torch.empty(0, 4)
    copy = COPIES[name]
    assert copy is not None
    copy((output, source), StandInRank(1, 2))
    assert output.shape == (0, 4)
