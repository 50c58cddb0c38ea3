"""Injects every fault of the pool into short trainings, and scores what the autopsy says of each.

    python -m benchmarks.autopsy_scores --kinds sigkill,stuck_data --runs 2 --ranks 2,4

Ranks are forked from this process, which has imported torch once. The last line is a JSON object: how often exactly the
right ranks were accused, healthy ones were, the phase and the kind of verdict were right, and the autopsy abstained;
and the seconds from the end of the timeout to the evidence. Kinds that were held out while the rules were written are
summed up apart.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # noqa: F401  once, before the ranks are forked

from aorta.autopsy.evidence import RankEvidence
from aorta.autopsy.judge import judge
from aorta.autopsy.progress_evidence import EVIDENCE_FILE, progress_evidence
from aorta.config.groups.faults import FAULTS
from aorta.records.run_files import AUTOPSY_DIR
from aorta.runner.manual_loop import resolved
from aorta.runner.train import run_training

STEP = 8
TIMEOUT_S = 4.0
WITHIN_S = 60.0
SLOW_FOR_S = 6.0
"""How long slow ranks go on before they are looked at."""
WORKLOAD = ("training.max_steps=100000", "training.progress=overlap", "clock.sync=false", "telemetry.devices=off")


def run(kind: str, ranks: int, layout: str) -> dict[str, Any]:
    """One training with one fault, on the last rank; returns its scores."""
    fact, culprit = FAULTS[kind], ranks - 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = (
            *WORKLOAD,
            f"parallel={layout}",
            f"training.output_dir={folder}",
            f"watchdog.timeout_s={TIMEOUT_S}",
            f"fault.kind={kind}",
            f"fault.rank={culprit}",
            f"fault.step={STEP}",
        )
        children = _fork(words, ranks, folder)
        try:
            evidence = _slow(folder) if fact.verdict == "slow" else _reported(folder, ranks)
        finally:
            for child in children:
                _end(child)
    if not evidence:
        return {
            "missed": True,
            "exact": False,
            "healthy_accused": 0,
            "phase": None,
            "verdict": None,
            "abstained": False,
        }
    verdict = judge(evidence, stuck_after_s=TIMEOUT_S if fact.verdict == "slow" else None)
    accused = {one.rank for one in verdict.culprits}
    own = next((one for one in verdict.culprits if one.rank == culprit), None)
    seen = next(each for each in evidence if each.rank == culprit)
    late_s = None
    if fact.verdict not in ("dead", "slow") and seen.taken_ns is not None and seen.progress_ns is not None:
        late_s = round((seen.taken_ns - seen.progress_ns) / 1e9 - TIMEOUT_S, 2)
    return {
        "missed": False,
        "exact": accused == {culprit},
        "healthy_accused": len(accused - {culprit}),
        "phase": None if fact.phase is None or own is None else (own.phase or seen.phase) == fact.phase,
        "verdict": verdict.kind == fact.verdict,
        "said": verdict.kind,
        "abstained": verdict.kind == "cannot_decide",
        "late_s": late_s,
    }


def _fork(words: tuple[str, ...], ranks: int, folder: Path) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.environ |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
                said = os.open(folder / f"rank_{rank}.said", os.O_WRONLY | os.O_CREAT)
                os.dup2(said, 1)
                os.dup2(said, 2)
                code = run_training(resolved(*words))
            finally:
                os._exit(code)
        children.append(child)
    return children


def _reported(folder: Path, ranks: int) -> list[RankEvidence]:
    """What the watchdog saved, once it has saved all of it."""
    saved = [folder / AUTOPSY_DIR / EVIDENCE_FILE.format(rank=rank) for rank in range(ranks)]
    if not _within(WITHIN_S, lambda: all(path.exists() for path in saved)):
        return []
    return progress_evidence(folder)


def _slow(folder: Path) -> list[RankEvidence]:
    """Evidence of ranks that go on, while one waits for another."""
    begun = _within(WITHIN_S, lambda: any((each.step or 0) > STEP for each in progress_evidence(folder, saved=False)))
    time.sleep(SLOW_FOR_S)
    return progress_evidence(folder, saved=False) if begun else []


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def _end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    late = sorted(row["late_s"] for row in rows if row.get("late_s") is not None)
    phases = [row["phase"] for row in rows if row["phase"] is not None]
    return {
        "runs": len(rows),
        "missed": sum(row["missed"] for row in rows),
        "exact_culprits": sum(row["exact"] for row in rows),
        "healthy_accused": sum(row["healthy_accused"] for row in rows),
        "abstained": sum(row["abstained"] for row in rows),
        "verdict_right": sum(bool(row["verdict"]) for row in rows),
        "phase_right": sum(phases),
        "phases": len(phases),
        "late_s": late,
    }


def main() -> int:
    """Run them all; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", default=",".join(FAULTS), help="kinds of faults, with commas (default: all)")
    parser.add_argument("--runs", type=int, default=1, help="of each kind and number of ranks (default: %(default)s)")
    parser.add_argument("--ranks", default="2", help="numbers of ranks, with commas (default: %(default)s)")
    parser.add_argument("--layouts", default="ddp", help="strategies, with commas (default: %(default)s)")
    options = parser.parse_args()
    rows = []
    for layout in options.layouts.split(","):
        for ranks in map(int, options.ranks.split(",")):
            for kind in options.kinds.split(","):
                for _ in range(options.runs):
                    row = {"kind": kind, "ranks": ranks, "layout": layout, **run(kind, ranks, layout)}
                    sys.stderr.write(json.dumps(row) + "\n")
                    rows.append(row)
    held_out = [row for row in rows if FAULTS[str(row["kind"])].held_out]
    developed = [row for row in rows if not FAULTS[str(row["kind"])].held_out]
    result = {"timeout_s": TIMEOUT_S, "developed": _summary(developed), "held_out": _summary(held_out), "rows": rows}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
