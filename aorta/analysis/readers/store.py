"""Columns on disk: what a thousand ranks left behind does not have to fit into memory.

Enters: bytes and arrays. Leaves: arrays, read where they are wanted. Must not: outlive the object (the file has no
name) or leave anything behind when the process is killed.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from aorta.errors import InputError

Number = TypeVar("Number", np.int64, np.float64)


class Store:
    """One nameless temporary file in `$TMPDIR`."""

    def __init__(self) -> None:
        try:
            self._file, name = tempfile.mkstemp(prefix="aorta-columns-")
            os.unlink(name)  # noqa: PTH108
        except OSError as error:
            raise _full(error) from error
        self._close = weakref.finalize(self, os.close, self._file)
        self.size = 0

    def reserve(self, count: int) -> int:
        """Room for `count` numbers; returns its offset in bytes."""
        offset = self.size
        self.size += 8 * count
        return offset

    def append(self, data: bytes) -> int:
        """Write at the end; returns the offset in bytes."""
        offset = self.reserve(len(data) // 8)
        self._write(offset, memoryview(data))
        return offset

    def write(self, offset: int, values: npt.NDArray[Any]) -> None:
        """Write into room that was reserved."""
        if len(values):
            self._write(offset, np.ascontiguousarray(values).data.cast("B"))

    def read(self, offset: int, count: int, dtype: type[Number]) -> npt.NDArray[Number]:
        """`count` numbers from `offset` on."""
        values: npt.NDArray[Number] = np.empty(count, dtype)
        view, done = values.data.cast("B") if count else memoryview(b""), 0
        while done < len(view):
            got = os.preadv(self._file, [view[done:]], offset + done)
            assert got, f"{count} numbers at {offset} of a store of {self.size} bytes"
            done += got
        return values

    def _write(self, offset: int, view: memoryview) -> None:
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._file, view[done:], offset + done)
        except OSError as error:
            raise _full(error) from error


def _full(error: OSError) -> InputError:
    return InputError(
        f"the temporary folder {tempfile.gettempdir()} takes no more ({error.strerror or error}). A report needs about "
        "a fifth of the size of its records there: set TMPDIR to a folder with more room"
    )
