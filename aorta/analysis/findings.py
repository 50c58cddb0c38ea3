"""Names what people look for by hand in a run: one table of rules, each with the place where it holds.

    for finding in findings(dataset, entry):
        print(finding.sentence)      # group 0: all-gather and reduce-scatter queue behind each other for 5.2 ms a step

A rule reads what the record, the manifest or the traces hold. Where its evidence is missing it finds nothing. Must not:
guess, or name a cost below `LEAST_SHARE` of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Final, TypeAlias

import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.because import because, idle_places, rank_times, sampled_steps
from aorta.analysis.documents import known
from aorta.analysis.documents.dataset import DatasetEntry, Described, Finding, StreamGapsEntry
from aorta.analysis.formatting import TEXT
from aorta.analysis.frames import NO_TIME
from aorta.analysis.host_bound import UNDECIDED
from aorta.analysis.metrics import JOB_STEP
from aorta.analysis.run import HOST_TIMER, RankTables
from aorta.timeline.intervals import clip, intersect, measure, merge
from aorta.timeline.overlap import NS_PER_MS

LEAST_SHARE: Final = 0.02
"""Of the step: what costs less is not named."""
LARGE_SHARE: Final = 0.1
"""Of the step or of a stream's time: idle or waiting for launches from here on."""
MOST: Final = 0.5
READ_RANKS: Final = 8
"""Ranks whose steps are read again; of more ranks the first."""
_THROTTLED: Final = (2, 0.05)
"""Least number of throttled samples of a rank, and their least share."""
_BLOCKS: Final = 0.1
"""Exposed communication that blocks computation for less than this share of it is called not blocking."""
_ALONE: Final = 0.02
"""Share of a group's communication that computation hides, up to which it is called hidden by communication alone."""
_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"

Rule: TypeAlias = Callable[[LabelledRun, DatasetEntry], Iterator[Finding]]


def findings(dataset: LabelledRun, entry: DatasetEntry) -> list[Finding]:
    """Return what the rules find in one run, in the order of `RULES`; empty where no step is used.

    Raises:
        InputError: a record cannot be read again.
    """
    return [finding for rule in RULES for finding in rule(dataset, entry)] if entry.count else []


def add_reasons(dataset: LabelledRun, entry: DatasetEntry) -> None:
    """Add what explains a run to its entry: the times of its ranks, why its stragglers are late, and the findings.

    Raises:
        InputError: a record cannot be read again.
    """
    if not entry.count:
        return
    entry.rank_times = rank_times(dataset.run)
    for straggler in known(entry.stragglers) or ():
        straggler.because = because(dataset.run, straggler, entry.rank_times)
    entry.findings = findings(dataset, entry)


def _median(entry: DatasetEntry, name: str) -> float | None:
    described = entry.described.get(name)
    return None if described is None else described.median


def _highest_rank(described: Described) -> int | None:
    """Return the rank with the largest median; None where ranks are not told apart."""
    by_rank = {rank: value for rank, value in (known(described.per_rank_median) or {}).items() if value is not None}
    return int(max(by_rank, key=by_rank.__getitem__)) if by_rank else None


def _streams(entry: DatasetEntry) -> dict[tuple[int | None, int | None], list[StreamGapsEntry]]:
    """Return the streams of each device of a trace."""
    traces = known(entry.traces)
    found: dict[tuple[int | None, int | None], list[StreamGapsEntry]] = {}
    for row in () if traces is None else traces.kernels.gaps:
        found.setdefault((row.rank, row.device), []).append(row)
    return found


def collective_on_compute_stream(_dataset: LabelledRun, entry: DatasetEntry) -> Iterator[Finding]:
    """A stream that has most of a device's computation also runs collectives: these never overlap with it (W24)."""
    for (rank, _), rows in _streams(entry).items():
        computing = max(rows, key=lambda row: row.compute_ms)
        total_ms = sum(row.comm_ms for row in rows)
        if not computing.compute_ms or computing.comm_ms < LEAST_SHARE * max(computing.busy_ms, total_ms):
            continue
        yield Finding(
            "collective_on_compute_stream",
            f"rank {rank}: {TEXT.quantity(computing.comm_ms, 'ms')} of {TEXT.quantity(total_ms, 'ms')} of collectives "
            f"run on stream {computing.stream}, the compute stream, and cannot be hidden",
            rank=rank,
            stream=computing.stream,
        )


