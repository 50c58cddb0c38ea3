"""Explains a run: what people look for by hand in it, and who holds the others up (`stragglers`).

    explain(dataset, entry, account_of(dataset))
    for finding in entry.findings:
        print(finding.sentence)   # group 0: all-gather and reduce-scatter queue behind each other for 5.2 ms a step

A rule of `RULES` reads what the record, the manifest or the traces hold; where its evidence is missing it finds
nothing. Must not: guess, or name a cost below `MARGIN` of the step or a part that does not make up most of a
difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Final

import numpy as np

from aorta.analysis.account import IDLE, MARGIN, MOST, OUTSIDE, StepAccount, as_document, rank_times
from aorta.analysis.aggregate import LabelledRun, job_step_times
from aorta.analysis.pace import level_change, slow_steps
from aorta.analysis.stragglers import stragglers_of
from aorta.command_line import name_ranks
from aorta.documents import known
from aorta.documents.dataset import DatasetEntry
from aorta.documents.explanations import Finding, Stragglers
from aorta.documents.formatting import TEXT
from aorta.documents.kernels import StreamGapsEntry
from aorta.documents.metrics import JOB_STEP
from aorta.read.frames import COPY_TO_HOST, NO_TIME, Collectives, Floats, Ints, Lane, Spans
from aorta.read.run import HOST_TIMER
from aorta.timeline.arrays import IntervalArray, covered_ns, intersect, measure, merge, subtract
from aorta.timeline.classes import COMPUTE
from aorta.timeline.overlap import NS_PER_MS

READ_RANKS: Final = 8
READ_STEPS: Final = 16
"""What a rule looks at one by one: the first ranks, and of each the last steps after warm-up."""
LARGE_SHARE: Final = 0.1
"""Of the step or of a stream's time: idle or waiting for launches from here on."""
_BLOCKS: Final = 0.1
"""Exposed communication that blocks computation for less than this share of it is called not blocking."""
_ALONE: Final = 0.02
"""Share of a group's communication that computation hides, up to which it is called hidden by communication alone."""
_STRETCHES: Final = 4
"""Of ranks that a sentence names."""
_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_FEWER_LAUNCHES: Final = "launch fewer kernels (torch.compile, CUDA graphs)"


def explain(dataset: LabelledRun, entry: DatasetEntry, account: StepAccount | str) -> None:
    """Add what explains a run to its entry: its account and that of its ranks, who holds the others up, and the
    findings, in the order of `RULES`. Nothing is added where no step is used.

    Raises:
        InputError: a record cannot be read again.
    """
    if not entry.count:
        return
    steps, cost_ms = np.empty(0, np.int64), np.empty((0, 0))
    if isinstance(account, str):
        entry.account, entry.stragglers = as_document(account), Stragglers(reason=account, ranks=[])
    else:
        entry.account, entry.rank_times = as_document([account]), rank_times([account])
        entry.stragglers, steps, cost_ms = stragglers_of(dataset, account)
    entry.findings = [*uneven_steps(dataset, steps, cost_ms)]
    entry.findings += [finding for rule in RULES for finding in rule(dataset, entry)]
    entry.findings += () if isinstance(account, str) else idle_cause(dataset, account)


def _median(entry: DatasetEntry, name: str) -> float | None:
    described = entry.described.get(name)
    return None if described is None else described.median


def _streams(entry: DatasetEntry) -> Iterator[tuple[int | None, StreamGapsEntry, float]]:
    """Yield the rank of each device of a trace, its stream that computes most, and the collectives of all its streams
    in ms.
    """
    traces = known(entry.traces)
    devices: defaultdict[tuple[int | None, int | None], list[StreamGapsEntry]] = defaultdict(list)
    for row in () if traces is None else traces.kernels.gaps:
        devices[row.rank, row.device].append(row)
    for (rank, _), rows in devices.items():
        computing = max(rows, key=lambda row: row.compute_ms)
        if computing.compute_ms:
            yield rank, computing, sum(row.comm_ms for row in rows)


