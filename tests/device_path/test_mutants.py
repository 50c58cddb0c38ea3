"""The loop of `scenario` notices when a rule of the device path is taken away.

A dozen of the mutants; `scripts/mutants --device` runs all of them, those of C++ too.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.device_path.launch import on_devices
from tests.device_path.run_mutants import AS_IT_IS, first_failure
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
DOZEN: Final = (
    "our stream does not wait for what the inputs were written by",
    "ends beside the backend are marked on the caller's stream",
    "a synchronous caller goes on at once",
    "who waits has the end mark's own event",
    "marks are taken on the default stream",
    "steps are not chained",
    "time in a communicator's queue counts as its duration",
    "a batch's tensors are not kept",
    "a handle's wait is no stall",
    "tensors are not kept",
    "the compute stream is never looked up again",
    "what was awaited is named again",
)
"""One of each kind of rule: order, times, queues, batches, stalls, lifetimes, names. None of them ends a rank, as all
run in one launch.
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank and mutant what its loops said; a launch that hangs says which mutant it was at."""
    return on_devices("tests.device_path.program_mutants", tmp_path_factory.mktemp("mutants"), "python", *DOZEN)


def test_every_mutant_is_noticed(told: list[dict[str, Any]]) -> None:
    """`test_rules` holds the code as it is to the same."""
    assert AS_IT_IS not in told[0]
    assert [name for name in DOZEN if not first_failure([rank[name] for rank in told], "python", "told")] == []
