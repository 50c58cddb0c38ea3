"""What is asked of an accelerator's own module, a stand-in here, and of CUDA and HIP where there is neither."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from aorta.distributed import accelerator, cuda

XPU = torch.device("xpu", 1)


class Generator:
    """The random state of a device."""

    def __init__(self) -> None:
        self.state = torch.tensor([7])
        self.asked: list[torch.device] = []

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        self.asked.append(device)
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.asked.append(device)
        self.state = state


def test_random_states_of_host_and_device_are_put_back(monkeypatch):
    generator = Generator()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: generator)
    states = accelerator.random_states(XPU)
    expected = torch.rand(3)
    generator.state = torch.tensor([8])
    accelerator.set_random_states(states, XPU)
    assert torch.equal(torch.rand(3), expected)
    assert generator.state.tolist() == [7]
    assert generator.asked == [XPU, XPU]


def test_states_without_a_device_s_leave_it_alone(monkeypatch):
    generator = Generator()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: generator)
    states = accelerator.random_states(torch.device("cpu"))
    assert list(states) == ["cpu"]
    accelerator.set_random_states(states, XPU)
    assert generator.asked == []


def test_a_device_is_called_as_its_module_calls_it_or_by_its_type(monkeypatch):
    monkeypatch.setattr(
        torch, "get_device_module", lambda _: SimpleNamespace(get_device_name=lambda d: f"Max {d.index}")
    )
    assert accelerator.device_name(XPU) == "Max 1"
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    assert accelerator.device_name(XPU) == "xpu"
    assert accelerator.device_name(torch.device("cpu")) == "cpu"


def test_the_profiler_sees_the_host_first_and_what_this_build_has_beside_it(monkeypatch):
    monkeypatch.setattr(accelerator, "supported_activities", lambda: {ProfilerActivity.XPU, ProfilerActivity.CPU})
    assert accelerator.profiled() == [ProfilerActivity.CPU, ProfilerActivity.XPU]


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
