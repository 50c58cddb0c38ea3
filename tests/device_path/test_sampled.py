"""On a device a step that is passed over records no event but those of its own begin and end, and, where
collectives are moved, those that order the streams; what is observed is as if every step were.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from aorta.distributed.topology import Topology
from aorta.instrument.sampling import drawn
from aorta.records.schema import Step
from tests.device_path.trainings import WARM_UP, lengths, looped
from tests.simulated import device as simulated
from tests.simulated.programs import needs_device, on_devices

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]
STEPS = 19
EVERY = 4
OF_A_STEP = 3
"""Events: the epoch that marks are read against, the begin and the end."""
OF_A_MOVED_COLLECTIVE = 2
"""Events that order AORTA's stream behind the caller's, and the caller's behind it: nothing is timed with them."""
MODES = ("dedicated", "observe")


def seen(topology: Topology, device: torch.device, strategy: str, mode: str) -> dict[str, Any]:
    """By step: events recorded, and the record's line. `bare`: events of a step that nothing of AORTA is part of."""
    lengths()
    lines: list[Step] = []
    words = f"parallel={strategy}", f"instrument.mode={mode}", f"instrument.every={EVERY}"

    def events() -> int:
        return simulated.counters(device.index).events_recorded

    taken = []
    with looped(words, topology, device, lines, warm_up=0) as loop:
        for _ in range(STEPS):
            before = events()
            loop.step()
            torch.accelerator.synchronize()
            taken.append(events() - before)
        with loop.instrument.paused():
            loop.unrecorded()
            before = events()
            loop.unrecorded()
            bare = events() - before
    return {
        "bare": bare,
        "steps": [
            {
                "events": count,
                "drawn": None if line.coverage.reason is not None else line.drawn,
                "overlap": line.overlap,
                "collectives": len(line.collectives),
                "complete": line.coverage.complete,
            }
            for count, line in zip(taken, lines, strict=True)
        ],
    }


def test_steps_that_are_passed_over_cost_the_device_their_begin_and_end(tmp_path: Path) -> None:
    cases = {f"{strategy} {mode}": (strategy, mode) for strategy, mode in product(("ddp", "fsdp"), MODES)}
    for name, ranks in on_devices(seen, tmp_path, cases).items():
        for rank in ranks:
            steps, bare = rank["steps"], rank["bare"]
            assert [EVERY if drawn(number, EVERY, 0) else None for number in range(STEPS)] == [
                step["drawn"] for step in steps
            ]
            moved = max(step["collectives"] for step in steps) if "dedicated" in name else 0
            for step in steps:
                if step["drawn"] is None:
                    assert set(step["overlap"]) <= {"window_ms", "aorta_ms"}
                    assert step["collectives"] == 0
                else:
                    assert step["complete"]
                    assert min(step["overlap"]["comm_ms"], step["overlap"]["compute_ms"]) > 0
                    assert step["events"] > bare + 2 * step["collectives"]
            # In the first ones streams and buckets are made; in virtual time the others are alike.
            settled = steps[WARM_UP:]
            passed_over = {step["events"] - bare for step in settled if step["drawn"] is None}
            assert passed_over == {OF_A_STEP + OF_A_MOVED_COLLECTIVE * moved}, name
            observed = [step["overlap"] for step in settled if step["drawn"] is not None]
            assert len({(round(one["comm_ms"], 6), round(one["compute_ms"], 6)) for one in observed}) == 1
            windows_ms = [step["overlap"]["window_ms"] for step in settled]
            assert windows_ms == pytest.approx([windows_ms[0]] * len(windows_ms), rel=1e-9)
