"""Noise of identical launches, recorded: `python -m benchmarks.launch_noise` writes `data/launch_noise.json`.

Regime: `--launches` (16) independent launches of one small configuration on this machine's CPU, two gloo ranks, DDP,
40 steps after 5 of warm-up, one after the other. Kept of each: a few metrics of every step that is not warm-up, of both
ranks, four digits. `benchmarks.verdict_error_rates` draws A/A plans from them. With `--from FOLDER` launches that
are there already (a launch set; repeatable) are taken instead.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from aorta.analysis.aggregate import LabelledRun, by_step
from aorta.analysis.compare.launch_set import incomplete
from aorta.analysis.load.locations import launch_folders
from aorta.analysis.load.records import load_run
from aorta.analysis.metrics import JOB_STEP
from tests.runs import command, environment

DATA = Path(__file__).parent / "data" / "launch_noise.json"
METRICS = (
    JOB_STEP,
    "overlap_ratio",
    "exposed_share",
    "compute_ms",
    "exposed_comm_ms",
    "compute_stall_ms",
    "idle_ms",
)
WORDS = ("training.device=cpu", "training.max_steps=45", "telemetry.warmup_steps=5")
RANKS = 2


def record(launches: int, folder: Path) -> list[Path]:
    """Make the launches; returns their run folders."""
    folders = [folder / f"{number:02}" for number in range(launches)]
    for place in folders:
        done = subprocess.run(
            command(RANKS, *WORDS, f"training.output_dir={place}"),
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{place}: exit {done.returncode}\n{done.stderr[-4000:]}")
        sys.stderr.write(f"{place.name} ")
        sys.stderr.flush()
    return folders


def of_launch(folder: Path) -> dict[str, list[list[float]]]:
    """Metric -> for each global step the values of its ranks."""
    dataset = LabelledRun(folder.name, load_run(folder))
    why = incomplete(dataset)
    if why is not None:
        raise RuntimeError(f"{folder}: {why}")
    found = {}
    for name in METRICS:
        values, steps, _ = by_step(dataset, name)
        found[name] = [[float(f"{value:.4g}") for value in values[steps == step]] for step in np.unique(steps)]
    return found


def main() -> int:
    """Record and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--launches", type=int, default=16)
    parser.add_argument("--from", dest="sets", type=Path, action="append", default=[], metavar="FOLDER")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [folder for each in words.sets for folder in launch_folders(each)]
        folders = folders or record(words.launches, Path(scratch))
        launches = [of_launch(folder) for folder in folders]
    made: dict[str, Any] = {
        "made_by": " ".join(["python -m benchmarks.launch_noise", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "words": list(WORDS) if not words.sets else [],
        "ranks": RANKS,
        "launches": launches,
    }
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(made, separators=(",", ":")) + "\n")
    print(json.dumps({"written": str(DATA), "launches": len(launches)}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
