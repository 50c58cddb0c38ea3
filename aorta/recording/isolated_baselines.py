"""Isolated baselines: steps that only compute, and steps that only communicate, run after the training (R10).

In the record they are steps whose `phase` is `compute_only` or `comm_only`. Must not change what a next step of
training would do, or run a step that not all ranks run.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aorta.distributed.topology import random_states, set_random_states
from aorta.instrument.emulation.rehearsal import Rehearsal, Replay
from aorta.instrument.emulation.stand_in import StandIn
from aorta.parallel.plan import local_part
from aorta.recording.train_step import TrainStep
from aorta.records.schema import Phase
from aorta.records.step_line import StepFacts
from aorta.workload.tasks import Batch

_log = logging.getLogger(__name__)
_REHEARSALS = 2
"""Real steps, of which the last one is recorded: DDP exchanges its bucket order in the second of all."""


@contextmanager
def restored_state(step: TrainStep) -> Iterator[None]:
    """Restore parameters, buffers, optimizer, schedule, scaler and random states after a `with` block between two
    steps, and clear gradients; not after an error, which ends the run.

    Tensors are restored in place, as strategies hold views of them; copies are on the CPU, to spare the accelerator.
    """
    module, optimizer, schedule, scaler = step.model.module, step.optimizer, step.schedule, step.scaler
    tensors = [_local(tensor) for tensor in (*module.parameters(), *module.buffers())]
    saved = [tensor.to("cpu", copy=True) for tensor in tensors]
    groups = [
        {key: copy.deepcopy(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups
    ]
    states: dict[Any, dict[str, Any]] = {
        parameter: {
            key: _local(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in state.items()
        }
        for parameter, state in optimizer.state.items()
    }
    others = copy.deepcopy(schedule.state_dict()), copy.deepcopy(scaler.state_dict())
    device = next(module.parameters()).device
    generators = random.getstate(), random_states(device)
    yield
    with torch.no_grad():
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
        for parameter in list(optimizer.state):
            if parameter not in states:
                del optimizer.state[parameter]  # its first update was inside the block
                continue
            for key, value in states[parameter].items():
                now = optimizer.state[parameter][key]
                if isinstance(now, torch.Tensor):
                    _local(now).copy_(value)
                else:
                    optimizer.state[parameter][key] = value
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)
    optimizer.zero_grad(set_to_none=True)
    schedule.load_state_dict(others[0])
    scaler.load_state_dict(others[1])
    random.setstate(generators[0])
    set_random_states(generators[1], device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be distributed over ranks; shares its memory."""
    with torch.no_grad():
        return local_part(tensor).detach()


def run_baselines(
    step: TrainStep, batches_of: Callable[[], Iterator[Batch]], may_start: Callable[[], bool], steps: int, warmup: int
) -> None:
    """Run both baselines of one rank, or as many steps as the run's end leaves time for; every rank runs them together.

    Args:
        batches_of: makes an endless source of them; training's own keeps its position.
        may_start: whether one more step may begin, the same on all ranks; once False, it stays False.
        steps: of each baseline, of which `warmup` are flagged as warm-up.
    """

    def facts_of(phase: Phase) -> Iterator[StepFacts]:
        for number in range(steps):
            if not may_start():
                return
            lr = float(step.schedule.get_last_lr()[0]) if phase == "compute_only" else None
            yield StepFacts(0, number, number, lr, number < warmup, phase)

    instrument, device = step.instrument, step.device
    with restored_state(step):
        batches = batches_of()
        for _ in range(_REHEARSALS):
            if not may_start():
                return
            rehearsal = Rehearsal(device)
            with instrument.replaced(rehearsal):
                step.unrecorded(batches)
        replay = Replay(rehearsal.events)
        _log.info("baseline: %d compute-only steps", steps)
        batches, done = batches_of(), 0
        with instrument.replaced(StandIn(device, instrument.clock, instrument.recorder.on_stall)):
            for facts in facts_of("compute_only"):
                step.run(batches, facts)
                done += 1
        if done < steps:
            return
        if not replay.collectives:
            _log.info("baseline: no communication-only steps, as a step has no collectives")
            return
        _log.info("baseline: %d communication-only steps of %d collectives", steps, replay.collectives)
        for facts in facts_of("comm_only"):
            with instrument.recorder.step(facts):
                replay.run()
