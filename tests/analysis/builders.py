"""Synthetic records, written through the real writer: by hand (known numbers) or by a small simulated pipeline."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import msgspec

from aorta.records.record_file import RecordWriter
from aorta.records.schema import (
    SCHEMA_VERSION,
    ActiveSegment,
    AuxRange,
    ClockReading,
    Collective,
    ComputeRange,
    Coverage,
    Footer,
    Header,
    Stall,
    Step,
)
from tests.windows import measure_window

MS = 1_000_000
Document = TypeVar("Document", bound=msgspec.Struct)
CLOCK = ClockReading(realtime_ns=1_700_000_000_000_000_000, boottime_ns=10**9, monotonic_ns=10**9, uncertainty_ns=50)
FULL = Coverage(seen=0, issued=0, complete=True)


def header(rank: int = 0, world_size: int = 1, **changes: Any) -> Header:
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run_id": "run-1",
        "label": "base",
        "attempt": 0,
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "node_rank": 0,
        "host": "node0",
        "pid": 100 + rank,
        "boot_id": "boot",
        "platform": "cpu",
        "device": "cpu",
        "backend": "gloo",
        "parallel": "ddp",
        "timer": "perf_counter",
        "instrument_mode": "dedicated",
        "manifest_hash": "abc",
        "start_step": 0,
        "warmup_steps": 0,
        "clock": CLOCK,
    }
    return Header(**fields | changes)


def metrics(window: float, compute: float, comm: float, hidden: float, **more: float | None) -> dict[str, float | None]:
    """Overlap metrics of a step with all-reduce only, written down by hand; `more` overrides."""
    return {
        "window_ms": window,
        "compute_ms": compute,
        "comm_ms": comm,
        "copy_ms": 0.0,
        "aux_ms": 0.0,
        "idle_ms": window - compute - comm + hidden,
        "compute_comm_ms": hidden,
        "exposed_comm_ms": comm - hidden,
        "compute_stall_ms": 0.0,
        "overlap_ratio": hidden / comm if comm else None,
        "overlap_over_compute": hidden / compute if compute else None,
        "exposed_share": (comm - hidden) / window,
        "allreduce_ms": comm,
        "compute_allreduce_ms": hidden,
        "exposed_allreduce_ms": comm - hidden,
        "reducescatter_ms": 0.0,
        "compute_reducescatter_ms": 0.0,
        "exposed_reducescatter_ms": 0.0,
        **more,
    }


def step(
    rank: int = 0,
    world_size: int = 1,
    global_step: int = 0,
    *,
    overlap: dict[str, float | None],
    warmup: bool = False,
    **changes: Any,
) -> Step:
    """One step whose duration is the `window_ms` of `overlap`."""
    start = 10**9 + global_step * 10**9
    length = round((overlap["window_ms"] or 0) * MS)
    fields: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "epoch": 0,
        "step": global_step,
        "global_step": global_step,
        "warmup": warmup,
        "loss": 1.0,
        "lr": 0.1,
        "start_mono_ns": start,
        "end_mono_ns": start + length,
        "t_start_ns": CLOCK.realtime_ns + start,
        "t_end_ns": CLOCK.realtime_ns + start + length,
        "overlap": overlap,
        "coverage": FULL,
    }
    return partial(Step, **fields | changes)


def measured_step(
    rank: int,
    world_size: int,
    number: int,
    length_ns: int,
    compute: Sequence[ComputeRange],
    collectives: Sequence[Collective],
    stalls: Sequence[Stall],
    aux: Sequence[AuxRange],
    **changes: Any,
) -> Step:
    """A step whose metrics are measured by the recorder's own definition."""
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for row in collectives:
        by_kind.setdefault(row.kind, []).append((row.start_ns or 0, row.end_ns or 0))
    parts = {"compute": [*compute], "stalls": [*stalls], "aux": [*aux]}
    spans = {name: [(part.start_ns, part.end_ns) for part in listed] for name, listed in parts.items()}
    measured = measure_window((0, length_ns), comm=by_kind, **spans)
    values, reasons = measured.metrics()
    fields = {
        "reasons": reasons,
        "per_stream_ms": measured.per_stream_ms(),
        "coverage": Coverage(len(collectives), len(collectives), True),
        "active_segments": [ActiveSegment(*tile) for tile in measured.tiles],
        "collectives": [*collectives],
    }
    return step(rank, world_size, number, overlap=values, **fields | parts | changes)


def collective(
    kind: str = "allreduce", seq: int = 0, start_ms: float = 0.0, end_ms: float | None = 1.0, **changes: Any
) -> Collective:
    fields: dict[str, Any] = {
        "kind": kind,
        "group": "world",
        "seq": seq,
        "bytes": 1_000_000,
        "dtype": "float32",
        "issue_ns": round(start_ms * MS),
        "start_ns": round(start_ms * MS),
        "end_ns": None if end_ms is None else round(end_ms * MS),
        "end_source": None if end_ms is None else "future",
    }
    return Collective(**fields | changes)


