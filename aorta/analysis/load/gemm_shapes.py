"""Reads the shapes and data types of matrix products from the arguments that the profiler writes of torch's operators.

A product of [B, M, K] and [B, K, N] has 2 x B x M x N x K floating point operations: a multiplication and an addition
for each of B x M x N x K pairs of elements (what torch.utils.flop_counter counts). Data types of torch's C++ and NCCL
map to torch's Python name and the size of an element.

Must not: guess a shape that the trace does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from aorta.timeline.arrays import Int64

_TORCH_TYPES: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "uint8": (1, ("byte", "unsigned char", "uint8_t")),
    "int8": (1, ("char", "signed char", "int8_t")),
    "int16": (2, ("short", "short int")),
    "int32": (4, ("int", "uint32")),
    "int64": (8, ("long", "long int", "uint64", "long long")),
    "float16": (2, ("half", "c10::half", "f16")),
    "bfloat16": (2, ("c10::bfloat16", "bf16")),
    "float32": (4, ("float", "f32")),
    "float64": (8, ("double", "f64")),
    "bool": (1, ()),
    "complex64": (8, ("complexfloat", "c10::complex<float>")),
    "complex128": (16, ("complexdouble", "c10::complex<double>")),
    "float8_e4m3fn": (1, ("f8e4m3", "c10::float8_e4m3fn")),
    "float8_e5m2": (1, ("f8e5m2", "c10::float8_e5m2")),
    "float8_e4m3fnuz": (1, ("c10::float8_e4m3fnuz",)),
    "float8_e5m2fnuz": (1, ("c10::float8_e5m2fnuz",)),
}
_BY_NAME: Final = {
    name: (torch_name, size) for torch_name, (size, others) in _TORCH_TYPES.items() for name in (torch_name, *others)
}


def known_dtype(name: str | None) -> tuple[str | None, int | None]:
    """Return torch's name of a data type and its bytes per element (c10/core/ScalarType.h). An unknown name is returned
    unchanged, with None.
    """
    if not name:
        return None, None
    found = _BY_NAME.get(name.lower())
    return (name, None) if found is None else found


_FACTORS: Final = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::_int_mm": 0,
    "aten::_scaled_mm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::_addmm_activation": 1,
}
"""Operator -> place of its first factor among its inputs (native_functions.yaml of torch); the second follows."""
GEMM_OPERATORS: Final = frozenset(_FACTORS)
_DIMS: Final = msgspec.json.Decoder(list[Any])
_TYPES: Final = msgspec.json.Decoder(list[str])
_LARGEST: Final = 2**31
"""No dimension of a tensor that fits into a device is larger; it also keeps the operations of a product exact."""


class Gemm(NamedTuple):
    """One shape of a product: `batch` times [m, k] by [k, n]. `dtype` is that of the first factor."""

    operator: str
    batch: int
    m: int
    n: int
    k: int
    dtype: str | None

    @property
    def flops(self) -> int:
        """Floating point operations of one product."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Gemms:
    """The products of a trace. `origin` (ascending, each once) is the `Intervals.origin` of the rows that a product
    ran as, `shape` an index into `shapes`. `unknown` products have no shape in the trace. `lasted_ns`: how long each
    ran, where a CPU ran it: its operator, whose parts are rows of other names. None: its rows tell.
    """

    origin: Int64
    shape: Int64
    shapes: tuple[Gemm, ...]
    unknown: int
    lasted_ns: Int64 | None = None


def gemm_of(operator: str, dims: bytes, types: bytes) -> Gemm | None:
    """Return the shape of one product, or None where the arguments do not say it.

    Args:
        dims: `Input Dims` as JSON. types: `Input type` as JSON.
    """
    first = _FACTORS[operator]
    try:
        factors = _DIMS.decode(dims)[first : first + 2]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if len(factors) != 2 or not all(isinstance(factor, list) and len(factor) in (2, 3) for factor in factors):
        return None
    (*batch, m, k), (*other, rows, n) = factors
    sizes = (*batch, m, k, n)
    if rows != k or batch != other or not all(type(size) is int and 0 < size < _LARGEST for size in sizes):
        return None
    return Gemm(operator, batch[0] if batch else 1, m, n, k, _dtype(types, first))


def _dtype(types: bytes, first: int) -> str | None:
    try:
        names = _TYPES.decode(types)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return known_dtype(names[first])[0] if first < len(names) else None


def gemms_of(origin: Int64, code: Int64, shapes: Sequence[Gemm | None]) -> Gemms:
    """Return the products of a trace by their origin; of those with the same origin the first counts.

    Args:
        origin: of each product; `UNKNOWN` (-1) where it has none, so that no row can be its. code: of each product, the
            index of its shape. shapes: may repeat; None where the trace does not say it.
    """
    kept = np.flatnonzero(origin >= 0)
    origins, first = np.unique(origin[kept], return_index=True)
    code = code[kept[first]]
    shaped = np.array([shape is not None for shape in shapes], bool)[code] if len(code) else np.zeros(0, bool)
    distinct: dict[Gemm | None, int] = {}
    place = {each: distinct.setdefault(shapes[each], len(distinct)) for each in dict.fromkeys(code[shaped].tolist())}
    return Gemms(
        origins[shaped],
        np.array(list(map(place.__getitem__, code[shaped].tolist())), np.int64),
        tuple(shape for shape in distinct if shape is not None),
        int((~shaped).sum()),
    )
