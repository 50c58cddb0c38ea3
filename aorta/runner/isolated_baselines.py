"""Isolated baselines: steps that only compute, and steps that only communicate, run after the training (R10).

In the record they are steps whose `phase` is `compute_only` or `comm_only`. Must not change what a next step of
training would do, or run a step that not all ranks run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aorta.instrument.emulation.replay import Rehearsal, Replay
from aorta.instrument.emulation.stand_in import StandIn
from aorta.instrument.open_step import StepFacts
from aorta.records.schema import Phase
from aorta.runner.snapshot import put_back
from aorta.runner.train_step import TrainStep
from aorta.workload.task import Batch

_log = logging.getLogger(__name__)
_REHEARSALS = 2
"""Real steps, of which the last one is recorded: DDP exchanges its bucket order in the second of all."""


@dataclass
class Baselines:
    """Both baselines of one rank; every rank runs them together.

    Attributes:
        step: of the training.
        batches: a separate, endless source of them, so that training's own keeps its position.
        may_start: whether one more step may begin, the same on all ranks; once False, it stays False.
        steps: of each baseline.
        warmup: how many of them are flagged as warm-up.
    """

    step: TrainStep
    batches: Callable[[], Iterator[Batch]]
    may_start: Callable[[], bool]
    steps: int
    warmup: int

    def run(self) -> None:
        """Run both, or as many steps as the run's end leaves time for."""
        with put_back(self.step.model.module, self.step.optimizer, self.step.schedule, self.step.scaler):
            replay = self._rehearsed()
            if replay is None:
                return
            _log.info("baseline: %d steps that only compute", self.steps)
            instrument = self.step.instrument
            batches = self.batches()
            with instrument.replaced(StandIn(self.step.device, instrument.clock, instrument.recorder.on_stall)):
                done = 0
                for facts in self._facts("compute_only"):
                    self.step.run(batches, facts)
                    done += 1
            if done < self.steps:
                return
            if not replay.collectives:
                _log.info("baseline: the step has no collectives, so there is no step that only communicates")
                return
            _log.info("baseline: %d steps that only communicate: %d collectives", self.steps, replay.collectives)
            for facts in self._facts("comm_only"):
                with instrument.recorder.step(facts):
                    replay.run()

    def _rehearsed(self) -> Replay | None:
        """The collectives of a real step; None where the run ends before there was one."""
        batches = self.batches()
        rehearsal = None
        for _ in range(_REHEARSALS):
            if not self.may_start():
                return None
            rehearsal = Rehearsal(self.step.device)
            with self.step.instrument.replaced(rehearsal):
                self.step.unrecorded(batches)
        assert rehearsal is not None  # there is a rehearsal
        return Replay(rehearsal.events)

    def _facts(self, phase: Phase) -> Iterator[StepFacts]:
        for number in range(self.steps):
            if not self.may_start():
                return
            lr = float(self.step.schedule.get_last_lr()[0]) if phase == "compute_only" else None
            yield StepFacts(0, number, number, lr, number < self.warmup, phase)
