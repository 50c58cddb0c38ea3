"""Hand-made Kineto traces: events as dictionaries, written in any layout."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

from aorta.read.traces.interval_table import NameClassifier, Trace
from aorta.read.traces.kineto.trace import read_kineto
from aorta.read.traces.open import Peekable
from aorta.read.traces.reader import TraceInput

GEMM = "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64"
BASE_NS = 1_790_857_026_000_000_000
ALLREDUCE = "void ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(cat: str, name: str, ts: Any, dur: Any, pid: Any = 0, tid: Any = 7, **args: Any) -> dict[str, Any]:
    """A complete event; arguments by their own names, `_` for a blank."""
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": named}


def kernel(name: str, ts: Any, dur: Any, device: int = 0, stream: int = 7, **args: Any) -> dict[str, Any]:
    return event("kernel", name, ts, dur, device, stream, **{"External_id": 5, **args})


def step(number: int, ts: Any, dur: Any) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur, 4242, 4242)


def document(events: Sequence[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    given = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "x"}], "baseTimeNanoseconds": BASE_NS}
    given |= {"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1}}
    merged = given | facts
    return {key: value for key, value in merged.items() if value is not None} | {
        "traceEvents": list(events),
        "traceName": "t.json",
    }


def read_text(text: str | bytes, path: str = "t.json", patterns: Sequence[str] = ()) -> Trace:
    data = text.encode() if isinstance(text, str) else text
    (trace,) = read_kineto(TraceInput({path: Peekable(io.BytesIO(data))}, NameClassifier(patterns)))  # type: ignore[arg-type]
    return trace


def read(events: Sequence[dict[str, Any]], *, patterns: Sequence[str] = (), **facts: Any) -> Trace:
    return read_text(json.dumps(document(events, **facts)), patterns=patterns)
