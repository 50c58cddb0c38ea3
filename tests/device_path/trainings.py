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


def seen(
    topology: Topology, device: torch.device, words: list[str], transfer: tuple[int, float] | None = None
) -> list[dict[str, Any]]:
    """Each step of a case after the warm-up: the record's numbers and the device's.

    Where no pipeline exchanges batches of messages, each collective has its start and end in both.

    Args:
        words: of `train.py`, beside `SHAPE`.
        transfer: how long a collective takes, as fixed nanoseconds and nanoseconds per byte. Layers then take
            `LAYER_NS` each and nothing else takes time, so that stages of a pipeline with as many layers are equal.
    """
    if transfer is None:
        lengths()
        simulated.lengths(copy_h2d=(2_000, 1_000.0), copy_d2h=(3_000, 1_000.0))
    else:
        lengths(LAYER_NS, transfer, operators=ONCE_A_LAYER)
    lines: list[Step] = []
    with looped(words, topology, device, lines) as loop:
        for _ in range(STEPS):
            loop.step()
    rows, waits, stream = simulated.timeline(device.index), simulated.waits(), torch.cuda.current_stream().stream_id
    still = [(wait.begin_ns, wait.end_ns) for wait in waits if (wait.device, wait.stream) == (device.index, stream)]
    queues: dict[str, list[Any]] = {}
    for row in rows if transfer is None else ():
        if row.kind == "collective":
            queues.setdefault(row.group, []).append(row)
    steps = []
    for line in lines[WARM_UP:]:
        window = (line.start_mono_ns, line.end_mono_ns)
        truth = truth_of(window, rows, waits, stream, device.index)
        pairs = []
        for row in line.collectives if transfer is None else ():
            own, origin = queues[row.group].pop(0), line.start_mono_ns
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