def collective_on_compute_stream(_dataset: LabelledRun, entry: DatasetEntry) -> Iterator[Finding]:
    """A stream that has most of a device's computation also runs collectives: these never overlap with it (W24), and
    nothing that another stream computes hides them.
    """
    for rank, computing, total_ms in _streams(entry):
        if computing.exposed_ms >= MARGIN * max(computing.busy_ms, total_ms) and computing.exposed_ms:
            yield Finding(
                "collective_on_compute_stream",
                f"rank {rank}: {TEXT.quantity(computing.exposed_ms, 'ms')} of {TEXT.quantity(total_ms, 'ms')} of "
                f"collectives run on stream {computing.stream}, the compute stream, and cannot be hidden",
                rank=rank,
                stream=computing.stream,
            )


def serialised_communicator(dataset: LabelledRun, entry: DatasetEntry) -> Iterator[Finding]:
    """All-gathers and reduce-scatters of one group queue behind each other: a communicator runs one at a time."""
    step_ms, exposed_ms = _median(entry, JOB_STEP), _median(entry, "exposed_comm_ms")
    if not step_ms or exposed_ms is None or exposed_ms < MARGIN * step_ms:
        return
    worst: dict[str, tuple[float, int, int]] = {}
    for rank, tables in dataset.run.ranks.items():
        steps, rows = tables.steps, tables.collectives
        for group in dict.fromkeys(name.group for name in rows.names):
            kinds = np.array([_KINDS.get(name.kind, -1) if name.group == group else -1 for name in rows.names])
            counted = rows.timed & (rows.issue_ns != NO_TIME) & steps.used[rows.step] & (kinds[rows.name] >= 0)
            own = rows.take(counted)
            own = own.take(np.lexsort((own.start_ns, own.step)))
            before, after = own.take(slice(None, -1)), own.take(slice(1, None))
            behind = (
                (before.step == after.step)
                & (kinds[before.name] != kinds[after.name])
                & (after.issue_ns < before.end_ns)
                & (after.start_ns >= before.end_ns)
            )
            if behind.any():
                queued_ns = (before.end_ns - np.maximum(after.issue_ns, before.start_ns))[behind]
                per_step = np.bincount(after.step[behind], queued_ns, minlength=len(steps))
                step = int(steps.global_step[int(per_step.argmax())])
                queued_ms = float(per_step.sum()) / int(steps.used.sum()) / NS_PER_MS
                worst[group] = max(worst.get(group, (0.0, rank, step)), (queued_ms, rank, step))
    for group, (queued_ms, rank, step) in worst.items():
        if queued_ms >= MARGIN * step_ms:
            yield Finding(
                "serialised_communicator",
                f"{dataset.run.group_titles[group]}: all-gather and reduce-scatter queue behind each other for "
                f"{TEXT.quantity(queued_ms, 'ms')} a step (rank {rank}): one communicator runs one at a time; a "
                "process group for each lets them overlap",
                rank=rank,
                step=step,
                group=group,
            )


_KINDS: Final = {"allgather": 0, "reducescatter": 1}


def one_connection(dataset: LabelledRun, _entry: DatasetEntry) -> Iterator[Finding]:
    """`CUDA_DEVICE_MAX_CONNECTIONS=1` puts the kernels of all streams into one queue. Tensor parallelism sets it on
    purpose, so that collectives are launched before the GEMMs that hide them (Megatron-LM's documentation).
    """
    run = dataset.run
    environment = {} if run.manifest is None else run.manifest.get("environment")
    value = environment.get(_CONNECTIONS) if isinstance(environment, dict) else None
    if str(value).strip() == "1" and run.source.platform == "cuda" and "tp" not in (run.source.parallel or ""):
        yield Finding(
            "one_connection",
            f"{_CONNECTIONS}=1: all streams share one queue: collectives start after all earlier kernels; unset it",
        )


