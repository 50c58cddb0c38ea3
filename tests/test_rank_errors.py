"""An error that every rank meets is on the terminal once, and one of a single rank names that rank."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.runs import HANGS_S, ROOT, SMALL, environment, finished, job

MEET = """
import os, sys, time
from aorta.command_line import command
from aorta.errors import ConfigError, PeerFailed

@command()
def main(text: str, of_a_peer: str) -> int:
    raise (PeerFailed if of_a_peer == "yes" else ConfigError)(text)

sys.exit(main(*sys.argv[1:]))
"""


def said_by(*texts: str, of_a_peer: tuple[int, ...] = (), world: int | None = None) -> list[str]:
    """What ranks of one launcher, this process, write to stderr when each meets its error."""
    ranks = []
    for rank, text in enumerate(texts):
        size = str(len(texts))
        own = environment(RANK=str(rank), WORLD_SIZE=str(world or size), LOCAL_WORLD_SIZE=size, MASTER_PORT="1")
        words = [sys.executable, "-c", MEET, text, "yes" if rank in of_a_peer else "no"]
        ranks.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=own | {"PYTHONPATH": str(ROOT)}))
    return sorted(filter(None, (rank.communicate(timeout=HANGS_S)[1].strip() for rank in ranks)))


def left_over() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"aorta-errors-{os.getuid()}-{os.getpid()}-*"))


def test_an_error_of_all_ranks_is_said_once() -> None:
    assert said_by("no such device", "no such device", "no such device") == ["error (all 3 ranks): no such device"]
    assert left_over() == []


def test_what_a_peer_s_failure_does_to_the_others_is_said_once_and_the_failed_rank_speaks_for_itself() -> None:
    texts = ("rank 0: a collective failed", "rank 1: ValueError: broken", "rank 2: a collective failed: [::1]:7")
    first, second = said_by(*texts, of_a_peer=(0, 2), world=8)
    assert first == "error (rank 1): ValueError: broken"
    assert second.startswith("error (ranks 0, 2): a collective failed")
    assert left_over() == []


def test_one_rank_needs_no_number() -> None:
    assert said_by("no such device") == ["error: no such device"]


@pytest.mark.dist
def test_torchrun_shows_a_wrong_configuration_once_and_no_traceback_of_ours() -> None:
    done = job(*SMALL, "training.batch_size=0", launcher="torchrun")
    assert done.returncode == 1
    assert done.stderr.count("training.batch_size=0: must be at least 1") == 1
    assert "aorta/errors.py" not in done.stderr


@pytest.mark.dist
def test_aorta_train_adds_nothing_to_the_error_and_passes_the_exit_code_on(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "aorta", "train", "--nproc_per_node", "2", *SMALL]
    done = finished([*words, f"training.output_dir={tmp_path}", "training.start_step=3"], HANGS_S)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error (all 2 ranks): training.start_step=3: no checkpoint")