def serialised_communicator(dataset: LabelledRun, entry: DatasetEntry) -> Iterator[Finding]:
    """All-gathers and reduce-scatters of one group queue behind each other: a communicator runs one at a time."""
    step_ms, exposed_ms = _median(entry, JOB_STEP), _median(entry, "exposed_comm_ms")
    if not step_ms or exposed_ms is None or exposed_ms < LEAST_SHARE * step_ms:
        return
    worst: dict[str, tuple[float, int, int]] = {}
    for rank, tables in dataset.run.ranks.items():
        for group, (queued_ms, step) in _queued_behind_another_kind(tables).items():
            worst[group] = max(worst.get(group, (0.0, rank, step)), (queued_ms, rank, step))
    for group, (queued_ms, rank, step) in worst.items():
        if queued_ms >= LEAST_SHARE * step_ms:
            yield Finding(
                "serialised_communicator",
                f"group {group}: all-gather and reduce-scatter queue behind each other for "
                f"{TEXT.quantity(queued_ms, 'ms')} a step (rank {rank}): one communicator runs one at a time; a "
                "process group for each lets them overlap",
                rank=rank,
                step=step,
                group=group,
            )


def _queued_behind_another_kind(tables: RankTables) -> dict[str, tuple[float, int]]:
    """Return group -> milliseconds a step in which an all-gather waited for a reduce-scatter of its group, or the other
    way round, and the global step with most of it.
    """
    steps, rows = tables.steps, tables.collectives
    kinds = np.array([_KINDS.index(name.kind) if name.kind in _KINDS else -1 for name in rows.names])
    if not len(rows) or not {0, 1} <= set(kinds.tolist()):
        return {}
    step = rows.step
    groups = {name.group: None for name in rows.names}
    group_of = np.array([list(groups).index(name.group) for name in rows.names])
    timed = (rows.issue_ns != NO_TIME) & (rows.start_ns != NO_TIME) & (rows.end_ns != NO_TIME) & steps.used[step]
    found: dict[str, tuple[float, int]] = {}
    used = int(steps.used.sum())
    for number, group in enumerate(groups):
        mine = np.flatnonzero(timed & (kinds[rows.name] >= 0) & (group_of[rows.name] == number))
        mine = mine[np.lexsort((rows.start_ns[mine], step[mine]))]
        before, after = mine[:-1], mine[1:]
        behind = (
            (step[before] == step[after])
            & (kinds[rows.name[before]] != kinds[rows.name[after]])
            & (rows.issue_ns[after] < rows.end_ns[before])
            & (rows.start_ns[after] >= rows.end_ns[before])
        )
        first, last = before[behind], after[behind]
        if len(last):
            queued = rows.end_ns[first] - np.maximum(rows.issue_ns[last], rows.start_ns[first])
            per_step = np.bincount(step[last], queued, minlength=len(steps))
            worst = int(steps.global_step[int(per_step.argmax())])
            found[group] = float(per_step.sum()) / used / NS_PER_MS, worst
    return found


_KINDS: Final = ("allgather", "reducescatter")


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
        yield Finding(
            "exposed_not_blocking",
            f"{TEXT.quantity(exposed_ms, 'ms')} of communication a step is exposed, but computation waits for only "
            f"{TEXT.quantity(stall_ms, 'ms')} of it: hiding it gains little",
            rank=_highest_rank(entry.described["exposed_comm_ms"]),
        )


def hidden_by_another_group(dataset: LabelledRun, _entry: DatasetEntry) -> Iterator[Finding]:
    """Communication of one group runs beside another group's, and computation hides none of it."""
    for rank, tables in list(dataset.run.ranks.items())[:READ_RANKS]:
        if len({name.group for name in tables.collectives.names}) < 2:
            continue
        beside: Counter[tuple[str, str]] = Counter()
        total: Counter[str] = Counter()
        hidden: Counter[str] = Counter()
        worst: dict[str, tuple[int, int]] = {}
        steps_ns = 0
        for step in sampled_steps(tables):
            steps_ns += step.length_ns
            flights: dict[str, list[tuple[int, int]]] = {}
            for start, end, (_, group) in step.collectives:
                flights.setdefault(group, []).append((start, end))
            merged = {group: merge(clip(spans, (0, step.length_ns))) for group, spans in flights.items()}
            for group, spans in merged.items():
                length_ns = measure(spans)
                total[group] += length_ns
                hidden[group] += measure(intersect(spans, step.computing))
                worst[group] = max(worst.get(group, (0, step.global_step)), (length_ns, step.global_step))
            for one, other in permutations(merged, 2):
                beside[one, other] += measure(intersect(merged[one], merged[other]))
        for (one, other), shared_ns in beside.items():
            large = total[one] >= LEAST_SHARE * steps_ns and shared_ns >= MOST * total[one]
            if large and total[other] >= total[one] and hidden[one] <= _ALONE * total[one]:
                yield Finding(
                    "hidden_by_another_group",
                    f"rank {rank}: {TEXT.percent(shared_ns / total[one], 0)} of group {one}'s communication "
                    f"overlaps group {other}'s, and none of it overlaps computation",
                    rank=rank,
                    step=worst[one][1],
                    group=one,
                )


