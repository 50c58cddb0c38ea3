"""Scalars that live on the device and are recorded without waiting for them, e.g. the loss (R4).

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
            value = tensor.detach()
            self._copy = torch.empty_like(value, device="cpu", pin_memory=True)
            self._copy.copy_(value, non_blocking=True)

    def read(self) -> float:
        """The value."""
        return self._value if self._copy is None else float(self._copy)
