"""Times the copies of a step: between host and device, between devices, and within one (docs/measuring.md, R1).

A kernel at the dispatcher's BackendSelect key sees `aten::copy_`, which every copy of torch ends in (`to`, `clone`,
`copy_`, offloading, moving a batch), and `aten::_local_scalar_dense` (`item`). Two marks on the stream that the copy is
issued on bracket it. Must not order streams, make the host wait, or mark anything outside a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from aorta.distributed.cuda import is_capturing
from aorta.instrument.event_clock import Mark
from aorta.records.schema import CopyDirection

DIRECTIONS: Final[tuple[CopyDirection, ...]] = ("h2d", "d2h", "d2d", "p2p")
"""In the order of the compiled part's numbers (`native/step.hpp`)."""
ON_A_CPU: Final = "on a CPU a copy is made by the threads that compute: it is part of computation"
INSTEAD: Final = "copies are not looked at in an isolated baseline"

Take: TypeAlias = Callable[[], Mark]


@dataclass(slots=True)
class Copied:
    """One copy between two marks; None where none could be taken: it was issued on a stream of another device."""

    direction: CopyDirection
    bytes: int
    start: Mark | None
    end: Mark | None


class CopyWatch:
    """Brackets copies with marks, while the object is open.

    Args:
        device: whose memory they read or write.
        mark: takes a mark on the device's current stream.
        on_copy: called with each copy once it has been issued.
        is_open: whether a step is recorded now.
    """

    def __init__(
        self, device: torch.device, mark: Take, on_copy: Callable[[Copied], None], is_open: Callable[[], bool]
    ) -> None:
        self._device, self._mark, self._on_copy, self._is_open = device, mark, on_copy, is_open
        self._memory = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(device.type))
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        copy, scalar = torch.ops.aten.copy_.default, torch.ops.aten._local_scalar_dense.default

        def copied(keyset: Any, self: torch.Tensor, src: Any, non_blocking: bool = False) -> Any:
            if not isinstance(src, torch.Tensor):  # of a number's tensor a kernel in Python gets the number
                return copy.redispatch(keyset & after, self, _as_tensor(src), non_blocking)
            return timed(src, self, lambda: copy.redispatch(keyset & after, self, src, non_blocking))

        def read(keyset: Any, self: torch.Tensor) -> Any:
            return timed(self, None, lambda: scalar.redispatch(keyset & after, self))

        timed = self._timed
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an operator of torch's that gets another kernel
            for name, kernel in (("copy_", copied), ("_local_scalar_dense", read)):
                self._library.impl(name, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Restore torch's own kernels."""
        self._library._destroy()  # type: ignore[no-untyped-call]

    def _timed(self, source: torch.Tensor, into: torch.Tensor | None, original: Callable[[], Any]) -> Any:
        direction = self._direction(source, into) if self._is_open() else None
        if direction is None or is_capturing():
            return original()
        moved = source if into is None else into
        # It is issued on the current stream of its source's device; another device's streams are not marked.
        at = source if into is None or source.device.type == self._device.type else into
        here = at.device.index == self._device.index
        start = self._mark() if here else None
        try:
            return original()
        finally:
            end = self._mark() if here else None
            self._on_copy(Copied(direction, moved.numel() * moved.element_size(), start, end))

    def _direction(self, source: torch.Tensor, into: torch.Tensor | None) -> CopyDirection | None:
        there, here = self._holds(source), into is not None and self._holds(into)
        if not (there or here) or not (source if into is None else into).numel():
            return None
        if into is None:
            return "d2h"
        if there and here:
            if source.device != into.device:
                return "p2p"
            return "d2d" if moves_bytes_only(source, into) else None
        if not (into if there else source).is_cpu:
            return None
        return "d2h" if there else "h2d"

    def _holds(self, tensor: torch.Tensor) -> bool:
        """By its keys: a tensor that only pretends to be on a device has no memory there."""
        on_device = tensor.device.type == self._device.type and tensor.layout == torch.strided
        return on_device and torch._C._dispatch_keys(tensor).has(self._memory)


def _as_tensor(number: complex) -> torch.Tensor:
    """As torch makes a tensor of a number: in the widest type of its kind."""
    widest = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
    return torch.scalar_tensor(number, dtype=widest[type(number)])


def moves_bytes_only(source: torch.Tensor, into: torch.Tensor) -> bool:
    """Whether a copy within one device is one of bytes; else a kernel converts or rearranges, which is computation
    (ATen/native/cuda/Copy.cu, `memcpy_eligible`).
    """
    same = source.dtype == into.dtype and source.is_conj() == into.is_conj() and source.is_neg() == into.is_neg()
    if not same or source.shape != into.shape or source is into:
        return False
    if source.is_contiguous() and into.is_contiguous():
        return True
    return source.stride() == into.stride() and bool(torch.ops.aten.is_non_overlapping_and_dense(source))
