"""What only CUDA and HIP have, asked where there is neither."""

from __future__ import annotations

import warnings

import pytest
import torch

from aorta.distributed import cuda


def test_nothing_is_being_captured_in_a_build_without_graphs(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert cuda.is_capturing() is False


def test_a_capture_is_seen(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
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
