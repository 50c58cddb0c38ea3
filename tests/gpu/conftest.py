"""A world of one on the first card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.device import world_of_one


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with world_of_one() as device:
        yield device
