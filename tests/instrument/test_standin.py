"""Collectives without a network, and a network without a step: against the real collectives, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aorta.instrument.emulation.rehearsal import Rehearsal, Replay, ReplayedCall, ReplayedWait, Shape
from aorta.instrument.emulation.stand_in import COPIES, StandInRank
from aorta.instrument.operators import OPERATORS
from tests.instrument.standin import NEEDS_THE_NETWORK
from tests.instrument.test_kinds import EXPECTED, KINDS_ONLY, UNCOVERED, told_by

NAMES = [*EXPECTED, *KINDS_ONLY, *UNCOVERED, "send", "exchange"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return told_by("tests.instrument.standin", tmp_path_factory.mktemp("standin"))


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
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_THE_NETWORK])
def test_it_gives_back_what_the_real_collective_does_and_issues_nothing(told: list[dict[str, Any]], name: str) -> None:
    for one in told:
        rows = one["kinds"][name]
        assert rows["issued"] == 0
        assert rows["issued_really"] > 0
        real, standin = rows["real"], rows["standin"]
        assert [row["name"] for row in standin] == [row["name"] for row in real]
        for theirs, ours in zip(real, standin, strict=True):
            assert ours["result"] == theirs["result"]  # shapes and types of tensors, the handle's type
            assert ours["completed"]
            assert ours["finite"]
            assert ours["future"] == flat(ours["written"])


def flat(written: Any) -> list[Any]:
    """[shape, type] of nested tensors, in order."""
    if written and isinstance(written[0], list) and all(isinstance(n, int) for n in written[0]):
        return [written]
    return [found for item in written for found in flat(item)]


@pytest.mark.dist
def test_outputs_hold_this_ranks_own_data(told: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(told):
        found, ten = one["values"], 10 * rank
        own = [ten + 0.0, ten + 1.0, ten + 2.0]
        assert found["all_gather"] == own + own
        assert found["all_gather_list"] == [own, own]
        assert found["reduce_scatter"] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]][rank]
        assert found["all_to_all"] == [0.0, 1.0, 2.0, 3.0]
        assert found["all_to_all_uneven"] == [0.0, 1.0, 0.0, 1.0, 0.0]
        third = [ten + 3.0 * rank + i for i in range(3)]
        assert found["in_place"] == third + third
        assert found["all_reduce"] == own
        assert found["inference"] == [1.0] * 6


@pytest.mark.dist
def test_autograd_does_not_notice_it(told: list[dict[str, Any]]) -> None:
    for one in told:
        assert not one["values"]["version_moved"]
        # saved became 1 behind autograd's back: d(saved^2)/d(saved) * 2 = 4.
        assert one["values"]["gradient"] == [4.0] * 4


@pytest.mark.dist
def test_a_replay_issues_and_waits_as_the_step_did(told: list[dict[str, Any]]) -> None:
    for one in told:
        found = one["replay"]
        gather = "_allgather_base_"
        assert found["events"] == [
            ["ReplayedCall", "allreduce_"],
            ["ReplayedCall", gather],
            ["ReplayedWait", 1],
            ["ReplayedCall", "allreduce_"],
            ["ReplayedWait", 2],
            ["ReplayedCall", gather],
            ["ReplayedWait", 3],
            ["ReplayedWait", 0],
        ]
        assert found["again"] == found["events"]


@pytest.mark.dist
def test_replayed_steps_are_recorded_like_the_step_but_for_their_phase(told: list[dict[str, Any]]) -> None:
    for one in told:
        found = one["replay"]
        assert found["phases"] == ["train", "comm_only", "comm_only"]
        assert found["rows"][0] == found["rows"][1] == found["rows"][2]
        assert [row[2:] for row in found["rows"][0]] == [
            [96, "float32"],
            [48, "float32"],
            [10, "bfloat16"],
            [64, "float64"],
        ]
        # The rehearsal is not counted, or the emulated fabric's ranks would disagree about numbers.
        assert found["seqs"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert all(found["complete"])
        assert found["reasons"]["lr"] == "a comm_only step trains nothing"


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


@pytest.mark.parametrize("offset", [0, 3, 130, 1000])
def test_parts_of_one_storage_lie_as_they_lay(offset: int) -> None:
    storage = torch.zeros(2000, dtype=torch.float32)
    whole, part = storage[offset : offset + 600].view(20, 30), storage[offset + 300 : offset + 600]
    events = [ReplayedCall("_allgather_base_", (Shape.of(whole), Shape.of(part), "group", 3), None, ())]
    ((_, args),) = [entry for entry in Replay(events)._events if not isinstance(entry, ReplayedWait)]
    assert [tuple(t.shape) for t in args[:2]] == [(20, 30), (300,)]
    assert args[1].data_ptr() - args[0].data_ptr() == 1200
    assert args[2:] == ("group", 3)
    assert not args[0].any()


def test_a_transposed_tensor_keeps_its_strides() -> None:
    turned = torch.ones(3, 5, dtype=torch.float16).t()
    ((_, args),) = [
        e
        for e in Replay([ReplayedCall("send", ([Shape.of(turned)],), None, ())])._events
        if not isinstance(e, ReplayedWait)
    ]
    assert (args[0][0].stride(), args[0][0].dtype) == (turned.stride(), torch.float16)


@pytest.mark.parametrize("name", ["_allgather_base_", "_reduce_scatter_base_"])
def test_empty_tensors_are_no_error(name: str) -> None:
    output, source = torch.empty(0, 4), torch.empty(0, 4)
    copy = COPIES[name]
    assert copy is not None
    copy((output, source), StandInRank(1, 2))
    assert output.shape == (0, 4)
