"""Streams and events in virtual time, to the nanosecond, however busy the machine is."""

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


def test_events_tell_exact_times_and_elapsed_time_is_float32(origin: int) -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(123_456_789)
    end.record()
    end.synchronize()
    assert device.event_ns(end) - device.event_ns(begin) == 123_456_789
    assert begin.elapsed_time(end) == torch.tensor(123.456789, dtype=torch.float32).item()
    assert device.host_ns() - origin == 123_456_789


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


def test_a_device_whose_host_is_slow_stands_between_kernels(origin: int) -> None:
    """The host hands over a kernel of 4 us every 10 us, and an event when the device has nothing to do."""
    device.costs(launch_ns=10 * US)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        torch.cuda._sleep(4 * US)
    end.record()
    assert spans(origin) == [(0, "sleep", launched, launched + 4) for launched in (10, 20, 30)]
    assert device.event_ns(end) - device.event_ns(begin) == 34 * US  # 12 of them busy


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


def test_the_device_sees_what_is_launched_after_the_submission(origin: int) -> None:
    device.costs(launch_ns=10 * US, submission_ns=7 * US)
    event = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(4 * US)  # launched at 10, seen at 17
    event.record()  # recorded at 10, seen at 17: behind the kernel
    assert device.host_ns() - origin == 10 * US
    torch.cuda._sleep(4 * US)
    assert spans(origin) == [(0, "sleep", 17, 21), (0, "sleep", 27, 31)]
    assert (device.event_ns(event) - origin) // US == 21


def test_a_full_queue_holds_the_host_up(origin: int) -> None:
    device.queue_depth(4)
    for _ in range(4):
        torch.cuda._sleep(100 * US)
    assert device.host_ns() == origin
    torch.cuda._sleep(100 * US)  # waits for the first one
    assert device.host_ns() - origin == 100 * US
    torch.cuda._sleep(100 * US)
    assert device.host_ns() - origin == 200 * US
    assert device.counters().host_synchronisations == {}


def test_lengths_are_by_class_by_size_and_by_name(origin: int) -> None:
    x = torch.ones(256, device="cuda")  # 1 KiB
    device.lengths(elementwise=(10 * US, 2 * US), operators={"aten::sin": (7 * US, 0)})
    x.mul_(2)
    torch.sin(x)
    lengths = {name: end - start for _, name, start, end in spans(origin, "op")}
    assert lengths == {"aten::mul": 12, "aten::sin": 7}


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
        y = x.to("cuda:1")
        z = y * 2
    assert z.tolist() == [2] * 8
    torch.cuda.synchronize(1)
    found = [(row.device, row.name, (row.start_ns - origin) // US) for row in device.timeline() if row.name != "sleep"]
    assert (0, "aten::copy_", 80) in found
    assert (1, "aten::mul", 90) in found
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


def test_streams_of_one_hardware_queue_run_in_the_order_of_issue(origin: int) -> None:
    device.pool_streams(32)
    sides = [torch.cuda.Stream() for _ in range(3)]
    device.hardware_queues(2)  # the first stream and the third are dealt the first queue
    for side in sides:
        with torch.cuda.stream(side):
            torch.cuda._sleep(50 * US)
    urgent = torch.cuda.Stream(priority=-1)  # another priority has queues of its own
    with torch.cuda.stream(urgent):
        torch.cuda._sleep(50 * US)
    found = {stream: (start, end) for stream, _, start, end in spans(origin)}
    first, second, third = (found[side.stream_id] for side in sides)
    assert (first, second, third, found[urgent.stream_id]) == ((0, 50), (0, 50), (50, 100), (0, 50))
    (wait,) = device.waits()
    assert (wait.stream, wait.on_stream, wait.why) == (sides[2].stream_id, sides[0].stream_id, "queue")


def test_a_wait_in_a_hardware_queue_holds_up_the_other_streams_on_it(origin: int) -> None:
    waiting, other, elsewhere = (torch.cuda.Stream() for _ in range(3))
    done = torch.cuda.Event()
    with torch.cuda.stream(elsewhere):
        torch.cuda._sleep(70 * US)
        done.record()
    device.hardware_queues(1)
    waiting.wait_event(done)
    with torch.cuda.stream(other):
        torch.cuda._sleep(10 * US)
    assert spans(origin)[-1] == (other.stream_id, "sleep", 70, 80)
