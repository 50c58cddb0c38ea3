"""The loop of `scenario` notices when a rule of the device path's Python is taken away, whichever it is.

Mutants of the compiled tap are not made: it is held to the same loop (`test_rules`).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.device_path.launch import on_devices
from tests.device_path.mutants import MUTANTS
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]
NONE = ("the code as it is", "the code as it is, again")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank and mutant what was wrong; a launch that hangs says which mutant it was at."""
    return on_devices("tests.device_path.program_mutants", tmp_path_factory.mktemp("mutants"))


def test_every_mutant_changes_one_place_of_the_code() -> None:
    for mutant in MUTANTS:
        assert mutant.source() != mutant.path.read_text()
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_code_as_it_is_passes_before_and_after(told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert [rank[name] for name in NONE] == [[], []]


def test_every_mutant_is_caught(told: list[dict[str, Any]]) -> None:
    survivors = [mutant.name for mutant in MUTANTS if not all(rank[mutant.name] for rank in told)]
    assert not survivors
