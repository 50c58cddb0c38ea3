"""The record of a simulated job, as AORTA's recorder would have written it, and what the job really took.

The only part of the simulator that knows AORTA: the record's types, its writer and the definition of overlap.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aorta.config.schema import EmulatedFabric
from aorta.records.schema import AuxRange, Collective, ComputeRange, Coverage, Stall, Step, Wait
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


def truth(job: Job, accounts: list[list[Account]] | None = None) -> Truth:
    """Carry a job out (or take its accounts) and measure it."""
    accounts = carry_out(job) if accounts is None else accounts
    measured = [[_Lanes(account).measured for account in steps[job.warmup :]] for steps in accounts]
    slowest = [max(rank_steps, key=lambda one: one.window_ns) for rank_steps in zip(*measured, strict=True)]
    everything = [one for rank_steps in measured for one in rank_steps]
    ratios = [one.overlap_ratio for one in everything if one.overlap_ratio is not None]
    return Truth(
        step_ms=statistics.median(one.window_ns for one in slowest) / NS_PER_MS,
        ratio=statistics.median(ratios) if ratios else 0.0,
        exposed_ms=statistics.median(one.exposed_ns for one in everything) / NS_PER_MS,
    )


def record(job: Job, folder: Path, run_id: str = "run-1") -> Truth:
    """Carry a job out and leave its run folder."""
    folder.mkdir(parents=True)
    accounts = carry_out(job)
    for rank, steps in enumerate(accounts):
        lines = [_line(job, rank, number, account) for number, account in enumerate(steps)]
        groups = {group.name: list(group.ranks) for group in groups_of(job, rank).values()}
        head = header(rank, job.ranks, parallel=job.strategy, warmup_steps=job.warmup, run_id=run_id)
        write_rank(folder, head, lines, footer(len(lines), job.ranks, groups=groups))
    write_manifest(folder, _config(job), world_size=job.ranks, run_id=run_id)
    return truth(job, accounts)


def _config(job: Job) -> dict[str, object]:
    network = job.network
    fabric = EmulatedFabric(
        inter_latency_us=network.latency_us,
        inter_bandwidth_gb_per_s=network.gb_per_s,
        emulated_world_size=network.world,
        jitter=network.jitter,
        straggler_rank=job.late_rank,
        straggler_ms=job.late_ns / NS_PER_MS,
    )
    return {
        "workload": {"name": "simulated"},
        "training": {"dtype": "float32"},
        "parallel": {"strategy": job.strategy},
        "fabric": asdict(fabric) | {"algorithm": network.algorithm, "sharing": "group"},
    }


class _Lanes:
    """An account in the offsets of its step."""

    def __init__(self, account: Account) -> None:
        moments = dict(account.marks)
        start = self.start_ns = moments["step<"]
        self.end_ns = moments["step>"]
        self._account = account
        spans = [
            (name[:-1], ns - start, moments[f"{name[:-1]}>"] - start) for name, ns in account.marks if name[-1] == "<"
        ]
        self.compute = [ComputeRange(*name.split("/"), begin, end) for name, begin, end in spans if "/" in name]
        self.aux = [AuxRange(name[4:], begin, end) for name, begin, end in spans if name.startswith("aux:")]
        self.waits = [
            Wait(one.group.name, one.seq, enter_ns - start, leave_ns - start)
            for one, enter_ns, leave_ns in account.waited
        ]
        self.stalls = [Stall(row.enter_ns, row.leave_ns, "wait") for row in self.waits]
        self.collectives: list[Collective] = []
        comm: dict[str, list[tuple[int, int]]] = {}
        for one, issue_ns in account.issued:
            assert one.end_ns is not None
            begin, end = max(issue_ns, one.link_free_ns) - start, one.end_ns - start
            source = "future" if one.backend_end_ns > one.network_end_ns else "emulated"
            of = (one.kind, one.group.name, one.seq, one.bytes, "float32", issue_ns - start, begin, end, source)
            self.collectives.append(Collective(*of, one.backend_end_ns - start))
            comm.setdefault(one.kind, []).append((begin, end))
        self.measured: Overlap = measure_window(
            (0, self.end_ns - start),
            compute=[(row.start_ns, row.end_ns) for row in self.compute],
            comm=comm,
            stalls=[(row.start_ns, row.end_ns) for row in self.stalls],
            aux=[(row.start_ns, row.end_ns) for row in self.aux],
        )


def _line(job: Job, rank: int, number: int, account: Account) -> Step:
    lanes = _Lanes(account)
    values, reasons = lanes.measured.metrics()
    rows: Sequence[Collective] = lanes.collectives
    return step(
        rank,
        job.ranks,
        number,
        overlap=values,
        warmup=number < job.warmup,
        reasons=reasons,
        start_mono_ns=EPOCH_NS + lanes.start_ns,
        end_mono_ns=EPOCH_NS + lanes.end_ns,
        t_start_ns=EPOCH_NS + lanes.start_ns,
        t_end_ns=EPOCH_NS + lanes.end_ns,
        per_stream_ms=lanes.measured.per_stream_ms(),
        coverage=Coverage(len(rows), len(rows), complete=True),
        collectives=rows,
        compute=lanes.compute,
        stalls=lanes.stalls,
        aux=lanes.aux,
        waits=lanes.waits,
    )
