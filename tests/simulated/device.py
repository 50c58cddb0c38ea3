"""What a test sets, and what it reads: the simulated device's own account.

    device.lengths(matmul=(50_000, 0))
    ...
    device.no_races()
    rows = device.timeline()

Everything set holds for what is launched later. Times are nanoseconds of the host's clock (`host_ns`).
Must not: be imported in a process without the device and then used; each call says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from tests.simulated import load

CLASSES = ("matmul", "elementwise", "copy_h2d", "copy_d2h", "copy_d2d", "memset")


class Row(NamedTuple):
    """One kernel, copy or collective as the device ran it. `stream` is the stream's `stream_id`; 0 is the default."""

    id: int
    """In the order of issue."""
    device: int
    stream: int
    kind: Literal["op", "collective", "copy", "sleep", "memset"]
    name: str
    start_ns: int
    end_ns: int
    bytes: int
    group: str
    """Of a collective: its group's name."""
    seq: int
    """Of a collective: ProcessGroupNCCL's number; point-to-point has a count of its own. Otherwise -1."""


class Wait(NamedTuple):
    """A stretch [begin, end) in which a stream stood still for something on another one."""

    device: int
    stream: int
    begin_ns: int
    end_ns: int
    on_device: int
    on_stream: int
    on_row: int
    """`Row.id` of the last row of that stream before the event; -1: none."""
    why: Literal["event", "communicator", "queue"]
    """queue: another stream's work was before it in the hardware queue that both share."""


class Race(NamedTuple):
    """Two accesses to the same bytes without an order between them, one of them a write: what they are in, in the order
    of issue, and all that is known of them.
    """

    first: str
    second: str
    words: str


class Counters(NamedTuple):
    """Since the last `reset` (memory: `live_bytes` is what is allocated now)."""

    host_synchronisations: Mapping[str, int]
    """By what waited: device, stream, event, work, barrier, an operator's name, ..."""
    events_created: int
    events_recorded: int
    live_bytes: int
    peak_bytes: int


def defaults() -> None:
    """All settings as at the start."""
    load.native().default_settings()


def lengths(*, operators: Mapping[str, tuple[int, float]] | None = None, **classes: tuple[int, float]) -> None:
    """How long operators take: (fixed ns, ns per KiB written).

    Args:
        operators: by name, "aten::mm", "memcpy_h2d", ...; these win over classes.
        classes: matmul, elementwise, copy_h2d, copy_d2h, copy_d2d, memset.
    """
    for name, (fixed_ns, ns_per_kib) in classes.items():
        if name not in CLASSES:
            raise ValueError(f"no class of operators: {name}")
        load.native().set_class_length(name, fixed_ns, ns_per_kib)
    for name, (fixed_ns, ns_per_kib) in (operators or {}).items():
        load.native().set_operator_length(name, fixed_ns, ns_per_kib)


def collective_lengths(**kinds: tuple[int, float]) -> None:
    """How long collectives take: (fixed ns, ns per byte), where the bytes are the larger of inputs and outputs.

    Args:
        kinds: allreduce, allgather, reducescatter, broadcast, reduce, gather, scatter, alltoall, barrier, send, recv;
            default for all that are not set. What is coalesced takes the fixed part of its first call once.
    """
    for kind, (fixed_ns, ns_per_byte) in kinds.items():
        load.native().set_collective_length(kind, fixed_ns, ns_per_byte)


def costs(
    *,
    launch_ns: int | None = None,
    event_ns: int | None = None,
    event_on_device_ns: int | None = None,
    submission_ns: int | None = None,
) -> None:
    """What launches and events cost.

    Args:
        launch_ns: the host, for each kernel, copy or collective (1 us); it is launched when they are over.
        event_ns: the host, to record an event or to let a stream wait for one (0).
        event_on_device_ns: the stream, to write the time of an event that has timing enabled; the event's time is the
            end of the writing (0).
        submission_ns: from then on until the device sees what was launched, recorded or is to be waited for (0).
    """
    on_device = {"event_on_device_cost_ns": event_on_device_ns, "submission_ns": submission_ns}
    _numbers(launch_cost_ns=launch_ns, event_cost_ns=event_ns, **on_device)


def clock_rate(ppm: int) -> None:
    """How much faster than the host's clock the device's own passes, by which `elapsed_time` tells (0 ppm)."""
    _numbers(rate_ppm=ppm)


def contention(factor: float) -> None:
    """How much slower kernels are while a collective runs on their device (1).

    With more than 1 the host has to wait for the device at some time, and one communicator to be at work at a time
    (native/contention.hpp says why).
    """
    load.native().set_contention(factor)


