"""Describes collectives from the arguments that `record_param_comms` left on their kernels or on the host's rows.

Fills columns row by row: kind, group, sequence number, bytes, data type. Must not: guess; what an argument does not say
is `NULL`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.dtypes import known_dtype
from aorta.analysis.load.interval_table import NULL, Interner
from aorta.analysis.load.kernel_classifier import kind_of
from aorta.analysis.load.kineto.event_structs import Arguments, integer
from aorta.timeline.arrays import Int64
from aorta.timeline.classes import KINDS

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
        """Columns in which nothing is known of any row."""
        group, seq, size, dtype = (np.full(rows, NULL, np.int64) for _ in range(4))
        return cls(np.full(rows, NULL, np.int8), group, seq, size, dtype)


def from_arguments(columns: CollectiveColumns, arguments: Mapping[int, Arguments]) -> None:
    """Fill in the rows that have arguments. A collective's arguments are the same in every step except for the sequence
    number, so everything else is computed once per distinct set.
    """
    rows = np.fromiter(arguments, np.int64, len(arguments))
    known: dict[Any, tuple[int, int, int, int]] = {}
    told = []
    for kind, found in zip(columns.kind[rows].tolist(), arguments.values(), strict=True):
        ranks = tuple(found.ranks) if isinstance(found.ranks, list) else found.ranks
        size, elements = found.group_size, (found.elements_in, found.elements_out)
        same = (kind, found.collective, found.group, type(found.group), size, ranks, found.dtype, elements)
        if same not in known:
            known[same] = _told(columns, kind, found)
        told.append((*known[same], max(integer(found.seq), NULL)))
    kinds, groups, dtypes, sizes, numbers = zip(*told, strict=True) if told else ((),) * 5
    columns.kind[rows] = kinds
    columns.group[rows], columns.dtype[rows], columns.bytes[rows], columns.seq[rows] = groups, dtypes, sizes, numbers


def _told(columns: CollectiveColumns, kind: int, found: Arguments) -> tuple[int, int, int, int]:
    """Interpret one set of arguments; facts about the group are added to `columns`.

    Args:
        kind: the kind in the name of the kernel.

    Returns:
        Kind, code of the group, code of the data type, and bytes; each `NULL` where the arguments do not say.
    """
    said = _kind_of(found.collective or "")
    kind = said if said != NULL else kind
    group, size = NULL, integer(found.group_size)
    if found.group is not None:
        name = str(found.group)
        group = columns.groups(name)
        if size > 0:
            columns.group_sizes[name] = size
        if name not in columns.group_ranks and (ranks := group_ranks(found.ranks)):
            columns.group_ranks[name] = ranks
    dtype, width = _known_dtype(found.dtype)
    moved = NULL
    if kind != NULL and width is not None:
        elements = full_array(KINDS[kind], integer(found.elements_in), integer(found.elements_out), size)
        moved = elements * width if 0 <= elements < LARGEST_BYTES else NULL
    return kind, group, columns.dtypes(dtype) if dtype is not None else NULL, moved


def full_array(kind: str, elements_in: int, elements_out: int, group_size: int) -> int:
    """Number of elements of the full array, or `NULL`."""
    if kind == "barrier":
        return 0
    side, one_part = _FULL_ARRAY[kind]
    elements = {"in": elements_in, "out": elements_out, "any": max(elements_in, elements_out)}[side]
    if elements < 0 or (one_part and group_size < 1):
        return NULL
    return elements * group_size if one_part else elements


def group_ranks(text: object) -> tuple[int, ...]:
    """Ranks of `[0, 1]`, given as a list or as text; empty where they are abbreviated ("[0, 1, ..., 7]")."""
    if isinstance(text, list):
        return tuple(rank for rank in text if isinstance(rank, int))
    if not isinstance(text, str) or not _LIST.fullmatch(text):
        return ()
    try:
        return tuple(_RANKS.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ()


_LIST: Final = re.compile(r"\[[\d, ]*\]")
