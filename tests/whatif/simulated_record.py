"""The record of a simulated job, as AORTA's recorder would have written it, and what the job really took.

The only part of the simulator that knows AORTA: the record's types, its writer and the definition of overlap.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aorta.config.schema import EmulatedFabric
from aorta.records.schema import AuxRange, Collective, ComputeRange, Coverage, Stall, Wait
from aorta.timeline.overlap import NS_PER_MS, Overlap
from tests.analysis.builders import footer, header, step, write_manifest, write_rank
from tests.whatif.event_loop import Account
from tests.whatif.simulated_job import Job, carry_out, groups_of
from tests.windows import measure_window

EPOCH_NS = 10**9
"""The monotonic clock when the job begins."""


@dataclass(frozen=True)
class Truth:
    """What a job really took, behind its warm-up: medians over steps (of the slowest rank), and over all rank-steps."""

    step_ms: float
    ratio: float
    exposed_ms: float


def truth(job: Job) -> Truth:
    """Carry a job out and measure it."""
    measured = [[_rows(account)[0] for account in steps[job.warmup :]] for steps in carry_out(job)]
    everything = [one for of_rank in measured for one in of_rank]
    ratios = [one.overlap_ratio for one in everything if one.overlap_ratio is not None]
    slowest = [max(one.window_ns for one in ranks) for ranks in zip(*measured, strict=True)]
    return Truth(
        step_ms=statistics.median(slowest) / NS_PER_MS,
        ratio=statistics.median(ratios) if ratios else 0.0,
        exposed_ms=statistics.median(one.exposed_ns for one in everything) / NS_PER_MS,
    )


def record(job: Job, folder: Path) -> None:
    """Carry a job out and leave its run folder."""
    folder.mkdir(parents=True)
    for rank, steps in enumerate(carry_out(job)):
        lines = []
        for number, account in enumerate(steps):
            overlap, rows = _rows(account)
            values, reasons = overlap.metrics()
            more = {"warmup": number < job.warmup, "reasons": reasons, **rows}
            lines.append(step(rank, job.ranks, number, overlap=values, **more))
        groups = {group.name: list(group.ranks) for group in groups_of(job, rank)}
        head = header(rank, job.ranks, parallel=job.strategy, warmup_steps=job.warmup)
        write_rank(folder, head, lines, footer(len(lines), job.ranks, groups=groups))
    write_manifest(folder, _config(job), world_size=job.ranks)


def _config(job: Job) -> dict[str, object]:
    network = job.network
    fabric = EmulatedFabric(
        inter_latency_us=network.latency_us,
        inter_bandwidth_gb_per_s=network.gb_per_s,
        emulated_world_size=network.world,
    )
    return {
        "workload": {"name": "simulated"},
        "training": {"dtype": "float32"},
        "parallel": {"strategy": job.strategy},
        "fabric": asdict(fabric) | {"algorithm": network.algorithm, "sharing": "group"},
    }


def _rows(account: Account) -> tuple[Overlap, dict[str, Any]]:
    """What was measured of a step, and its line's rows, in offsets from its start."""
    marks = account.marks
    start, end = marks["step<"], marks["step>"]
    spans = [(name[:-1], ns - start, marks[f"{name[:-1]}>"] - start) for name, ns in marks.items() if name[-1] == "<"]
    compute = [ComputeRange(*name.split("/"), *span) for name, *span in spans if "/" in name]
    aux = [AuxRange(name.removeprefix("aux:"), *span) for name, *span in spans if name.startswith("aux:")]
    waits = [Wait(one.group.name, one.seq, enter - start, leave - start) for one, enter, leave in account.waited]
    stalls = [Stall(row.enter_ns, row.leave_ns, "wait") for row in waits]
    collectives: list[Collective] = []
    comm: dict[str, list[tuple[int, int]]] = {}
    for one, issue_ns in account.issued:
        assert one.end_ns is not None
        span = max(issue_ns, one.link_free_ns) - start, one.end_ns - start
        source = "future" if one.backend_end_ns > one.network_end_ns else "emulated"
        of = (one.kind, one.group.name, one.seq, one.bytes, "float32", issue_ns - start, *span, source)
        collectives.append(Collective(*of, one.backend_end_ns - start))
        comm.setdefault(one.kind, []).append(span)
    overlap = measure_window(
        (0, end - start),
        compute=[(row.start_ns, row.end_ns) for row in compute],
        comm=comm,
        stalls=[(row.start_ns, row.end_ns) for row in stalls],
        aux=[(row.start_ns, row.end_ns) for row in aux],
    )
    return overlap, {
        **dict.fromkeys(("start_mono_ns", "t_start_ns"), EPOCH_NS + start),
        **dict.fromkeys(("end_mono_ns", "t_end_ns"), EPOCH_NS + end),
        "per_stream_ms": overlap.per_stream_ms(),
        "coverage": Coverage(len(collectives), len(collectives), complete=True),
        "collectives": collectives,
        "compute": compute,
        "stalls": stalls,
        "aux": aux,
        "waits": waits,
    }
