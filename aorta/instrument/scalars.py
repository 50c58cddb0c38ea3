"""A number that lives on the device and is wanted in the record, without waiting for it (R4)."""

from __future__ import annotations

import torch


class Scalar:
    """The value of a one-element tensor, as it is now.

    On CUDA/HIP it is copied to page-locked memory in the current stream; `read` must come after that point of the
    stream is known to have been passed (the recorder reads a step only after its end mark).
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
