"""What only CUDA and HIP have, asked where there is neither."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from aorta.distributed import cuda


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    cuda._has_device.cache_clear()
    yield
    cuda._has_device.cache_clear()


def test_nothing_is_being_captured_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch built for CUDA, as PyPI's is for Linux, raises where there is no driver."""

    def raises() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", raises)
    assert cuda.is_capturing() is False


def test_a_capture_is_seen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert cuda.is_capturing() is True


def test_a_version_is_of_a_library_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.nccl_version() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert cuda.nccl_version() == "2.27.3"


def test_the_check_for_synchronisations_hides_torch_s_word_about_itself_and_nothing_else(monkeypatch):
    modes = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if mode == "error":
            # As torch words it (torch/csrc/cuda/Module.cpp), once a process.
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet ...", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.warns(UserWarning, match="another"), cuda.no_synchronisation():
        warnings.warn("another", stacklevel=1)
    with pytest.raises(ZeroDivisionError), cuda.no_synchronisation():
        raise ZeroDivisionError
    assert modes == ["error", "default"] * 2
