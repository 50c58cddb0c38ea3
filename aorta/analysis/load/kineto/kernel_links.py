"""What ties a kernel to the host: the call that launched it (`correlation`), and the operator that it is a part of
(`External id`), of matrix products with their shapes.

Must not: decode more of arguments than that; a trace has one set per kernel and per call.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from aorta.analysis.load.gemm_shapes import Gemms, gemm_of, gemms_of
from aorta.analysis.load.interval_table import NULL
from aorta.analysis.load.kineto.event_structs import Number
from aorta.analysis.load.sqlite_files import look_up
from aorta.timeline.arrays import Int64


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
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class KernelLinks:
    """Collects launches and matrix products of a trace, piece by piece."""

    def __init__(self) -> None:
        self._starts: list[Int64] = []
        self._calls = array("q")
        self._products = array("q")
        self._shapes: list[int] = []
        self._shape_of: dict[tuple[str, bytes, bytes], int] = {}

    def add_calls(self, calls: Sequence[Any], start: Int64, known: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Keep when calls began (ns), where that is known."""
        ids = idents([call.correlation for call in links_of([call.args for call in calls])])
        kept = known & (ids != NULL)
        self._calls.extend(ids[kept].tolist())
        self._starts.append(start[kept])

    def add_products(self, operators: Sequence[Any]) -> None:
        """Keep the shapes of matrix products (`GEMM_OPERATORS`)."""
        told = _decoded(_PRODUCTS, [operator.args for operator in operators], _Product())
        self._products.extend(externals_of(told).tolist())
        codes = self._shape_of
        for operator, each in zip(operators, told, strict=True):
            shape = (operator.name, bytes(each.dims), bytes(each.types))
            self._shapes.append(codes.setdefault(shape, len(codes)))

    def launches(self, correlation: Int64) -> Int64:
        """When the call that launched each row began, in the time of the rows; `NULL` where the trace does not say."""
        calls = np.frombuffer(self._calls, np.int64) if self._calls else np.zeros(0, np.int64)
        starts = np.concatenate(self._starts) if self._starts else np.zeros(0, np.int64)
        order = np.argsort(starts, kind="stable")  # of calls with one number the first counts
        found = look_up(correlation, calls[order], starts[order])
        return np.where(correlation == NULL, NULL, found)

    def gemms(self) -> Gemms:
        """The matrix products of the trace."""
        shapes = [gemm_of(*shape) for shape in self._shape_of]
        return gemms_of(np.array(self._products, np.int64), np.array(self._shapes, np.int64), shapes)


def links_of(texts: Sequence[msgspec.Raw | bytes]) -> list[Links]:
    """What each set of arguments ties its event to; nothing where it has another form."""
    return _decoded(_LINKS, texts, Links())


def externals_of(links: Sequence[Links]) -> Int64:
    """The ids of the host operators, or `NULL`."""
    return idents([each.external if each.external is not None else each.external_old for each in links])


def idents(values: Sequence[Number]) -> Int64:
    """The ids among values of any type, `NULL` for those that are none."""
    try:
        if set(map(type, values)) <= {int}:
            found = np.array(values, np.int64)
            return np.where(found >= 0, found, NULL)
    except OverflowError:
        pass  # beyond 63 bits: one by one
    return np.array(list(map(_ident, values)), np.int64)


def _ident(value: Number) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else NULL


def _decoded(
    decoder: msgspec.json.Decoder[list[Any]], texts: Sequence[msgspec.Raw | bytes], nothing: Links
) -> list[Any]:
    """All sets at once, which is several times as fast; one by one where that fails."""
    try:
        return [each or nothing for each in decoder.decode(b"[%b]" % b",".join(texts))]
    except _MALFORMED:
        found = []
    for text in texts:
        try:
            found.append(decoder.decode(b"[%b]" % bytes(text))[0] or nothing)
        except _MALFORMED:
            found.append(nothing)
    return found
