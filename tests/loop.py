"""The training's loop by hand, of arguments of `train.py`; each choice of options is composed once (`composed`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from aorta.config.resolve import Resolved, resolve
from aorta.distributed.topology import Topology
from aorta.instrument.ring_lines import LentRecord
from aorta.recording import train_step
from aorta.records.ring_file import RingFile
from aorta.records.schema import Step
from tests.composed import composed


def resolved(*words: str) -> Resolved:
    """The configuration that `train.py` would have with these arguments."""
    return resolve(composed(*words))


class Loop(train_step.Loop):
    """`train_step.Loop` of arguments: `words` are as for `train.py`, `instrument.mode` among them."""

    def __init__(
        self,
        words: tuple[str, ...],
        topology: Topology,
        device: torch.device,
        sink: Callable[[Step], None],
        ring: RingFile | None = None,
        elsewhere: LentRecord | None = None,
    ) -> None:
        super().__init__(resolved(*words).config, topology, device, sink, ring, elsewhere)
