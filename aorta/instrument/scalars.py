"""A number that lives on the device and is wanted in the record, without waiting for it (R4)."""

from __future__ import annotations

import torch


class Scalar:
    """A copy of a one-element tensor.

    On CUDA/HIP it is copied to page-locked memory in the current stream; `read` must come after that point of the
    stream is known to have been passed (the recorder reads a step only after its end mark).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        value = tensor.detach()
        if value.device.type == "cpu":
            self._copy = value.clone()
        else:
            self._copy = torch.empty_like(value, device="cpu", pin_memory=True)
            self._copy.copy_(value, non_blocking=True)

    def read(self) -> float:
        """The value."""
        return float(self._copy)
