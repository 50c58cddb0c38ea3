"""Several ranks train on the simulated device in virtual time; each writes what the record says beside the truth.

Enters: a folder and the cases as JSON. Leaves: `rank_<r>.json`, a list with one entry a case. Run by `test_overlap`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.ranks import by_rank
from tests.device_path.witness import truth_of
from tests.loop import Loop
from tests.simulated import device as simulated

SHAPE = (
    "training.device=cuda",
    "training.log_interval=1",
    "workload.num_layers=3",
    "workload.model_dim=64",
    "workload.mlp_hidden_dim=128",
    "workload.vocab_size=500",
    "dataset.num_samples=256",
)
WARM_UP, STEPS = 3, 3
MATH = ("aten::addmm", "aten::mm", "aten::bmm", "aten::_scaled_dot_product", "aten::native_layer_norm", "aten::gelu")


@dataclass(frozen=True)
class Case:
    """One way to train. `words` are train.py's, beside `SHAPE`."""

    name: str
    words: tuple[str, ...]


def main() -> None:
    """Every case, one after another."""
    cases = [Case(one["name"], tuple(one["words"])) for one in json.loads(sys.argv[2])]
    by_rank(lambda *rank: [{"name": case.name, "steps": seen(case, *rank)} for case in cases])


def seen(case: Case, topology: Topology, device: torch.device) -> list[dict[str, Any]]:
    """Each step of a case after the warm-up: the record's numbers, the device's, and both of every collective."""
    # Only the mathematics of blocks takes time: what else runs on the computing stream is no computation of the model.
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=dict.fromkeys(MATH, (23_000, 0.0)))
    simulated.lengths(copy_h2d=(2_000, 1_000.0), copy_d2h=(3_000, 1_000.0))
    simulated.costs(launch_ns=0)
    simulated.collective_lengths(default=(90_000, 0.5))
    lines: list[Step] = []
    one = Loop((*SHAPE, *case.words), topology, device, lines.append)
    for _ in range(WARM_UP):
        one.step()
    torch.accelerator.synchronize()
    simulated.reset()
    for _ in range(STEPS):
        one.step()
    one.finish()
    rows, waits = simulated.timeline(), simulated.waits()
    simulated.no_races()
    collectives = [row for row in rows if row.device == device.index and row.kind == "collective"]
    queues: dict[str, list[Any]] = {}
    for row in collectives:
        queues.setdefault(row.group, []).append(row)
    told = []
    for line in lines[WARM_UP:]:
        window = (line.start_mono_ns, line.end_mono_ns)
        truth = truth_of(window, rows, waits, torch.cuda.current_stream().stream_id, device.index)
        pairs = []
        for row in line.collectives:
            own = queues[row.group].pop(0)
            origin = line.start_mono_ns
            pairs.append((row.kind, origin + row.start_ns, own.start_ns, origin + row.end_ns, own.end_ns))
        told.append(
            {
                "overlap": line.overlap,
                "coverage": line.coverage.complete,
                "truth": truth.lengths_ns() | {"ratio": truth.ratio},
                "collectives": pairs,
                "loss": line.loss,
            }
        )
    assert not any(queues.values()), "the device ran collectives that no record has"
    return told


if __name__ == "__main__":
    main()
