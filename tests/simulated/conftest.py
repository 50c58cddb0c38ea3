"""Every test of the device begins with the settings of the start and an empty record."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulated import device, load


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    if not load.loaded():
        yield
        return
    device.defaults()
    device.reset()
    yield
    device.defaults()
    device.reset()
