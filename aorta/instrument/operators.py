"""Table of the `c10d::*` operators: the name engineers use, the bytes moved, and whether the caller waits.

The tables follow the operators' schemas (`torch.ops.c10d.<name>.default._schema`). Must not call an operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Operator:
    """What an operator is called, and which argument holds its full array.

    The full array (docs/dev/measuring.md, section 1) is the reduced tensor, the gathered output, the scattered input;
    for all-to-all one rank's send buffer.

    Attributes:
        kind: one of `timeline.classes.KINDS`.
        argument: position of the argument that holds the array; None for operators that move none.
        one_part: only the root is given the full array, so the argument is one rank's part of it.
        coalesced: several tensors share one work handle; the first argument lists those that are written.
        stacks: takes a list of tensors, which ProcessGroupNCCL and ProcessGroupXCCL copy to or from one stacked tensor
            if all have one size. Only the backend's work keeps that tensor alive.
    """

    kind: str
    argument: int | None
    one_part: bool = False
    coalesced: bool = False
    stacks: bool = False

    @property
    def point_to_point(self) -> bool:
        """Whether only two ranks of the group take part."""
        return self.kind in ("send", "recv")

    def full_array_bytes(self, args: Arguments, group_size: int) -> int:
        if self.argument is None:
            return 0
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(args[self.argument]))
        return size * (group_size if self.one_part else 1)


OPERATORS: dict[str, Operator] = {
    "allreduce_": Operator("allreduce", 0),
    "allreduce_coalesced_": Operator("allreduce", 0, coalesced=True),
    "_reduce_scatter_base_": Operator("reducescatter", 1),
    "reduce_scatter_": Operator("reducescatter", 1, stacks=True),
    "reduce_scatter_tensor_coalesced_": Operator("reducescatter", 1, coalesced=True),
    "_allgather_base_": Operator("allgather", 0),
    "allgather_": Operator("allgather", 0, stacks=True),
    "allgather_coalesced_": Operator("allgather", 0, coalesced=True),
    "allgather_into_tensor_coalesced_": Operator("allgather", 0, coalesced=True),
    "broadcast_": Operator("broadcast", 0),
    "alltoall_base_": Operator("alltoall", 1),
    "alltoall_": Operator("alltoall", 1),
    "reduce_": Operator("reduce", 0),
    "gather_": Operator("gather", 1, one_part=True),
    "gather_into_tensor_": Operator("gather", 1, one_part=True),  # from torch 2.15 on
    "scatter_": Operator("scatter", 0, one_part=True),
    "send": Operator("send", 0),
    "recv_": Operator("recv", 0),
    "recv_any_source_": Operator("recv", 0),
    "barrier": Operator("barrier", None),
}
"""Operator name -> its description. `offered` gives those that this torch has."""


def offered() -> dict[str, Operator]:
    return {name: operator for name, operator in OPERATORS.items() if hasattr(torch.ops.c10d, name)}


def position_of(name: str, *arguments: str) -> int | None:
    """Return the position of the argument with one of these names; None for operators without it."""
    return next((i for i, argument in enumerate(_arguments(name)) if argument.name in arguments), None)


@cache
def position_of_group(name: str) -> int:
    return next(i for i, argument in enumerate(_arguments(name)) if str(argument.type).endswith("ProcessGroup"))


def _arguments(name: str) -> Any:
    return getattr(torch.ops.c10d, name).default._schema.arguments


def tensors_in(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    if not isinstance(argument, (list, tuple)):
        return []
    return [tensor for item in argument for tensor in tensors_in(item)]


def is_async(args: Arguments, position: int | None) -> bool:
    """Return whether the caller continues without waiting. `position`: of `async_op`; None: it always does. The
    dispatcher omits trailing defaults, and the default is asynchronous.
    """
    return position is None or position >= len(args) or bool(args[position])
