"""One rank's training, made of the engine's own parts, which a check or a benchmark drives step by step.

Enters: configuration words and an open process group. Leaves: a `Loop` whose steps are the engine's (`TrainStep`),
whose instrument can be paused, and whose record goes to a file or a list. No folder, manifest or checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir

from aorta.config.multirun import register
from aorta.config.resolve import Resolved, resolve
from aorta.instrument.instrument import Instrument
from aorta.instrument.reading import StepFacts
from aorta.instrument.recorder import TOGETHER
from aorta.launch.topology import Topology
from aorta.parallel.strategies import spread
from aorta.runner.optimization import make_optimizer, make_scaler, make_schedule
from aorta.runner.train_step import TrainStep
from aorta.telemetry.clock import read_clocks
from aorta.telemetry.schema import Step
from aorta.workload.tasks import task_of

ROOT = Path(__file__).resolve().parents[2]


def resolved(*words: str) -> Resolved:
    """What `train.py WORDS` would run with."""
    register()
    with initialize_config_dir(str(ROOT / "config"), version_base="1.3"):
        return resolve(compose("default", list(words)))


class Loop:
    """A model, spread and watched; `step()` trains once.

    Args:
        words: for `train.py`; `instrument.mode` among them.
        sink: takes finished steps.
    """

    def __init__(self, words: tuple[str, ...], topology: Topology, device: torch.device, sink: Callable[[Step], None]):
        config = resolved(*words).config
        task = task_of(config)
        torch.manual_seed(config.training.seed)
        model = task.model().to(device)
        blocks = list(model.blocks())
        whole = spread(model, blocks, model.tensor_parallel_parts(), config, device)
        torch.manual_seed(config.training.seed + 1 + whole.data_rank)
        self.instrument = Instrument(
            device,
            config.instrument.mode.value,
            topology.rank,
            topology.world_size,
            read_clocks(),
            sink,
            config.instrument.stream_priority,
            native=config.instrument.native,
            together=TOGETHER,
        )
        loss = task.loss()
        self.instrument.watch([*blocks, ("loss", loss)])
        self.instrument.watch_backward(loss)
        optimizer = make_optimizer(model.parameters(), task)
        schedule = make_schedule(optimizer, config)
        scaler = make_scaler(config, device)
        self.step_of_training = TrainStep(whole, loss, optimizer, schedule, scaler, self.instrument, config, device)
        self.batches = task.batches(whole.data_rank, whole.data_size, device).for_ever
        self._batches = self.batches()
        self.model, self.steps_done = whole.module, 0

    def step(self) -> None:
        """One recorded step."""
        number, self.steps_done = self.steps_done, self.steps_done + 1
        self.step_of_training.run(self._batches, StepFacts(0, number, number, lr=0.0, warmup=False))

    def unrecorded(self) -> None:
        """One step of the training, without the recorder."""
        self.step_of_training.unrecorded(self._batches)

    def finish(self) -> None:
        """Write the last steps and take everything off."""
        self.instrument.recorder.finish()
        self.instrument.close()
