"""Run on two or four ranks: a training loop, whose lines are held to those that a witness makes of the same rows.

Arguments: a folder, which gets `rank_<r>.json`; how many steps; words as for `train.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from aorta.distributed.topology import process_group, read_topology
from aorta.instrument.emulation.stand_in import StandIn
from aorta.instrument.open_step import Scalar
from aorta.instrument.recorder import Recorder
from aorta.records import ring_steps
from aorta.records.ring_steps import RingSteps
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts
from tests.instrument.rows_as_marks import witnessed
from tests.loop import Loop

CPU = torch.device("cpu")
BATCHES = (1, 16, 64)
GONE_ON_BEHIND = (0, 6, 12)
"""Steps behind which somebody else goes on."""


def main(folder: str, steps: str, *words: str) -> None:
    """Train, and compare."""
    topology, recorded = read_topology(), list[Step]()
    with process_group(topology, CPU, 60):
        loop = Loop(words, topology, CPU, recorded.append)
        for number in range(int(steps)):
            with loop.instrument.recorder.user_marks.range("named") if number % 3 else loop.instrument.paused():
                loop.step()
        with loop.instrument.replaced(StandIn(CPU, loop.instrument.clock, loop.instrument.recorder.on_stall)):
            loop.step_of_training.run(loop.batches(), StepFacts(0, 0, 0, 0.5, warmup=True, phase="compute_only"))
        by_hand(loop.instrument.recorder)
        loop.instrument.recorder.finish()
        ring = loop.instrument._ring
        assert ring is not None
        encode = msgspec.json.Encoder().encode
        expected = [encode(line) for line in witnessed(ring)]
        equal = {"recorded": _equal(expected, [encode(line) for line in recorded])}
        for batch in BATCHES:
            ring_steps.MOST = batch  # type: ignore[misc]
            equal[str(batch)] = _equal(expected, [encode(line) for line in RingSteps(ring).take()])
        ring_steps._AGAIN = 4  # type: ignore[misc]
        for done in GONE_ON_BEHIND:
            rest = RingSteps(ring, behind_ns=recorded[done].start_mono_ns).take()
            equal[f"behind {done}"] = [""] * (done + 1) + _equal(expected[done + 1 :], [encode(line) for line in rest])
        loop.finish()
    Path(folder, f"rank_{topology.rank}.json").write_text(json.dumps(equal))


def by_hand(recorder: Recorder) -> None:
    """Steps of a caller's loop, without gaps: collectives begin between them, and reach over their ends."""
    for number in range(4):
        recorder.begin(StepFacts(1, number, number, None, warmup=False), continues=number > 1)
        work = dist.all_reduce(torch.ones(1_000), async_op=True)
        recorder.boundary = "unclear" if number == 2 else None
        recorder.note(None, Scalar(torch.tensor(float("inf"))), 0.25)
        recorder.end()
        dist.all_reduce(torch.ones(2))
        assert work is not None
        work.wait()


def _equal(expected: list[bytes], lines: list[bytes]) -> list[str]:
    """Per step "", or what both begin with and how each goes on."""
    assert len(expected) == len(lines)
    found = []
    for left, right in zip(expected, lines, strict=True):
        pairs = enumerate(zip(left, right, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
        found.append("" if left == right else f"{left[same - 60 : same + 40]!r} {right[same - 60 : same + 40]!r}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
