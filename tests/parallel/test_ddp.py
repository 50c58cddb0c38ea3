"""Which device DDP is told, and how its buckets are sized."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aorta.config.schema import DDP, Precision
from aorta.parallel import ddp
from aorta.parallel.ddp import default_bucket_mb


@pytest.mark.parametrize(("device", "told"), [("cuda:1", [1]), ("cpu", None)])
@pytest.mark.spec("B11")
def test_ddp_is_told_the_device_of_the_local_rank(monkeypatch, device, told):
    monkeypatch.setenv("RANK", "9")
    asked = {}

    def wrapped(module, **settings):
        asked.update(settings)
        return module

    monkeypatch.setattr(ddp, "DistributedDataParallel", wrapped)
    monkeypatch.setattr(ddp, "ParallelizedModel", lambda module, **_: module)
    ddp.parallelize(nn.Linear(2, 2), DDP(), Precision.none, torch.device(device))
    assert asked["device_ids"] == told


def test_bucket_size_follows_the_model_up_to_torchs_own() -> None:
    assert default_bucket_mb(nn.Linear(1024, 1024, bias=False)) == pytest.approx(4 / 8)
    assert default_bucket_mb(nn.Linear(2, 2)) == 1 / 16
    with torch.device("meta"):
        assert default_bucket_mb(nn.Linear(32768, 32768)) == 25.0
