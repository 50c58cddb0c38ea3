"""What ties a kernel to the host: the call that launched it (`correlation`), and the operator that it is a part of
(`External id`), of matrix products with their shapes.

Must not: decode arguments as a whole, of which a trace has one set per kernel.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from aorta.analysis.load.gemm_shapes import Gemm, Gemms, gemm_of, gemms_of
from aorta.analysis.load.interval_table import NULL
from aorta.analysis.load.sqlite_files import look_up
from aorta.timeline.arrays import Int64

_CORRELATION: Final = re.compile(rb'"correlation"\s*:\s*"?(\d{1,18})\b')
_EXTERNAL: Final = re.compile(rb'"[Ee]xternal id"\s*:\s*"?(\d{1,18})\b')


class _Product(msgspec.Struct, gc=False):
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="Input type")


_PRODUCT: Final = msgspec.json.Decoder(_Product | None)


class KernelLinks:
    """Collects launches and matrix products of a trace, piece by piece."""

    def __init__(self) -> None:
        self._starts: list[Int64] = []
        self._calls = array("q")
        self._gemms: dict[int, Gemm | None] = {}

    def add_calls(self, calls: Sequence[Any], start: Int64, known: Sequence[bool]) -> None:
        """Keep when calls began (ns), where that is known."""
        ids = _numbers(_CORRELATION, [bytes(call.args) for call in calls])
        kept = np.array([good and ident != NULL for good, ident in zip(known, ids, strict=True)], bool)
        self._calls.extend(ident for ident, good in zip(ids, kept.tolist(), strict=True) if good)
        self._starts.append(start[kept])

    def add_products(self, operators: Sequence[Any]) -> None:
        """Keep the shapes of matrix products (`GEMM_OPERATORS`)."""
        texts = [bytes(operator.args) for operator in operators]
        for operator, text, external in zip(operators, texts, external_ids(texts), strict=True):
            if external != NULL:
                self._gemms.setdefault(external, _gemm(operator.name, text))

    def launches(self, correlation: Int64) -> Int64:
        """When the call that launched each row began, in the time of the rows; `NULL` where the trace does not say."""
        calls = np.frombuffer(self._calls, np.int64) if self._calls else np.zeros(0, np.int64)
        starts = np.concatenate(self._starts) if self._starts else np.zeros(0, np.int64)
        order = np.argsort(starts, kind="stable")  # of calls with one number the first counts
        found = look_up(correlation, calls[order], starts[order])
        return np.where(correlation == NULL, NULL, found)

    def gemms(self) -> Gemms:
        """The matrix products of the trace."""
        return gemms_of(self._gemms)


def external_ids(texts: Sequence[bytes]) -> list[int]:
    """`External id` of each set of arguments, or `NULL`."""
    return _numbers(_EXTERNAL, texts)


def correlations(texts: Sequence[bytes]) -> list[int]:
    """`correlation` of each set of arguments, or `NULL`."""
    return _numbers(_CORRELATION, texts)


def _numbers(pattern: re.Pattern[bytes], texts: Sequence[bytes]) -> list[int]:
    return [NULL if (found := pattern.search(text)) is None else int(found[1]) for text in texts]


def _gemm(operator: str, text: bytes) -> Gemm | None:
    try:
        told = _PRODUCT.decode(text) or _Product()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return gemm_of(operator, bytes(told.dims), bytes(told.types))
