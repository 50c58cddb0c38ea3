"""What the host's side of a trace says must have run on a device, and what of it has no row.

Calls launch kernels, copies and graphs, and share a number with the rows they launched; operators, ranges and calls of
a library issue collectives. `reconciled` compares both with the rows of a trace, for every format; what is missing are
gaps (`aorta.read.ledger`). Must not: know a format, or take a row that it lacks for one that did not run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aorta.read.frames import Groups
from aorta.read.ledger import COMM, LANES, WHOLE, Gap, lacking, lost
from aorta.read.traces.consistency import EDGES, by_step, refuse_other_units, skipped, too_fast
from aorta.read.traces.interval_table import (
    LANE_CLASSES,
    NULL,
    IntervalClass,
    Intervals,
    Trace,
    countable,
    look_up,
    overlapping_ns,
    step_of,
)
from aorta.timeline.arrays import Int64
from aorta.timeline.classes import COMPUTE, COPY, computes
from aorta.timeline.overlap import DECIDED

_PEERS: Final = re.compile(r"(?i)memcpy PtoP|peer.?to.?peer|^p2p$")
"""Copies to or from another device."""
_FROM_DEVICES: Final = re.compile(r"(?i)memcpy (?:PtoP|DtoD|DtoH)|device.?to.?(?:device|host)|peer.?to.?peer|^p2p$")
"""Copies that may move a collective which has no row."""
_ISSUED: Final = re.compile("(?i)[nr]ccl")
"""Kernels that operators or calls issue which traces show; other libraries launch theirs by themselves."""
_COMPUTE: Final = int(IntervalClass.COMPUTE)
NESTED: Final = 2
"""Calls that may share a number: cudaLaunchKernel calls cuLaunchKernel."""


class Launches(IntEnum):
    """What a call launches."""

    NOTHING = 0
    KERNEL = 1
    COPY = 2
    GRAPH = 3
    CAPTURE = 4
    """Begins the capture of a graph: what follows does not run."""
    CAPTURED = 5


_CALLS: Final = tuple(
    (what, re.compile(pattern))
    for what, pattern in (
        (Launches.GRAPH, r"GraphLaunch"),
        (Launches.KERNEL, r"^(?:cuda|cu|hip)\w*Launch\w*Kernel|^hipModuleLaunch|^hipExtLaunch"),
        (Launches.COPY, r"^(?:cuda|cu|hip)Mem(?:cpy|set)\w*Async"),
        (Launches.CAPTURE, r"BeginCapture"),
        (Launches.CAPTURED, r"EndCapture"),
    )
)


def launched_by(call: str) -> Launches:
    """Return what a call of CUDA or HIP launches, by its name."""
    return next((what for what, pattern in _CALLS if pattern.search(call)), Launches.NOTHING)


def launches_of(name: Int64, names: Sequence[str]) -> Int64:
    """Return what calls launch, by the code of their name in `names`, or `NULL`."""
    return np.array([*map(launched_by, names), Launches.NOTHING], np.int64)[name]


@dataclass(frozen=True)
class Claims:
    """What the host's side of a trace claims.

    Attributes:
        start_ns, link, launches: of each call: when it began, on the clock of the trace, the number that it shares with
            what it launched, and which `Launches` that is.
        call: what is the same for calls of one name.
        sends: whether an operator that issues communication made the call.
        row_link: the number of each row of the trace, `NULL` where it has none.
        lasted_ns: how long each call lasted, `NULL` where that is not known.
        row_graph: the graph of each row, `NULL` where the trace does not say it.
        issued: name -> how many operators, ranges or calls of that name issue communication.
        counted: numbers by which the tool counts all kernels of the process, of each row, `NULL` of others.
        silent: how many of the collectives are of one rank, or of nothing, and so run no kernel.
    """

    start_ns: Int64
    link: Int64
    launches: Int64
    call: NDArray[Any]
    sends: NDArray[np.bool_]
    row_link: Int64
    lasted_ns: Int64
    row_graph: Int64 | None = None
    issued: Mapping[str, int] = field(default_factory=dict)
    counted: Int64 | None = None
    silent: int = 0


def reconciled(trace: Trace, claims: Claims) -> Trace:
    """Return the trace with what its lanes may lack (`gaps`). Where communication lacks rows, it may have run under any
    name that is not known to compute, or that a collective launched.

    Raises:
        InputError: its times are in another unit.
    """
    launching, rows = claims.launches == Launches.KERNEL, trace.intervals
    ran_ns = (rows.end_ns - rows.start_ns)[(rows.device != NULL) & (rows.cls != IntervalClass.COPY)]
    refuse_other_units(trace.path, "launches", claims.lasted_ns[launching], some_short=True)
    refuse_other_units(trace.path, "kernels", ran_ns, some_short=False)
    known = (*_doubled(trace, claims), *_blind(trace, claims), *_crossed(trace, claims), *too_fast(trace))
    trace, claims = _told_apart(trace, replace(claims, launches=_learned(trace, claims)))
    sent, left_out = tuple(_sent(trace, claims)), tuple(skipped(trace, claims.counted))
    missing = _without_row(trace, claims)
    lost_rows = _lost(trace, claims, missing) if missing.any() or (claims.launches == Launches.GRAPH).any() else ()
    return replace(
        trace,
        intervals=_read_both_ways(trace, claims, lacks=bool(sent)),
        gaps=(*trace.gaps, *known, *lost_rows, *sent, *left_out),
        counters={**trace.counters, "kernels_lost": int(missing.sum())},
    )


def _read_both_ways(trace: Trace, claims: Claims, *, lacks: bool) -> Intervals:
    """Return the rows with those that may belong to another account.

    Args:
        lacks: communication lacks rows.
    """
    rows, second = trace.intervals, trace.intervals.second.copy()
    ran = np.flatnonzero((rows.device != NULL) & (rows.stream != NULL) & (rows.cls <= IntervalClass.COMM))
    streams = Groups(rows.device[ran], rows.stream[ran])
    launched = np.bincount(streams.of_row, rows.launch_ns[ran] != NULL, len(streams)) > 0
    strange = ~launched[streams.of_row] if launched.any() else np.zeros(len(ran), bool)
    sends = rows.cls == IntervalClass.COMM
    expected, more = _countable(claims), sends[ran] & (rows.launch_ns[ran] == NULL)
    if sends.sum() - sends[ran[strange]].sum() < (1 - EDGES) * expected:
        strange &= ~sends[ran]  # as many collectives were issued
    elif sends.sum() - more.sum() >= (1 - EDGES) * expected > 0 and more.sum() > EDGES * expected:
        strange |= more  # those that were issued ran without them
    if (rows.launch_ns[ran] != NULL).sum() >= (1 - DECIDED) * (~strange).sum():
        second[ran[strange]] = IntervalClass.UNKNOWN  # another process's, as all others have their launches
    issued = np.isin(claims.row_link, claims.link[claims.sends])
    called = np.isin(claims.row_link, claims.link[claims.launches == Launches.KERNEL])
    if 2 * np.count_nonzero(sends & issued) > np.count_nonzero(sends):
        second[sends & called & ~issued & rows.named(lambda name: _ISSUED.search(name) is not None)] = _COMPUTE
    if lacks:
        second[(rows.cls == _COMPUTE) & (issued | ~rows.named(computes)) & (rows.name != NULL)] = IntervalClass.COMM
    if trace.world_size != 1 and (lacks or len(np.unique(rows.device[rows.device != NULL])) == 1):
        moves = _FROM_DEVICES if lacks else _PEERS  # the other device is another process's
        copied = (rows.cls == IntervalClass.COPY) & rows.named(lambda name: moves.search(name) is not None)
        second[copied] = IntervalClass.COMM
    return replace(rows, second=second)


def _crossed(trace: Trace, claims: Claims) -> Iterator[Gap]:
    """Yield both lanes where operators that issue communication launch kernels of other names, and others those that
    are named after it: names are those of other kernels.
    """
    rows, kernels = trace.intervals, claims.launches == Launches.KERNEL
    issued, others = (np.isin(claims.row_link, claims.link[kernels & by]) for by in (claims.sends, ~claims.sends))
    named = rows.named(lambda name: _ISSUED.search(name) is not None) & (rows.cls != IntervalClass.COPY)
    wrong, unnamed = named & others & ~issued, issued & rows.named(computes)
    if min(wrong.sum(), unnamed.sum()) > EDGES * named.sum():
        why = f"{wrong.sum()} kernels only have names of communication, and {unnamed.sum()} were only issued as it"
        yield from lacking(why, COMPUTE, COMM, seen=False)


def _doubled(trace: Trace, claims: Claims) -> Iterator[Gap]:
    """Yield the lanes in which a launch that is no graph's, and so runs one kernel, ran several at once on a device, or
    one of the same name again, though no other launch lacks its own. All where most calls are there twice.
    """
    linked = (claims.launches > Launches.NOTHING) & np.isin(claims.link, claims.row_link) & (claims.link != NULL)
    twice = Groups(claims.link[linked], np.unique(claims.call[linked], return_inverse=True)[1]).sizes == NESTED
    if 2 * NESTED * np.count_nonzero(twice) > np.count_nonzero(linked):
        why = f"{np.count_nonzero(twice)} pairs of calls have one name and number, so two processes are in one trace"
        yield from lacking(why, *LANES, seen=False)
    kernels = np.flatnonzero((claims.row_link != NULL) & (trace.intervals.cls != IntervalClass.COPY))
    number = np.sort(claims.row_link[kernels])
    if not (shared := number[1:][number[1:] == number[:-1]]).size:
        return
    launched, made = _launches_of_numbers(claims, claims.launches == Launches.KERNEL)
    chosen = kernels[np.isin(claims.row_link[kernels], np.intersect1d(shared, launched))]
    chosen = chosen[np.argsort(trace.intervals.start_ns[chosen], kind="stable")]
    rows = trace.intervals.take(chosen)
    # Rows that repeat another to the nanosecond are counted once (`check_rows`).
    once = np.sort(Groups(rows.start_ns, rows.end_ns, rows.name, claims.row_link[chosen]).first)
    chosen, rows = chosen[once], rows.take(once)
    link = claims.row_link[chosen]
    again = overlapping_ns(rows, rows.device, link) > 0
    edges = Groups(np.tile(link, 2), np.append(rows.end_ns, rows.start_ns))
    piece = np.bincount(edges.of_row[: len(rows)], minlength=len(edges))[edges.of_row[len(rows) :]] > 0
    more = ~piece & (Groups(rows.device, rows.name, link, piece).position >= look_up(link, launched, made))
    again |= more & (np.count_nonzero(more) > made[~np.isin(launched, number)].sum())
    for lane in (COMPUTE, COMM):
        own = rows.cls == LANE_CLASSES[lane]
        if (own & again).any():
            why = "{count} kernels are of launches that ran another, so rows are repeated"
            weight, ran = np.ones(len(rows))[own & again], trace.intervals.cls == LANE_CLASSES[lane]
            yield from lost(why, (lane,), rows.step[own & again], weight, by_step(trace.intervals, ran), seen=False)


def _launches_of_numbers(claims: Claims, chosen: NDArray[np.bool_]) -> tuple[Int64, Int64]:
    """Return the numbers of some calls, and how many launches have each. A call inside of another has that one's."""
    link = claims.link[chosen]
    calls = Groups(link, np.unique(claims.call[chosen], return_inverse=True)[1])
    numbers = Groups(link[calls.first])
    return link[calls.first][numbers.first], numbers.reduce(np.maximum, calls.sizes)


def _learned(trace: Trace, claims: Claims) -> Int64:
    """Return what calls launch: all of a name that is not known, most of which have a kernel, launch one. Calls of a
    kind either launch or do not; a majority, as some kernels may be lost and some numbers be shared by chance.
    """
    kernels = claims.row_link[trace.intervals.cls != IntervalClass.COPY]
    other, linked = claims.launches <= Launches.NOTHING, np.isin(claims.link, kernels) & (claims.link != NULL)
    names, name = np.unique(claims.call, return_inverse=True)
    count, have = (np.bincount(name[chosen], minlength=len(names)) for chosen in (other, other & linked))
    return np.where(other & (2 * have >= count)[name], Launches.KERNEL, claims.launches)


def _told_apart(trace: Trace, claims: Claims) -> tuple[Trace, Claims]:
    """Return both without the numbers that several calls share, and so identify none. A call inside of another has the
    number of that.
    """
    number, count = np.unique(claims.link[claims.launches > Launches.NOTHING], return_counts=True)
    shared = np.isin(claims.row_link, number[count > NESTED])
    if not shared.any():
        return trace, claims
    note = f"{trace.path}: {int(shared.sum())} rows have the numbers of several calls: which launched them is not known"
    again = (claims.launches == Launches.KERNEL) & np.isin(claims.link, number[count > NESTED])
    made = int(_launches_of_numbers(claims, again)[1].sum())
    ran = int((shared & (trace.intervals.cls != IntervalClass.COPY)).sum())
    if ran < (1 - DECIDED) * made:
        why = f"{made} launches share numbers with others, and only {ran} kernels have these"
        trace = replace(trace, gaps=(*trace.gaps, *lacking(why, COMPUTE, COMM)))
    table = replace(trace.intervals, launch_ns=np.where(shared, NULL, trace.intervals.launch_ns))
    of_shared = np.isin(claims.link, number[count > NESTED])
    launches = np.where(of_shared, Launches.NOTHING, claims.launches)
    claims = replace(claims, row_link=np.where(shared, NULL, claims.row_link), launches=launches)
    return replace(trace, intervals=table, notes=(*trace.notes, note)), claims


def _without_row(trace: Trace, claims: Claims) -> NDArray[np.bool_]:
    """Return which calls launched something that has no row. Where no row of a kernel is linked to a call, none are
    known. Copies are known where one is linked, or where none has a row; HIP runs some as kernels of another number,
    so there all have to be.
    What is launched while a graph is captured does not run.
    """
    what, linked = claims.launches, claims.row_link != NULL
    copied = trace.intervals.cls == IntervalClass.COPY
    known = {Launches.KERNEL, Launches.GRAPH} if linked[~copied].any() or not (~copied).any() else set()
    one_by_one = linked[copied].any() and (
        trace.platform != "rocm" or np.isin(claims.row_link[copied], claims.link).all()
    )
    known |= {Launches.COPY} if one_by_one or (linked.any() and not copied.any()) else set()
    launched = np.zeros(len(Launches), bool)
    launched[[*known]] = True
    missing: NDArray[np.bool_] = launched[np.maximum(what, 0)] & ~np.isin(claims.link, claims.row_link)
    if missing.any() and (what == Launches.CAPTURE).any():
        order = np.argsort(claims.start_ns, kind="stable")
        steps = np.select([what == Launches.CAPTURE, what == Launches.CAPTURED], [1, -1], 0)[order]
        missing[order[np.cumsum(steps) > 0]] = False
    return missing & ~_ran_with_others(trace, claims, missing) if missing.any() else missing


def _ran_with_others(trace: Trace, claims: Claims, missing: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return as many of the launches of a step that have no row as it has kernels with the number of another launch:
    one launch runs one kernel, so these are theirs (ROCm may give several kernels the number of one launch).
    """
    rows, kernels = trace.intervals, claims.launches == Launches.KERNEL
    ran = np.flatnonzero((rows.cls != IntervalClass.COPY) & np.isin(claims.row_link, claims.link[kernels]))
    more = np.delete(ran, Groups(claims.row_link[ran]).first)
    counts = np.unique(step_of(rows.launch_ns[more], trace.windows), return_counts=True)
    candidates = np.flatnonzero(missing & kernels)
    step, theirs = step_of(claims.start_ns[candidates], trace.windows), np.zeros(len(missing), bool)
    theirs[candidates] = Groups(step).position < look_up(step, *counts)
    return theirs


def _lost(trace: Trace, claims: Claims, missing: NDArray[np.bool_]) -> Iterator[Gap]:
    """Yield launches without a row. A launch of unknown purpose may have been communication, unless as many collectives
    ran as were issued.
    """
    rows, what = trace.intervals, claims.launches
    step = step_of(claims.start_ns, trace.windows)
    graphs, sends = what == Launches.GRAPH, claims.sends & (what != Launches.GRAPH)
    plain, copies = (missing & (what == launched) & ~sends for launched in (Launches.KERNEL, Launches.COPY))
    # As many collectives ran as were issued, and in this step as many as in any: what it lost did not communicate.
    settled = _countable(claims) > 0 and not _fewer(trace, claims)
    of_comm, counts = np.unique(rows.step[rows.cls == IntervalClass.COMM], return_counts=True)
    of_comm = of_comm[counts >= (1 - EDGES) * counts.max(initial=0)]
    ran_all = settled & np.isin(step, of_comm)
    may_send = plain & ~ran_all & (trace.world_size != 1)
    copied = rows.cls == IntervalClass.COPY
    ran = {COMPUTE: by_step(rows, ~copied), COMM: by_step(rows, rows.cls == IntervalClass.COMM)}
    ran[COPY] = by_step(rows, copied)
    rows_of_graphs, short = _replayed(claims, graphs & ~missing, rows.name, step)
    weight = np.where(graphs, rows_of_graphs, 1.0)
    weight[short >= 0] = short[short >= 0]
    both = (COMPUTE, COMM)
    kinds: tuple[tuple[NDArray[np.bool_], tuple[str, ...], str, str], ...] = (
        (plain, (COMPUTE,), COMPUTE, "{count} launches have no kernel in the trace"),
        (may_send, (COMM,), COMPUTE, "{count} launches have no kernel in the trace"),
        (missing & sends & ~ran_all, (COMM,), COMM, "{count} launches of communication have no kernel in the trace"),
        (copies, (COPY,), COPY, "{count} calls that copy have no copy in the trace"),
        (missing & graphs, both, COMPUTE, "{count} launches of graphs have no kernel in the trace"),
        (short > 0, both, COMPUTE, "{count} launches of graphs have fewer kernels in the trace than the graph"),
    )
    for chosen, lanes, beside, why in kinds:
        if chosen.any():
            yield from lost(why, lanes, step[chosen], weight[chosen], ran[beside])
    linked = claims.row_link != NULL
    without_call = linked & ~np.isin(claims.row_link, claims.link) & (rows.cls != IntervalClass.COPY)
    if missing.sum() > DECIDED * max(len(what), 1) and without_call.sum() > DECIDED * linked.sum():
        counted = f"{int(missing.sum())} launches have no row and {int(without_call.sum())} rows no launch in the trace"
        yield from lacking(f"{counted}, so some have neither", *both)


def _replayed(claims: Claims, replays: NDArray[np.bool_], name: NDArray[np.int32], step: Int64) -> tuple[float, Int64]:
    """Return how many rows a launch of a graph has on average, and of each call how many rows its graph has more in
    another launch, -1 where that is not known. Where a trace does not tell graphs apart, launches are of one graph that
    stand at the same place of their steps (of each call: `step`), and whose rows are all among those of the longest.
    """
    short = np.full(len(claims.link), NULL, np.int64)
    if not replays.any():
        return max(len(claims.row_link), 1), short
    in_graph = np.flatnonzero(np.isin(claims.row_link, claims.link[replays]))
    launches = Groups(claims.row_link[in_graph])
    link, count = claims.row_link[in_graph][launches.first], launches.sizes
    row_graph = claims.row_graph
    graph = np.zeros(len(link), np.int64) if row_graph is None else row_graph[in_graph][launches.first]
    numbered = row_graph is not None and (graph != NULL).any()
    if not numbered:
        replayed = np.flatnonzero(replays)[np.argsort(claims.start_ns[replays], kind="stable")]
        of_step = Groups(step[replayed])
        if len(of_step) > 1 and np.ptp(of_step.sizes) == 0:
            graph = look_up(link, claims.link[replayed], of_step.position)
    ran = [Counter(name[in_graph[own]].tolist()) for own in launches.rows] if not numbered else []
    fewer = np.full(len(launches), NULL, np.int64)
    for own in (np.flatnonzero(graph == identifier) for identifier in np.unique(graph[graph != NULL])):
        longest = own[np.argmax(count[own])]
        same = own[[numbered or ran[index] <= ran[longest] for index in own]]
        fewer[same] = count[longest] - count[same]
    short[replays] = look_up(claims.link[replays], link, fewer)
    return max(len(in_graph) / int(replays.sum()), 1), short


def _countable(claims: Claims) -> int:
    """Return how many collectives must have run, by the most complete of the accounts (`c10d::`, ...), one of which are
    the labels of all backends (`nccl:`, `gloo:`). Sends and receives, and what is coalesced, may share a kernel.
    """
    if any("coalesced" in name for name in claims.issued):
        return 0
    accounts: Counter[str] = Counter()
    for name, count in claims.issued.items():
        if countable(name):
            accounts["" if re.match(r"\w+:(?!:)", name) else re.split(r"[:A-Z]", name, maxsplit=1)[0]] += count
    return max(max(accounts.values(), default=0) - claims.silent, 0)


def _fewer(trace: Trace, claims: Claims) -> bool:
    """Return whether more collectives were issued than there are rows of communication, or that may be."""
    rows = trace.intervals
    may = (rows.cls == IntervalClass.COMM) | (rows.second == IntervalClass.COMM)
    return int(may.sum()) < (1 - EDGES) * _countable(claims)


def _sent(trace: Trace, claims: Claims) -> Iterator[Gap]:
    """Yield communication that was issued, or must have been in a job of several ranks, and has no row."""
    rows = int((trace.intervals.cls == IntervalClass.COMM).sum())
    if trace.world_size == 1:
        return
    may = (trace.intervals.second == IntervalClass.COMM).any()
    if not rows and claims.issued and not (may and _countable(claims) and not _fewer(trace, claims)):
        most = max(claims.issued, key=claims.issued.__getitem__)
        total = sum(claims.issued.values())
        why = f"{total} operators or ranges issue communication (most: {most}), and no row of it is known"
        yield from lacking(why, COMM, seen=False)
    elif not rows and trace.world_size and not may:
        yield from lacking(
            f"the job has {trace.world_size} ranks, and no row of communication is known", COMM, seen=False
        )
    elif _fewer(trace, claims):
        issued = _countable(claims)
        yield from lacking(f"{issued} collectives were issued, and only {rows} rows of communication are known", COMM)


def _blind(trace: Trace, claims: Claims) -> Iterator[Gap]:
    """Yield the windows in which nothing ran that computes, and no call tells that nothing was launched."""
    rows = trace.intervals
    computing = set(np.unique(rows.step[rows.cls == IntervalClass.COMPUTE]).tolist())
    blind = [step for step in trace.windows.step.tolist() if step not in computing]
    called = set(step_of(claims.start_ns, trace.windows).tolist()) if blind else set()
    blind = [step for step in blind if step not in called]
    nothing = not computing and (not len(claims.link) or len(trace.windows) > 0)
    if nothing and len(claims.link):
        yield from lacking("no row of computation is known, though steps are marked", COMPUTE, seen=False)
    why = "no kernel or operator that computes was recorded in this window, nor any call, so it was not observed"
    yield from (Gap(COMPUTE, why, step, seen=False) for step in blind)
    # Of a device without any calls the steps say nothing: it may lag behind them.
    if nothing or (blind and (len(claims.link) or (rows.device == NULL).all())):
        yield from (Gap(lane, why, WHOLE, seen=not nothing) for lane in ((COMPUTE, COPY) if nothing else (COMPUTE,)))
