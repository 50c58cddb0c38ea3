"""Healthy trainings, each disturbed in one way, whose watchdog must not speak until they really hang.

    python -m benchmarks.autopsy_false_alarms --steps 1000

Two ranks (gloo) of a loop of its own in `aorta.record`, or of `train.py` where a checkpoint is written; the timeout is
learned. Behind the last step rank 1 hangs: an alarm then shows that the watchdog was watching. Standard output has one
JSON object a disturbance: the steps that were done, whether there was an alarm, and how long after the last progress
the hang was noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aorta
from aorta.autopsy.processes import EVIDENCE_FILE, saved_evidence
from aorta.recording.checkpoint import Checkpoints
from aorta.recording.train import run_training
from aorta.recording.train_step import resolved
from aorta.records.run_files import AUTOPSY_DIR
from aorta.workload.faults import Faults
from benchmarks.autopsy_scores import end, forked, within

RANKS: Final = 2
WARMUP_STEPS: Final = 5
PAUSE_S: Final = 20.0
COMPILE_S: Final = 60.0
STOPPED_S: Final = 6.0
"""Shorter than any timeout that is learned."""
PACE_S: Final = 1.05
"""A step of the training that has a straggler: ten times that is more than the least timeout."""
SLOWER: Final = 5
STRAGGLES_EVERY: Final = 20
DISTURBANCES: Final = ("checkpoint", "evaluation", "straggler", "compile", "pause", "sigstop")
_HEALTHY: Final = "healthy.json"
_NOTICED_WITHIN_S: Final = 180.0


def run(disturbance: str, steps: int) -> dict[str, Any]:
    """One training; returns what its watchdog made of it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        train = _train if disturbance == "checkpoint" else _own_loop
        children = forked(lambda rank: train(folder / "run", rank, disturbance, steps), RANKS, folder)
        try:
            within(steps * PACE_S * 3, lambda: (folder / _HEALTHY).exists() or _has_ended(children))
            healthy = json.loads((folder / _HEALTHY).read_text()) if (folder / _HEALTHY).exists() else {"steps": 0}
            saved = folder / "run" / AUTOPSY_DIR / EVIDENCE_FILE.format(rank=1)
            noticed = within(_NOTICED_WITHIN_S, lambda: saved.exists() or _has_ended(children))
            evidence = saved_evidence(folder / "run", 1) if noticed else None
        finally:
            for child in children:
                end(child)
        after_s = None
        if evidence is not None and evidence.taken_ns is not None and evidence.progress_ns is not None:
            after_s = round((evidence.taken_ns - evidence.progress_ns) / 1e9, 1)
        said = "" if healthy["steps"] else (folder / "rank_1.said").read_text()[-400:]
        return {"disturbance": disturbance, **healthy, "hang_noticed_after_s": after_s, "said": said}


def _has_ended(children: Sequence[int]) -> bool:
    return any(os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) for child in children)


def _own_loop(folder: Path, rank: int, disturbance: str, steps: int) -> int:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(2, 8)
    with aorta.record(folder, model=model, warmup_steps=WARMUP_STEPS, devices="off", calibration="off") as recording:
        for step in range(steps):
            if disturbance == "compile" and step == 0:
                time.sleep(COMPILE_S)
            if disturbance == "straggler":
                late = rank == 1 and step % STRAGGLES_EVERY == STRAGGLES_EVERY - 1
                time.sleep(PACE_S * (SLOWER if late else 1))
            model(batch).sum().backward()
            optimizer.step()
            recording.step()
            if step != steps // 2:
                continue
            if disturbance == "evaluation":
                _evaluate(model, batch)
                recording.restart()
            elif disturbance == "pause" and rank == 1:
                with recording.pause():
                    time.sleep(PAUSE_S)
            elif disturbance == "sigstop" and rank == 1:
                subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
        _hang(folder, rank, steps)
        model(batch).sum().backward()
    return 0


def _evaluate(model: nn.Module, batch: torch.Tensor) -> None:
    deadline = time.monotonic() + PAUSE_S
    with torch.no_grad():
        while time.monotonic() < deadline:
            model(batch)
            time.sleep(0.5)


def _train(folder: Path, rank: int, _disturbance: str, steps: int) -> int:
    """`train.py` with a checkpoint that takes long, and a hang in place of a fault."""
    save, begin = Checkpoints.save, Faults.begin

    def slow_save(checkpoints: Checkpoints, step: int) -> Path:
        time.sleep(PAUSE_S)
        return save(checkpoints, step)

    def hang_at_the_end(faults: Faults, step: int) -> None:
        begin(faults, step)
        if step == steps:
            _hang(folder, rank, steps)

    words = ("training.progress=overlap", "clock.sync=false", "telemetry.devices=off", f"training.output_dir={folder}")
    limits = (f"training.max_steps={steps + 1}", f"training.checkpoint_interval={steps // 2}")
    with patch.object(Checkpoints, "save", slow_save), patch.object(Faults, "begin", hang_at_the_end):
        return run_training(resolved(*words, *limits, f"telemetry.warmup_steps={WARMUP_STEPS}"))


def _hang(folder: Path, rank: int, steps: int) -> None:
    """Note whether there was an alarm so far; then rank 1 never returns."""
    if rank == 1:
        alarm = (folder / AUTOPSY_DIR).exists()
        part = folder.parent / f"{_HEALTHY}.part"
        part.write_text(json.dumps({"steps": steps, "alarm": alarm}))
        part.rename(folder.parent / _HEALTHY)
        while True:
            time.sleep(3600)


def main() -> int:
    """Run them all at once; returns 0 if no healthy training raised an alarm, and every hang did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="of each training (default: %(default)s)")
    parser.add_argument("--disturbances", default=",".join(DISTURBANCES), help="with commas (default: all)")
    options = parser.parse_args()
    names = options.disturbances.split(",")
    with ProcessPoolExecutor(len(names), mp_context=get_context("fork")) as pool:
        rows = list(pool.map(run, names, [options.steps] * len(names)))
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    right = all(row["steps"] and not row["alarm"] and row["hang_noticed_after_s"] is not None for row in rows)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
