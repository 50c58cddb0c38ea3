"""Start `train.py`, or a program of the tests, in processes of its own, once for all who look, and read what it left.

Ranks are forked (`tests.ranks`) unless a test asks for torchrun: how a run is launched and how it ends is known of the
real launcher only.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from aorta.experiments.process import launch_environment
from tests.rank_records import RankRecord, read_rank
from tests.ranks import forked

if TYPE_CHECKING:
    import pytest  # ranks import this module too

Launcher = Literal["fork", "torchrun"]
T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "training.max_steps=8",
    "dataset.num_samples=512",
    "workload.num_layers=2",
    "workload.model_dim=64",
    "workload.mlp_hidden_dim=128",
    "workload.vocab_size=500",
    "telemetry.warmup_steps=2",
)
"""A run that takes a second or two once its processes are up."""
HANGS_S = 600.0
"""A limit that only a hang reaches: a busy machine may take many times as long as one that is idle."""


def environment(**extra: str) -> dict[str, str]:
    """The caller's environment without anything a launcher left there; one thread a rank, as two cores want it. No run
    compiles the interceptor: what is there is used.
    """
    return launch_environment() | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "AORTA_BUILD": "0"} | extra


def torchrun(ranks: int, *words: str, options: tuple[str, ...] = ()) -> list[str]:
    """The command line of the real launcher; `words` begin with a script, or with `-m` and a module."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [*launcher, *options, *words]


def command(ranks: int, *words: str, options: tuple[str, ...] = ()) -> list[str]:
    """The command line of `train.py`: plain Python for one rank, torchrun for several."""
    script = [str(ROOT / "train.py"), *words]
    return [sys.executable, *script] if ranks == 1 else torchrun(ranks, *script, options=options)


def train(
    folder: Path, *words: str, ranks: int = 2, timeout_s: float = HANGS_S, launcher: Launcher = "fork"
) -> subprocess.CompletedProcess[str]:
    """A small run in `folder`; later words win over the small sizes. Fails the test when the run fails."""
    return succeeded(attempt(folder, *words, ranks=ranks, timeout_s=timeout_s, launcher=launcher))


def attempt(
    folder: Path, *words: str, ranks: int = 2, timeout_s: float = HANGS_S, launcher: Launcher = "fork"
) -> subprocess.CompletedProcess[str]:
    """Like `train`, but the run may fail."""
    return job(*SMALL, f"training.output_dir={folder}", *words, ranks=ranks, timeout_s=timeout_s, launcher=launcher)


def job(
    *words: str, ranks: int = 2, timeout_s: float = HANGS_S, launcher: Launcher = "fork"
) -> subprocess.CompletedProcess[str]:
    """`train.py` with these words and no others; it may fail."""
    if launcher == "fork":
        script, own = ROOT / "train.py", environment()
        return forked(script, *words, ranks=ranks, environment=own, timeout_s=timeout_s, launched=ranks > 1)
    return finished(command(ranks, *words), timeout_s)


def program(
    target: str | Path, *words: str, ranks: int = 2, launcher: Launcher = "fork"
) -> subprocess.CompletedProcess[str]:
    """A module of the tests, or a script, on several ranks; it may fail."""
    own = environment(PYTHONPATH=str(ROOT))
    if launcher == "fork":
        return forked(target, *words, ranks=ranks, environment=own, timeout_s=HANGS_S)
    return finished(
        torchrun(ranks, *(["-m", target] if isinstance(target, str) else [str(target)]), *words), HANGS_S, own
    )


def finished(
    words: list[str], timeout_s: float = HANGS_S, own: dict[str, str] | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A command line, run to its end in `own` environment and, if given, in `folder`."""
    return subprocess.run(
        words, capture_output=True, text=True, env=own or environment(), cwd=folder, timeout=timeout_s, check=False
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """The same; fails the test, with all that was said, unless the exit code is 0."""
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def until(happened: Callable[[], T]) -> T:
    """What a function returns once that is true; fails the test where it never is."""
    deadline = time.monotonic() + HANGS_S
    while not (found := happened()):
        assert time.monotonic() < deadline, f"still not: {happened}"
        time.sleep(0.01)
    return found


def free_port() -> int:
    """A TCP port that is free, for a program that has to be told one before it listens. It is below those that Linux
    gives to whoever asks for any, so that nobody is given it in between.
    """
    for port in random.SystemRandom().sample(range(10_000, 30_000), 100):
        with suppress(OSError), socket.socket() as tried:
            tried.bind(("", port))
            return port
    raise AssertionError("100 ports are in use")


def record(folder: Path, rank: int = 0) -> RankRecord:
    """One rank's record."""
    return read_rank(folder / f"rank_{rank}_metrics.jsonl")


def losses(folder: Path, rank: int = 0) -> list[float | None]:
    """The loss of every step of one rank."""
    return [step.loss for step in record(folder, rank).steps]


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder of a name, which says all that `make` rests on.

    `make` fills it once for all of pytest's processes, which share the tests of a file; others wait for it. Where it
    fails, whoever asks next tries again. No test changes it.
    """
    own = factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "once"
    shared.mkdir(exist_ok=True)
    folder, made = shared / name, shared / f"{name}.made"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder
