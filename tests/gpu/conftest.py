"""A world of one on the first card; on the simulated device every test ends without a race."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aorta.distributed.topology import process_group, read_topology
from aorta.gpu_check import races
from tests.simulated import device as simulated
from tests.simulated import load


@pytest.fixture(autouse=True)
def _no_races(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not load.loaded():
        yield
        return
    # Its checker of races looks at orders, not at values that came too early: no need for large tensors.
    monkeypatch.setattr(races, "ELEMENTS", 1 << 12)
    simulated.defaults()
    # A stream that is handed out twice, as after 32 of them, would hide what a test of the checks takes away.
    simulated.pool_streams(4096)
    simulated.reset()
    yield
    torch.cuda.synchronize()
    try:
        simulated.no_races()
    finally:
        simulated.defaults()
        simulated.reset()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with process_group(read_topology(), device, 120):
        yield device
