"""The operator table against torch's own schemas."""

from __future__ import annotations

import pytest
import torch

from aorta.instrument.operators import OPERATORS, is_async, offered, position_of_async_op
from aorta.timeline.classes import KINDS


@pytest.mark.parametrize("name", offered())
def test_the_table_fits_the_schema(name: str) -> None:
    operator = OPERATORS[name]
    arguments = getattr(torch.ops.c10d, name).default._schema.arguments
    assert operator.kind in KINDS
    if operator.argument is not None:
        assert "Tensor" in str(arguments[operator.argument].type)
    position = position_of_async_op(name)
    assert (position is None) == all(a.name != "async_op" for a in arguments)


def test_every_c10d_collective_of_this_torch_is_in_the_table() -> None:
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
    """Of what `test_kinds` cannot see on two ranks of gloo, and of a buffer that is not full."""
    assert OPERATORS[name].full_array_bytes(args, size) == expected


def test_left_out_defaults_mean_asynchronous() -> None:
    assert is_async((1, 2), 4)
    assert is_async((1, 2, 3, 4, True), 4)
    assert not is_async((1, 2, 3, 4, False), 4)
    assert is_async((1, 2, 3, 4, False), None)
