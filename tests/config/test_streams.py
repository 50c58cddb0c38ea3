"""What a run of streams has no use for or cannot do is refused, with what to do."""

from __future__ import annotations

import pytest
import torch

from aorta import train_command
from aorta.config.resolve import resolve
from aorta.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("training.device=cpu", "training.device=cpu: .* a CPU has no streams; run it on a machine with such a device"),
        ("workload.streams=[1,65]", r"workload.streams=\[1, 65\]: numbers from 1 to 64"),
        ("workload.streams=[2,4]", "must have 1, which the others are compared with"),
        ("workload.kernel_us=0", "workload.kernel_us=0.0: must be greater than 0"),
        ("workload.repeats=0", "workload.repeats=0: must be at least 1"),
        ("workload.knee_tolerance=1", "must be in"),
        ("baseline.enabled=true", "has no training steps to isolate"),
        ("fabric=emulated", "use fabric=none"),
        ("profiling.enabled=true", "takes no traces"),
    ],
)
def test_what_it_cannot_do_is_refused(composed, word, message):
    with pytest.raises(ConfigError, match=message):
        resolve(composed("workload=streams", word))
    resolve(composed("workload=streams"))


def test_a_machine_without_a_device_is_refused_with_why_and_what_to_use(composed, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(ConfigError, match=r"torch sees no accelerator: .* workload=ranking trains") as refused:
        train_command.run(resolve(composed("workload=streams")))
    assert refused.value.exit_code == 1