def exposed_not_blocking(_dataset: LabelledRun, entry: DatasetEntry) -> Iterator[Finding]:
    """Communication is exposed, but computation hardly ever waits for it: something else holds computation up."""
    step_ms, exposed_ms, stall_ms = (_median(entry, name) for name in (JOB_STEP, "exposed_comm_ms", "compute_stall_ms"))
    if not step_ms or exposed_ms is None or stall_ms is None:
        return
    if exposed_ms >= LARGE_SHARE * step_ms and stall_ms <= _BLOCKS * exposed_ms:
        medians = known(entry.described["exposed_comm_ms"].per_rank_median) or {}
        by_rank = {int(rank): median for rank, median in medians.items() if median is not None}
        yield Finding(
            "exposed_not_blocking",
            f"{TEXT.quantity(exposed_ms, 'ms')} of communication a step is exposed, but computation waits for only "
            f"{TEXT.quantity(stall_ms, 'ms')} of it: hiding it gains little",
            rank=max(by_rank, key=by_rank.__getitem__, default=None),
        )


def hidden_by_another_group(dataset: LabelledRun, _entry: DatasetEntry) -> Iterator[Finding]:
    """Communication of one group runs beside another group's, and computation hides none of it."""
    titles = dataset.run.group_titles
    for rank, tables in list(dataset.run.ranks.items())[:READ_RANKS]:
        names, indices = tables.collectives.names, np.flatnonzero(tables.steps.used)[-READ_STEPS:]
        if len({name.group for name in names}) < 2 or not len(indices):
            continue
        length_ns = tables.steps.length_ns[indices]
        spans = tables.details.spans(indices)
        computes, stalls = spans.of_lanes(Lane.COMPUTE), spans.of_lanes(Lane.STALL, Lane.HAND_OVER)
        computing = subtract(*(_one_behind_the_other(part, part.step, length_ns) for part in (computes, stalls)))
        rows = tables.collectives
        rows = rows.take(rows.timed & np.isin(rows.step, indices))
        group_of = np.array([name.group for name in names])[rows.name]
        flights = {
            str(group): _one_behind_the_other(own, np.searchsorted(indices, own.step), length_ns)
            for group in np.unique(group_of)
            for own in [rows.take(group_of == group)]
        }
        total = {group: measure(flight) for group, flight in flights.items()}
        for group, other in permutations(flights, 2):
            shared_ns = measure(intersect(flights[group], flights[other]))
            large = total[group] >= MARGIN * length_ns.sum() and shared_ns >= MOST * total[group]
            hidden_ns = measure(intersect(flights[group], computing))
            if large and total[other] >= total[group] and hidden_ns <= _ALONE * total[group]:
                ends_ns = np.cumsum(length_ns)
                of_step = covered_ns(IntervalArray(ends_ns - length_ns, ends_ns), flights[group])
                yield Finding(
                    "hidden_by_another_group",
                    f"rank {rank}: {TEXT.percent(shared_ns / total[group], 0)} of the communication of "
                    f"{titles[group]} overlaps that of {titles[other]}, and none of it overlaps computation",
                    rank=rank,
                    step=int(tables.steps.global_step[indices[int(of_step.argmax())]]),
                    group=group,
                )


def _one_behind_the_other(rows: Spans | Collectives, step: Ints, length_ns: Ints) -> IntervalArray:
    """Return the merged spans of rows on an axis on which the steps follow each other, without what is outside them.

    Args:
        step: of each row, an index into `length_ns`.
    """
    zero_ns = (np.cumsum(length_ns) - length_ns)[step]
    start_ns, end_ns = (np.clip(time_ns, 0, length_ns[step]) for time_ns in (rows.start_ns, rows.end_ns))
    return merge(IntervalArray(zero_ns + start_ns, zero_ns + end_ns))


