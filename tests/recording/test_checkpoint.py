"""Where training begins, and what a checkpoint that cannot be written does."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from aorta.errors import ConfigError, RunIncomplete
from aorta.recording.checkpoint import Checkpoints
from aorta.recording.train import first_step


@contextmanager
def checkpointed(folder: Path) -> Iterator[tuple[Checkpoints, nn.Module]]:
    """A small model in a process group of one rank: its checkpoints in `folder`, and itself."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        yield (
            Checkpoints(folder, "mine", module, optimizer, schedule, torch.amp.GradScaler("cpu", enabled=False)),
            module,
        )
    finally:
        dist.destroy_process_group()


def stored(folder: Path, *steps: int, run_id: str) -> Path:
    for step in steps:
        (folder / f"step_{step}").mkdir(parents=True)
        (folder / f"step_{step}" / "run_id").write_text(run_id)
        os.utime(folder / f"step_{step}", (1000.0, 1000.0))  # the clock says nothing of whose it is
    return folder


def test_a_first_start_begins_where_it_was_told_and_a_restart_at_the_newest_of_its_own_run(tmp_path):
    folder = stored(tmp_path, 4, 8, run_id="earlier")
    (folder / "step_12.part").mkdir()
    assert first_step(folder, None, "mine") == 0
    assert first_step(folder, 4, "mine") == 4
    with pytest.raises(ConfigError, match=r"training\.start_step=12: no checkpoint .* there are: 4, 8"):
        first_step(folder, 12, "mine")
    stored(folder, 5, 6, run_id="mine")
    assert first_step(folder, 4, "mine") == 6


def test_a_step_is_saved_again_whatever_an_earlier_attempt_left(tmp_path):
    with checkpointed(tmp_path) as (kept, _):
        saved = kept.save(3)
        for name in ("step_3.old", "step_3.part"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "left").touch()
        assert kept.save(3) == saved
        assert first_step(tmp_path, None, "mine") == 3
        saved.rename(tmp_path / "step_3.old")  # killed while it was replaced
        assert first_step(tmp_path, 3, "another") == 3
        kept.load(3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_a_checkpoint_that_fails_is_an_error_of_the_run(tmp_path, monkeypatch):
    full = CheckpointException("write", {0: (OSError(28, "No space left on device"), None)})
    monkeypatch.setattr(dcp, "save", Mock(side_effect=full))
    with (
        checkpointed(tmp_path) as (kept, _),
        pytest.raises(RunIncomplete, match=r"step_3: rank 0: .*No space left on device"),
    ):
        kept.save(3)


class Runs:
    """Unpickled, it would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_checkpoint_with_code_in_a_value_is_refused_and_nothing_is_run(tmp_path, monkeypatch):
    with checkpointed(tmp_path) as (kept, _):
        kept.save(3)
        kept.load(3)
        with monkeypatch.context() as patch:
            good = torch.optim.lr_scheduler.LambdaLR.state_dict
            changed = {"lr_lambdas": [Runs(tmp_path / "ran")]}
            patch.setattr(torch.optim.lr_scheduler.LambdaLR, "state_dict", lambda self: good(self) | changed)
            kept.save(4)
        with pytest.raises(RunIncomplete, match=r"checkpoint .*step_4"):
            kept.load(4)
    assert not (tmp_path / "ran").exists()


def unpickles(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"N.")  # None, for which torch reads the file of the rank
    (folder / "__0.metadata").write_bytes(pickle.dumps(Runs(folder.parent / "ran")))


def names_a_pipe_elsewhere(folder: Path) -> None:
    os.mkfifo(folder.parent / "pipe")
    found = pickle.loads((folder / ".metadata").read_bytes())
    for info in found.storage_data.values():
        info.relative_path = "../pipe"
    (folder / ".metadata").write_bytes(pickle.dumps(found))


class OfEnumerations(pickle.Pickler):
    """Writes their members as Python before 3.11.4 does."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_that_an_older_python_wrote_is_read(tmp_path):
    with checkpointed(tmp_path) as (kept, _):
        path = kept.save(3) / ".metadata"
        written = io.BytesIO()
        OfEnumerations(written).dump(pickle.loads(path.read_bytes()))
        assert b"getattr" in written.getvalue()
        path.write_bytes(written.getvalue())
        kept.load(3)


def asks_for_an_attribute(folder: Path) -> None:
    (folder / ".metadata").write_bytes(
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nV__init__\ntR."
    )


@pytest.mark.parametrize("change", [unpickles, names_a_pipe_elsewhere, asks_for_an_attribute])
def test_metadata_that_is_not_a_checkpoint_s_is_refused_and_nothing_is_run(tmp_path, change):
    with checkpointed(tmp_path) as (kept, _):
        change(kept.save(3))
        with pytest.raises(RunIncomplete, match=r"checkpoint .*step_3: .*its \.metadata "):
            kept.load(3)
    assert not (tmp_path / "ran").exists()
