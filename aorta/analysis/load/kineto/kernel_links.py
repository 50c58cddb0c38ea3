"""Links the kernels and copies of a Kineto trace to the host's calls and operators, and to collectives.

Three parts. *Links*: of a kernel to the call that launched it (`correlation`) and its operator (`External id`), of
matrix products with their shapes. *Collectives*: columns row by row (kind, group, sequence number, bytes, data type)
from the arguments that `record_param_comms` left on their kernels or on the host's rows; what an argument does not say
is `NULL`. *Copies*: collectives whose data is moved by copy engines launch no kernel (NCCL with zero-CTA collectives,
torch's symmetric memory). Of the copies between devices those that a collective launched are selected by their own
arguments and those of the host's operators; copies that may be either make communication unobserved, with this reason.

Must not: decode more of arguments for links than these (a trace has one set per kernel and per call), guess, or call a
copy communication without evidence in the trace.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from types import NoneType
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.interval_table import NULL, Gemms, Interner, look_up
from aorta.analysis.load.kernel_classifier import kind_of, known_dtype
from aorta.analysis.load.kernels import gemm_of, gemms_of
from aorta.analysis.load.kineto.event_structs import Arguments, Number, Rows, decoded, integer
from aorta.timeline.arrays import Int64
from aorta.timeline.classes import KINDS


class Links(msgspec.Struct, gc=False):
    """The arguments that tie an event to others."""

    external: Number = msgspec.field(default=None, name="External id")
    external_old: Number = msgspec.field(default=None, name="external id")
    correlation: Number = None


class _Product(Links, gc=False):
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="Input type")


_LINKS: Final = msgspec.json.Decoder(list[Links | None])
_PRODUCTS: Final = msgspec.json.Decoder(list[_Product | None])


class KernelLinks:
    """Collects launches and matrix products of a trace, piece by piece."""

    def __init__(self) -> None:
        self._calls = Rows("ident", "operator", "role")
        self._roles: dict[Any, int] = {}
        self._products: list[Int64] = []
        self._shapes: list[int] = []
        self._shape_of = defaultdict[tuple[str, bytes, bytes], int](count().__next__)

    def add_calls(self, calls: Sequence[Any], start: Int64, known: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Keep when calls began (ns), where that is known, what they launched, and for which operator."""
        links = links_of([call.args for call in calls])
        ids = idents([call.correlation for call in links])
        names = [call.name for call in calls]
        self._roles |= {name: _role(name) for name in set(names) - self._roles.keys()}
        role = np.array(list(map(self._roles.__getitem__, names)), np.int64)
        kept = known & ((ids != NULL) | (role > _KERNEL))
        self._calls.add(
            start[kept], start[kept] * 0, ident=ids[kept], operator=externals_of(links)[kept], role=role[kept]
        )

    def add_products(self, operators: Sequence[Any]) -> None:
        """Keep the shapes of matrix products (`GEMM_OPERATORS`)."""
        links = decoded(_PRODUCTS, [operator.args for operator in operators], _Product())
        self._products.append(externals_of(links))
        names = [operator.name for operator in operators]
        dims, types = map(bytes, [each.dims for each in links]), map(bytes, [each.types for each in links])
        self._shapes += map(self._shape_of.__getitem__, zip(names, dims, types, strict=True))

    def launches(self, correlation: Int64) -> Int64:
        """Return when the call that launched each row began, on the rows' clock; `NULL` where it is not known."""
        calls, starts = self._calls.ident, self._calls.start
        order = np.argsort(starts, kind="stable")  # of calls with one number the first counts
        found = look_up(correlation, calls[order], starts[order])
        return np.where(correlation == NULL, NULL, found)

    def lost(self, correlation: Int64) -> tuple[Int64, Int64]:
        """Return when calls launched kernels that no row is, and their operators. What is launched while a graph is
        captured does not run.

        Args:
            correlation: of all rows on devices.
        """
        role, start = self._calls.role, self._calls.start
        order = np.argsort(start, kind="stable")
        captured = np.empty(len(role), np.int64)
        captured[order] = np.cumsum((role[order] == _BEGIN).astype(np.int64) - (role[order] == _END))
        absent = (role == _KERNEL) & (captured <= 0) & ~np.isin(self._calls.ident, correlation)
        return start[absent], self._calls.operator[absent]

    def gemms(self) -> Gemms:
        """Return the matrix products of the trace."""
        shapes = [gemm_of(*shape) for shape in self._shape_of]
        products = np.concatenate(self._products) if self._products else np.zeros(0, np.int64)
        return gemms_of(products, np.array(self._shapes, np.int64), shapes)


