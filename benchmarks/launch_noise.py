"""Noise of identical launches: `python -m benchmarks.launch_noise FOLDER ...` writes `data/launch_noise.json`.

FOLDERs are launch sets of one configuration, as `aorta ab --aa` makes them. Kept of each launch: a few metrics of every
step that is not warm-up, of all ranks, four digits. `benchmarks.verdict_error_rates` draws A/A plans from them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from aorta.analysis.aggregate import LabelledRun, job_step_times
from aorta.analysis.compare.launch_set import incomplete
from aorta.documents.metrics import JOB_STEP
from aorta.read.locations import launch_folders
from aorta.read.record import load_run

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


def of_launch(folder: Path) -> dict[str, list[list[float]]]:
    """Metric -> for each global step the values of its ranks."""
    dataset = LabelledRun(folder.name, load_run(folder))
    why = incomplete(dataset)
    if why is not None:
        raise RuntimeError(f"{folder}: {why}")
    found = {}
    for name in METRICS:
        if name == JOB_STEP:
            values, steps, _ = job_step_times(dataset)
        else:
            values, steps = dataset.described(name), dataset.described(name, "global_step")
        found[name] = [[float(f"{value:.4g}") for value in values[steps == step]] for step in np.unique(steps)]
    return found


def main() -> int:
    """Record and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("sets", type=Path, nargs="+", metavar="FOLDER")
    words = parser.parse_args()
    launches = [of_launch(folder) for each in words.sets for folder in launch_folders(each)]
    made: dict[str, Any] = {
        "made_by": " ".join(["python -m benchmarks.launch_noise", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "launches": launches,
    }
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(made, separators=(",", ":")) + "\n")
    print(json.dumps({"written": str(DATA), "launches": len(launches)}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
