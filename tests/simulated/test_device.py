"""The simulated device in virtual time, to the nanosecond, however busy the machine is: streams, events and memory; the
race checker, what it finds whatever the timing, and what it leaves alone; NCCL's order on two ranks (what it does to
values, batches and failures, `tests/device_path` asks); and a rank that fails.

As a program (`python -m`) a rank fails while its device holds a collective that can never end, because a peer is dead.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.distributed.topology import Topology, process_group, read_topology
from tests.device_path.rig import exchanged, unbound_group
from tests.simulated import device
from tests.simulated.programs import ended, needs_device, on_devices

pytestmark = [pytest.mark.simulated, needs_device]
US = 1_000
Told = tuple[Any, Any]
"""What a rank found, and what it must find; times are in microseconds since it began."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Every test begins with the settings of the start and an empty record."""
    device.defaults()
    device.reset()
    yield
    device.defaults()
    device.reset()


def easy() -> int:
    """Now, with lengths that are easy to add: 100 us each kernel, nothing for a launch."""
    device.costs(launch_ns=0)
    device.lengths(elementwise=(100 * US, 0), matmul=(100 * US, 0), memset=(0, 0))
    device.reset()
    return device.host_ns()


@pytest.fixture
def origin() -> int:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return easy()


def spans(origin_ns: int, kind: str | None = None) -> list[tuple[int, str, int, int]]:
    """Stream, name, start and end in us."""
    torch.cuda.synchronize()
    return [
        (row.stream, row.name, (row.start_ns - origin_ns) // US, (row.end_ns - origin_ns) // US)
        for row in device.timeline(kind=kind)
    ]


def test_a_stream_starts_behind_the_event_it_waits_for(origin: int) -> None:
    x = torch.ones(8, device="cuda")
    side = torch.cuda.Stream()
    event = torch.cuda.Event()
    torch.cuda._sleep(70 * US)
    x.mul_(2)
    event.record()
    torch.cuda._sleep(1_000 * US)  # behind the event: not waited for
    side.wait_event(event)
    with torch.cuda.stream(side):
        y = x * 2
    assert sorted(spans(origin)) == [
        (0, "aten::fill_", 0, 0),
        (0, "aten::mul", 70, 170),
        (0, "sleep", 0, 70),
        (0, "sleep", 170, 1170),
        (side.stream_id, "aten::mul", 170, 270),
    ]
    (wait,) = device.waits()
    assert ((wait.begin_ns - origin) // US, (wait.end_ns - origin) // US, wait.why) == (0, 170, "event")
    (row,) = [row for row in device.timeline() if row.id == wait.on_row]
    assert (wait.on_stream, row.name) == (0, "aten::mul")
    assert y[0].item() == 4
    device.no_races()


def test_the_host_goes_on_until_it_waits(origin: int) -> None:
    """For the device, or for a copy to memory that is not page-locked."""
    x = torch.ones(8, device="cuda")
    device.lengths(copy_d2h=(50 * US, 0))
    torch.cuda._sleep(500 * US)
    assert device.host_ns() == origin
    device.advance_host(200 * US)
    torch.cuda._sleep(1 * US)
    torch.cuda.synchronize()
    assert device.host_ns() - origin == 501 * US
    pinned = torch.empty(8, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert device.host_ns() - origin == 501 * US
    assert device.counters().host_synchronisations == {"device": 1}
    assert x.cpu().tolist() == pinned.tolist() == [1] * 8
    assert device.host_ns() - origin == 601 * US


def test_the_device_sees_what_is_launched_after_the_submission(origin: int) -> None:
    """The host hands over a kernel of 4 us every 10 us."""
    device.costs(launch_ns=10 * US, submission_ns=7 * US)
    torch.cuda._sleep(4 * US)  # launched at 10, seen at 17
    assert device.host_ns() - origin == 10 * US
    torch.cuda._sleep(4 * US)
    assert spans(origin) == [(0, "sleep", 17, 21), (0, "sleep", 27, 31)]


def test_synchronising_operators_are_refused_in_debug_mode(origin: int) -> None:
    x = torch.ones(8, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once a process torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        x.mul_(2)
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            x[0].item()
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            x.nonzero()
        torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_would_end_a_capture_is_refused() -> None:
    event = torch.cuda.Event()
    graph = device.begin_capture()
    event.record()
    assert torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="capturing"):
        torch.cuda.synchronize()
    graph.end()
    with pytest.raises(RuntimeError, match="capturing stream"):
        event.query()


MULTIPLIED_AND_READ = ("aten::mul", "aten::add")


@pytest.fixture
def x() -> torch.Tensor:
    """Nothing is under way."""
    made = torch.ones(8, 64, device="cuda")
    torch.cuda.synchronize()
    return made


def found() -> list[tuple[str, str]]:
    """Names of the two sides, allocation aside."""
    torch.cuda.synchronize()
    return [race[:2] for race in device.races() if race.first != "allocation"]


@pytest.mark.parametrize(
    ("order", "is_one"), [("none", False), ("event", True), ("early event", False), ("query", False)]
)
def test_two_streams_race_unless_an_event_orders_them(x: torch.Tensor, order: str, is_one: bool) -> None:
    """One that was recorded too early does not, nor does a query that said yes."""
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    if order == "early event":
        event.record()
    x.mul_(2)
    if order != "early event":
        event.record()
    if "event" in order:
        side.wait_event(event)
    while order == "query" and not event.query():
        pass
    with torch.cuda.stream(side):
        x + 1
    assert found() == ([] if is_one else [MULTIPLIED_AND_READ])


def test_a_host_that_waits_orders_and_columns_of_a_matrix_are_apart(x: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)
    side.synchronize()
    x[:, :32].mul_(2)
    with torch.cuda.stream(side):
        x[:, 32:].mul_(2)
    assert found() == []
    x[:, :32].mul_(2)
    with torch.cuda.stream(side):
        x[:, 31:33].add(1)
    assert found() == [MULTIPLIED_AND_READ]


@pytest.mark.parametrize("how", ["at once", "record_stream", "wait", "query"])
def test_memory_given_back_while_another_stream_reads_it_is_a_race(how: str) -> None:
    x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        x + 1
        event.record()
    if how == "record_stream":
        x.record_stream(side)
    elif how == "wait":
        torch.cuda.current_stream().wait_event(event)
    while how == "query" and not event.query():
        pass
    del x
    # Of another size where it is a race: the allocator might have cut it out of the same bytes.
    torch.empty(5000 if how == "at once" else 64, device="cuda")
    assert found() == ([("aten::add", "memory given out again")] if how == "at once" else [])


def test_live_and_peak_bytes_count_what_the_caching_allocator_counts() -> None:
    before = torch.cuda.memory_allocated()
    device.reset()
    x = torch.empty(100, device="cuda")  # 400 bytes: 512
    y = torch.empty(256, device="cuda")  # 1,024
    assert torch.cuda.memory_allocated() - before == 1536
    del x
    z = torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() - before == 1536
    assert torch.cuda.max_memory_allocated() - before == 1536
    del y, z
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == before


def begin() -> int:
    """All ranks at one virtual moment, with lengths that are easy to add: 100 us each kernel and collective."""
    torch.cuda.synchronize()
    dist.barrier()
    device.defaults()
    device.collective_lengths(default=(100 * US, 0))
    start_ns = easy()
    # Hosts may be apart after the barrier; the later one is where both go on.
    latest = torch.tensor(start_ns)
    dist.all_reduce(latest, op=dist.ReduceOp.MAX)
    device.advance_host(int(latest) - start_ns)
    return int(latest)


def tensor(value: float = 1.0) -> torch.Tensor:
    return torch.full((1024,), value, device="cuda")


def communicators() -> Told:
    """Collectives of two groups run side by side; one of the same group waits for the other, whatever its stream."""
    other, side = dist.new_group([0, 1]), torch.cuda.Stream()
    x, y, z = (tensor(value) for value in (1.0, 2.0, 3.0))
    origin = begin()
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, group=other, async_op=True)]
    with torch.cuda.stream(side):
        dist.all_reduce(z)
    found = [span[1:] for span in spans(origin, "collective")]
    why = [wait.why for wait in device.waits() if wait.stream == side.stream_id]
    for work in works:
        work.wait()
    return (found, [one[0].item() for one in (x, y, z)], why), (
        [("allreduce", 0, 100), ("allreduce", 0, 100), ("allreduce", 100, 200)],
        [2, 4, 6],
        ["communicator"],
    )


def point_to_point(rank: int, group: Any, behind_us: int) -> Told:
    """An all-reduce, and a send and a receive between the same two ranks, unbatched, which wait for it in a group that
    is bound to a device; others have a communicator for each pair of ranks. Rank 1 is ready 200 us later.

    Args:
        behind_us: by how much later than the all-reduce the first message may run, and ends.
    """
    x, y, z = tensor(rank + 1.0), tensor(0.0), tensor(rank + 1.0)
    origin = begin()
    torch.cuda._sleep(rank * 200 * US)
    works = [dist.all_reduce(z, group=group, async_op=True), *exchanged(x, y, group)]
    for work in works:
        work.wait()
    y.mul_(10)
    found = [span[1:] for span in spans(origin, "collective")]
    sequences = [row.seq for row in device.timeline(kind="collective") if row.name != "allreduce"]
    ready, then = rank * 200, 300 + behind_us
    begins = 300 if behind_us else ready
    names = ("recv", "send") if rank else ("send", "recv")
    expected = [("allreduce", ready, 300), (names[0], begins, then), (names[1], then, then + 100)]
    return (found, y[0].item(), z[0].item(), sequences), (expected, 10 if rank else 20, 3, [1, 2])


def told_by(topology: Topology, _device: torch.device, how: str) -> Told:
    if how == "communicators":
        return communicators()
    bound = how == "bound"
    return point_to_point(topology.rank, dist.group.WORLD if bound else unbound_group(), 100 if bound else 0)


@pytest.mark.dist
def test_collectives_and_messages_run_in_nccls_order(tmp_path: Path) -> None:
    cases = {name: [name] for name in ("communicators", "bound", "unbound")}
    for name, ranks in on_devices(told_by, tmp_path, cases).items():
        for found, expected in ranks:
            assert found == expected, name


def main() -> None:
    """The other rank is gone, while the device holds a collective that can never end."""
    topology = read_topology()
    cuda = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(cuda)
    with process_group(topology, cuda, 300):
        x = torch.ones(8, device=cuda)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        if topology.rank == 1:
            os._exit(0)
        dist.all_reduce(x)
        torch.cuda.synchronize()


@pytest.mark.dist
@pytest.mark.thorough
def test_a_rank_with_a_dead_peer_says_why_it_ends_and_waits_for_nobody() -> None:
    done = ended("tests.simulated.test_device", ranks=2)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "could not be aborted" not in done.stderr
    assert all(word in done.stderr for word in ("allreduce", "Trace"))


if __name__ == "__main__":
    main()
