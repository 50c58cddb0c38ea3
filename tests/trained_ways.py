"""Which workload trains with which strategy: on how many ranks the tests train it, and why the others are refused.

`DECODERS` (all but pipelines: `tests/recording/test_pipeline.py`) are trained by `tests/recording/test_decoders.py` on
gloo, and those whose strategy takes no other workload by `tests/device_path/test_training.py` on the simulated device;
the docs' table is made from them (`tests.workload_table`). Must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RANKS: Final = {
    **dict.fromkeys(("none", "ddp", "fsdp1", "fsdp", "tp", "ep", "pp", "cp"), 2),
    **dict.fromkeys(("hsdp", "fsdp_tp", "fsdp_ep", "fsdp_pp", "fsdp_cp"), 4),
}
"""Strategy -> the ranks of its tests: two for one dimension, four for two."""
PIPELINES: Final = ("pp", "fsdp_pp")
OF_EXPERTS: Final = ("ep", "fsdp_ep")
TINY: Final = (
    "training.batch_size=4",
    "dataset.num_samples=256",
    "dataset.sequence_length=8",
    "workload.num_layers=2",
    "workload.model_dim=64",
    "workload.mlp_hidden_dim=128",
    "workload.vocab_size=200",
)


@dataclass(frozen=True)
class Way:
    """A decoder on a strategy; `more` words for `train.py`."""

    workload: str
    strategy: str
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join((self.workload, self.strategy, *self.more))

    @property
    def words(self) -> tuple[str, ...]:
        return (f"workload={self.workload}", f"parallel={self.strategy}", *self.more)

    @property
    def ranks(self) -> int:
        return RANKS[self.strategy]


DECODERS: Final = [
    Way(workload, strategy)
    for workload in ("gpt", "moe")
    for strategy in RANKS
    if strategy not in PIPELINES and not (workload == "gpt" and strategy in OF_EXPERTS)
]
