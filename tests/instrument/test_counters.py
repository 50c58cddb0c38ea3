"""What the backends count, and what coverage makes of it (R8): gloo as it is, NCCL and mixed groups as stand-ins.

The rule of NCCL was read in torch's source and has not been run:
docs/dev/decisions/0003-sequence-counters-as-coverage.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.instrument import cpu_interceptor
from aorta.instrument.cpu_interceptor import CpuInterceptor
from aorta.instrument.dispatcher import counts_point_to_point, issued_by
from aorta.instrument.event_clock import HostClock
from aorta.instrument.open_step import StepFacts
from aorta.instrument.step_builder import StepBuilder
from aorta.instrument.step_recorder import StepRecorder
from aorta.records.clocks import read_clocks
from aorta.records.schema import Step

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Backend:
    """Counts as the backend of its name does; `None` for one that keeps no count."""

    def __init__(self, name: str, count: int | None = 0) -> None:
        self._name, self.count = name, count

    def name(self) -> str:
        return self._name

    def run(self, operator: str) -> None:
        if self.count is not None and (self._name == "gloo" or operator not in ("send", "recv_")):
            self.count += 1

    def _get_sequence_number_for_group(self) -> int:
        if self.count is None:
            raise RuntimeError("does not yet support sequence numbers")
        return self.count


class Group:
    """A process group of one rank with a backend for each kind of device."""

    group_name = "stand-in"

    def __init__(self, **backends: Backend) -> None:
        self._backends = backends
        self._device_types = [torch.device(device) for device in backends]

    def size(self) -> int:
        return 1

    def _get_backend(self, device: torch.device) -> Backend:
        return self._backends[device.type]


def recorded(monkeypatch: pytest.MonkeyPatch, backend: Backend, operators: Sequence[str]) -> Step:
    """One step in which these operators pass a tap, on a group of that backend."""
    group, lines = Group(cpu=backend), list[Step]()
    monkeypatch.setattr(cpu_interceptor, "group_in", lambda argument: group)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    known: dict[str, cpu_interceptor.Group] = {}
    clock = HostClock()
    reader = StepBuilder(clock, 0, 1, known, read_clocks())
    recorder = StepRecorder(clock, reader, lambda: {0: issued_by(group)}, lines.append)  # type: ignore[arg-type]
    tap = CpuInterceptor(clock, known, recorder)
    tensors = [torch.ones(4)]
    with recorder.step(StepFacts(0, 0, 0, None, warmup=False)):
        for operator in operators:

            def original(operator: str = operator) -> Any:
                backend.run(operator)
                return None  # it is over

            tap(operator, (tensors, object(), 0, 0), original)  # a send or receive: its peer and tag
    recorder.finish()
    return lines[0]


MIXED = ("allreduce_", "send", "recv_", "broadcast_")


def test_nccl_leaves_sends_and_receives_out_of_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    line = recorded(monkeypatch, Backend("nccl"), MIXED)
    assert [row.kind for row in line.collectives] == ["allreduce", "send", "recv", "broadcast"]
    assert line.coverage.complete, line.coverage.reason
    assert (line.coverage.seen, line.coverage.issued) == (2, 2)
    assert line.overlap["comm_ms"] is not None


def test_gloo_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    line = recorded(monkeypatch, Backend("gloo"), MIXED)
    assert line.coverage.complete, line.coverage.reason
    assert (line.coverage.seen, line.coverage.issued) == (4, 4)


def test_every_backend_of_a_mixed_group_is_asked() -> None:
    # The group itself would answer for its default backend only.
    group = Group(cpu=Backend("gloo", 3), cuda=Backend("nccl", 40))
    assert issued_by(group) == 43  # type: ignore[arg-type]
    assert counts_point_to_point(group, CPU)  # type: ignore[arg-type]
    assert not counts_point_to_point(group, CUDA)  # type: ignore[arg-type]


def test_a_backend_that_serves_two_kinds_of_device_counts_once() -> None:
    both = Backend("gloo", 5)
    assert issued_by(Group(cpu=both, cuda=both)) == 5  # type: ignore[arg-type]


def test_one_backend_without_a_count_makes_the_groups_unknown() -> None:
    assert issued_by(Group(cpu=Backend("gloo", 3), cuda=Backend("ucc", None))) is None  # type: ignore[arg-type]


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo"])
def test_a_real_group_counts_what_it_is_given(backend: str) -> None:
    group = dist.new_group([0], backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    before = issued_by(group)
    assert before is not None
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    assert issued_by(group) == before + 3
    assert counts_point_to_point(group, CPU)
