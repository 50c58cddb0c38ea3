"""Behind an error the process group is aborted: a rank ends with its own error, not in a wait for a dead peer."""

from __future__ import annotations

import pytest

from tests.ranks import forked
from tests.runs import HANGS_S, environment
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]


def end_of(how: str, ranks: int) -> str:
    """What the rank that failed said."""
    own = environment(AORTA_SIMULATED_DEVICES="2")
    done = forked("tests.simulated.program_abort", how, ranks=ranks, environment=own, timeout_s=HANGS_S)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "could not be aborted" not in done.stderr
    return done.stderr


def test_an_error_of_its_own_is_what_a_rank_with_a_dead_peer_ends_with() -> None:
    assert "RealError: what really happened" in end_of("raises", ranks=1)


def test_a_peer_that_is_gone_is_told_and_not_waited_for() -> None:
    said = end_of("dies", ranks=2)
    assert "allreduce" in said
    assert "Traceback" in said
