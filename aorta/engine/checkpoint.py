"""Checkpoints: everything the next step depends on, whole or not there.

Enters: model, optimizer, schedule and scaler, spread or not. Leaves: `checkpoints/step_<n>/`, taken before global step
n, in torch.distributed.checkpoint's format. Must not: leave a folder of that name that cannot be resumed from.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from aorta.errors import ConfigError

_NAME = re.compile(r"^step_(\d+)$")


@dataclass
class Checkpoints:
    """The checkpoints of one run folder."""

    folder: Path
    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler

    def save(self, step: int) -> Path:
        """Save the state before global step `step`; collective, returns when it is complete on all ranks."""
        target = self.folder / f"step_{step}"
        part = target.with_name(target.name + ".part")
        dcp.save(self._state(), checkpoint_id=str(part))
        dist.barrier()
        if dist.get_rank() == 0:
            if target.exists():
                shutil.rmtree(target)
            part.rename(target)
        dist.barrier()
        return target

    def load(self, step: int) -> None:
        """Put everything back as it was before global step `step`; collective."""
        state = self._state()
        dcp.load(state, checkpoint_id=str(self.folder / f"step_{step}"))
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        random = state[f"random_{dist.get_rank()}"]
        torch.set_rng_state(random["cpu"])
        if "device" in random:
            torch.cuda.set_rng_state(random["device"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            random["device"] = torch.cuda.get_rng_state()
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            f"random_{dist.get_rank()}": random,  # dropout differs between ranks
        }


def available(folder: Path) -> list[int]:
    """Steps that a complete checkpoint in `folder` stands before, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match.group(1)) for path in folder.iterdir() if (match := _NAME.match(path.name)))


def first_step(folder: Path, wanted: int | None, restart_count: int) -> int:
    """Where training begins: as asked, or after a restart at the newest checkpoint, or at 0.

    Raises:
        ConfigError: a start step was asked for that has no checkpoint.
    """
    steps = available(folder)
    if restart_count > 0 and steps:
        return max(steps)
    if wanted is None or wanted == 0:
        return 0
    if wanted not in steps:
        found = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"training.start_step={wanted}: no checkpoint {folder}/step_{wanted}; there are: {found}. "
            "training.checkpoint_interval=K takes one every K steps"
        )
    return wanted
