"""Two sets of launches of `train.py`: one side's device waits for launches, and the report says so, not "hides less".

The sides differ by what a launch costs the host, as on a slower processor. With a calibration window the overlap ratios
are the device's own on both sides; without one the host-bound side has bounds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.compare.launch_set import read_subjects
from aorta.analysis.compare.verdict import Rules
from tests.analysis.by_json import summarize
from tests.device_path import launch as devices
from tests.device_path.program_overlap import SHAPE
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
TURNS, TURN_NS = ("fast", "slow", "bounded", "bounded", "slow", "fast") * 2, 3_600_000_000_000
LAUNCH_NS = {"fast": 0, "slow": 10_000, "bounded": 10_000}
MATH_NS = 23_000
WORDS = (
    *SHAPE,
    "parallel=ddp",
    "instrument.mode=dedicated",
    "training.max_steps=12",
    "training.log_interval=100",
    "telemetry.warmup_steps=3",
)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a launch set for each side."""
    folder = Path(tmp_path_factory.mktemp("launches"))
    for turn, side in enumerate(TURNS):
        words = [*WORDS, f"training.output_dir={folder / side}", f"label={turn:02}"]
        if side == "bounded":
            words.append("instrument.calibration=off")
        machine = map(str, (LAUNCH_NS[side], MATH_NS, turn * TURN_NS))
        devices.launched("tests.device_path.program_launch", *machine, *words)
    return folder


def compared(folder: Path, candidate: str) -> dict[str, Any]:
    """What the report says of "fast" and another side."""
    subjects = read_subjects({side: folder / side for side in ("fast", candidate)}, Rules())
    return summarize(subjects, "fast", candidate)


def of_ratio(summary: dict[str, Any], side: str) -> dict[str, Any]:
    found: dict[str, Any] = summary["datasets"][side]["metrics"]["overlap_ratio"]
    return found


def check_names_the_hosts(found: dict[str, Any]) -> None:
    """The verdict is about who is host-bound."""
    assert found["host_bound"]["side"] == "candidate"
    leads = found["host_bound"]["host_lead_ms"]
    assert leads["candidate"] < 0.1 < leads["reference"]
    assert "the candidate is host-bound, and the other is not" in found["headline"]
    assert found["attribution"]["sentence"].startswith("the candidate is host-bound: its host is ")
    assert found["attribution"].get("causes") is None
    for said in (found["headline"], found["attribution"]["sentence"].partition("What differs")[0]):
        assert "hides" not in said


def test_calibrated_launches_are_compared_by_kernels_and_their_hosts_are_named(launched: Path) -> None:
    summary = compared(launched, "slow")
    assert (of_ratio(summary, "fast")["source"], of_ratio(summary, "slow")["source"]) == ("marks", "kernels")
    found = summary["comparison"]
    check_names_the_hosts(found)
    assert found["verdict"] == "regression"
    # The device's own, as `test_host_bound` has them.
    ratio = found["metrics"]["overlap_ratio"]
    assert (ratio["reference"], ratio["candidate"]) == (pytest.approx(0.703, abs=0.02), pytest.approx(0.380, abs=0.02))


def test_bounds_of_launches_without_a_calibration_decide_nothing_and_name_the_hosts(launched: Path) -> None:
    summary = compared(launched, "bounded")
    assert of_ratio(summary, "fast")["source"] == "marks"
    assert of_ratio(summary, "bounded")["source"] is None
    bounds = of_ratio(summary, "bounded")["bounds"]
    assert bounds["at_least"] < 0.38 < bounds["at_most"]
    found = summary["comparison"]
    check_names_the_hosts(found)
    assert found["metrics"]["overlap_ratio"]["verdict"] is None
    assert found["metrics"]["overlap_ratio"]["verdict_reason"].startswith("not tested: host-bound, ")
