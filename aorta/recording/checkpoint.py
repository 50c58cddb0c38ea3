"""Checkpoints: everything the next step depends on, written whole or not at all, and read as data.

`checkpoints/step_<n>/` is taken before global step n, in torch.distributed.checkpoint's format, whose own loader runs
whatever code a pickle names. Must not leave a folder of that name that cannot be resumed from, or be imported in a run
without checkpoints: torch's checkpoint package takes a second.
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from aorta.distributed.output_folder import RUN_ID_FILE
from aorta.distributed.topology import random_states, set_random_states
from aorta.errors import RunIncomplete
from aorta.records.files import open_regular
from aorta.workload.tasks import Stages


@dataclass
class Checkpoints:
    """The checkpoints of one run folder; those of this run hold its id."""

    folder: Path
    run_id: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler

    def save(self, step: int) -> Path:
        """Save the state before global step `step`; collective, returns when it is complete on all ranks."""
        target = self.folder / f"step_{step}"
        part, old = (target.with_name(f"{target.name}.{suffix}") for suffix in ("part", "old"))
        with _failing_clearly(target):
            dcp.save(self._state(), checkpoint_id=str(part))
            dist.barrier()
            if dist.get_rank() == 0:
                (part / RUN_ID_FILE).write_text(self.run_id)
                if target.exists():  # never an incomplete folder under a name that can be resumed from
                    shutil.rmtree(old, ignore_errors=True)
                    target.rename(old)
                part.rename(target)
                shutil.rmtree(old, ignore_errors=True)
            dist.barrier()
        return target

    def load(self, step: int) -> None:
        """Restore the state before global step `step`; collective."""
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
    """Convert the exception of torch's checkpoints, which is no `Exception` and would bypass error handling."""
    try:
        yield
    except CheckpointException as error:
        failed = "; ".join(f"rank {rank}: {problem}" for rank, (problem, _) in sorted(error.failures.items()))
        raise RunIncomplete(f"checkpoint {path}: {failed}") from error
    except OSError as error:
        raise RunIncomplete(f"checkpoint {path}: {error.strerror or error}") from error


class PlainPlanner(DefaultLoadPlanner):
    """Takes plain data and tensors only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)  # torch reads it again, without a check
        checked.seek(0)
        super().load_bytes(read_item, checked)


class PlainReader(FileSystemReader):
    """Takes `.metadata` only if it names nothing but the classes that torch writes there, and no file elsewhere."""

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        if kwargs.get("rank") is not None:  # torch looks for this where it could not read `.metadata`
            raise pickle.UnpicklingError("metadata of single ranks, which AORTA does not write, is not loaded")
        with Path(self.path, ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError("its .metadata is not that of a checkpoint")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != str(info.relative_path):
                raise pickle.UnpicklingError(f"its .metadata names a file elsewhere: {info.relative_path}")
        return metadata


class _MetadataUnpickler(pickle._Unpickler):
    """Refuses every name but those that torch's own metadata is made of, none of which does anything when loaded."""

    dispatch = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # it takes as much memory as the file says

    def find_class(self, module: str, name: str) -> Any:
        if module == _METADATA_MODULE and "." not in name:
            class_ = super().find_class(module, name)
            if isinstance(class_, type) and class_.__module__ == module:
                return class_
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"its .metadata names {module}.{name}, which no checkpoint does; it is not loaded")


def _member(kind: object, name: object) -> Enum:
    """Return a member of an enumeration: Python before 3.11.4 pickles it as an attribute of its class."""
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("its .metadata asks for an attribute, which no checkpoint does; it is not loaded")


_METADATA_MODULE: Final = "torch.distributed.checkpoint.metadata"
_METADATA_NAMES: Final = (
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")),
)
"""Beside those, what a `.metadata` of torch 2.13 names."""
