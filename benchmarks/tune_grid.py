"""How much of the best gain `aorta tune` finds, with how few launches: `python -m benchmarks.tune_grid FOLDER`.

Regime: launches on this machine's CPU, two gloo ranks with real computation on the emulated fabric, DDP without overlap
and with small buckets, so that there is something to gain.

    tune    `aorta tune` as a user starts it
    grid    every setting that it looked at, and the base, launched as often each, in turn
    a_a     `aorta tune` with candidates that change nothing (a variable that nobody reads), `--aa` times over

A setting's step time is the median over the launches of the grid, in which tune had no part. `gain_share` is the gain
of the recommended setting over that of the best one, and `launch_share` tune's launches over the grid's. What is
launched stays in FOLDER: a second call goes on where the first was cut off.

Prints one JSON object last; exit 1 when a target is missed. `--quick` shows that it works (a small model, one launch a
setting of the grid), and has no targets.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from aorta.analysis.metrics import JOB_STEP
from aorta.experiments import search_commands
from aorta.experiments.launch_medians import read_medians
from aorta.experiments.launch_plan import REFERENCE, Plan, with_candidates
from aorta.experiments.plan_command import launch_all
from aorta.experiments.tune_proposals import Proposal
from benchmarks.plans import arguments, say
from tests.runs import SMALL

WORDS = (
    *("training.device=cpu", "training.max_steps=30", "telemetry.warmup_steps=4", "training.log_interval=1000"),
    *("parallel=ddp", "parallel.overlap=false", "parallel.bucket_cap_mb=0.1"),
    *("fabric=emulated", "fabric.inter_bandwidth_gb_per_s=0.05", "fabric.inter_latency_us=500"),
)
NOTHING = "TUNE_GRID_NOTHING"
"""A variable that nobody reads."""
GAIN, SHARE, SILENT = 0.95, 0.20, 0.95
"""Targets: of the best setting's gain, of the grid's launches, of the A/A repetitions without a recommendation."""


def tuned(folder: Path, options: list[str], words: list[str]) -> dict[str, Any]:
    """What `aorta tune` wrote."""
    code = search_commands.tune(["--output", str(folder), *options, *words])
    if code:
        raise RuntimeError(f"aorta tune --output {folder}: exit {code}")
    found: dict[str, Any] = json.loads((folder / search_commands.TUNE_FILE).read_text())
    return found


def grid_of(folder: Path, launches: int, words: list[str], found: dict[str, Any]) -> tuple[Plan, dict[str, str]]:
    """The plan of every setting that tune looked at, and the side of each by its name."""
    options = search_commands.parse_tune(["--output", str(folder), "--launches", str(launches), *words])
    cells = [Proposal(tuple(each["changes"])) for each in found["proposals"] if each["changes"]]
    plan = with_candidates(search_commands.base_plan(options), folder.resolve(), cells)
    return plan, dict(zip((cell.name for cell in cells), (side.name for side in plan.sides[1:]), strict=True))


def step_ms(plan: Plan) -> dict[str, float]:
    """Side -> median over its launches of the median step time."""
    found: dict[str, list[float]] = {}
    for launch in plan.order():
        value, reason = read_medians(plan.run_folder(launch)).of(JOB_STEP)
        if value is None:
            raise RuntimeError(f"{launch.name}: {reason}")
        found.setdefault(launch.side.name, []).append(value)
    return {side: float(np.median(values)) for side, values in found.items()}


def against_grid(folder: Path, launches: int, words: list[str], found: dict[str, Any]) -> dict[str, Any]:
    """Launch the grid, and hold what tune recommended to its best setting."""
    plan, sides = grid_of(folder, launches, words, found)
    stopped = launch_all(plan)
    if stopped is not None:
        sys.exit(stopped)
    times = step_ms(plan)
    base = times[REFERENCE]
    best = min(sides, key=lambda name: times[sides[name]])
    chosen = found["recommendation"]
    name = None if chosen is None else " ".join(chosen["overrides"])
    gained = 0.0 if name is None else base - times[sides[name]]
    to_gain = base - times[sides[best]]
    total = launches * len(plan.sides)
    return {
        "settings": len(sides),
        "grid_launches": total,
        "tune_launches": found["launches"]["total"],
        "launch_share": found["launches"]["total"] / total,
        "base_ms": base,
        "best": {"setting": best, "step_ms": times[sides[best]]},
        "recommended": None if name is None else {"setting": name, "step_ms": times[sides[name]]},
        "gain_share": gained / to_gain if to_gain > 0 else None,
        "step_ms": {each: times[side] for each, side in sides.items()},
    }


def main() -> int:
    """Launch what is missing, and compare."""
    parser = arguments(__doc__)
    parser.add_argument("folder", type=Path, help="where runs are, or will be")
    parser.add_argument("--launches", type=int, default=5, metavar="N", help="of each side and setting; %(default)s")
    parser.add_argument("--aa", type=int, default=20, metavar="N", help="A/A repetitions; %(default)s")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # gloo's own threads need a core to run beside computation
    quick = asked.quick
    words = [*WORDS, *SMALL] if quick else [*WORDS]
    launches, per_setting = (4, 1) if quick else (asked.launches, asked.launches)
    options, values = ["--launches", str(launches)], "1" if quick else "1,2"
    found = tuned(asked.folder / "tune", options, words)
    figures = against_grid(asked.folder / "grid", per_setting, words, found)
    wrong = 0
    for number in range(asked.aa):
        nothing = [*options, "--try", "0", "--env", f"{NOTHING}={values}"]
        wrong += tuned(asked.folder / f"aa-{number:02}", nothing, words)["recommendation"] is not None
    figures["a_a"] = {"repetitions": asked.aa, "recommendations": wrong}
    if quick:
        return say("tune_grid", figures, {})
    share = figures["gain_share"]
    targets = {"gain": share is not None and share >= GAIN, "launches": figures["launch_share"] <= SHARE}
    if asked.aa:
        targets["a_a"] = wrong <= (1 - SILENT) * asked.aa
    return say("tune_grid", figures, targets)


if __name__ == "__main__":
    sys.exit(main())
