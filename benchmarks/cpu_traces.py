"""What the reader of CPU traces finds, beside plain loops over the same file: `python -m benchmarks.cpu_traces`.

Regime: every strategy trains on gloo ranks of this machine (`--layers`, `--width` size it), three steps of it under
torch.profiler, with AORTA's own record of the same steps. For each rank's trace: the overlap ratio as the reader has
it, as `tests.known_answers.host_union` finds it, as it is where only innermost operators count, and as the record has
it for the profiled steps. The first two have to be equal, to the nanosecond in each length; how far the record is off
is given, not judged. `scripts/torch_versions` makes the environments of other versions of torch.

Prints one JSON object last; exit 1 where reader and loops differ.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from aorta.analysis.load.device_timelines import device_timelines
from aorta.analysis.load.interval_table import Trace
from aorta.analysis.load.trace_files import TraceFiles, read_unit
from benchmarks import plans
from tests.known_answers.host_union import host_union
from tests.rank_records import read_rank
from tests.runs import succeeded, train

RANKS: Final = {"ddp": 2, "fsdp1": 2, "fsdp": 2, "tp": 2, "cp": 2, "ep": 2, "pp": 2, "hsdp": 4, "fsdp_tp": 4}
WORKLOAD: Final = {"cp": "gpt", "ep": "moe", "pp": "gpt"}
"""Strategies that the synthetic ranking transformer does not train with."""
WAIT, WARMUP, ACTIVE = 2, 1, 3


def launched(strategy: str, folder: Path, words: argparse.Namespace) -> Path:
    """Train under the profiler; the run's folder."""
    given = [f"parallel={strategy}", f"training.max_steps={WAIT + WARMUP + ACTIVE + 1}", "profiling.enabled=true"]
    given += [f"profiling.wait={WAIT}", f"profiling.warmup={WARMUP}", f"profiling.active={ACTIVE}"]
    if strategy in WORKLOAD:
        given += [f"workload={WORKLOAD[strategy]}"]
    given += [f"workload.num_layers={words.layers}", f"workload.model_dim={words.width}"]
    succeeded(train(folder, *given, ranks=RANKS[strategy]))
    return folder


def traces_of(folder: Path) -> list[Path]:
    """The profiler's files of a run."""
    return sorted(
        path for path in folder.rglob("*.json*") if "trace" in path.name and "torch_profiler" in str(path.parent)
    )


def innermost(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace without operators that have others inside, which counted as nothing before."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") == "cpu_op"]
    outer: set[int] = set()
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        threads.setdefault(event["tid"], []).append(event)
    for rows in threads.values():
        rows.sort(key=lambda row: (row["ts"], -row["dur"]))
        for this, following in itertools.pairwise(rows):
            if following["ts"] < this["ts"] + this["dur"] and not this["name"].startswith("c10d::"):
                outer.add(id(this))
    return trace | {"traceEvents": [event for event in trace["traceEvents"] if id(event) not in outer]}


def compared(path: Path, folder: Path) -> dict[str, Any]:
    """One rank's trace."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document = json.loads(text)
    expected, before = host_union(document), host_union(innermost(document))
    (trace,) = read_unit(TraceFiles((str(path),), "kineto"))
    (device,) = device_timelines(trace)
    found = device.measure(device.whole)
    recorded = _recorded(trace, folder)
    lengths = (found.compute_ns, found.comm_ns, found.hidden_ns)
    return {
        "compute_ms": found.compute_ns / 1e6,
        "comm_ms": found.comm_ns / 1e6,
        "reader": found.overlap_ratio,
        "loops": expected.hidden_ns / expected.comm_ns if expected.comm_ns else None,
        "innermost_only": before.hidden_ns / before.comm_ns if before.comm_ns else None,
        "largest_difference_ns": max(
            abs(a - b)
            for a, b in zip(lengths, (expected.compute_ns, expected.comm_ns, expected.hidden_ns), strict=True)
        ),
        "doubt": [note for note in trace.notes if "own time" in note],
        "record": recorded,
    }


def _recorded(trace: Trace, folder: Path) -> dict[str, float] | None:
    """Overlap ratio and computation of the record, over the profiled steps."""
    (rank,) = trace.ranks
    (path,) = folder.rglob(f"rank_{rank}_metrics.jsonl")
    steps = [step for step in read_rank(path).steps if step.global_step in trace.windows.step]
    names = ("compute_ms", "comm_ms", "compute_comm_ms")
    compute, comm, hidden = (sum(step.overlap[name] or 0.0 for step in steps) for name in names)
    return {"compute_ms": compute, "overlap_ratio": hidden / comm} if comm else None


def main() -> int:
    """Launch each strategy, read its traces both ways, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    words = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for strategy in words.strategies:
        with tempfile.TemporaryDirectory(prefix="aorta-cpu-traces-") as name:
            folder = launched(strategy, Path(name), words)
            found[strategy] = [compared(path, folder) for path in traces_of(folder)]
        for row in found[strategy]:
            sys.stderr.write(f"{strategy}: {json.dumps(row)}\n")
    targets = {
        f"{strategy}: the reader finds what plain loops find": bool(rows)
        and all(row["largest_difference_ns"] == 0 for row in rows)
        for strategy, rows in found.items()
    }
    return plans.say("cpu_traces", {"torch": torch.__version__, "strategies": found}, targets)


if __name__ == "__main__":
    raise SystemExit(main())
