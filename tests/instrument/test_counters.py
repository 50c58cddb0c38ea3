"""What the backends count (R8): gloo as it is, NCCL and mixed groups as stand-ins.

The rule of NCCL was read in torch's source and has not been run: docs/dev/decisions.md, 3.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from aorta.instrument.dispatcher import counts_point_to_point, issued_by

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Backend:
    """Stand-in for a backend; a `count` of None is that of one that keeps none."""

    def __init__(self, name: str, count: int | None) -> None:
        self._name, self.count = name, count

    def name(self) -> str:
        return self._name

    def _get_sequence_number_for_group(self) -> int:
        if self.count is None:
            raise RuntimeError("does not yet support sequence numbers")
        return self.count


class Group:
    """A process group of one rank with a backend for each kind of device."""

    def __init__(self, **backends: Backend) -> None:
        self._backends = backends
        self._device_types = [torch.device(device) for device in backends]

    def _get_backend(self, device: torch.device) -> Backend:
        return self._backends[device.type]


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
