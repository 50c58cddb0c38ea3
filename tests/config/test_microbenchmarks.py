"""What runs that train nothing have no use for or cannot do: refused with what to do, or said where it is ignored."""

from __future__ import annotations

import pytest
import torch

from aorta import train_command
from aorta.config.resolve import resolve
from aorta.errors import ConfigError


@pytest.mark.parametrize(
    ("workload", "word", "message"),
    [
        ("rpc", "baseline.enabled=true", "baseline=true: workload=rpc has no training steps"),
        ("rpc", "fabric=emulated", "fabric=emulated: delays collectives"),
        ("rpc", "profiling.remote_root=s3://b/c", r"profiling\.remote_root='s3://b/c': workload=rpc uploads nothing"),
        ("streams", "training.device=cpu", "training.device=cpu: .* a CPU has no streams; run it on a machine with"),
        ("streams", "workload.streams=[1,65]", r"workload.streams=\[1, 65\]: numbers from 1 to 64"),
        ("streams", "workload.streams=[2,4]", "must have 1, which the others are compared with"),
        ("streams", "workload.kernel_us=0", "workload.kernel_us=0.0: must be greater than 0"),
        ("streams", "workload.repeats=0", "workload.repeats=0: must be at least 1"),
        ("streams", "workload.knee_tolerance=1", "must be in"),
        ("streams", "baseline.enabled=true", "has no training steps to isolate"),
        ("streams", "fabric=emulated", "use fabric=none"),
        ("streams", "profiling.enabled=true", "takes no traces"),
    ],
)
def test_what_it_cannot_do_is_refused(composed, workload, word, message):
    with pytest.raises(ConfigError, match=message):
        resolve(composed(f"workload={workload}", word))
    if not word.startswith("workload."):  # it is a training's, or the run's without it
        resolve(composed(word))
    resolve(composed(f"workload={workload}"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), None),
        (("profiling.enabled=true",), None),
        (("profiling.enabled=false", "profiling.ranks=[1]"), None),
        (("profiling.enabled=true", "profiling.ranks=[1]"), "profiling.ranks"),
        (("profiling=d9d", "profiling.enabled=true"), "profiling.naming, profiling.compression"),
        (("profiling.enabled=true", "profiling.num_traces_to_keep=1"), "profiling.num_traces_to_keep"),
        (("telemetry.devices=psutil",), "telemetry.devices"),
        (("telemetry.devices=off",), None),
        (("telemetry.loggers=[prometheus]",), "telemetry.loggers"),
    ],
)
def test_what_a_run_of_calls_ignores_is_said(composed, words, named):
    said = f"workload=rpc: has no use for {named}: every worker profiles itself, samples no device and has no steps"
    assert resolve(composed("workload=rpc", *words)).notes == (() if named is None else (said,))


def test_a_machine_without_a_device_is_refused_with_why_and_what_to_use(composed, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(ConfigError, match=r"torch sees no accelerator: .* workload=ranking trains") as refused:
        train_command.run(resolve(composed("workload=streams")))
    assert refused.value.exit_code == 1
