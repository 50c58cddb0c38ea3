"""What a test sets, and what it reads: the simulated device's own account.

    from tests.simulated import device

    device.reset()
    device.lengths(matmul=(50_000, 0))
    ...
    device.no_races()
    rows = device.timeline()

Everything set holds for what is launched later. Times are nanoseconds of the host's clock (`host_ns`), virtual or real.
Must not: be imported in a process without the device and then used; each call says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.simulated import load
from tests.simulated.account import Counters, Race, Row, Side, Wait

CLASSES = ("matmul", "elementwise", "copy_h2d", "copy_d2h", "copy_d2d", "memset")


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
    """What launches and events cost, in virtual time.

    Args:
        launch_ns: the host, for each kernel, copy or collective (1 us); it is launched when they are over.
        event_ns: the host, to record an event or to let a stream wait for one (0).
        event_on_device_ns: the stream, to write the time of an event that has timing enabled; the event's time is the
            end of the writing (0).
        submission_ns: from then on until the device sees what was launched, recorded or is to be waited for (0).
    """
    _numbers(
        launch_cost_ns=launch_ns,
        event_cost_ns=event_ns,
        event_on_device_cost_ns=event_on_device_ns,
        submission_ns=submission_ns,
    )


def clock_rate(ppm: int) -> None:
    """How much faster than the host's clock the device's own passes, by which `elapsed_time` tells (0 ppm)."""
    _numbers(rate_ppm=ppm)


def contention(factor: float) -> None:
    """How much slower kernels are while a collective runs on their device (1); virtual time only.

    With more than 1 the host has to wait for the device at some time, and one communicator to be at work at a time
    (native/contention.hpp says why).
    """
    load.native().set_contention(factor)


def queue_depth(tasks: int) -> None:
    """How many tasks a stream takes before a launch waits (1024)."""
    _numbers(queue_depth=tasks)


def real_delays(
    *, operator_ns: int | None = None, collective_ns: int | None = None, sleep_ns: int | None = None
) -> None:
    """Really sleep in the stream's thread, in either mode: who does not wait then reads poison.

    Args:
        operator_ns: before each operator (0). collective_ns: before each collective writes its outputs (0).
        sleep_ns: in virtual time, `torch.cuda._sleep` really takes its length, but at most so long (50 ms): programs
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


def polling_orders(on: bool) -> None:
    """Whether a query that said yes counts as an order for later launches (no: see native/races.hpp)."""
    load.native().set_switch("polling_orders", on)


def advance_host(by_ns: int) -> None:
    """The host computes for so long. Does nothing in wall time."""
    load.native().advance_host(by_ns)


def fail_next_collective(group: Any = None, message: str = "injected", *, at_issue: bool = False) -> None:
    """The next collective of a group fails on this rank.

    On the device, its Work's `wait` and every later call of the group raise DistBackendError; without a Work, the
    host's next synchronisation raises. Its peers wait for ever, until they abort.

    Args:
        group: the default one if None. at_issue: the call itself raises, and nothing is launched.
    """
    fault = load.native().Fault
    _backend(group).fault_next(fault.REFUSES_ISSUE if at_issue else fault.FAILS, message)


def dead_peer(group: Any = None) -> None:
    """The next collective of a group never ends on this rank, until the group is aborted."""
    _backend(group).fault_next(load.native().Fault.PEER_IS_DEAD, "")


def begin_capture() -> Any:
    """From now on kernels are kept in place of run, until `end_capture`; the graph, which can be replayed."""
    graph = load.native().Graph()
    graph.begin()
    return graph


def end_capture(graph: Any) -> None:
    """The other end of `begin_capture`."""
    graph.end()


def is_virtual() -> bool:
    """Whether time is virtual."""
    return bool(load.native().is_virtual())


def host_ns() -> int:
    """The host's clock."""
    return int(load.native().host_ns())


def host_clock_address() -> int:
    """Address of a C function `int64_t now(void)` that reads it, for compiled code."""
    return int(load.native().host_clock_address())


def event_ns(event: Any) -> int:
    """When an event happened; to the nanosecond, unlike `elapsed_time`."""
    return int(load.native().event_ns(event.event_id))


def timeline(device: int | None = None, *, kind: str | None = None, name: str | None = None) -> list[Row]:
    """What has run, in the order of starts; of one device, one kind, one name."""
    rows = [Row(**row) for row in load.native().timeline()]
    rows.sort(key=lambda row: (row.start_ns, row.id))
    return [
        row
        for row in rows
        if (device is None or row.device == device)
        and (kind is None or row.kind == kind)
        and (name is None or row.name == name)
    ]


def waits() -> list[Wait]:
    """Where streams stood still, in the order of begins."""
    return sorted((Wait(**row) for row in load.native().waits()), key=lambda wait: (wait.begin_ns, wait.stream))


def races() -> list[Race]:
    """What the race checker has found since the last `reset`."""
    return [
        Race(Side(**race["first"]), Side(**race["second"]), race["begin"], race["end"], race["times"])
        for race in load.native().races()
    ]


def no_races() -> None:
    """Fails the test with all that was found."""
    found = races()
    assert not found, f"{len(found)} races:\n" + "\n".join(map(describe, found))


def describe(race: Race) -> str:
    """A race in words."""

    def side(one: Side) -> str:
        return f"{'writes' if one.write else 'reads'} in {one.name} on stream {one.stream} of device {one.device}"

    return f"{side(race.first)}; {side(race.second)}; {race.end - race.begin} bytes, {race.times} times"


def counters(device: int = 0) -> Counters:
    """The device's counts."""
    native = load.native()
    live, peak, _allocations = native.memory(device)
    counts = native.counts("")
    return Counters(
        native.counts("host_synchronisation:"),
        counts.get("events_created", 0),
        counts.get("events_recorded", 0),
        counts.get("streams_created", 0),
        native.kernels(),
        live,
        peak,
    )


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
