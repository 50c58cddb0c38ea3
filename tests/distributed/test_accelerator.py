"""What is asked of an accelerator's own module; the accelerator is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.profiler import ProfilerActivity

from aorta.distributed import accelerator

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
