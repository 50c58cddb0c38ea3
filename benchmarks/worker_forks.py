"""Hangs of a loop with evaluations and forked data workers: `python -m benchmarks.worker_forks --runs 200`.

Regime: two gloo ranks on this machine's CPU, DDP with accumulation, 12 optimizer steps; every second one is followed by
an evaluation whose losses are gathered and a checkpoint between barriers. Every loader forks two workers while gloo's
threads, those of the loaders and AORTA's run. Runs without AORTA, with the compiled interceptor
and with Python's alternate. Ranks are forked from a process that has torch loaded; `--launcher torchrun` starts them as
users do. A run that is not done after `--limit` seconds is a hang, and the stacks of its ranks and workers are shown.

Prints one JSON object: for each kind of run how many there were, how many hung or failed, and how many workers were
forked. Ends with 1 where a run hung or failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import aorta
from tests.ranks import forked
from tests.runs import environment, finished, torchrun

KINDS = ("plain", "native", "python")
RANKS, STEPS, ACCUMULATED, EVERY, WORKERS, BATCH, WIDTH = 2, 12, 2, 2, 2, 4, 64


class Samples(Dataset[torch.Tensor]):
    """Tensors that a worker makes."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(index))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + added


def train(folder: Path, kind: str, limit_s: int) -> None:
    """One rank's part."""

    def loader(batches: int) -> DataLoader[torch.Tensor]:
        return DataLoader(Samples(batches * BATCH), BATCH, num_workers=WORKERS, multiprocessing_context="fork")

    # Not by faulthandler's own timer, whose lock a forked worker would wait for.
    faulthandler.register(signal.SIGALRM)
    signal.alarm(limit_s)
    os.register_at_fork(after_in_child=lambda: signal.alarm(limit_s))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(Layer() for _ in range(4))))
    optimizer = torch.optim.AdamW(model.parameters())
    with nullcontext() if kind == "plain" else aorta.record(folder / "run", model=model) as recording:
        batches = iter(loader(STEPS * ACCUMULATED))
        for step in range(1, STEPS + 1):
            for number in range(ACCUMULATED):
                with nullcontext() if number == ACCUMULATED - 1 else model.no_sync():
                    model(next(batches)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if recording:
                recording.step()
            if step % EVERY:
                continue
            model.eval()
            gathered = torch.empty(RANKS)
            with torch.no_grad():
                for batch in loader(3):
                    dist.all_gather_single(gathered, model(batch).square().mean().reshape(1))
            model.train()  # type: ignore[no-untyped-call]
            dist.barrier()
            if dist.get_rank() == 0:
                torch.save(model.state_dict(), folder / "model.pt")
            dist.barrier()
            if recording:
                recording.restart()
    dist.destroy_process_group()


def forks() -> int:
    """Workers forked in a run."""
    return RANKS * WORKERS * (1 + STEPS // EVERY)


def run(kind: str, launcher: str, limit_s: float, number: int) -> str | None:
    """One run; returns what was said where it hung or failed."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("--rank", folder, kind, str(int(0.8 * limit_s)))
        own = environment(AORTA_SEED=str(number))
        if kind == "python":  # where nothing has been built
            own["XDG_CACHE_HOME"] = folder
        try:
            if launcher == "fork":
                done = forked("benchmarks.worker_forks", *words, ranks=RANKS, environment=own, timeout_s=limit_s)
            else:
                done = finished(torchrun(RANKS, "-m", "benchmarks.worker_forks", *words), limit_s, own)
        except subprocess.TimeoutExpired as error:
            return f"hung: {error.output!r}\n{error.stderr!r}"
        if done.returncode:
            return f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        if kind != "plain" and f'"interceptor": "{kind}' not in Path(folder, "run", "run.json").read_text():
            return f"collectives were not timed as {kind}"
    return None


def main() -> int:
    """Make the runs and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--runs", type=int, default=200, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--launcher", choices=("fork", "torchrun"), default="fork")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a run counts as a hang")
    asked = parser.parse_args()
    result: dict[str, Any] = {kind: {"runs": 0, "hung": 0, "failed": 0, "forks": 0} for kind in asked.kinds}
    for number in range(asked.runs):
        for kind in asked.kinds:
            said, counts = run(kind, asked.launcher, asked.limit, number), result[kind]
            counts["runs"] += 1
            counts["forks"] += forks()
            if said is not None:
                counts["hung" if said.startswith("hung") else "failed"] += 1
                sys.stderr.write(f"{kind} {number}: {said}\n")
        sys.stderr.write(f"\r{number + 1} of {asked.runs}")
        sys.stderr.flush()
    sys.stdout.write(json.dumps({"launcher": asked.launcher} | result) + "\n")
    return int(any(counts["hung"] or counts["failed"] for counts in result.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        sys.exit(main())
