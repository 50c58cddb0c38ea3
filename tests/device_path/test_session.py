"""`aorta.record` round a loop of one's own, on the simulated device: the examples of the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.device_path.launch import launched
from tests.runs import ROOT, record
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]


@pytest.mark.parametrize("example", ["ddp", "fsdp2"])
def test_an_example_records_on_a_device(example: str, tmp_path: Path) -> None:
    launched(ROOT / f"docs/examples/{example}.py", str(tmp_path))
    ranks = json.loads((tmp_path / "run.json").read_text())["topology"]
    assert [rank["interceptor"] for rank in ranks] == ["native", "native"]
    for rank in (0, 1):
        written = record(tmp_path, rank)
        assert (written.header.platform, written.header.timer) == ("cuda", "cuda_event")
        assert written.footer is not None
        assert written.footer.device_clock is not None
        for step in written.steps:
            assert step.coverage.complete, step.coverage.reason
            assert {row.end_source for row in step.collectives} == {"event"}
            assert step.overlap["overlap_ratio"] is not None
            assert step.overlap["compute_stall_ms"] is not None
