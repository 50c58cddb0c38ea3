"""Start `train.py` as a user would, in processes of its own, and read back what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from aorta.telemetry.reader import RankRecord, read_rank

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


def environment(**extra: str) -> dict[str, str]:
    """The caller's environment without anything a launcher left there; one thread a rank, as two cores want it."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RANK", "WORLD", "LOCAL_", "MASTER"))
    }
    return kept | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"} | extra


def command(ranks: int, *words: str, torchrun: tuple[str, ...] = ()) -> list[str]:
    """The command line: plain Python for one rank, torchrun for several."""
    script = [str(ROOT / "train.py"), *words]
    if ranks == 1:
        return [sys.executable, *script]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [*launcher, *torchrun, *script]


def train(folder: Path, *words: str, ranks: int = 2, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """A small run in `folder`; later words win over the small sizes. Fails the test when the run fails."""
    done = attempt(folder, *words, ranks=ranks, timeout_s=timeout_s)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def attempt(folder: Path, *words: str, ranks: int = 2, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Like `train`, but the run may fail."""
    return subprocess.run(
        command(ranks, *SMALL, f"training.output_dir={folder}", *words),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=timeout_s,
        check=False,
    )


def record(folder: Path, rank: int = 0) -> RankRecord:
    """One rank's record."""
    return read_rank(folder / f"rank_{rank}_metrics.jsonl")


def losses(folder: Path, rank: int = 0) -> list[float | None]:
    """The loss of every step of one rank."""
    return [step.loss for step in record(folder, rank).steps]
