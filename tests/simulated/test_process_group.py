"""NCCL's contract on two and four ranks: exact times, values, order, failures; and torch's own strategies.

A scenario tells, on each rank, what it found and what it must find; times are in microseconds since it began. As a
program (`python -m`) a rank fails while its device holds a collective that can never end, because a peer is dead. That
none of these has a race is asked in `tests.device_path.test_training`, with and without the instrument.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.distributed.topology import Topology, process_group, read_topology
from tests.device_path.rig import exchanged, unbound_group
from tests.runs import Launcher, losses, train
from tests.simulated import device
from tests.simulated.programs import ended, needs_device, on_devices

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]
US = 1_000
Told = tuple[Any, Any]


def begin() -> int:
    """All ranks at one virtual moment, with lengths that are easy to add: 100 us each kernel and collective."""
    torch.cuda.synchronize()
    dist.barrier()
    device.defaults()
    device.costs(launch_ns=0)
    device.lengths(elementwise=(100 * US, 0), matmul=(100 * US, 0), memset=(0, 0))
    device.collective_lengths(default=(100 * US, 0))
    device.reset()
    start_ns = device.host_ns()
    # Hosts may be apart after the barrier; the later one is where both go on.
    latest = torch.tensor(start_ns)
    dist.all_reduce(latest, op=dist.ReduceOp.MAX)
    device.advance_host(int(latest) - start_ns)
    return int(latest)


def rows(origin_ns: int, kind: str = "collective") -> list[tuple[str, float, float]]:
    """Name, start and end of what ran."""
    torch.cuda.synchronize()
    found = device.timeline(kind=kind)
    return [(row.name, (row.start_ns - origin_ns) / US, (row.end_ns - origin_ns) / US) for row in found]


def tensor(value: float = 1.0) -> torch.Tensor:
    return torch.full((1024,), value, device="cuda")


def contention(rank: int) -> Told:
    """Kernels beside all-reduces of 100 us, at two thirds of their speed where one runs.

    Rank 1 is ready 60 us later than rank 0: there the first all-reduce runs from 0 to 160, on rank 1 from 60 to 160.
    Rank 0: at 160 the first kernel has done 106.667 of its 200 us; the second one has the device to itself, and the
    next all-reduce starts behind it. Rank 1: 60 us alone, 66.667 beside the first all-reduce, the rest alone. Of the
    100 us of the last kernel 66.667 run beside the all-reduce of rank 0, 80 beside the longer one of rank 1.
    """
    x, y = tensor(rank + 1.0), tensor()
    side, then = torch.cuda.Stream(), torch.cuda.Event()
    origin = begin()
    device.contention(1.5)
    with torch.cuda.stream(side):
        torch.cuda._sleep(rank * 60 * US)
        dist.all_reduce(x)
    torch.cuda._sleep(200 * US)
    torch.cuda._sleep(30 * US)
    then.record()
    side.wait_event(then)  # the second one is issued when the stream's threads may be done with what was before
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    y.mul_(2)
    torch.cuda.synchronize()
    device.contention(1.0)
    torch.cuda._sleep(7 * US)
    began, first, second, last = ((0, 253.333, 283.333, 416.666), (60, 233.333, 263.333, 403.333))[rank]
    return (rows(origin), rows(origin, "sleep")[1:], rows(origin, "op"), x[0].item()), (
        [("allreduce", began, 160), ("allreduce", second, 383.333)],
        [("sleep", 0, first), ("sleep", first, second), ("sleep", last, round(last + 7, 3))],
        [("aten::mul", second, last)],
        6,
    )


def one_communicator_from_two_streams(rank: int) -> Told:
    """Two collectives on two streams of the caller's: the second waits for the first."""
    x, y = tensor(1.0), tensor(2.0)
    side = torch.cuda.Stream()
    origin = begin()
    dist.all_reduce(x)
    with torch.cuda.stream(side):
        dist.all_reduce(y)
    found = rows(origin)
    return (
        (found, [x[0].item(), y[0].item()], [wait.why for wait in device.waits()]),
        ([("allreduce", 0, 100), ("allreduce", 100, 200)], [2, 4], ["communicator"]),
    )


def two_groups_side_by_side(rank: int) -> Told:
    """Communicators of two groups do not wait for each other."""
    other = dist.new_group([0, 1])
    x, y = tensor(1.0), tensor(2.0)
    origin = begin()
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, group=other, async_op=True)]
    for work in works:
        work.wait()
    return rows(origin), [("allreduce", 0, 100)] * 2


def bound_point_to_point(rank: int) -> Told:
    """An all-reduce, and a send and a receive between the same two ranks, unbatched, which wait for it in a group that
    is bound to a device; rank 1 is ready 200 us later.
    """
    return point_to_point(rank, dist.group.WORLD, behind_us=100)


def unbound_point_to_point(rank: int) -> Told:
    """The same in a group that is not, and has a communicator for each pair of ranks."""
    return point_to_point(rank, unbound_group(), behind_us=0)


def point_to_point(rank: int, group: Any, behind_us: int) -> Told:
    """`behind_us`: by how much later than the all-reduce the first message may run, and ends."""
    x, y, z = tensor(rank + 1.0), tensor(0.0), tensor(rank + 1.0)
    origin = begin()
    torch.cuda._sleep(rank * 200 * US)
    works = [dist.all_reduce(z, group=group, async_op=True), *exchanged(x, y, group)]
    for work in works:
        work.wait()
    y.mul_(10)
    found = rows(origin)
    sequences = [row.seq for row in device.timeline(kind="collective") if row.name != "allreduce"]
    ready, then = rank * 200, 300 + behind_us
    begins = 300 if behind_us else ready
    names = ("recv", "send") if rank else ("send", "recv")
    expected = [("allreduce", ready, 300), (names[0], begins, then), (names[1], then, then + 100)]
    return (found, y[0].item(), z[0].item(), sequences), (expected, 10 if rank else 20, 3, [1, 2])


