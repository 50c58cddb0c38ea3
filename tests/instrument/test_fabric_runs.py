"""Whole runs on the emulated fabric: the same training, and a report that says what its times are worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from aorta.analysis.frames import collectives_frame
from aorta.analysis.load.records import load_run
from tests.runs import losses, train

pytestmark = [pytest.mark.dist, pytest.mark.thorough]
LATENCY_MS = 60  # gloo on a busy machine may need 20 and more
FABRIC = (
    "fabric=emulated",
    f"fabric.inter_latency_us={1000 * LATENCY_MS}",
    "fabric.jitter=0.1",
    "fabric.straggler_rank=1",
    "fabric.straggler_ms=2",
)
SHORT = "training.max_steps=4"


@pytest.mark.parametrize(
    ("strategy", "sharing", "links"),
    [
        ("ddp", "group", "each process group has a link of its own"),
        ("fsdp", "link", "groups of a rank share its links"),
    ],
)
def test_training_is_bit_identical_and_the_results_say_that_they_are_emulated(
    tmp_path: Path, strategy: str, sharing: str, links: str
) -> None:
    train(tmp_path / "real", f"parallel={strategy}", SHORT)
    train(tmp_path / "emulated", f"parallel={strategy}", SHORT, *FABRIC, f"fabric.sharing={sharing}")
    for rank in (0, 1):
        expected = losses(tmp_path / "real", rank)
        assert None not in expected
        assert losses(tmp_path / "emulated", rank) == expected

    run = load_run(tmp_path / "emulated")
    assert run.health.uncovered_steps == {}
    assert run.health.fabric is not None
    assert run.health.fabric["inter_latency_us"] == 1000 * LATENCY_MS
    assert run.health.notes()[0].startswith("EMULATED FABRIC (kind=emulated, ")
    assert "straggler_rank=1, straggler_ms=2" in run.health.notes()[0]
    assert links in run.health.notes()[0]

    rows = collectives_frame(run)
    emulated = rows[rows["end_source"] == "emulated"]
    # The least that anything costs here: one latency, less the jitter. gloo may be slower, but not every time.
    assert emulated["duration_ms"].min() >= 0.9 * LATENCY_MS
    assert len(emulated) > len(rows) / 2
    assert load_run(tmp_path / "real").health.fabric is None
