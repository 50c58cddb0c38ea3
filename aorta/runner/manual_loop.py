"""A training loop driven step by step by its caller: device checks, benchmarks and tests.

Model, step and instrumentation are those of a run. There is no folder, and so no manifest, header or checkpoint:
finished steps go to a function. Must not be a second way to train.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hydra import compose, initialize_config_dir

from aorta.config import CONFIG_DIR
from aorta.config.resolve import Resolved, resolve
from aorta.config.schema import Config, register
from aorta.config.schema import Instrument as InstrumentSettings
from aorta.distributed.topology import Topology
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.open_step import StepFacts
from aorta.instrument.step_recorder import TOGETHER
from aorta.records.progress_file import Progress
from aorta.records.schema import Calibration, Step
from aorta.runner.calibration import Calibrator, calibration_plan
from aorta.runner.recorded_run import open_instrument
from aorta.runner.train_step import SpreadModel, TrainStep
from aorta.workload.tasks import task_of


def resolved(*words: str) -> Resolved:
    """Return the configuration that `train.py` would have with these arguments."""
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return resolve(compose("default", list(words)))


class Loop:
    """A distributed, instrumented model; `step()` trains once. Needs an open process group.

    Args:
        config: as `resolved` makes it of arguments; `instrument.mode` is chosen by the caller.
        sink: receives finished steps.
        fabric: delays collectives; None: the network is the real one, whatever `config` says.
        progress: of the rank, in which steps and collectives are noted; None: nowhere.

    Attributes:
        calibrations: of the steps behind the first `telemetry.warmup_steps`, where `instrument.calibration` is a number
            (`auto` would profile what is to be measured here).

    Example:
        >>> lines = []
        >>> config = resolved("parallel=ddp", "instrument.mode=observe").config
        >>> loop = Loop(config, topology, device, lines.append)
        >>> loop.step()
        >>> loop.finish()  # now `lines` holds one step
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        device: torch.device,
        sink: Callable[[Step], None],
        fabric: EmulatedNetwork | None = None,
        progress: Progress | None = None,
    ) -> None:
        task = task_of(config)
        model = SpreadModel.build(task, config, device)
        settings = config.instrument
        self.calibrations: list[Calibration] = []
        self._calibrator = Calibrator(
            None
            if settings.calibration == InstrumentSettings().calibration
            else calibration_plan(settings.calibration, device, settings.mode.value, 0, config.telemetry.warmup_steps),
            device,
            self.calibrations.append,
        )

        def finished(step: Step) -> None:
            sink(step)
            self._calibrator.take(step)

        self.instrument = open_instrument(
            settings, topology, device, finished, fabric=fabric, together=TOGETHER, progress=progress
        )
        self._calibrator.attach(self.instrument.recorder)
        self.step_of_training = TrainStep.build(model, task, self.instrument, config, device)
        self.batches = task.batches(model.parallelized.data_rank, model.parallelized.data_size, device).for_ever
        self._batches = self.batches()
        self.model, self.steps_done = model.parallelized.module, 0

    def step(self) -> None:
        """Run and record one step."""
        number, self.steps_done = self.steps_done, self.steps_done + 1
        with self._calibrator.step(number):
            self.step_of_training.run(self._batches, StepFacts(0, number, number, lr=0.0, warmup=False))

    def unrecorded(self) -> None:
        """Run one training step that is not recorded."""
        self.step_of_training.unrecorded(self._batches)

    def finish(self) -> None:
        """Write the last steps and remove the instrumentation."""
        self._calibrator.close()
        self.instrument.recorder.finish()
        self._calibrator.finish()
        self.instrument.close()