def footer(steps: int, world_size: int = 1, **changes: Any) -> Footer:
    fields: dict[str, Any] = {
        "reason": "completed",
        "exit_code": 0,
        "steps_written": steps,
        "clock": CLOCK,
        "groups": {"world": list(range(world_size))},
    }
    return Footer(**fields | changes)


def write_rank(
    folder: Path, head: Header, steps: list[Step], foot: Footer | str | None = "completed", name: str | None = None
) -> Path:
    """One record; `foot` None leaves a killed one."""
    path = folder / (name or f"rank_{head.rank}_metrics.jsonl")
    with RecordWriter(path, head.rank) as writer:
        writer.write(head)
        for line in steps:
            writer.write(line)
        if isinstance(foot, Footer):
            writer.write(foot)
        elif foot is not None:
            writer.write(footer(len(steps), head.world_size))
    return path


def write_manifest(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> None:
    fields = {
        "schema_version": SCHEMA_VERSION,
        "run_id": "run-1",
        "label": "base",
        "world_size": 1,
        "platform": "cpu",
        "config": {"workload": {"name": "mlp"}, "training": {"dtype": "float32"}} if config is None else config,
    }
    (folder / "run.json").write_text(json.dumps(fields | changes))


def simulated_run(
    folder: Path,
    *,
    label: str,
    ranks: int,
    steps: int = 30,
    warmup: int = 3,
    transfer_ms: float = 6.0,
    hidden_ms: float | None = None,
    platform: str = "cuda",
    fabric: str = "none",
    seed: int = 0,
) -> Path:
    """Data-parallel training on one emulated link: blocks of backward, each followed by an all-reduce of its bucket,
    a tail that the optimizer waits for. For pictures and end-to-end tests, not for known answers.

    Args:
        hidden_ms: the transfer of every bucket but the last, which backward hides; None: as `transfer_ms`.
    """
    random.seed(seed)
    transfers_ms = [transfer_ms if hidden_ms is None else hidden_ms] * 3 + [transfer_ms]
    shared = {"run_id": f"run-{label}", "platform": platform}
    for rank in range(ranks):
        lines = [_simulated_step(rank, ranks, number, transfers_ms, warm=number < warmup) for number in range(steps)]
        write_rank(folder, header(rank, ranks, label=label, warmup_steps=warmup, **shared), lines)
    config = {"workload": {"name": "gpt"}, "training": {"dtype": "bfloat16"}, "fabric": {"kind": fabric}}
    write_manifest(folder, config | {"label": label}, world_size=ranks, **shared)
    return folder


def _simulated_step(rank: int, ranks: int, number: int, transfer_ms: list[float], *, warm: bool) -> Step:
    def around(value: float) -> int:
        return round(value * random.uniform(0.9, 1.15) * (1.8 if warm else 1.0) * MS)

    now, link = around(1.0), 0
    compute: list[ComputeRange] = []
    comm: list[Collective] = []
    for block in range(4):
        length = around(5)
        compute.append(ComputeRange(f"block{block}", "forward", now, now + length))
        now += length + around(0.05)
    for block in range(4):
        length = around(8)
        compute.append(ComputeRange(f"block{block}", "backward", now, now + length))
        now += length
        issue, begin = now, max(now, link)
        link = begin + around(transfer_ms[block])
        size = 25_000_000 if block < 3 else 24_000_000  # the last bucket is what is left
        comm.append(Collective("allreduce", "world", number * 4 + block, size, "bfloat16", issue, begin, link, "event"))
    stalls = [Stall(now, link)] if link > now else []
    now = max(now, link)
    tail = now + around(3.0)
    end = tail + around(0.5)
    return measured_step(
        *(rank, ranks, number, end, compute, comm, stalls, [AuxRange("optimizer", now, tail)]),
        warmup=warm,
        loss=2.0 / (number + 1),
        start_mono_ns=10**9 * (number + 1),
        end_mono_ns=10**9 * (number + 1) + end,
    )


def strict_json(path: Path) -> dict[str, Any]:
    """JSON without NaN or Infinity, which are not JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path} holds {word}")

    loaded = json.loads(path.read_text(), parse_constant=refuse)
    assert isinstance(loaded, dict)
    return loaded


def line_of(line: msgspec.Struct) -> str:
    return msgspec.json.encode(line).decode() + "\n"


def partial(kind: type[Document], /, **given: Any) -> Document:
    """A struct of which a test says only what its rule reads: every other field is empty, or null."""
    empty = {name: container() if container in (list, dict) else None for name, container in _containers(kind).items()}
    return kind(**empty | given)


@cache
def _containers(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Required field -> the container that it is, if it is one."""
    hints = get_type_hints(kind)
    return {field.name: get_origin(hints[field.name]) for field in msgspec.structs.fields(kind) if field.required}
