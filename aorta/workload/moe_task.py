"""The decoder with experts as a trainable workload: data, loss and optimizer are those of `workload=gpt`.

Must not know how the model is distributed over ranks.
"""

from __future__ import annotations

from aorta.config.schema import Config
from aorta.config.schema import Moe as Shape
from aorta.workload.gpt_task import GptTask
from aorta.workload.moe import Moe


class MoeTask(GptTask):
    """`workload=moe`. `config` is that of the run, `shape` its workload section."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__(config, shape)
        self._experts, self._micro_batches = shape, config.training.gradient_accumulation

    def model(self) -> Moe:
        """A new model on the CPU, initialised from torch's global random state."""
        return Moe(self._dims, self._experts, self._micro_batches)
