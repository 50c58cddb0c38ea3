"""Streams, events and memory in virtual time, to the nanosecond, however busy the machine is; and the race checker:
what it finds whatever the timing, and what it leaves alone.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.simulated import device
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, needs_device]
US = 1_000


@pytest.fixture
def origin() -> int:
    """Now, with lengths that are easy to add: 100 us each kernel, nothing for a launch."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    device.costs(launch_ns=0)
    device.lengths(elementwise=(100 * US, 0), matmul=(100 * US, 0), memset=(0, 0))
    device.reset()
    return device.host_ns()


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
    torch.cuda._sleep(500 * US)
    assert device.host_ns() == origin
    device.advance_host(200 * US)
    torch.cuda._sleep(1 * US)
    torch.cuda.synchronize()
    assert device.host_ns() - origin == 501 * US
    device.advance_host(99 * US)
    torch.cuda._sleep(1 * US)
    assert spans(origin)[-1] == (0, "sleep", 600, 601)
    assert device.counters().host_synchronisations == {"device": 2}


def test_the_device_sees_what_is_launched_after_the_submission(origin: int) -> None:
    """The host hands over a kernel of 4 us every 10 us, and an event when the device has nothing to do."""
    device.costs(launch_ns=10 * US, submission_ns=7 * US)
    event = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(4 * US)  # launched at 10, seen at 17
    event.record()  # recorded at 10, seen at 17: behind the kernel
    assert device.host_ns() - origin == 10 * US
    torch.cuda._sleep(4 * US)
    assert spans(origin) == [(0, "sleep", 17, 21), (0, "sleep", 27, 31)]
    assert (device.event_ns(event) - origin) // US == 21


def test_events_cost_the_host_and_the_stream(origin: int) -> None:
    """Each of the two records takes the host 3 us and the stream 2 us, and the wait takes the host 3 us."""
    device.costs(event_ns=3 * US, event_on_device_ns=2 * US)
    side = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()  # the host at 3; written from 3 to 5
    torch.cuda._sleep(10 * US)  # 5 to 15
    end.record()  # the host at 6; written from 15 to 17
    torch.cuda._sleep(10 * US)  # 17 to 27
    side.wait_event(end)
    assert device.host_ns() - origin == 9 * US
    with torch.cuda.stream(side):
        torch.cuda._sleep(1 * US)
    assert spans(origin) == [(0, "sleep", 5, 15), (0, "sleep", 17, 27), (side.stream_id, "sleep", 17, 18)]
    assert ((device.event_ns(begin) - origin) // US, (device.event_ns(end) - origin) // US) == (5, 17)


def test_a_copy_to_the_host_waits_and_one_to_page_locked_memory_does_not(origin: int) -> None:
    x = torch.ones(8, device="cuda")
    device.lengths(copy_d2h=(50 * US, 0))
    torch.cuda._sleep(100 * US)
    pinned = torch.empty(8, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    assert device.host_ns() == origin
    assert x.cpu().tolist() == [1] * 8
    assert device.host_ns() - origin == 200 * US
    assert pinned.tolist() == [1] * 8


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


def test_two_devices_have_their_own_streams_and_copies_wait_for_both(origin: int) -> None:
    x = torch.ones(8, device="cuda:0")
    torch.cuda._sleep(50 * US)
    with torch.cuda.device(1):
        torch.cuda._sleep(80 * US)
        device.lengths(copy_d2d=(10 * US, 0))
        z = x.to("cuda:1") * 2
    assert z.tolist() == [2] * 8
    torch.cuda.synchronize(1)
    found = {(row.device, row.name, (row.start_ns - origin) // US) for row in device.timeline()}
    assert found >= {(0, "aten::copy_", 80), (1, "aten::mul", 90)}
    device.no_races()


def test_a_captured_kernel_runs_when_it_is_replayed(origin: int) -> None:
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    event = torch.cuda.Event()
    graph.capture_begin()
    x.add_(1)
    event.record()
    assert torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="capturing"):
        torch.cuda.synchronize()
    graph.capture_end()
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="capturing stream"):
        event.query()
    assert x.tolist() == [0] * 4
    graph.replay()
    graph.replay()
    assert x.tolist() == [2] * 4


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
    return [(race.first.name, race.second.name) for race in device.races() if race.first.name != "allocation"]


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


def test_who_does_not_wait_for_reused_memory_reads_poison() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    device.real_delays(operator_ns=3_000_000_000)  # far longer than a busy machine needs for what follows
    del x
    y = torch.ones(64, device="cuda")  # the same bytes
    device.real_delays(operator_ns=0)
    with torch.cuda.stream(side):
        early = y.clone()
    torch.cuda.synchronize()
    assert bool(early.isnan().any())
    assert device.races()


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
