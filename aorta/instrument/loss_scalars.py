"""Values that live on the device and are recorded without waiting for them: the loss, tokens of experts (R4).

Must not synchronise with the device.
"""

from __future__ import annotations

import torch


class Scalar:
    """The value of a one-element tensor, as it is now.

    On CUDA/HIP it is copied to page-locked memory in the current stream; `read` must be called only once the stream is
    known to have passed that point (the recorder reads a step only after its end mark).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy: torch.Tensor | None = None
        if tensor.is_cpu:
            self._value = float(tensor.item())
        else:
            self._copy = _page_locked(tensor)

    def read(self) -> float:
        """The value."""
        return self._value if self._copy is None else float(self._copy)


class Counts:
    """Some whole numbers in a tensor that nobody changes; on CUDA/HIP copied and read as `Scalar`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor if tensor.is_cpu else _page_locked(tensor)

    def read(self) -> list[int]:
        """The numbers."""
        return [int(number) for number in self._copy.tolist()]


def _page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked memory of the host, which is there once the current stream has passed this point."""
    copy = torch.empty_like(tensor.detach(), device="cpu", pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)
