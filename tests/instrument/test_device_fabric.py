"""The emulated fabric on CUDA/HIP streams: where the delay stands, and who waits for it. Streams only take notes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.config.schema import EmulatedFabric
from aorta.instrument import links
from aorta.instrument.device_collectives import DeviceTap
from aorta.instrument.fabric import Fabric
from aorta.instrument.issued import Group, Issued
from aorta.instrument.links import DeviceLink
from aorta.instrument.seam import work_in
from tests.instrument.test_device_tap import BRACKET, NotedClock, NotedStreams, NotedWork

pytestmark = pytest.mark.usefixtures("world_of_one")
LATE = {"straggler_rank": 0, "straggler_ms": 2.0}
COST_NS = 2 * 1_000 + 8  # an all-reduce of 8 bytes on two ranks: 2 (n - 1) latencies of 1 us, and 8 bytes at 1 GB/s


class Rig:
    """One tap with a fabric over noting streams; `call` issues one all-reduce through it."""

    def __init__(self, *, dedicated: bool, **settings: Any) -> None:
        self.notes: list[str] = []
        self.streams = NotedStreams(self.notes)
        chosen = EmulatedFabric(
            inter_latency_us=1.0, inter_bandwidth_gb_per_s=1.0, **{"emulated_world_size": 2} | settings
        )
        link = DeviceLink(
            Fabric(chosen, 0, 1, None),
            [],
            lambda ns: self.notes.append(f"{ns} ns of spinning on {self.streams.now.name}"),
        )
        self.tap = DeviceTap(
            NotedClock(self.streams),  # type: ignore[arg-type]
            {"0": Group((0,), 1)},
            lambda issued: None,
            lambda begin, end: None,
            self.streams,
            dedicated=dedicated,
            device_link=link,
        )
        self.alive: list[Any] = []

    def call(self, *, asynchronous: bool) -> Any:
        tensor = torch.ones(2)

        def original() -> Any:
            self.notes.append(f"issued on {self.streams.now.name}")
            inner = dist.all_reduce(tensor, async_op=True)
            inner.wait()
            work = NotedWork(inner, self.streams)
            work.get_future = inner.get_future
            self.alive.append(work)
            return [tensor], work.boxed()

        issued = Issued("allreduce", "0", 0, 8, "float32", 0, 0)
        self.tap._be_late(on_host=False)
        return work_in(self.tap._on_device(issued, ([tensor],), asynchronous, original))


DELAYED = [*BRACKET[:-1], f"{COST_NS} ns of spinning on side", BRACKET[-1]]


def test_dedicated_spins_behind_the_backend_and_inside_the_marks() -> None:
    rig = Rig(dedicated=True)
    work = rig.call(asynchronous=True)
    assert rig.notes == DELAYED
    work.wait()
    assert "caller waits for event 1 of side" in rig.notes


def test_observe_lets_the_caller_wait_for_the_emulated_end_as_well() -> None:
    rig = Rig(dedicated=False)
    work = rig.call(asynchronous=True)
    assert rig.notes[-3:] == ["backend's wait on side", f"{COST_NS} ns of spinning on side", "mark on side"]
    rig.notes.clear()
    work.wait()
    assert rig.notes == [
        "mark on caller",
        "backend's wait on caller",
        "caller waits for event 1 of side",
        "mark on caller",
    ]


def test_observe_synchronous_spins_on_the_callers_stream() -> None:
    rig = Rig(dedicated=False)
    rig.call(asynchronous=False)
    assert rig.notes[-2:] == [f"{COST_NS} ns of spinning on caller", "mark on caller"]


@pytest.mark.parametrize("dedicated", [True, False])
def test_the_future_holds_the_backends_value(dedicated: bool) -> None:
    work = Rig(dedicated=dedicated).call(asynchronous=True)
    assert torch.equal(work.get_future().wait()[0], torch.ones(2))


def test_the_straggler_spins_on_the_callers_stream_before_anything_else() -> None:
    rig = Rig(dedicated=True, **LATE)
    rig.call(asynchronous=True)
    assert rig.notes == ["2000000 ns of spinning on caller", *DELAYED]


def test_a_collective_that_costs_nothing_is_not_delayed() -> None:
    rig = Rig(dedicated=True, emulated_world_size=None)
    rig.call(asynchronous=True)
    assert rig.notes == BRACKET


class FakeEvent:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _end: FakeEvent) -> float:
        return 10.0  # ms for 20 million cycles: 2 GHz


def test_spinning_is_calibrated_to_the_devices_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(links, "_spin", cycles.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    sleep = links.stream_sleep(torch.device("cuda"))
    cycles.clear()
    sleep(1_500)
    assert cycles == [3_000]
