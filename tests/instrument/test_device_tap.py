"""The order of events on CUDA/HIP streams (docs/measuring.md, R2 and R3), with streams that only take notes.

The collectives are real (gloo, one rank); what is checked is who waits for whom, and when the marks are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.instrument.device_collectives import DeviceTap
from aorta.instrument.issued import Group, Issued
from aorta.instrument.seam import work_in

pytestmark = pytest.mark.usefixtures("world_of_one")


class NotedStream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes, self.events = name, notes, 0

    def wait_stream(self, other: NotedStream) -> None:
        self.notes.append(f"{self.name} waits for stream {other.name}")

    def wait_event(self, event: str) -> None:
        self.notes.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events += 1
        return f"event {self.events} of {self.name}"


class NotedStreams:
    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.caller, self.side = NotedStream("caller", notes), NotedStream("side", notes)
        self.now = self.caller

    def current(self) -> NotedStream:
        return self.now

    def of_group(self, group: str) -> NotedStream:
        return self.side

    @contextmanager
    def use(self, stream: NotedStream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class NotedClock:
    timer = "cuda_event"

    def __init__(self, streams: NotedStreams) -> None:
        self.streams, self.happened = streams, False

    def mark(self) -> str:
        self.streams.notes.append(f"mark on {self.streams.now.name}")
        return f"mark on {self.streams.now.name}"

    def read_ns(self, mark: Any) -> int | None:
        return 1 if self.happened else None


class NotedWork(dist._Work):
    def __init__(self, inner: Any, streams: NotedStreams) -> None:
        super().__init__()
        self.inner, self.streams = inner, streams

    def wait(self, timeout: Any = None) -> bool:
        self.streams.notes.append(f"backend's wait on {self.streams.now.name}")
        return bool(self.inner.wait())

    def is_completed(self) -> bool:
        return bool(self.inner.is_completed())


class Rig:
    """One tap over noting streams; `call` issues one all-reduce through it."""

    def __init__(self, *, dedicated: bool) -> None:
        self.notes: list[str] = []
        self.streams = NotedStreams(self.notes)
        self.clock = NotedClock(self.streams)
        self.issued: list[Issued] = []
        self.stalls: list[tuple[Any, Any]] = []
        groups: dict[str, Group] = {}
        self.tap = DeviceTap(
            self.clock,  # type: ignore[arg-type]
            groups,
            self.issued.append,
            lambda begin, end: self.stalls.append((begin, end)),
            self.streams,
            dedicated=dedicated,
        )
        self.alive: list[Any] = []

    def call(self, *, asynchronous: bool, handle: bool = True) -> Any:
        tensor = torch.ones(2)
        issued = Issued("allreduce", "0", 0, 8, "float32", 0)
        self.issued.append(issued)

        def original() -> Any:
            self.notes.append(f"issued on {self.streams.now.name}")
            work = NotedWork(dist.all_reduce(tensor, async_op=True), self.streams)
            self.alive.append(work)
            return [tensor], work.boxed() if handle else None

        result = self.tap._on_device(issued, ([tensor],), asynchronous, original)
        return work_in(result)


BRACKET = [
    "side waits for stream caller",
    "mark on side",
    "issued on side",
    "backend's wait on side",
    "mark on side",
]


def test_dedicated_asynchronous_brackets_on_its_own_stream_and_the_caller_waits_late() -> None:
    rig = Rig(dedicated=True)
    work = rig.call(asynchronous=True)
    assert rig.notes == BRACKET
    assert rig.stalls == []
    work.wait()
    assert rig.notes[len(BRACKET) :] == ["mark on caller", "caller waits for event 1 of side", "mark on caller"]
    assert len(rig.stalls) == 1


def test_dedicated_synchronous_makes_the_caller_wait_at_once() -> None:
    rig = Rig(dedicated=True)
    rig.call(asynchronous=False)
    assert rig.notes == [*BRACKET, "mark on caller", "caller waits for event 1 of side", "mark on caller"]


def test_waiting_for_one_collective_does_not_wait_for_the_next() -> None:
    rig = Rig(dedicated=True)
    first, _second = rig.call(asynchronous=True), rig.call(asynchronous=True)
    rig.notes.clear()
    first.wait()
    assert "caller waits for event 1 of side" in rig.notes
    assert not any("stream side" in note for note in rig.notes)


def test_observe_leaves_the_collective_where_it_is() -> None:
    rig = Rig(dedicated=False)
    work = rig.call(asynchronous=True)
    assert rig.notes == [
        "side waits for stream caller",
        "mark on side",
        "issued on caller",
        "backend's wait on side",
        "mark on side",
    ]
    rig.notes.clear()
    work.wait()
    assert rig.notes == ["mark on caller", "backend's wait on caller", "mark on caller"]


def test_observe_synchronous_is_marked_on_the_callers_stream() -> None:
    rig = Rig(dedicated=False)
    rig.call(asynchronous=False)
    assert rig.notes == ["mark on caller", "issued on caller", "backend's wait on caller", "mark on caller"]
    assert rig.issued[0].end_source == "event"


def test_tensors_live_until_the_end_event_has_happened() -> None:
    rig = Rig(dedicated=True)
    rig.call(asynchronous=True)
    assert rig.issued[0].alive is not None
    rig.call(asynchronous=True)
    assert rig.issued[0].alive is not None
    rig.clock.happened = True
    rig.call(asynchronous=True)
    assert rig.issued[0].alive is None
    assert rig.issued[1].alive is None


@pytest.mark.parametrize("dedicated", [True, False])
def test_a_synchronous_collective_without_a_handle_is_bracketed_all_the_same(dedicated: bool) -> None:
    # NCCL: the caller's stream runs what comes next behind it, so there is nothing to wait for.
    rig = Rig(dedicated=dedicated)
    assert rig.call(asynchronous=False, handle=False) is None
    assert "backend's wait on side" not in rig.notes
    stream = "side" if dedicated else "caller"
    begin = rig.notes.index(f"issued on {stream}")
    assert rig.notes[begin - 1] == rig.notes[begin + 1] == f"mark on {stream}"
    assert rig.issued[0].end_source == "event"
    assert ("caller waits for event 1 of side" in rig.notes) is dedicated


@pytest.mark.parametrize("dedicated", [True, False])
def test_the_end_of_a_part_of_a_batch_is_not_known(dedicated: bool) -> None:
    # NCCL issues it later, past the seam: an end marked here would be that of nothing (W1).
    rig = Rig(dedicated=dedicated)
    assert rig.call(asynchronous=True, handle=False) is None
    assert rig.issued[0].end is None


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("dedicated", [True, False])
def test_a_part_of_a_batch_stays_on_the_callers_stream(dedicated: bool, asynchronous: bool) -> None:
    # The batch's kernels go out when it ends, on the caller's stream: nothing of ours may be in between.
    rig = Rig(dedicated=dedicated)
    group = dist.group.WORLD
    tensor = torch.empty(2, device="meta")  # a device's, as far as the tap can see
    given = object()

    def original() -> Any:
        rig.notes.append(f"issued on {rig.streams.now.name}")
        return given

    arguments = ([tensor], group.boxed(), 0, 0, asynchronous, -1)
    with dist._coalescing_manager(group=group):
        assert rig.tap("broadcast_", arguments, original) is given
    assert rig.notes == ["mark on caller", "issued on caller"]
    (issued,) = rig.issued
    assert issued.end is None
    assert rig.stalls == []


def test_behind_a_batch_collectives_are_moved_again() -> None:
    with dist._coalescing_manager(group=dist.group.WORLD):
        pass
    rig = Rig(dedicated=True)
    work = NotedWork(dist.all_reduce(torch.ones(1), async_op=True), rig.streams)
    arguments = ([torch.empty(2, device="meta")], dist.group.WORLD.boxed(), 0, 0, True, -1)
    rig.tap("broadcast_", arguments, lambda: ([], work.boxed()))
    assert rig.notes[:2] == BRACKET[:2]
