"""Checkpoints: everything the next step depends on, written whole or not at all.

`checkpoints/step_<n>/` is taken before global step n, in torch.distributed.checkpoint's format. Must not leave a folder
of that name that cannot be resumed from, or load torch's checkpoint package in a run without checkpoints: it takes a
second.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from aorta.distributed.topology import random_states, set_random_states
from aorta.errors import ConfigError, RunIncomplete
from aorta.records.files import open_regular, read_small
from aorta.workload.tasks import Stages

_NAME = re.compile(r"^step_(\d+)$")
_RUN_FILE = "run_id"


@dataclass
class Checkpoints:
    """The checkpoints of one run folder, of which those of this run have its id in them."""

    folder: Path
    run_id: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler

    def save(self, step: int) -> Path:
        """Save the state before global step `step`; collective, returns when it is complete on all ranks."""
        import torch.distributed.checkpoint as dcp

        target = self.folder / f"step_{step}"
        part, old = (target.with_name(f"{target.name}.{suffix}") for suffix in ("part", "old"))
        with _failing_clearly(target):
            dcp.save(self._state(), checkpoint_id=str(part))
            dist.barrier()
            if dist.get_rank() == 0:
                (part / _RUN_FILE).write_text(self.run_id)
                if target.exists():  # never an incomplete folder under a name that can be resumed from
                    shutil.rmtree(old, ignore_errors=True)
                    target.rename(old)
                part.rename(target)
                shutil.rmtree(old, ignore_errors=True)
            dist.barrier()
        return target

    def load(self, step: int) -> None:
        """Restore the state before global step `step`; collective."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        from aorta.runner.checkpoint_reader import PlainPlanner, PlainReader

        state = self._state()
        source = self.folder / f"step_{step}"
        with _failing_clearly(source):
            for path in source.iterdir():
                open_regular(path).close()  # torch would wait for a pipe without end
            dcp.load(state, storage_reader=PlainReader(source), planner=PlainPlanner())
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        set_random_states(state[f"random_{dist.get_rank()}"], self._device)

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        # Stages of a pipeline have optimizers over different parameters, whose groups would all be group 0 of the
        # checkpoint: only by the names of their parameters are they told apart.
        options = StateDictOptions(flatten_optimizer_state_dict=isinstance(self.module, Stages))
        model, optimizer = get_state_dict(self.module, self.optimizer, options=options)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            f"random_{dist.get_rank()}": random_states(self._device),  # dropout differs between ranks
        }


@contextmanager
def _failing_clearly(path: Path) -> Iterator[None]:
    """Convert the exception of torch's checkpoints, which is not an `Exception` and would bypass the normal error
    handling.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failed = "; ".join(f"rank {rank}: {problem}" for rank, (problem, _) in sorted(error.failures.items()))
        raise RunIncomplete(f"checkpoint {path}: {failed}") from error
    except OSError as error:
        raise RunIncomplete(f"checkpoint {path}: {error.strerror or error}") from error


def available(folder: Path) -> list[int]:
    """Return the steps for which `folder` has a complete checkpoint, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match.group(1)) for path in folder.iterdir() if (match := _NAME.match(path.name)))


def first_step(folder: Path, wanted: int | None, run_id: str) -> int:
    """Return where training begins: after a restart at the newest checkpoint of this run, or as configured, or at 0.
    Nobody else may use the folder: a checkpoint that a killed run was about to replace gets its name back.

    Args:
        wanted: `training.start_step`.
        run_id: of this run; a restart has that of the attempts before it.

    Raises:
        ConfigError: there is no checkpoint of the configured start step. OSError: the folder cannot be read.
    """
    for old in folder.glob("step_*.old"):
        if not old.with_suffix("").exists():
            old.rename(old.with_suffix(""))
    steps = available(folder)
    # An earlier run's checkpoints may be there too, with larger numbers.
    ours = [step for step in steps if _run_of(folder / f"step_{step}") == run_id]
    if ours:
        return max(ours)
    if wanted is None or wanted == 0:
        return 0
    if wanted not in steps:
        found = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"training.start_step={wanted}: no checkpoint {folder}/step_{wanted}; there are: {found}. "
            "training.checkpoint_interval=K takes one every K steps"
        )
    return wanted


def _run_of(checkpoint: Path) -> str | None:
    """Return the id of the run that took a checkpoint; None where it does not say."""
    try:
        return read_small(checkpoint / _RUN_FILE).decode(errors="replace")
    except OSError:
        return None
