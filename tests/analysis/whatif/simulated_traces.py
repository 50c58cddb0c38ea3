"""Kineto traces of a simulated job, as torch.profiler would have written them on devices.

    trace(job, folder)                 # rank<r>.pt.trace.json
    trace(job, folder, syncs=True)     # recorded with enable_cuda_sync_events

Own time of a rank is kernels on stream 7, a group's collectives are kernels on a stream of the group's own: each starts
when the rank has come to it and the one before it has ended. Must not share code with `aorta.analysis.whatif`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from tests.analysis.load.kineto_files import GEMM, document, event, kernel
from tests.analysis.whatif.event_loop import Account, Collective
from tests.analysis.whatif.simulated_job import Job, carry_out, groups_of
from tests.analysis.whatif.simulated_record import Truth, truth

COMPUTING = 7
_FIRST_OF_GROUPS = 20
Events = list[dict[str, Any]]
Edit = Callable[[int, Events], Events]
"""Rank and events of a trace -> its events."""


@dataclass(frozen=True)
class Clocks:
    """Where and when the ranks are: each rank's host, and what its clock shows when the job begins."""

    host: Callable[[int], str | None] = lambda _rank: "node0"
    begin_ns: Callable[[int], int] = lambda _rank: 10**9


def trace(
    job: Job,
    folder: Path,
    *,
    syncs: bool = False,
    clocks: Clocks | None = None,
    edit: Edit = lambda _rank, events: events,
    **facts: Any,
) -> Truth:
    """Carry a job out and leave the traces of its ranks; its warm-up is not in them."""
    folder.mkdir(parents=True)
    clocks = clocks or Clocks()
    accounts = carry_out(job)
    for rank, steps in enumerate(accounts):
        events = edit(
            rank, list(_Trace(job, clocks.begin_ns(rank), syncs).events(rank, steps[job.warmup :], job.warmup))
        )
        groups = [{"pg_name": group.name, "ranks": list(group.ranks)} for group in groups_of(job, rank).values()]
        info = {"backend": "nccl", "rank": rank, "world_size": job.ranks, "pg_config": groups}
        made = {"distributedInfo": info, "host_name": clocks.host(rank), "cupti_version": 24, **facts}
        (folder / f"rank{rank}.pt.trace.json").write_text(json.dumps(document(events, **made)))
    return truth(job, accounts)


class _Trace:
    """Writes the events of one rank, in the order in which the host launches them."""

    def __init__(self, job: Job, begin_ns: int, syncs: bool) -> None:
        self._job, self._begin_ns, self._syncs = job, begin_ns, syncs
        self._calls = count(100)

    def events(self, rank: int, steps: Sequence[Account], first: int) -> Iterator[dict[str, Any]]:
        sizes = {group.name: group.ranks for group in groups_of(self._job, rank).values()}
        for number, account in enumerate(steps, start=first):
            moments = dict(account.marks)
            yield self._row(
                event("user_annotation", f"ProfilerStep#{number}", *self._when(moments["step<"], moments["step>"]))
            )
            yield from self._step(account, moments, sizes)

    def _step(
        self, account: Account, moments: dict[str, int], members: dict[str, tuple[int, ...]]
    ) -> Iterator[dict[str, Any]]:
        begin, end = moments["step<"], moments["step>"]
        issues = {issued.issue_ns: issued.collective for issued in account.issued}
        assert len(issues) == len(account.issued)
        edges = {begin, end, *issues, *moments.values()}
        edges |= {ns for wait in account.waited for ns in (wait.enter_ns, wait.leave_ns)}
        blocked = {wait.enter_ns: wait for wait in account.waited}
        for low, high in pairwise(sorted(edge for edge in edges if begin <= edge <= end)):
            if low in issues:
                yield from self._collective(issues[low], low, members)
            if low in blocked:
                yield from self._waits(blocked[low].collective)
            else:
                yield self._kernel(GEMM, low, high, COMPUTING)

    def _collective(
        self, one: Collective, issue_ns: int, members: dict[str, tuple[int, ...]]
    ) -> Iterator[dict[str, Any]]:
        stream = _FIRST_OF_GROUPS + int(one.group.name)
        assert one.end_ns is not None
        yield from self._sync(stream, COMPUTING)
        start = max(issue_ns, one.link_free_ns)
        ranks = members[one.group.name]
        made = self._kernel("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", start, one.end_ns, stream)
        elements = one.bytes // 4
        gathers = one.kind == "allgather"
        made["args"] |= {
            "Collective name": one.kind,
            "In msg nelems": elements // len(ranks) if gathers else elements,
            "Out msg nelems": elements,
            "Group size": len(ranks),
            "dtype": "Float",
            "Process Group Name": one.group.name,
            "Process Group Ranks": str(list(ranks)),
            "Seq": one.seq,
        }
        yield made

    def _waits(self, one: Collective) -> Iterator[dict[str, Any]]:
        return self._sync(COMPUTING, _FIRST_OF_GROUPS + int(one.group.name))

    def _sync(self, stream: int, on: int) -> Iterator[dict[str, Any]]:
        recorded, call = next(self._calls), next(self._calls)
        if self._syncs:
            made = event("cuda_sync", "Stream Wait Event", 1, 1, 0, stream)
            told = {"wait_on_stream": on, "wait_on_cuda_event_record_corr_id": recorded, "correlation": call}
            yield made | {"args": told}

    def _kernel(self, name: str, low: int, high: int, stream: int) -> dict[str, Any]:
        ts, dur = self._when(low, high)
        return kernel(name, ts, dur, stream=stream, correlation=next(self._calls))

    def _row(self, made: dict[str, Any]) -> dict[str, Any]:
        return made | {"pid": 4242, "tid": 4242}

    def _when(self, low: int, high: int) -> tuple[float, float]:
        return (self._begin_ns + low) / 1000, (high - low) / 1000
