"""Every test of the device begins with the settings of the start and an empty record."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.fixture(params=["idle", "busy"])
def machine(request: pytest.FixtureRequest) -> Iterator[str]:
    """A second process that uses a whole processor, or none."""
    if request.param == "idle":
        yield "idle"
        return
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as loop:
        try:
            yield "busy"
        finally:
            loop.kill()
