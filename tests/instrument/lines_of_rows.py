"""Run on two ranks: a training loop in each arm, whose lines are held to those of one step at a time, and to
those of the first arm as far as nothing in them was timed.

Arguments: a folder, which gets `rank_<r>.json`; how many steps; words as for `train.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from aorta.config.schema import EmulatedFabric
from aorta.distributed.topology import Topology, process_group, read_topology
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.emulation.stand_in import StandIn
from aorta.instrument.recorder import Recorder, Scalar
from aorta.records import ring_file as rf
from aorta.records import ring_steps
from aorta.records.ring_steps import RingSteps
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts
from tests.instrument.taps import lines_at_once
from tests.loop import Loop

CPU = torch.device("cpu")
BATCHES = (4, 64)
GONE_ON_BEHIND = (0, 6, 12)
"""Steps behind which somebody else goes on."""
AGAIN = ring_steps._AGAIN
ARMS = ("compiled", "python", "emulated")
FABRIC = EmulatedFabric(intra_latency_us=100.0)


def main(folder: str, steps: str, *words: str) -> None:
    """Train, and compare."""
    topology = read_topology()
    with process_group(topology, CPU, 60):
        shapes, told = {}, {}
        trained(1, words, topology, None)  # a process's first model shares groups that later ones make anew
        for arm in ARMS:
            fabric = None
            if arm == "emulated":
                (place := Path(folder, "links")).mkdir(exist_ok=True)
                fabric = EmulatedNetwork(FABRIC, topology.rank, topology.world_size, place)
            told[arm], recorded, on_a_link = trained(
                int(steps), (*words, f"instrument.native={arm == 'compiled'}"), topology, fabric
            )
            shapes[arm] = shape_of(recorded)
            told[arm]["shape"] = _equal(shapes["compiled"], shapes[arm])
            told[arm]["on a link"] = on_a_link
    Path(folder, f"rank_{topology.rank}.json").write_text(json.dumps(told))


def trained(
    steps: int, words: tuple[str, ...], topology: Topology, fabric: EmulatedNetwork | None
) -> tuple[dict[str, Any], list[Step], bool]:
    """Where one arm's lines differ from those of one step at a time; its lines; whether all was on a link."""
    recorded: list[Step] = []
    loop = Loop(words, topology, CPU, recorded.append, fabric)
    for number in range(steps):
        with loop.instrument.recorder.user_marks.range("named") if number % 3 else loop.instrument.paused():
            loop.step()
    with loop.instrument.replaced(StandIn(CPU, loop.instrument.clock, loop.instrument.recorder.on_stall)):
        loop.step_of_training.run(loop.batches(), StepFacts(0, 0, 0, 0.5, warmup=True, phase="compute_only"))
    by_hand(loop.instrument.recorder)
    loop.instrument.recorder.finish()
    ring = loop.instrument._ring
    assert ring is not None
    encode = msgspec.json.Encoder().encode
    expected = [encode(line) for line in lines_at_once(ring, 1)]
    equal = {"recorded": _equal(expected, [encode(line) for line in recorded])}
    for batch in BATCHES:
        equal[str(batch)] = _equal(expected, [encode(line) for line in lines_at_once(ring, batch)])
    ring_steps._AGAIN = 4  # type: ignore[misc]
    for done in (one for one in GONE_ON_BEHIND if one < len(recorded)):
        rest = RingSteps(ring, behind_ns=recorded[done].start_mono_ns).take()
        equal[f"behind {done}"] = [""] * (done + 1) + _equal(expected[done + 1 :], [encode(line) for line in rest])
    ring_steps._AGAIN = AGAIN  # type: ignore[misc]
    loop.finish()
    rows, _ = ring.rows_since(0)
    links = np.count_nonzero((rows["kind"] == rf.LINK) & (rows["a"] > 0))
    return equal, recorded, bool(links == np.count_nonzero(rows["kind"] == rf.COLLECTIVE))


def shape_of(lines: list[Step]) -> list[bytes]:
    """What lines say that was not timed. Groups are numbered as they come: each arm makes its own."""
    groups: dict[str, int] = {}

    def numbered(group: str) -> int:
        return groups.setdefault(group, len(groups))

    return [
        msgspec.json.encode(
            {
                "facts": (line.global_step, line.epoch, line.step, line.phase, line.warmup, line.lr),
                "values": (line.loss, line.grad_norm),
                "coverage": line.coverage,
                "reasons": sorted(line.reasons.items()),
                "null": sorted(name for name, value in line.overlap.items() if value is None),
                "collectives": [
                    (row.kind, numbered(row.group), row.seq, row.bytes, row.dtype, row.end_ns is None)
                    for row in line.collectives
                ],
                "compute": sorted((row.block, row.phase) for row in line.compute),
                "aux": [row.name for row in line.aux],
                "waits": sorted((numbered(row.group), row.seq, row.kind or "") for row in line.waits or []),
                "ranges": [(row.name, row.thread, row.depth, row.error) for row in line.ranges or []],
            }
        )
        for line in lines
    ]


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