_KERNEL, _BEGIN, _END = 1, 2, 3


def _role(name: object) -> int:
    """Return whether a call launches a kernel, begins or ends a capture; 0 for any other."""
    text = str(name)
    return (
        _KERNEL if "LaunchKernel" in text else _BEGIN if "BeginCapture" in text else _END if "EndCapture" in text else 0
    )


def links_of(texts: Sequence[msgspec.Raw | bytes]) -> list[Links]:
    """Return what each set of arguments ties its event to; nothing where it has another form."""
    return decoded(_LINKS, texts, Links())


def externals_of(links: Sequence[Links]) -> Int64:
    """Return the ids of the host operators, or `NULL`."""
    return idents([each.external if each.external is not None else each.external_old for each in links])


def idents(values: Sequence[Number]) -> Int64:
    """Return the ids among values of any type, `NULL` for those that are none."""
    try:
        if set(map(type, values)) <= {int, NoneType}:
            ids = np.array([NULL if value is None else value for value in values], np.int64)
            return np.where(ids >= 0, ids, NULL)
    except OverflowError:
        pass  # beyond 63 bits: one by one
    return np.array(list(map(_ident, values)), np.int64)


def _ident(value: Number) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else NULL


LARGEST_BYTES: Final = 2**60
_FULL_ARRAY: Final = {
    "allreduce": ("in", False),
    "reducescatter": ("in", False),
    "allgather": ("out", False),
    "broadcast": ("any", False),
    "alltoall": ("in", False),
    "reduce": ("in", False),
    "gather": ("in", True),
    "scatter": ("out", True),
    "send": ("any", False),
    "recv": ("any", False),
}
"""Kind -> which side's elements are the full array, and whether they are one rank's part of it (docs/dev/measuring.md,
section 1: the reduced tensor, the gathered output, the scattered input; for all-to-all one rank's send buffer).
"""
_RANKS: Final = msgspec.json.Decoder(list[int])


_kind_of = cache(kind_of)
_known_dtype = cache(known_dtype)


@dataclass
class CollectiveColumns:
    """Columns over all rows of a table; `NULL` where nothing is known."""

    kind: NDArray[np.int8]
    group: Int64
    seq: Int64
    bytes: Int64
    dtype: Int64
    groups: Interner = field(default_factory=Interner)
    dtypes: Interner = field(default_factory=Interner)
    group_ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    group_sizes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def empty(cls, rows: int) -> CollectiveColumns:
        """Return the columns in which nothing is known of any row."""
        group, seq, size, dtype = (np.full(rows, NULL, np.int64) for _ in range(4))
        return cls(np.full(rows, NULL, np.int8), group, seq, size, dtype)


def from_arguments(columns: CollectiveColumns, arguments: Mapping[int, Arguments]) -> None:
    """Fill in the rows that have arguments. A collective's arguments are the same in every step except for the sequence
    number, so everything else is computed once per distinct set.
    """
    rows = np.fromiter(arguments, np.int64, len(arguments))
    known: dict[Any, tuple[int, int, int, int]] = {}
    interpreted = []
    for kind, found in zip(columns.kind[rows].tolist(), arguments.values(), strict=True):
        ranks = tuple(found.ranks) if isinstance(found.ranks, list) else found.ranks
        size, elements = found.group_size, (found.elements_in, found.elements_out)
        same = (kind, found.collective, found.group, type(found.group), size, ranks, found.dtype, elements)
        if same not in known:
            known[same] = _interpreted(columns, kind, found)
        interpreted.append((*known[same], max(integer(found.seq), NULL)))
    kinds, groups, dtypes, sizes, numbers = zip(*interpreted, strict=True) if interpreted else ((),) * 5
    columns.kind[rows] = kinds
    columns.group[rows], columns.dtype[rows], columns.bytes[rows], columns.seq[rows] = groups, dtypes, sizes, numbers


