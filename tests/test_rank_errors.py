"""An error that every rank meets is on the terminal once, and one of a single rank names that rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from subprocess import PIPE

import pytest

from aorta import command_line
from tests.runs import HANGS_S, ROOT, SMALL, environment, finished, job

pytestmark = pytest.mark.thorough

MEET = """
import os, sys, time
from aorta import command_line
from aorta.command_line import command
from aorta.errors import ConfigError, PeerFailed

command_line.GRACE_S, command_line._SPEAKER_S = 120.0, 240.0  # a rank that is held up is waited for

@command()
def main(text: str, of_a_peer: str) -> int:
    print("up", flush=True)
    sys.stdin.readline()
    raise (PeerFailed if of_a_peer == "yes" else ConfigError)(text)

sys.exit(main(*sys.argv[1:]))
"""


def started(*texts: str, of_a_peer: tuple[int, ...], world: int, here: int) -> list[subprocess.Popen[str]]:
    """Ranks of one launcher, this process, which raise their errors as soon as all of them are up."""
    ranks = []
    for rank, text in enumerate(texts):
        own = environment(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(here), MASTER_PORT="1")
        words = [sys.executable, "-c", MEET, text, "yes" if rank in of_a_peer else "no"]
        own |= {"PYTHONPATH": str(ROOT)}
        ranks.append(subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env=own))
    for process in ranks:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return ranks


def said(ranks: Iterable[subprocess.Popen[str]]) -> list[str]:
    """What ranks write to stderr until they have ended."""
    return sorted(filter(None, (rank.communicate(timeout=HANGS_S)[1].strip() for rank in ranks)))


def said_by(*texts: str, of_a_peer: tuple[int, ...] = (), world: int | None = None) -> list[str]:
    """What ranks of one launcher write to stderr when each meets its error."""
    return said(started(*texts, of_a_peer=of_a_peer, world=world or len(texts), here=len(texts)))


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


def test_ranks_that_are_asked_to_end_while_they_wait_say_an_error_once() -> None:
    """A fourth rank never comes, so that they wait; torchrun sends SIGTERM as soon as one rank has ended."""
    ranks = started("broken", "broken", "broken", of_a_peer=(), world=4, here=4)
    while len(list(chain.from_iterable(folder.glob("*-*") for folder in left_over()))) < 4:  # ranks and a speaker
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.01)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    assert said(ranks) == ["error (ranks 0-2): broken"]
    assert left_over() == []


def test_a_rank_speaks_where_the_one_that_was_to_speak_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "GRACE_S", 0.1)
    monkeypatch.setattr(command_line, "_SPEAKER_S", 0.2)
    seen = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(os.getpid())}
    speakers: list[Path] = []
    heard: list[tuple[str, str]] = []

    def say(ranks: str, text: str) -> None:
        speakers.extend(Path(tempfile.gettempdir()).glob(f"aorta-errors-*-{os.getpid()}-*/*-speaker"))
        heard.append((ranks, text))

    command_line.say_once("broken", say, environment=seen)
    (speaker,) = speakers
    speaker.parent.mkdir(mode=0o700)
    speaker.touch()
    command_line.say_once("broken", say, environment=seen | {"RANK": "1"})
    assert heard == [("rank 0", "broken"), ("rank 1", "broken")]
    assert not speaker.parent.exists()


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
    own = environment()
    del own["OMP_NUM_THREADS"]  # without it torchrun has something to say as well
    done = finished([*words, f"training.output_dir={tmp_path}", "training.start_step=3"], HANGS_S, own)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error (all 2 ranks): training.start_step=3: no checkpoint")
