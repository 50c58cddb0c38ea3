"""On a device a step that is passed over records no event but those of its own begin and end, and, where
collectives are moved, those that order the streams; what is observed is as if every step were.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from aorta.distributed.topology import Topology
from aorta.instrument.sampling import drawn
from aorta.records.schema import Step
from tests.device_path.launch import on_devices
from tests.device_path.trainings import SHAPE, WARM_UP, set_lengths
from tests.loop import Loop
from tests.simulated import device as simulated
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]
STEPS = 16


def every_case(topology: Topology, device: torch.device, cases: list[list[str]]) -> list[dict[str, Any]]:
    """On a rank, one after another."""
    return [seen(words, topology, device) for words in cases]


def seen(words: list[str], topology: Topology, device: torch.device) -> dict[str, Any]:
    """By step: events recorded, and the record's line. `bare`: events of a step that nothing of AORTA is part of."""
    set_lengths(None)
    lines: list[Step] = []
    one = Loop((*SHAPE, *words), topology, device, lines.append)

    def events() -> int:
        return simulated.counters(device.index).events_recorded

    taken = []
    for _ in range(WARM_UP + STEPS):
        before = events()
        one.step()
        torch.accelerator.synchronize()
        taken.append(events() - before)
    with one.instrument.paused():
        one.unrecorded()
        before = events()
        one.unrecorded()
        bare = events() - before
    one.finish()
    simulated.no_races()
    return {
        "bare": bare,
        "events": taken,
        "drawn": [None if line.coverage.reason is not None else line.drawn for line in lines],
        "overlap": [line.overlap for line in lines],
        "collectives": [len(line.collectives) for line in lines],
        "complete": [line.coverage.complete for line in lines],
    }


EVERY = 4
OF_A_STEP = 3
"""Events: the epoch that marks are read against, the begin and the end."""
OF_A_MOVED_COLLECTIVE = 2
"""Events that order AORTA's stream behind the caller's, and the caller's behind it: nothing is timed with them."""
CASES = [
    [f"parallel={strategy}", f"instrument.mode={mode}", f"instrument.every={EVERY}"]
    for strategy in ("ddp", "fsdp")
    for mode in ("dedicated", "observe")
]


def test_steps_that_are_passed_over_cost_the_device_their_begin_and_end(tmp_path: Path) -> None:
    ranks = on_devices(every_case, tmp_path, CASES)
    for words, first, other in zip(CASES, *ranks, strict=True):
        assert first["drawn"] == other["drawn"]
        numbers = range(len(first["drawn"]))
        assert [EVERY if drawn(number, EVERY, 0) else None for number in numbers] == first["drawn"]
        assert len(numbers) > 4 * EVERY
        for rank in (first, other):
            moved = max(rank["collectives"]) if "instrument.mode=dedicated" in words else 0
            for number in numbers:
                observed = rank["drawn"][number] is not None
                overlap, events = rank["overlap"][number], rank["events"][number]
                if number >= WARM_UP and not observed:  # in the first ones streams and buckets are made
                    allowed = OF_A_STEP + OF_A_MOVED_COLLECTIVE * moved
                    assert events - rank["bare"] == allowed, (words, number, rank["events"])
                if not observed:
                    assert set(overlap) <= {"window_ms", "aorta_ms"}
                    assert rank["collectives"][number] == 0
                if observed:
                    assert rank["complete"][number]
                    assert overlap["comm_ms"] > 0
                    assert overlap["compute_ms"] > 0
                    assert events > rank["bare"] + 2 * rank["collectives"][number]
            alike = {
                (round(line["comm_ms"], 6), round(line["compute_ms"], 6))
                for line, which in zip(rank["overlap"][2:], rank["drawn"][2:], strict=True)
                if which is not None
            }
            assert len(alike) == 1  # in virtual time observed steps are alike
            windows_ms: dict[bool, list[float]] = {True: [], False: []}
            for line, which in zip(rank["overlap"][WARM_UP:], rank["drawn"][WARM_UP:], strict=True):
                windows_ms[which is not None].append(line["window_ms"])
            assert median(windows_ms[True]) == pytest.approx(median(windows_ms[False]), rel=1e-9)
