"""Chrome traces by hand, their files in every packing, and a check of the format written from its specification."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

BASE_NS = 1_790_857_026_000_000_000
"""Kineto's base of autumn 2026: floored to 7,889,238 s."""


def x(name: str, ts: float | str, dur: float | str, pid: Any = 77, tid: Any = 77, **more: Any) -> dict[str, Any]:
    """A complete event; times in microseconds, as text where every digit counts."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, **more}


def flow(phase: str, ident: Any, ts: float, tid: Any) -> dict[str, Any]:
    return {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": ident, "pid": 77, "tid": tid, "ts": ts}


def text(events: list[dict[str, Any]], rank: int | None = 0, world: int = 2, base: int | None = BASE_NS, **more: Any):
    """As Kineto writes it: indented, the base before the events, a name behind them. Quoted times lose their quotes."""
    head: dict[str, Any] = {"schemaVersion": 1, "host_name": "node0", **more}
    if rank is not None:
        head["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": world}
    if base is not None:
        head["baseTimeNanoseconds"] = base
    whole = json.dumps({**head, "traceEvents": events, "traceName": "t.json"}, indent=2)
    for event in events:
        for key in ("ts", "dur"):
            if isinstance(event.get(key), str):
                whole = whole.replace(json.dumps(event[key]), event[key])
    return whole.encode()


def write(path: Path, body: bytes) -> Path:
    """Packed as the ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path, "w:gz") as archive:
            member = tarfile.TarInfo("inside.json")
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(body))
    else:
        path.write_bytes(body)
    return path


def load(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.name.endswith(".gz") else raw)


def problems(trace: dict[str, Any]) -> list[str]:
    """What breaks the Trace Event Format (Google, 2016), as far as viewers depend on it."""
    wrong: list[str] = []
    open_slices: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    arrows: Counter[tuple[str, str, int]] = Counter()
    if not isinstance(trace.get("traceEvents"), list):
        return ["traceEvents is no list"]
    if trace.get("displayTimeUnit") not in ("ms", "ns"):
        wrong.append("displayTimeUnit is neither ms nor ns")
    by_time = sorted(
        (e for e in trace["traceEvents"] if e["ph"] != "M"), key=lambda e: (e["pid"], e.get("tid", 0), e["ts"])
    )
    for event in trace["traceEvents"]:
        for key, kinds in (("pid", int), ("name", str), ("ph", str), ("ts", (int, float))):
            if not isinstance(event.get(key), kinds):
                wrong.append(f"{key} of {event}")
        if "tid" in event and not isinstance(event["tid"], int):
            wrong.append(f"tid of {event}")
        if event["ph"] == "X" and not event.get("dur", -1) >= 0:
            wrong.append(f"dur of {event}")
        if event["ph"] in "sft":
            if not isinstance(event.get("id"), int) or event["id"] >= 2**53:
                wrong.append(f"id of {event}")
            else:
                arrows[event["cat"], event["ph"], event["id"]] += 1
        if event["ph"] == "C" and not all(isinstance(v, int | float) for v in event["args"].values()):
            wrong.append(f"counter {event}")
    for event in by_time:
        stack = open_slices[event["pid"], event.get("tid", 0)]
        if event["ph"] == "B":
            stack.append(event["name"])
        elif event["ph"] == "E" and (not stack or stack.pop() != event["name"]):
            wrong.append(f"an end without its beginning: {event}")
    wrong += [f"never ended on {thread}: {names}" for thread, names in open_slices.items() if names]
    for cat, phase, ident in arrows:
        if phase == "s" and not arrows[cat, "f", ident]:
            wrong.append(f"arrow {cat} {ident} has no end")
    return wrong
