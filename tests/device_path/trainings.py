"""Ranks train on the simulated device in virtual time: what their records say, beside the truth.

Run by `test_overlap` and `test_pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.witness import clipped, length, truth_of
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
LAYER_NS = 1_000_000
"""Of one layer forward, and of one backward, in a case with `transfer`."""
ONCE_A_LAYER = ("aten::gelu", "aten::gelu_backward", "aten::silu", "aten::silu_backward")
"""Of the ranking model and of the decoder."""
MATH = ("aten::addmm", "aten::mm", "aten::bmm", "aten::_scaled_dot_product", "aten::native_layer_norm", "aten::gelu")


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        words: of `train.py`, beside `SHAPE`.
        transfer: how long a collective takes, as fixed nanoseconds and nanoseconds per byte. Layers then take
            `LAYER_NS` each and nothing else takes time, so that stages of a pipeline with as many layers are equal.
    """

    words: tuple[str, ...]
    transfer: tuple[int, float] | None = None


def every_case(topology: Topology, device: torch.device, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """On a rank, one after another: the steps of each `Case`."""
    return [seen(Case(**case), topology, device) for case in cases]


def set_lengths(transfer: tuple[int, float] | None) -> None:
    """How long the device takes for what, as `Case` says."""
    # Only the mathematics of blocks takes time: what else runs on the computing stream is no computation of the model.
    timed = dict.fromkeys(MATH, (23_000, 0.0)) if transfer is None else dict.fromkeys(ONCE_A_LAYER, (LAYER_NS, 0.0))
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=timed)
    if transfer is None:
        simulated.lengths(copy_h2d=(2_000, 1_000.0), copy_d2h=(3_000, 1_000.0))
    simulated.costs(launch_ns=0)
    simulated.collective_lengths(default=(90_000, 0.5) if transfer is None else tuple(transfer))


def seen(case: Case, topology: Topology, device: torch.device) -> list[dict[str, Any]]:
    """Each step of a case after the warm-up: the record's numbers and the device's.

    Where no pipeline exchanges batches of messages, each collective has its start and end in both.
    """
    set_lengths(case.transfer)
    lines: list[Step] = []
    one = Loop((*SHAPE, *case.words), topology, device, lines.append)
    for _ in range(WARM_UP):
        one.step()
    torch.accelerator.synchronize()
    simulated.reset()
    for _ in range(STEPS):
        one.step()
    one.finish()
    rows, waits, stream = simulated.timeline(), simulated.waits(), torch.cuda.current_stream().stream_id
    still = [(wait.begin_ns, wait.end_ns) for wait in waits if (wait.device, wait.stream) == (device.index, stream)]
    simulated.no_races()
    queues: dict[str, list[Any]] = {}
    for row in rows if case.transfer is None else ():
        if row.device == device.index and row.kind == "collective":
            queues.setdefault(row.group, []).append(row)
    steps = []
    for line in lines[WARM_UP:]:
        window = (line.start_mono_ns, line.end_mono_ns)
        truth = truth_of(window, rows, waits, stream, device.index)
        pairs = []
        for row in line.collectives if case.transfer is None else ():
            own = queues[row.group].pop(0)
            origin = line.start_mono_ns
            pairs.append((row.kind, origin + row.start_ns, own.start_ns, origin + row.end_ns, own.end_ns))
        steps.append(
            {
                "overlap": line.overlap,
                "coverage": line.coverage.complete,
                "truth": truth.lengths_ns() | {"ratio": truth.ratio},
                "collectives": pairs,
                "kinds": [row.kind for row in line.collectives],
                "still_ns": length(clipped(still, window)),
                "lanes_ms": line.per_stream_ms,
            }
        )
    assert not any(queues.values()), "the device ran collectives that no record has"
    return steps
