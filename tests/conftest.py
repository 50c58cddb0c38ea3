"""For all tests: signals, the simulated device, hypothesis' profile, a world of one, and which skips are accepted.

Signals: what the tests start hears them, also where a shell had them ignored (`nohup`, `&`). A program starts with the
signals ignored that its parent ignores, and many tests send one. A handler, even one that does nothing, is not passed
on: the tests themselves still ignore what they were told to ignore.

The simulated device (`tests/simulated`), where AORTA_SIMULATED_DEVICE asks for it: before anybody imports torch.

Hypothesis: `gate` draws the same examples every time, so that the gate answers alike twice, `short` fewer of them; with
`HYPOTHESIS_PROFILE=soak` it searches anew, and longer; `seeds` takes its seed from `--hypothesis-seed`. No deadlines
and no limit for drawing examples: on a shared machine they test the machine. Must not: define what only some packages
need.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.allowed_skips import pytest_make_collect_report, pytest_runtest_makereport
from tests.known_answers import again
from tests.simulated import load

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]

for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda _number, _frame: None)

if load.wanted():
    load.load()
    load.for_children()


def pytest_configure(config: pytest.Config) -> None:
    """What is taken again is counted."""
    config.pluginmanager.register(again)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes begins first: at the end, one process would be busy with it and the others idle."""
    items.sort(key=lambda item: item.path.stem not in ("test_package", "test_gpu_check", "test_training"))


def pytest_collection_finish() -> None:
    """Modules and tests stay: nobody who collects garbage, or looks for models among all objects, visits them again."""
    gc.freeze()


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group of one rank, for tests that need real collectives but no peers."""
    import torch.distributed as dist  # most tests load no torch

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Said here, not left to hypothesis: where `CI` is set its own default profile draws the same examples every time.
_UNTIMED = settings(derandomize=False, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", _UNTIMED, derandomize=True, max_examples=100)
settings.register_profile("short", settings.get_profile("gate"), max_examples=25)
settings.register_profile("soak", _UNTIMED, max_examples=20_000)
settings.register_profile("seeds", _UNTIMED, max_examples=100, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))