def host_bound_launches(_dataset: LabelledRun, entry: DatasetEntry) -> Iterator[Finding]:
    """The device waits for the host's next launch: by the launches of a trace, or the marks of a record."""
    pace = known(entry.pace)
    if pace is not None and pace.host_bound:
        undecided = entry.described.get(UNDECIDED)
        yield Finding(
            "host_bound_launches",
            f"host-bound: the host is only {TEXT.quantity(pace.host_lead_ms, 'ms')} ahead of the device, which waits "
            "for launches: launch fewer kernels (torch.compile, CUDA graphs)",
            rank=None if undecided is None else _highest_rank(undecided),
        )
    for (rank, _), rows in _streams(entry).items():
        row = max(rows, key=lambda each: each.compute_ms)
        if row.launch_bound_ms is None or not row.compute_ms:
            continue
        share = row.launch_bound_ms / (row.busy_ms + row.gap_ms)
        if share >= LARGE_SHARE:
            yield Finding(
                "host_bound_launches",
                f"rank {rank}, stream {row.stream}: {TEXT.percent(share, 0)} of the time the device waits for the "
                f"host's next launch ({row.launch_bound} gaps, {TEXT.quantity(row.launch_bound_ms, 'ms')}): launch "
                "fewer kernels (torch.compile, CUDA graphs)",
                rank=rank,
                stream=row.stream,
            )


def throttled(_dataset: LabelledRun, entry: DatasetEntry) -> Iterator[Finding]:
    """A device's clock or power was held back in more than a passing sample."""
    for rank, device in entry.devices.ranks.items():
        count, share = _THROTTLED
        if device.throttled_samples < max(count, share * device.samples):
            continue
        clock = device.sclk_mhz
        fell = "" if clock is None else f", clock down to {clock.min:.0f} MHz (median {clock.median:.0f})"
        yield Finding(
            "throttled",
            f"rank {rank} was throttled in {device.throttled_samples} of {device.samples} samples "
            f"({', '.join(device.throttle_reasons)}){fell}",
            rank=int(rank),
        )


def idle_cause(dataset: LabelledRun, entry: DatasetEntry) -> Iterator[Finding]:
    """A tenth of the step or more is idle (or spent on data), most of it in one place: behind a read of the loss, where
    the host waited for the device and launches anew, or before the next batch, which was not ready.
    """
    step_ms = _median(entry, JOB_STEP)
    if not step_ms:
        return
    for rank, tables in list(dataset.run.ranks.items())[:READ_RANKS]:
        data_ms = _data_ms(tables)
        if data_ms >= LARGE_SHARE * step_ms:
            yield Finding(
                "starved_by_data",
                f"rank {rank} waits {TEXT.quantity(data_ms, 'ms')} a step for its next batch: the data loader is too "
                "slow",
                rank=rank,
            )
        if tables.source.timer == HOST_TIMER:
            continue
        places = idle_places(tables)
        edges = max(places, key=places.__getitem__, default=None)
        if edges is None or places[edges] < LARGE_SHARE * step_ms or places[edges] < MOST * sum(places.values()):
            continue
        if edges[0] == "loss_read":
            yield Finding(
                "idle_by_synchronisation",
                f"rank {rank} is idle for {TEXT.quantity(places[edges], 'ms')} a step behind the read of the loss: the "
                "host waited for the device there; read it every few steps",
                rank=rank,
            )


def _data_ms(tables: RankTables) -> float:
    """Return milliseconds a step spent on the next batch in which nothing computed."""
    found, count = 0, 0
    for step in sampled_steps(tables):
        count += 1
        spans = [(start, end) for start, end, (name, _) in step.ranges if name == "data"]
        data = merge(clip(spans, (0, step.length_ns)))
        found += measure(data) - measure(intersect(data, step.computing))
    return found / count / NS_PER_MS if count else 0.0


RULES: Final[tuple[Rule, ...]] = (
    throttled,
    one_connection,
    collective_on_compute_stream,
    serialised_communicator,
    hidden_by_another_group,
    host_bound_launches,
    idle_cause,
    exposed_not_blocking,
)