def coalesced(rank: int) -> Told:
    """What is coalesced is launched at the end, as one, and counted once."""
    tensors = [tensor(rank + 1.0 + i) for i in range(3)]
    outs = [torch.empty(2048, device="cuda") for _ in range(2)]
    origin = begin()
    group = dist.group.WORLD
    counts = [group._get_sequence_number_for_group()]
    with dist._coalescing_manager(async_ops=True) as manager:  # the fast path: one operator
        for one in tensors:
            dist.all_reduce(one)
    manager.wait()
    counts.append(group._get_sequence_number_for_group())
    with dist._coalescing_manager(device=torch.device("cuda", rank)):  # NCCL's own grouping, synchronous
        for out, one in zip(outs, tensors, strict=False):
            dist.all_gather_into_tensor(out, one)
    counts.append(group._get_sequence_number_for_group())
    values = [one[0].item() for one in tensors] + [out[1500].item() for out in outs]
    return (rows(origin), [count - counts[0] for count in counts], values), (
        [("allreduce_coalesced", 0, 100), ("coalesced", 100, 200)],
        [0, 1, 2],
        [3, 5, 7, 3, 5],
    )


def refused(rank: int) -> Told:
    """A call that is refused leaves the group whole."""
    x, said = tensor(), ""
    if rank == 0:
        device.fail_next_collective(message="refused", at_issue=True)
        try:
            dist.all_reduce(x)
        except dist.DistBackendError as error:
            said = str(error)
    dist.all_reduce(x)
    return (said, x[0].item()), ("" if rank else "refused", 2)


def link_down(_rank: int) -> Told:
    return failing("link down", lambda group: device.fail_next_collective(group, "link down"))


def dead_peer(_rank: int) -> Told:
    return failing("timed out", device.dead_peer)


def failing(why: str, fail: Callable[[Any], None]) -> Told:
    """A collective that fails says so, and so does its group from then on, until the kernel is taken off the device."""
    x, said, group = tensor(), list[bool](), dist.new_group()
    fail(group)
    work = dist.all_reduce(x, group=group, async_op=True)
    for call in (lambda: work.wait(timedelta(seconds=2)), lambda: dist.all_reduce(x, group=group)):
        try:
            call()
        except dist.DistBackendError as error:
            said.append(why in str(error))
    group._get_backend(torch.device("cuda")).abort()
    torch.cuda.synchronize()
    return said, [True, True]


SCENARIOS: dict[str, Callable[[int], Told]] = {
    scenario.__name__: scenario
    for scenario in (
        contention,
        one_communicator_from_two_streams,
        two_groups_side_by_side,
        bound_point_to_point,
        unbound_point_to_point,
        coalesced,
        refused,
        link_down,
        dead_peer,
    )
}


def told_by(topology: Topology, _device: torch.device, name: str) -> Told:
    return SCENARIOS[name](topology.rank)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the ranks say of each, in one launch."""
    return on_devices(told_by, tmp_path_factory.mktemp("scenarios"), {name: [name] for name in SCENARIOS})


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_finds_what_it_must(told: dict[str, list[Any]], name: str) -> None:
    """The scenarios' docstrings say what that is."""
    for found, expected in told[name]:
        assert found == expected


class RealError(Exception):
    pass


def main(how: str) -> None:
    """`raises`: an error of the program's own. `dies`: the other rank is gone, and the device says so at the next
    synchronisation.
    """
    topology = read_topology()
    cuda = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(cuda)
    with process_group(topology, cuda, 300):
        x = torch.ones(8, device=cuda)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        if how == "dies":
            if topology.rank == 1:
                os._exit(0)
            dist.all_reduce(x)
            torch.cuda.synchronize()
        device.dead_peer()
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert device.pending(), "the collective has ended"
        raise RealError("what really happened")


@pytest.mark.parametrize(
    ("how", "ranks", "words"), [("raises", 1, ["RealError: what really happened"]), ("dies", 2, ["allreduce", "Trace"])]
)
@pytest.mark.thorough
def test_a_rank_with_a_dead_peer_says_why_it_ends_and_waits_for_nobody(how: str, ranks: int, words: list[str]) -> None:
    done = ended("tests.simulated.test_process_group", how, ranks=ranks)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "could not be aborted" not in done.stderr
    assert all(word in done.stderr for word in words)


@pytest.mark.parametrize(("strategy", "ranks", "launcher"), [("ddp", 2, "torchrun"), ("fsdp_tp", 4, "fork")])
@pytest.mark.thorough
def test_the_script_trains_as_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, ranks: int, launcher: Launcher
) -> None:
    """The launch is the same for every strategy: one shows that the real one brings the device with it."""
    monkeypatch.setenv("AORTA_SIMULATED_DEVICES", "4")
    words = (f"parallel={strategy}", "instrument.mode=off", "training.max_steps=3", "training.log_interval=1")
    train(tmp_path / "cuda", *words, "training.device=cuda", ranks=ranks, launcher=launcher)
    train(tmp_path / "cpu", *words, "training.device=cpu", ranks=ranks)
    for rank in range(ranks):
        assert losses(tmp_path / "cuda", rank) == pytest.approx(losses(tmp_path / "cpu", rank), rel=1e-4)


if __name__ == "__main__":
    main(*sys.argv[1:])