def _interpreted(columns: CollectiveColumns, kind: int, arguments: Arguments) -> tuple[int, int, int, int]:
    """Interpret one set of arguments; facts about the group are added to `columns`.

    Args:
        kind: the kind in the name of the kernel.

    Returns:
        Kind, code of the group, code of the data type, and bytes; each `NULL` where the arguments do not say.
    """
    said = _kind_of(arguments.collective or "")
    kind = said if said != NULL else kind
    group, size = NULL, integer(arguments.group_size)
    if arguments.group is not None:
        name = str(arguments.group)
        group = columns.groups(name)
        if size > 0:
            columns.group_sizes[name] = size
        if name not in columns.group_ranks and (ranks := group_ranks(arguments.ranks)):
            columns.group_ranks[name] = ranks
    dtype, width = _known_dtype(arguments.dtype)
    moved = NULL
    if kind != NULL and width is not None:
        elements = full_array(KINDS[kind], integer(arguments.elements_in), integer(arguments.elements_out), size)
        moved = elements * width if 0 <= elements < LARGEST_BYTES else NULL
    return kind, group, columns.dtypes(dtype) if dtype is not None else NULL, moved


def full_array(kind: str, elements_in: int, elements_out: int, group_size: int) -> int:
    """Return the number of elements of the full array, or `NULL`."""
    if kind == "barrier":
        return 0
    side, one_part = _FULL_ARRAY[kind]
    elements = {"in": elements_in, "out": elements_out, "any": max(elements_in, elements_out)}[side]
    if elements < 0 or (one_part and group_size < 1):
        return NULL
    return elements * group_size if one_part else elements


def group_ranks(text: object) -> tuple[int, ...]:
    """Return the ranks of `[0, 1]`, given as a list or as text; empty where they are abbreviated ("[0, 1, ..., 7]")."""
    if isinstance(text, list):
        return tuple(rank for rank in text if isinstance(rank, int))
    if not isinstance(text, str) or not _LIST.fullmatch(text):
        return ()
    try:
        return tuple(_RANKS.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ()


_LIST: Final = re.compile(r"\[[\d, ]*\]")


SYMMETRIC: Final = "symm_mem::"
"""Operators of torch's symmetric memory (torch/csrc/distributed/c10d/symm_mem); they do not go through a `c10d::`
operator.
"""
_WITH_HOST: Final = re.compile(r"HtoD|DtoH|HtoH|HostToDevice|DeviceToHost|HostToHost|Pageable|Pinned|Host\b")


def between_devices(name: str) -> bool:
    """Return whether a copy of that name may have moved data between devices ("Memcpy PtoP (Device -> Device)"). Fills,
    and copies to or from the host, do not. CUPTI also calls a copy to another device's mapped memory `DtoD`.
    """
    return "memset" not in name.lower() and _WITH_HOST.search(name) is None


def launched_by_collectives(
    copies: Mapping[int, Arguments | int], parameters: Mapping[int, Arguments]
) -> dict[int, Arguments]:
    """Return the copies that a collective launched, with that collective's arguments.

    Args:
        copies: row -> its own arguments where they name a collective, else the id of its host operator.
        parameters: that id -> the arguments of `record_param_comms`.
    """
    found = {}
    for row, known in copies.items():
        arguments = known if isinstance(known, Arguments) else parameters.get(known)
        if arguments is not None:
            found[row] = arguments
    return found


def unknown(count: int, symmetric: bool) -> str | None:
    """Return why communication was not fully observed, or None. `count`: device copies without a known collective."""
    if not symmetric or not count:
        return None
    return (
        f"symmetric memory was used, and of {count} copies between devices the trace does not say whether they are "
        "communication: copy engines move the data of such collectives, without a kernel"
    )
