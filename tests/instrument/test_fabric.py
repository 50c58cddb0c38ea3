"""The emulated fabric: what it charges, and how ranks learn of each other's arrivals; one process for all ranks, which
issues what rank 0 of real ranks does and says what it is; collectives without a network, and a network without a step.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.config.fabric import cost_ns
from aorta.config.schema import Algorithm, EmulatedFabric
from aorta.distributed.peers import Peers
from aorta.errors import RunIncomplete
from aorta.instrument.emulation.network import SLOTS, Arrivals, EmulatedNetwork, shared_folder
from aorta.instrument.emulation.stand_in import COPIES, NO_VALUES, StandInRank
from aorta.instrument.operators import OPERATORS, tensors_in
from aorta.read.record import load_run
from aorta.recording.isolated_baselines import Rehearsal, Replay, ReplayedCall, ReplayedWait, Shape
from aorta.timeline.classes import KINDS
from tests.recording.modes import MODES
from tests.recording.test_every_strategy import CASES, TINY, trained
from tests.runs import program, record, succeeded, train

US = 1_000
# 1 GB/s is a byte a nanosecond: 800,000 bytes are 800,000 ns.
SIZE = 800_000
SETTINGS = {"intra_latency_us": 1.0, "intra_bandwidth_gb_per_s": 1.0, "inter_latency_us": 10.0}


def settings(**changes: Any) -> EmulatedFabric:
    return EmulatedFabric(**{**SETTINGS, "inter_bandwidth_gb_per_s": 0.5, **changes})


# --- what it charges

# kind, ring of 8, tree of 8: latencies of 1 us, and parts of 800 us; written down by hand
BY_HAND = [
    ("allreduce", 14 * US + 1_400 * US, 6 * US + 1_400 * US),
    ("reducescatter", 7 * US + 700 * US, 3 * US + 700 * US),
    ("allgather", 7 * US + 700 * US, 3 * US + 700 * US),
    ("alltoall", 7 * US + 700 * US, 3 * US + 1_200 * US),
    ("broadcast", 7 * US + 800 * US, 3 * US + 800 * US),
    ("reduce", 7 * US + 800 * US, 3 * US + 800 * US),
    ("gather", 7 * US + 700 * US, 3 * US + 700 * US),
    ("scatter", 7 * US + 700 * US, 3 * US + 700 * US),
    ("send", 1 * US + 800 * US, 1 * US + 800 * US),
    ("recv", 1 * US + 800 * US, 1 * US + 800 * US),
    ("barrier", 3 * US, 3 * US),
]


def test_costs_of_eight_ranks() -> None:
    assert {kind for kind, *_ in BY_HAND} == set(KINDS)
    algorithms = [settings(algorithm=algorithm) for algorithm in (Algorithm.ring, Algorithm.tree)]
    for kind, *expected in BY_HAND:
        assert [cost_ns(kind, SIZE, 8, spans_nodes=False, settings=each) for each in algorithms] == expected, kind
    assert cost_ns("allreduce", SIZE, 2, spans_nodes=True, settings=settings()) == 2 * 10 * US + 1_600 * US


@pytest.mark.parametrize("algorithm", Algorithm)
def test_one_rank_costs_nothing_and_no_size_of_group_is_cheaper_than_a_smaller(algorithm: Algorithm) -> None:
    chosen = settings(algorithm=algorithm)
    for kind in KINDS:
        costs = [cost_ns(kind, SIZE, n, spans_nodes=False, settings=chosen) for n in (1, 2, 3, 4, 7, 8, 9, 512)]
        assert costs[0] == 0
        assert costs == sorted(costs), kind
    latencies = 9 if algorithm is Algorithm.tree else 511  # a tree of many ranks has few
    assert cost_ns("allreduce", 0, 512, spans_nodes=True, settings=chosen) == 2 * latencies * 10 * US


def fabric(rank: int = 0, **changes: Any) -> EmulatedNetwork:
    return EmulatedNetwork(settings(**changes), rank, 4, None)


def test_a_group_inside_a_node_uses_its_links_and_only_groups_of_all_ranks_get_the_emulated_size() -> None:
    pairs = fabric(ranks_per_node=2)
    assert [pairs.cost_ns("send", 1000, ranks, 0) for ranks in ((2, 3), (1, 2))] == [US + 1000, 10 * US + 2000]
    large = fabric(emulated_world_size=512, ranks_per_node=8)
    assert large.cost_ns("allreduce", 0, (0, 1, 2, 3), 0) == 2 * 511 * 10 * US  # 512 ranks span nodes of 8
    assert large.cost_ns("allreduce", 0, (0, 1), 0) == 2 * US


def test_jitter_is_the_same_on_every_rank_bounded_and_different_every_time() -> None:
    ranks = (0, 1, 2, 3)

    def costs(rank: int, **seed: int) -> list[int]:
        return [fabric(rank, jitter=0.1, **seed).cost_ns("allreduce", SIZE, ranks, number) for number in range(50)]

    plain, found = fabric().cost_ns("allreduce", SIZE, ranks, 0), costs(0)
    assert found == costs(3) != costs(0, seed=7)
    assert len(set(found)) == 50
    assert all(0.9 * plain <= cost <= 1.1 * plain for cost in found)


def test_only_the_straggler_is_late() -> None:
    assert [fabric(rank, straggler_rank=1, straggler_ms=2.5).late_ns for rank in range(3)] == [0, 2_500_000, 0]


# --- who arrives when


def test_ranks_see_each_others_arrivals_and_leave_nothing_behind(tmp_path: Path) -> None:
    one, two = (Arrivals(tmp_path, "0", (3, 5), rank) for rank in (3, 5))
    one.arrive(0, 1_000)
    assert two.known(0) == [1_000]
    assert len(list(tmp_path.iterdir())) == 1
    two.arrive(0, 2_000)
    assert one.known(0) == two.known(0) == [1_000, 2_000]
    assert list(tmp_path.iterdir()) == []
    assert one.known(1) == []


def test_a_slot_that_is_used_again_is_not_taken_for_its_next_lap(tmp_path: Path) -> None:
    one, two = (Arrivals(tmp_path, "0", (0, 1), rank) for rank in (0, 1))
    for number in (0, SLOTS, 62 * SLOTS, 63 * SLOTS):
        one.arrive(number, 10**17 + number)
        assert two.known(number) == [10**17 + number]
        assert two.known(number + SLOTS) == []


def test_groups_of_one_name_and_other_ranks_do_not_meet(tmp_path: Path) -> None:
    Arrivals(tmp_path, "1", (0, 1), 0).arrive(0, 1)
    assert Arrivals(tmp_path, "1", (2, 3), 2).known(0) == []


def test_a_full_memory_is_an_error_and_not_the_end_of_the_process(tmp_path, monkeypatch):
    def full(_file: int, _at: int, size: int) -> None:
        assert size == 2 * SLOTS * 8
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunIncomplete, match=rf"65536 bytes of {tmp_path} cannot be had: No space left"):
        Arrivals(tmp_path, "0", (0, 1), 0)


def test_the_meeting_place_is_gone_afterwards() -> None:
    with shared_folder(Peers(dist.HashStore(), 0, 1, 5)) as folder:
        assert folder.is_dir()
    assert not folder.exists()


# --- injected faults


def cost(kind: str, size: int, **changes: Any) -> int:
    return EmulatedNetwork(EmulatedFabric(**changes), 0, 2, None).cost_ns(kind, size, (0, 1), 0)


@pytest.mark.parametrize(
    ("given", "slow"),
    [
        ({"slow_kind": "reducescatter"}, {("reducescatter", 10), ("reducescatter", 1000)}),
        ({"slow_min_bytes": 1000}, {("allgather", 1000), ("reducescatter", 1000)}),
        ({"slow_max_bytes": 999}, {("allgather", 10), ("reducescatter", 10)}),
        ({"slow_kind": "allgather", "slow_min_bytes": 10, "slow_max_bytes": 10}, {("allgather", 10)}),
        ({}, {("allgather", 10), ("allgather", 1000), ("reducescatter", 10), ("reducescatter", 1000)}),
    ],
)
def test_only_what_matches_is_slow(given: dict[str, Any], slow: set[tuple[str, int]]) -> None:
    for kind, size in itertools.product(("allgather", "reducescatter"), (10, 1000)):
        factor = 3 if (kind, size) in slow else 1
        assert cost(kind, size, slow_factor=3.0, **given) == factor * cost(kind, size)
    plain, jittered = (cost("allreduce", 10**6, jitter=0.2, slow_factor=factor) for factor in (1.0, 2.0))
    assert jittered == pytest.approx(2 * plain, abs=1)


# --- one process for all


WORDS = (*TINY, "instrument.native=false")
LATENCY_US = 500
EMULATED = ("fabric=emulated", f"fabric.inter_latency_us={LATENCY_US}")
STRATEGIES = ("ddp", "tp", "hsdp", "fsdp_cp")


def issued(folder: Path) -> list[list[tuple[str, int, str | None, tuple[int, ...]]]]:
    """Kind, bytes, type and ranks of what each step of rank 0 issued, by group."""
    one = record(folder)
    return [
        sorted((row.kind, row.bytes, row.dtype, tuple(one.footer.groups[row.group])) for row in step.collectives)
        for step in one.steps
    ]


@pytest.mark.dist
@pytest.mark.parametrize(
    "name", [name if name == "ddp" else pytest.param(name, marks=pytest.mark.thorough) for name in STRATEGIES]
)
def test_it_issues_what_a_rank_of_as_many_processes_does(tmp_path_factory, tmp_path, name):
    (ranks, choices), real = CASES[name], trained(tmp_path_factory, name) / MODES[-1]
    words = (*WORDS, *(word for word in choices if word != "compile"))
    train(tmp_path, *words, *EMULATED, f"fabric.ranks={ranks}", ranks=1)
    assert issued(tmp_path) == issued(real)
    plans = [json.loads((folder / "run.json").read_text())["plan"] for folder in (real, tmp_path)]
    assert plans[0] == plans[1]  # the mesh, and how many parameters there are
    one = record(tmp_path)
    assert (one.header.emulated_ranks, one.header.world_size) == (ranks, 1)
    for step in one.steps:
        assert step.coverage.complete, step.coverage.reason
        assert step.coverage.seen == step.coverage.issued == len(step.collectives)
        assert (step.loss, step.grad_norm) == (None, None)
        assert {step.reasons["loss"], step.reasons["grad_norm"]} == {NO_VALUES}


@pytest.mark.dist
def test_many_ranks_with_the_compiled_interceptor_and_what_the_report_says(tmp_path: Path) -> None:
    words = (*WORDS, *EMULATED, "parallel=fsdp", "instrument.native=true", "fabric.ranks=64")
    train(tmp_path, *words, "baseline=true", "baseline.steps=2", ranks=1)
    manifest = json.loads((tmp_path / "run.json").read_text())
    assert (manifest["emulated_ranks"], manifest["backend"], manifest["warnings"]) == (64, "fake", [])
    for step in record(tmp_path).steps:
        for row in step.collectives:
            # A ring of 64 ranks: 63 messages, one behind another.
            assert row.end_ns - row.issue_ns >= 63 * LATENCY_US * 1000
    run = load_run(tmp_path)
    assert run.health.ranks == "one rank of 64, emulated"
    first, second, *others = run.health.notes
    assert first.startswith("ONE RANK OF 64, EMULATED: the others are assumed to be as fast, and never late")
    assert second.startswith("EMULATED FABRIC: ")
    assert not [note for note in others if "one rank: " in note or "missing" in note]


@pytest.mark.dist
def test_nothing_is_measured_and_collectives_still_take_as_long(tmp_path: Path) -> None:
    """The backend is emulated, and not what sees it: a run with `instrument.mode=off` is the reference of its cost."""
    train(tmp_path, *WORDS, *EMULATED, "parallel=ddp", "instrument.mode=off", "fabric.ranks=8", ranks=1)
    for step in record(tmp_path).steps:
        assert not step.collectives
        assert step.coverage.issued
        assert step.end_mono_ns - step.start_mono_ns >= 14 * LATENCY_US * 1000


# --- stand-ins, and the streams of what is replayed


def test_every_operator_that_is_seen_can_be_replaced() -> None:
    assert set(COPIES) == set(OPERATORS)


OWN = [5.0, 6.0]


@pytest.mark.parametrize(
    ("name", "output", "others", "expected"),
    [
        ("_allgather_base_", torch.zeros(4), (torch.tensor(OWN),), OWN + OWN),
        ("allgather_", [[torch.zeros(2), torch.zeros(2)]], ([torch.tensor(OWN)],), OWN + OWN),
        ("_reduce_scatter_base_", torch.zeros(2), (torch.arange(4.0),), [2, 3]),
        ("alltoall_base_", torch.zeros(4), (torch.arange(4.0),), [0, 1, 2, 3]),
        ("alltoall_base_", torch.ones(5), (torch.arange(2.0), [3, 2], [1, 1]), [0, 1, 0, 1, 0]),
        # The root's; torch 2.15 has it, for backends other than gloo.
        ("gather_into_tensor_", torch.zeros(4), (torch.tensor(OWN), None, 1), OWN + OWN),
        ("gather_into_tensor_", torch.zeros(4), (torch.tensor(OWN), None, 0), [0.0] * 4),
        *(
            (name, torch.empty(0, 4), (torch.empty(0, 4),), [])
            for name in ("_allgather_base_", "_reduce_scatter_base_")
        ),
    ],
)
def test_outputs_hold_this_ranks_own_data(
    name: str, output: Any, others: tuple[Any, ...], expected: list[float]
) -> None:
    copy = COPIES[name]
    copy((output, *others), StandInRank(1, 2))
    assert torch.cat(tensors_in(output)).tolist() == expected


def test_a_gather_in_place_leaves_its_part_and_autograd_does_not_notice() -> None:
    gather, whole, parameter = COPIES["_allgather_base_"], torch.arange(4.0), torch.zeros(4, requires_grad=True)
    gather((whole, whole[2:]), StandInRank(1, 2))  # as FSDP does
    assert whole.tolist() == [2, 3, 2, 3]
    saved = parameter * 2
    loss = (saved * saved).sum()
    gather((saved.detach(), torch.ones(2)), StandInRank(1, 2))  # backends do not count as in-place operations
    loss.backward()
    assert parameter.grad.tolist() == [4] * 4  # `saved` became 1 behind autograd's back: d(saved^2)/d(saved) * 2 = 4
    with torch.inference_mode():
        gather((quiet := torch.empty(4), torch.ones(2)), StandInRank(1, 2))
    assert quiet.tolist() == [1] * 4


@pytest.mark.dist
def test_every_collective_is_recorded_and_answered_on_two_ranks() -> None:
    succeeded(program("tests.instrument.every_collective"))


# --- streams, with stand-ins for a device -----------------------------------------------------------------------------


def rehearsed(calls: list[tuple[str, str, torch.Tensor]]) -> list[ReplayedCall | ReplayedWait]:
    """What a rehearsal notes of (operator, stream, tensor), each waited for at once on the same stream."""
    device = SimpleNamespace(current="")
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