def host_bound_launches(_dataset: LabelledRun, entry: DatasetEntry) -> Iterator[Finding]:
    """The device of a trace waits for the host's next launch: the host had waited for the device before it, or issues
    late. Of a record `pace_notes` says it. Where computation lacks rows, it may not have waited.
    """
    lacking = {gap.rank for gap in entry.health.gaps if COMPUTE in gap.lanes}
    for rank, row, _ in _streams(entry):
        if rank in lacking:
            continue
        waited_ms, time_ms = row.host_wait_ms or 0.0, row.busy_ms + row.gap_ms
        who = "a trace of unknown rank" if rank is None else f"rank {rank}"
        if waited_ms >= LARGE_SHARE * time_ms:
            yield Finding(
                "idle_by_synchronisation",
                f"{who}, stream {row.stream}: {TEXT.percent(waited_ms / time_ms, 0)} of the time the device is "
                f"idle ({TEXT.quantity(waited_ms, 'ms')}) because the host waited for it before its next launch: "
                "avoid .item(), .cpu() and synchronize() in a step",
                rank=rank,
                stream=row.stream,
            )
        late_ms = (row.launch_bound_ms or 0.0) - waited_ms
        share = late_ms / time_ms
        if share >= LARGE_SHARE:
            yield Finding(
                "host_bound_launches",
                f"{who}, stream {row.stream}: {TEXT.percent(share, 0)} of the time the device waits for the "
                f"host's next launch ({TEXT.quantity(late_ms, 'ms')}), which no wait for the device holds up: "
                f"load data ahead, or {_FEWER_LAUNCHES}",
                rank=rank,
                stream=row.stream,
            )


def uneven_steps(dataset: LabelledRun, steps: Ints, cost_ms: Floats) -> Iterator[Finding]:
    """Steps change their level after the warm-up, or a few, of one rank maybe, draw the mean away from the median."""
    times_ms, numbers, _ = job_step_times(dataset)
    changed, slow = level_change(times_ms), slow_steps(times_ms, numbers)
    if changed is not None:
        yield Finding("not_settled", f"steps have not settled: {changed}")
    elif slow is not None:
        sentence, apart, longer_ms = slow
        waited_ms = cost_ms[np.isin(steps, apart)].sum(axis=0)
        late = [rank for rank, ms in zip(dataset.run.ranks, waited_ms, strict=False) if ms >= MOST * longer_ms > 0]
        because = f"; in them the others wait for {name_ranks(late)}" if late else ""
        yield Finding("uneven_steps", f"{sentence}{because}", rank=late[0] if late else None)


def idle_cause(dataset: LabelledRun, account: StepAccount) -> Iterator[Finding]:
    """A tenth of the step or more is spent on data, or idle, most of it in one place: behind a read of the loss or a
    copy to the host, where the host waited for the device and launches anew.
    """
    data_ms = {rank: own.ms(2).get((OUTSIDE, "data"), 0.0) for rank, own in account.ranks.items()}
    starved = [rank for rank, ms in sorted(data_ms.items()) if ms >= LARGE_SHARE * account.step_ms]
    if starved:
        longest_ms, most = max((data_ms[rank], rank) for rank in starved)
        wait = f"{name_ranks(starved, _STRETCHES)} wait{'' if len(starved) > 1 else 's'}"
        up_to = f"{'up to ' if len(starved) > 1 else ''}{TEXT.quantity(longest_ms, 'ms')}"
        sentence = f"{wait} {up_to} a step for the next batch: the data loader is too slow"
        yield Finding("starved_by_data", sentence, rank=most)
    for rank, own in list(account.ranks.items())[:READ_RANKS]:
        idle_ms = {} if dataset.run.ranks[rank].source.timer == HOST_TIMER else own.ms(2, (IDLE,))
        longest = max(idle_ms, key=idle_ms.__getitem__, default=(IDLE, ""))
        before = longest[-1].partition(" .. ")[0]
        least_ms = max(LARGE_SHARE * account.step_ms, MOST * sum(idle_ms.values()))
        if before in _WAITS and idle_ms[longest] >= least_ms:
            yield Finding(
                "idle_by_synchronisation",
                f"rank {rank} is idle for {TEXT.quantity(idle_ms[longest], 'ms')} a step behind {_WAITS[before]}",
                rank=rank,
            )


_WAITS: Final = {
    "loss_read": "the read of the loss: the host waited for the device there; read it every few steps",
    COPY_TO_HOST: "a copy to the host, which waits for the device unless it is non_blocking into pinned memory",
}


RULES: Final[tuple[Callable[[LabelledRun, DatasetEntry], Iterator[Finding]], ...]] = (
    one_connection,
    collective_on_compute_stream,
    serialised_communicator,
    hidden_by_another_group,
    host_bound_launches,
    exposed_not_blocking,
)
