"""A few of the kills of `benchmarks/kills.py`, which says what has to hold behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kills import TARGETS, Seen, kill


@pytest.mark.dist
@pytest.mark.thorough
def test_nothing_is_left_and_nothing_lost_behind_a_kill(tmp_path: Path) -> None:
    seen = Seen()
    kill(tmp_path, len(TARGETS), 1, seen)
    assert seen.findings == []
    assert seen.kills