def real_delays(
    *, operator_ns: int | None = None, collective_ns: int | None = None, sleep_ns: int | None = None
) -> None:
    """Really sleep in the stream's thread: who does not wait then reads poison.

    Args:
        operator_ns: before each operator (0). collective_ns: before each collective writes its outputs (0).
        sleep_ns: `torch.cuda._sleep` really takes its length, but at most so long (50 ms): programs
            hold a stream up with it.
    """
    _numbers(real_operator_ns=operator_ns, real_collective_ns=collective_ns, real_sleep_ns=sleep_ns)


def pool_streams(number: int) -> None:
    """How many streams of a priority there are before the first comes again (32, as CUDA's pool has)."""
    _numbers(pool_streams=number)


def hardware_queues(number: int) -> None:
    """How many hardware queues a device has for each priority of streams (0: no limit); waits for all streams.

    Streams come to queues in turn, at their first use from now on, and what streams of one queue do runs in the order
    of issue (native/streams.cpp has the rule and its source).
    """
    load.native().set_hardware_queues(number)


def advance_host(by_ns: int) -> None:
    """The host computes for so long."""
    load.native().advance_host(by_ns)


def fail_next_collective(group: Any, message: str) -> None:
    """The next collective of a group fails on this rank.

    On the device, its Work's `wait` and every later call of the group raise DistBackendError; without a Work, the
    host's next synchronisation raises. Its peers wait for ever, until they abort.
    """
    _backend(group).fault_next(load.native().Fault.FAILS, message)


def dead_peer(group: Any = None) -> None:
    """The next collective of a group never ends on this rank, until the group is aborted."""
    _backend(group).fault_next(load.native().Fault.PEER_IS_DEAD, "")


def begin_capture() -> Any:
    """From now on kernels are kept in place of run, until the graph's `end()`."""
    graph = load.native().Graph()
    graph.begin()
    return graph


def host_ns() -> int:
    """The host's clock."""
    return int(load.native().host_ns())


def timeline(device: int | None = None, *, kind: str | None = None, name: str | None = None) -> list[Row]:
    """What has run, in the order of starts; of one device, one kind, one name."""
    rows = sorted((Row(**row) for row in load.native().timeline()), key=lambda row: (row.start_ns, row.id))
    asked = {"device": device, "kind": kind, "name": name}.items()
    return [row for row in rows if all(value in (None, getattr(row, what)) for what, value in asked)]


def waits() -> list[Wait]:
    """Where streams stood still, in the order of begins."""
    return sorted((Wait(**row) for row in load.native().waits()), key=lambda wait: (wait.begin_ns, wait.stream))


def races() -> list[Race]:
    """What the race checker has found since the last `reset`."""
    found = []
    for race in load.native().races():
        sides = [
            "{} in {name} on stream {stream} of device {device}".format("writes" if one["write"] else "reads", **one)
            for one in (race["first"], race["second"])
        ]
        words = f"{'; '.join(sides)}; {race['end'] - race['begin']} bytes, {race['times']} times"
        found.append(Race(race["first"]["name"], race["second"]["name"], words))
    return found


def no_races() -> None:
    """Fails the test with all that was found."""
    found = races()
    assert not found, f"{len(found)} races:\n" + "\n".join(race.words for race in found)


def counters(device: int = 0) -> Counters:
    """The device's counts."""
    native = load.native()
    live, peak, _allocations = native.memory(device)
    events = [native.counts("").get(name, 0) for name in ("events_created", "events_recorded")]
    return Counters(native.counts("host_synchronisation:"), *events, live, peak)


def backend_streams(device: int = 0) -> frozenset[int]:
    """Streams of the process groups' own that kernels were launched on since the last `reset`."""
    words = (name.split(":") for name in load.native().counts("backend_stream:"))
    return frozenset(int(stream) for *_, on, stream in words if int(on) == device)


def pending() -> dict[tuple[int, int], list[str]]:
    """What each stream (device, stream) is at, and what is queued behind it: for a program that hangs."""
    return dict(load.native().pending())


def reset() -> None:
    """Let all that is queued finish, then forget what was seen. Settings, clocks and memory stay; peaks begin anew."""
    native = load.native()
    native.reset()
    for index in range(native.device_count()):
        native.reset_peak(index)


def _numbers(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None:
            load.native().set_number(name, value)


def _backend(group: Any) -> Any:
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    return group._get_backend(torch.device("cuda"))
