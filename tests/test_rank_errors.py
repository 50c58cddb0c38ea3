"""Rank 0 says its error; the error of another rank is in the launcher's summary, and none is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from aorta.command_line import command
from aorta.errors import ConfigError
from tests.runs import HANGS_S, SMALL, environment, finished, job


@command()
def refused(message: str) -> int:
    raise ConfigError(message)


@pytest.mark.parametrize(
    ("rank", "message", "said", "left"),
    [
        (None, "no such device", "error: no such device\n", "no such device"),
        (0, "no such device", "error: no such device\n", "no such device"),
        (1, "no such device", "", "rank 1: no such device"),
        (1, "rank 1: ValueError: broken", "", "rank 1: ValueError: broken"),
        (1, "rank 12 is missing", "", "rank 1: rank 12 is missing"),
    ],
)
def test_rank_zero_speaks_and_every_rank_leaves_its_error_where_torchrun_reads_it(
    monkeypatch, tmp_path, capsys, rank, message, said, left
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    if rank is not None:
        monkeypatch.setenv("RANK", str(rank))
    assert refused(message) == ConfigError.exit_code
    assert capsys.readouterr().err == said
    found = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert found.message["message"] == left
    assert found.timestamp > 0


def test_a_rank_without_a_launcher_that_reads_speaks_for_itself(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", "3")
    assert refused("broken") == 1
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    assert refused("broken") == 1
    (tmp_path / "error.json").write_text("{}")  # the error that came first
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert refused("broken") == 1
    assert capsys.readouterr().err == "error: rank 3: broken\n" * 3
    assert (tmp_path / "error.json").read_text() == "{}"


@pytest.mark.thorough
@pytest.mark.dist
def test_torchrun_names_a_wrong_configuration_and_no_traceback_of_ours() -> None:
    done = job(*SMALL, "training.batch_size=0", launcher="torchrun")
    assert done.returncode == 1
    assert "training.batch_size=0: must be at least 1" in done.stderr
    assert "aorta/errors.py" not in done.stderr


@pytest.mark.thorough
@pytest.mark.dist
def test_aorta_train_adds_nothing_to_the_error_and_passes_the_exit_code_on(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "aorta", "train", "--nproc_per_node", "2", *SMALL]
    own = environment()
    del own["OMP_NUM_THREADS"]  # without it torchrun has something to say as well
    done = finished([*words, f"training.output_dir={tmp_path}", "training.start_step=3"], HANGS_S, own)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.removeprefix("error: ").removeprefix("rank 1: ").startswith("training.start_step=3: no checkpoint")
