"""Torch's own strategies on the device: the values of the CPU, and the same virtual time every time.

That none of them has a race is asked in `tests.device_path.test_training`, with and without the instrument.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import Launcher, job, losses, succeeded
from tests.simulated.programs import needs_device, scenario

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
STRATEGIES = (("ddp", 2), ("fsdp", 2), ("fsdp_tp", 4))
SMALL = (
    "training.max_steps=3",
    "dataset.num_samples=256",
    "workload.num_layers=2",
    "workload.model_dim=64",
    "workload.mlp_hidden_dim=128",
    "workload.vocab_size=500",
    "telemetry.warmup_steps=1",
    "training.log_interval=1",
    "instrument.mode=off",
)


def test_virtual_times_are_the_same_every_time() -> None:
    once, again = (scenario("training", "fsdp", "2") for _ in range(2))
    assert once == again


@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_the_script_trains_as_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, ranks: int
) -> None:
    monkeypatch.setenv("AORTA_SIMULATED_DEVICES", "4")
    words = (*SMALL, f"parallel={strategy}")
    on_device = (f"training.output_dir={tmp_path / 'cuda'}", "training.device=cuda")
    # The launch is the same for every strategy: one shows that the real one brings the device with it.
    launcher: Launcher = "torchrun" if strategy == "ddp" else "fork"
    succeeded(job(*words, *on_device, ranks=ranks, launcher=launcher))
    succeeded(job(*words, f"training.output_dir={tmp_path / 'cpu'}", "training.device=cpu", ranks=ranks))
    for rank in range(ranks):
        assert losses(tmp_path / "cuda", rank) == pytest.approx(losses(tmp_path / "cpu", rank), rel=1e-4)
