"""What of torch is used: the operator table against its schemas; a private name that is gone is named before anything
is measured, with what is lost and what still works; what backends count (R8): gloo as it is, NCCL and mixed groups as
stand-ins, whose rule was read in torch's source and has not been run (docs/dev/decisions.md, 3).
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from aorta.errors import InstrumentError
from aorta.instrument.dispatcher import PrivateName, check_torch, counts_point_to_point, issued_by, private_names
from aorta.instrument.operators import OPERATORS, is_async, offered, position_of
from aorta.timeline.classes import KINDS


def test_the_table_fits_the_schemas_and_has_every_collective_of_this_torch() -> None:
    for name in offered():
        operator, arguments = OPERATORS[name], getattr(torch.ops.c10d, name).default._schema.arguments
        assert operator.kind in KINDS
        assert operator.argument is None or "Tensor" in str(arguments[operator.argument].type), name
        assert (position_of(name, "async_op") is None) == all(each.name != "async_op" for each in arguments), name
    known = {name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    moves_data = {name for name in known if "ProcessGroup" in str(getattr(torch.ops.c10d, name).default._schema)}
    # A debugging aid that never overlaps with anything and has no work handle.
    assert moves_data - set(OPERATORS) == {"monitored_barrier_"}


@pytest.mark.parametrize(
    ("name", "args", "size", "expected"),
    [
        ("reduce_scatter_", ([torch.zeros(2)], [[torch.zeros(2)] * 4]), 4, 32),
        ("alltoall_base_", (torch.zeros(8), torch.zeros(6, dtype=torch.bfloat16)), 4, 12),
        ("gather_into_tensor_", (torch.zeros(0), torch.zeros(2)), 4, 32),
    ],
)
def test_full_array_bytes(name: str, args: tuple[object, ...], size: int, expected: int) -> None:
    """Of what cannot be seen on two ranks of gloo, and of a buffer that is not full."""
    assert OPERATORS[name].full_array_bytes(args, size) == expected


def test_left_out_defaults_mean_asynchronous() -> None:
    assert is_async((1, 2), 4)
    assert is_async((1, 2, 3, 4, True), 4)
    assert not is_async((1, 2, 3, 4, False), 4)
    assert is_async((1, 2, 3, 4, False), None)


@pytest.mark.parametrize("gone", private_names(), ids=lambda each: each.name)
def test_a_name_that_is_gone_is_told_with_what_is_lost(gone: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    check_torch()
    remove(gone, monkeypatch)
    words = f"^torch {torch.__version__} does not offer .*{gone.name}.*, without which .*{gone.lost}"
    with pytest.raises(InstrumentError, match=words.replace("+", r"\+")) as error:
        check_torch()
    assert "What still works with instrument.mode=off: training" in str(error.value)


def remove(gone: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a name from this torch, wherever the attribute stands."""
    if gone.owner is torch.ops.c10d:  # makes its attributes when asked for them
        monkeypatch.delattr(gone.owner, gone.attribute)
        monkeypatch.setattr(type(gone.owner), "__getattr__", object.__getattribute__)
    elif gone.attribute == "queue_callback":  # of a type that cannot be changed
        monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", object())
    else:
        monkeypatch.delattr(gone.owner if gone.attribute in vars(gone.owner) else type(gone.owner), gone.attribute)


def test_remote_calls_say_what_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd, "_profiler_enabled")
    words = "cannot import name '_profiler_enabled'.*workload=rpc does not work with it. Every other workload does"
    # Another test of this process may have imported it, and runpy warns of that.
    monkeypatch.delitem(sys.modules, "aorta.rpc.tracer", raising=False)
    with pytest.raises(InstrumentError, match=words):
        runpy.run_module("aorta.rpc.tracer")


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def backend(name: str, count: int | None) -> Mock:
    """A `count` of None is that of one that keeps none."""
    counted = {"return_value": count} if count is not None else {"side_effect": RuntimeError("does not yet support it")}
    made = Mock(_get_sequence_number_for_group=Mock(**counted))
    made.name.return_value = name
    return made


def group(**backends: Mock) -> Any:
    """A process group of one rank with a backend for each kind of device."""
    devices = [torch.device(device) for device in backends]
    return SimpleNamespace(_device_types=devices, _get_backend=lambda device: backends[device.type])


def test_every_backend_of_a_mixed_group_is_asked_once() -> None:
    # The group itself would answer for its default backend only.
    mixed = group(cpu=backend("gloo", 3), cuda=backend("nccl", 40))
    both, without_a_count = backend("gloo", 5), backend("ucc", None)
    found = [mixed, group(cpu=both, cuda=both), group(cpu=backend("gloo", 3), cuda=without_a_count)]
    assert [issued_by(one) for one in found] == [43, 5, None]
    assert counts_point_to_point(mixed, CPU)
    assert not counts_point_to_point(mixed, CUDA)
