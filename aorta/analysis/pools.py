"""Values that arrive in pieces and are described once all are there: small ones in memory, many on disk.

Enters: pieces of float64. Leaves: count, percentiles and the rest of `stats.numbers_of`. Must not: keep more than
`BUFFER` values of all pools together in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Final

import numpy as np

from aorta.analysis.readers.scan import Floats
from aorta.analysis.readers.store import Store
from aorta.analysis.stats import numbers_of

BUFFER: Final = 1 << 20
"""Values in memory, 8 bytes each."""
_BLOCK: Final = 1 << 17


class Pools:
    """Pools by key. A key may be anything that can be hashed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pending: defaultdict[Hashable, list[Floats]] = defaultdict(list)
        self._written: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        self._held = 0

    def add(self, key: Hashable, values: Floats) -> None:
        """Take values in; NaN is left out."""
        known = values[~np.isnan(values)]
        if len(known):
            self._pending[key].append(known)
            self._held += len(known)
            if self._held > BUFFER:
                self._write()

    def numbers(self, key: Hashable) -> tuple[int, Floats | None]:
        """Number of values of a pool, and `stats.numbers_of` them."""
        return numbers_of(lambda: self._blocks(key))

    def _write(self) -> None:
        for key, parts in self._pending.items():
            values = np.concatenate(parts)
            offset = self._store.reserve(len(values))
            self._store.write(offset, values)
            self._written[key].append((offset, len(values)))
        self._pending.clear()
        self._held = 0

    def _blocks(self, key: Hashable) -> Iterator[Floats]:
        for offset, count in self._written.get(key, ()):
            for start in range(0, count, _BLOCK):
                yield self._store.read(offset + 8 * start, min(_BLOCK, count - start), np.float64)
        if key in self._pending:
            yield np.concatenate(self._pending[key])
