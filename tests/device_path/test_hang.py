"""Why a job hangs on a device: what was scheduled is told from what has started, and no healthy rank is accused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from aorta.autopsy.evidence import RankEvidence, Verdict
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.judge import judge
from tests.device_path.launch import launched
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]


def hung(fault: str, folder: Path) -> tuple[Verdict, Verdict]:
    """What the progress files lead to, taken while two ranks hung; and these with the rings."""
    launched("tests.device_path.program_hang", str(folder), fault)
    evidence = msgspec.json.decode((folder / "evidence.json").read_bytes(), type=list[RankEvidence])
    assert [one.state for one in evidence] == ["running"] * 2
    assert all(one.device_seen_ns is not None for one in evidence)
    rings = read_dumps([folder / f"trace_{rank}" for rank in range(2)])
    return judge(evidence), judge([*evidence, *rings])


def test_a_rank_that_never_enqueues_is_accused(tmp_path: Path) -> None:
    files, both = hung("never_enqueued", tmp_path)
    for verdict in (files, both):
        (one,) = verdict.culprits
        assert (one.rank, one.kind, one.rule) == (1, "stuck_outside", "behind_its_peers")
        assert one.collective is not None
        assert one.collective.number == 3
    assert [(wait.ranks, wait.for_ranks) for wait in both.waits] == [([0], [1])]
    assert both.contradictions == []


def test_a_rank_whose_kernel_waits_on_its_stream_for_another_is_accused(tmp_path: Path) -> None:
    for verdict in hung("stuck_before", tmp_path):
        (one,) = verdict.culprits
        assert (one.rank, one.kind) == (1, "rank_did_not_join")
        assert "its device has not begun it; rank 0 began it" in one.reason
        assert [(wait.ranks, wait.for_ranks) for wait in verdict.waits] == [([0], [1])]


def test_a_kernel_that_is_stuck_on_all_ranks_accuses_nobody(tmp_path: Path) -> None:
    files, both = hung("stuck_inside", tmp_path)
    assert (files.kind, files.culprits) == ("stuck_inside", [])
    assert (both.kind, both.culprits, both.contradictions) == ("stuck_inside", [], [])
    assert [wait.collective.number for wait in both.waits] == [3]
