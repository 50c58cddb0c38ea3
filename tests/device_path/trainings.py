"""Ranks train on the simulated device in virtual time: how long it takes for what, and what their records say, beside
the truth.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aorta.distributed.topology import Topology
from aorta.records.schema import Step
from tests.device_path.agreement import clipped, length, truth_of
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
WARM_UP = 3
MATH = ("aten::addmm", "aten::mm", "aten::bmm", "aten::_scaled_dot_product", "aten::native_layer_norm", "aten::gelu")
MATH_NS = 23_000
COLLECTIVE = (90_000, 0.5)
"""Nanoseconds, and nanoseconds a byte."""


def lengths(
    math_ns: int = MATH_NS,
    collective: tuple[int, float] = COLLECTIVE,
    launch_ns: int = 0,
    operators: tuple[str, ...] = MATH,
) -> None:
    """Only the mathematics of blocks takes time, and collectives: what else runs on the computing stream is no
    computation of the model.
    """
    simulated.lengths(**dict.fromkeys(simulated.CLASSES, (0, 0.0)), operators=dict.fromkeys(operators, (math_ns, 0.0)))
    simulated.collective_lengths(default=collective)
    simulated.costs(launch_ns=launch_ns)


@contextmanager
def looped(
    words: tuple[str, ...] | list[str],
    topology: Topology,
    device: torch.device,
    lines: list[Step],
    warm_up: int = WARM_UP,
) -> Iterator[Loop]:
    """A loop behind its warm-up, and the device's account from there on; it ends without a race."""
    loop = Loop((*SHAPE, *words), topology, device, lines.append)
    for _ in range(warm_up):
        loop.step()
    torch.accelerator.synchronize()
    simulated.reset()
    yield loop
    loop.finish()
    simulated.no_races()


def compared(lines: list[Step], device: torch.device, **within: float) -> list[dict[str, Any]]:
    """Each step: the record's numbers, the device's, and where they differ (`Truth.differences`)."""
    rows, waits, stream = simulated.timeline(device.index), simulated.waits(), torch.cuda.current_stream().stream_id
    still = [(wait.begin_ns, wait.end_ns) for wait in waits if (wait.device, wait.stream) == (device.index, stream)]
    steps = []
    for line in lines:
        window = (line.start_mono_ns, line.end_mono_ns)
        truth = truth_of(window, rows, waits, stream, device.index)
        steps.append(
            {
                "overlap": line.overlap,
                "complete": line.coverage.complete,
                "truth": truth.lengths_ns | {"ratio": truth.ratio},
                "wrong": truth.differences(line.overlap, **within),
                "kinds": [row.kind for row in line.collectives],
                "still_ns": length(clipped(still, window)),
                "lanes_ms": line.per_stream_ms,
            }
        )
    return steps
