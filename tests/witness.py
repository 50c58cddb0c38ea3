"""An independent count of a run's collectives: torch.profiler's operator rows and shapes."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

KINDS = {
    "c10d::allreduce_": "allreduce",
    "c10d::_allgather_base_": "allgather",
    "c10d::allgather_": "allgather",
    "c10d::allgather_into_tensor_coalesced_": "allgather",
    "c10d::_reduce_scatter_base_": "reducescatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reducescatter",
    "c10d::broadcast_": "broadcast",
}
FULL_ARRAY = {"allreduce": 0, "allgather": 0, "reducescatter": 1, "broadcast": 0}
# Its outputs are lists of lists, which the profiler does not describe; its input is one rank's part.
ONE_PART = "c10d::allgather_"
BYTES = {"float": 4, "c10::BFloat16": 2}
PROFILED = ("profiling.enabled=true", "profiling.wait=1", "profiling.warmup=1", "profiling.active=2")
"""Words for `train.py`; the steps seen are 2 and 3."""


def profiler_rows(folder: Path, rank: int) -> dict[int, list[tuple[str, int]]]:
    """Step -> (kind, bytes) of every collective, sorted; gathers into lists must be those of all ranks."""
    world_size = json.loads((folder / "run.json").read_text())["world_size"]
    (path,) = (folder / "torch_profiler" / f"rank{rank}").iterdir()
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
    windows = {
        int(event["name"].split("#")[1]): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"].startswith("iteration#") and event["cat"] == "user_annotation"
    }
    rows: dict[int, list[tuple[str, int]]] = {}
    for step, (begin, end) in windows.items():
        operators = [e for e in events if e["cat"] == "cpu_op" and begin <= e["ts"] < end]
        inside = [e for e in operators if e["name"].startswith("c10d::")]
        unknown = {e["name"] for e in inside} - set(KINDS)
        assert not unknown, f"operators this witness cannot read: {unknown}"
        rows[step] = sorted((KINDS[e["name"]], _bytes(e, world_size)) for e in inside)
    return rows


def _bytes(event: dict[str, Any], world_size: int) -> int:
    part = event["name"] == ONE_PART
    position = 1 if part else FULL_ARRAY[KINDS[event["name"]]]
    dims, kind = event["args"]["Input Dims"][position], event["args"]["Input type"][position]
    if dims and isinstance(dims[0], list):  # a list of tensors
        return sum(math.prod(one) for one in dims) * 4 * (world_size if part else 1)
    return math.prod(dims) * BYTES[kind]
