"""Loads the traces of all ranks as a `Run`, so that matching, reports and pictures treat them like records.

Traces of one rank may be windows of one process, whose steps are put under one another. A trace of unknown rank gets a
negative number, which belongs to no process group and is reported as no rank. Must not: guess a rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from msgspec import structs

from aorta.command_line import name_ranks
from aorta.documents.dataset import Health
from aorta.documents.kernels import KernelTotalEntry, TraceEntries
from aorta.documents.metrics import RATIO_PARTS
from aorta.errors import InputError
from aorta.read.engines import Engine, Local, progress
from aorta.read.frames import UNKNOWN, CollectiveName, Collectives, declared
from aorta.read.join import NO_ROWS, join, join_steps
from aorta.read.ledger import COMM, LANES, WHOLE, Gap, lacking, notes_of, nulled, resting_on
from aorta.read.run import NO_STEPS, Run, gaps_of, partial_steps
from aorta.read.traces.consistency import EDGES, ORDER_NS
from aorta.read.traces.files import find_units
from aorta.read.traces.health import examine
from aorta.read.traces.kernels import entries, largest_first
from aorta.read.traces.reader import RANK_IN_PATH, headers_near, ranks_in_path
from aorta.read.traces.tables import DeviceTables, TraceDetails, TraceTables, read_trace_tables
from aorta.timeline.classes import COMPUTE, UNKNOWN_KIND, computes
from aorta.timeline.overlap import DECIDED


def load_traces(location: str, engine: Engine | None = None, comm_patterns: Sequence[str] = ()) -> Run:
    """Read every trace of a file, directory, glob or URL. Files of a rank with other steps are windows of one process.

    Returns:
        A run whose `ranks` hold the busiest device of each trace. Its `traces` are what a report shows of traces only:
        each device measured as one window, kernels and their slowdown.

    Raises:
        InputError: nothing there can be read.
    """
    units, left_out = find_units(location, comm_patterns, headers_near(location))
    traces: list[TraceTables] = []
    with progress(len(units), f"reading {location}") as tick:
        for result in (engine or Local()).map(read_trace_tables, units):
            tick()
            if isinstance(result, InputError):
                if len(units) == 1:
                    raise result
                left_out.append(str(result))
            else:
                traces += result
    traces, copies = _without_copies(traces)
    left_out += copies
    traces, local = _without_local_ranks(traces)
    windows_of = _windows_of_processes(traces)
    _refuse_several_jobs(location, windows_of)
    processes = [_join_devices(windows) for windows in windows_of]
    devices = [device for process in processes for device in process]
    if not devices:
        left_out += [f"{trace.facts.path}: no classified kernel with a duration" for trace in traces]
        raise InputError(f"{location}: none of its {len(units)} trace(s) can be read:\n  " + "\n  ".join(left_out))
    numbered, chosen, numbering = _numbers(processes)
    marked = {own[0].facts.path for own in windows_of if own[0].facts.steps}
    claimed = [process[0].tables.source.rank for process in processes if process]
    entries_of = [trace.facts for trace in traces]
    world, missing, seen = examine(entries_of, measured=numbered, claimed=claimed)
    known_ranks = sum(number >= 0 for number in numbered)
    lasting = {
        device.tables.source.path: float(np.median(device.tables.steps.length_ns)) / 1e6
        for device in devices
        if device.tables.source.path in marked
    }
    if odd := _odd(lasting):
        listed = "".join(f"  {path}: {lasting[path]:.4g} ms\n" for path in odd)
        raise InputError(
            f"NOT COMPARABLE: steps in {location} last {_APART} times as long in some traces as in others:\n{listed}"
            "Their times are in another unit, or of other work: convert them, or leave these traces out"
        )
    devices = _held_against_others(devices, traces, known_ranks)
    if world is None:
        world = known_ranks
        numbering.append("no trace says how many ranks there were: the world size is the number of ranks read")
    ordered = sorted(zip(numbered, devices, strict=True), key=lambda item: (item[0] < 0, abs(item[0])))
    ranks = {}
    for number, device in ordered:
        if number in chosen:
            tables = device.tables
            # Groups belong to a rank; a number that stands for an unknown rank has none.
            groups = tables.source.groups if number >= 0 else {}
            source = replace(tables.source, rank=number, world_size=world, groups=groups)
            if marked and tables.source.path not in marked:
                why = "the trace marks no steps, as others do: its whole is no step"
                unlike = tuple(Gap(lane, why, WHOLE, seen=False) for lane in LANES)
                tables = replace(tables, steps=NO_STEPS, collectives=NO_ROWS, gaps=(*tables.gaps, *unlike))
            ranks[number] = replace(tables, source=source)
    shown = TraceEntries(
        whole={str(number): device.whole for number, device in ordered},
        slowdowns=sorted((row for trace in traces for row in trace.kernels.slowdowns.rows), key=largest_first),
        kernels=entries(trace.kernels for trace in traces),
    )
    known = {number: tables for number, tables in ranks.items() if number >= 0}
    frames = join(ranks.values(), len(ranks))
    health = Health(
        ranks_expected=world or None,
        ranks_read=[*known],
        ranks_missing=missing,
        files_left_out=left_out,
        steps_not_on_all_ranks=partial_steps([tables for tables in known.values() if len(tables.steps)]),
        instrument_modes=sorted({tables.source.instrument_mode for tables in ranks.values()}),
        traces=entries_of,
        gaps=gaps_of(frames.ranks),
    )
    health.notes = notes_of(health, [*seen, *local, *numbering])
    return Run(**vars(frames), location=location, manifest=None, health=health, traces=shown)


_APART: Final = 300
"""Units are a thousand apart; kernels of one name, and steps of one job, are not. A choice."""
_UNPAIRED: Final = frozenset({UNKNOWN_KIND, "send", "recv"})
_PACE: Final = "its collectives end closer to each other or farther apart than on other ranks, so its clock is wrong"
_NODE: Final = re.compile(
    r"(?<![a-z])(?:node|host(?:name)?|worker|machine|server|compute|dgx|hgx|ip)[_-]?(\d[\d_-]*|[a-z](?![a-z]))",
    re.IGNORECASE,
)


def _without_local_ranks(traces: Sequence[TraceTables]) -> tuple[list[TraceTables], list[str]]:
    """Return the traces with unknown ranks where their names number the ranks of each node anew, and a note."""
    nodes: dict[int, set[tuple[str, ...]]] = {}
    named = []
    for trace in traces:
        own = trace.rank in ranks_in_path(trace.facts.path)
        named.append(tuple(_NODE.findall(trace.facts.path)) if own else ())
    for trace, node in zip(traces, named, strict=True):
        nodes.setdefault(trace.rank, set()).update({node} if node else ())
    if max(map(len, nodes.values()), default=0) < 2:
        return [*traces], []
    note = (
        "names number the ranks of each node anew (node0 and node1 both have a rank 0), so ranks are unknown: name "
        "files by the rank in the job, or give the folder of the records"
    )
    return [_unranked(trace) if node else trace for trace, node in zip(traces, named, strict=True)], [note]


def _held_against_others(
    devices: Sequence[DeviceTables], traces: Sequence[TraceTables], ranks: int
) -> list[DeviceTables]:
    """Return the devices with as unknown what the other ranks make doubtful: no communication in a job of several, and
    where kernels have names that are not known to compute, computation too; and rows of which most other ranks have
    `_APART` times longer or shorter ones.
    """
    totals = [row for trace in traces for row in trace.kernels.totals.rows]
    lanes = (COMPUTE, COMM) if any(row.cls == "compute" and not computes(row.name) for row in totals) else (COMM,)
    silent = f"{ranks} ranks were read, and no row of communication of this one is known"
    unlike = {trace for row in _alike(totals).values() for trace in _odd(row)}
    differ = _unlike_peers(totals, devices, {trace.facts.path for trace in traces if trace.facts.steps})
    changed = []
    for device in devices:
        key = device.tables.source.rank, device.device
        if key in unlike:
            why = f"kernels last {_APART} times as long or short as on other ranks, so their unit is another"
            device = _unknown(device, LANES, why)
        elif ranks > max(device.tables.source.world_size, 1) and device.whole["metrics"].get("comm_ms") == 0:
            device = _unknown(device, lanes, silent)
        elif key in differ:
            device = _unknown(device, LANES, differ[key], "window_ms")
        changed.append(device)
    return changed


def _alike(totals: Sequence[KernelTotalEntry]) -> dict[str, dict[tuple[int, int], float]]:
    """Return name -> mean length on each device. Communication waits for other ranks, so it may differ."""
    means: dict[str, dict[tuple[int, int], float]] = {}
    for row in totals:
        if row.cls != "comm" and row.rank is not None:
            device = UNKNOWN if row.device is None else row.device
            means.setdefault(row.name, {})[row.rank, device] = row.mean_ms
    return means


def _unlike_peers(
    totals: Sequence[KernelTotalEntry], devices: Sequence[DeviceTables], marked: Collection[str]
) -> dict[tuple[int, int], str]:
    """Return why devices are of another program, or lack rows or the time of others: ranks of one job run as many
    kernels for each collective, and what they communicate ends on all at once. Of two that differ the one is right that
    lacks nothing that the other has. With sends and receives, of which ranks have unlike many, that is not known.
    """
    if _UNPAIRED & {name.kind for device in devices for name in device.tables.collectives.names}:
        return {}
    counts: dict[tuple[int, int], Counter[str]] = {}
    names: dict[tuple[int, int], Counter[tuple[str, str]]] = {}
    for row in totals:
        if row.rank is not None and row.cls in (COMPUTE, COMM):
            key = row.rank, UNKNOWN if row.device is None else row.device
            counts.setdefault(key, Counter())[row.cls] += row.count
            names.setdefault(key, Counter())[row.cls, row.name] += row.count
    sent = {key: own for key, own in counts.items() if own["compute"] and own["comm"]}
    odd = {*_disagreeing({key: own["compute"] / own["comm"] for key, own in sent.items()}, EDGES)}
    most = {
        (device.tables.source.rank, device.device): int(np.bincount(device.tables.collectives.step).max(initial=0))
        for device in devices
        if device.tables.source.path in marked
    }
    odd |= sent.keys() & _disagreeing({key: most[key] for key in sent.keys() & most.keys()}, EDGES)
    lack = [key for key in odd if not all(_has_all(names[key], names[other]) for other in sent)]
    why = "other ranks run more or fewer kernels for each collective: rows were lost, or it is of another job"
    return dict.fromkeys(_of_another_pace(devices), _PACE) | dict.fromkeys(lack, why)


def _has_all(own: Counter[tuple[str, str]], other: Counter[tuple[str, str]]) -> bool:
    """Return whether a rank has what another has, or less of some names only, of so many others as much that no loss
    left them out: experts get unlike many tokens.
    """
    for lane in (COMPUTE, COMM):
        fewer = [name for name in other if name[0] == lane and own[name] < other[name]]
        steady = sum(count for name, count in own.items() if name[0] == lane and count >= other[name])
        kept = sum(own[name] for name in fewer) / max(sum(other[name] for name in fewer), 1)
        if fewer and (not all(own[name] for name in fewer) or kept**steady >= DECIDED):
            return False
    return True


def _disagreeing(values: Mapping[Any, float], tolerance: float, least: float = 0) -> list[Any]:
    """Return the keys of values that most of the others are not near. `least`: so far apart they always are near."""
    near = {
        key: sum(abs(own - other) <= max(tolerance * max(own, other), least) for other in values.values())
        for key, own in values.items()
    }
    return [key for key, count in near.items() if 2 * count <= len(values)]


def _of_another_pace(devices: Sequence[DeviceTables]) -> list[tuple[int, int]]:
    """Return the devices whose collectives do not end as far apart as those of the others, in the steps that all have,
    or about as far in any: their clocks differ. Threads of a host end when they are scheduled.
    """
    known = [device for device in devices if UNKNOWN not in (device.tables.source.rank, device.device)]
    sends = [device for device in known if len(device.tables.collectives)]
    steps_of = [set(device.tables.steps.global_step.tolist()) for device in sends]
    common = set.intersection(*steps_of) if sends else set[int]()
    ends: dict[tuple[int, int], Any] = {}
    for device in sends:
        steps, rows = device.tables.steps, device.tables.collectives
        shared = np.isin(steps.global_step[rows.step], [*common]) if common else slice(None)
        ends[device.tables.source.rank, device.device] = np.sort((steps.start_mono_ns[rows.step] + rows.end_ns)[shared])
    apart, most = {}, max(map(len, ends.values()), default=0)
    for key, own in ends.items():
        if (part := len(own) // 3) and len(own) >= (1 - EDGES) * most:
            apart[key] = float(np.median(own[-part:]) - np.median(own[:part])) / (len(own) - part)
    return _disagreeing(apart, DECIDED if common else EDGES, ORDER_NS / max(most, 1))


def _odd(values: Mapping[Any, float]) -> list[Any]:
    """Return the keys of values `_APART` times as large as the least, or the other way, that most do not agree with."""
    least, most = min(values.values(), default=0), max(values.values(), default=0)
    if most <= _APART * least or not least:
        return []
    near, every = _APART**0.5, [*values.values()]
    agree = {key: sum(own <= near * other <= near**2 * own for other in every) for key, own in values.items()}
    return [key for key, count in agree.items() if 2 * count <= len(values)]


def _unknown(device: DeviceTables, lanes: Sequence[str], why: str, *others: str) -> DeviceTables:
    """Return the device with what rests on some lanes, and other metrics, null."""
    unknown = frozenset(others).union(*map(resting_on, lanes))
    tables, null = device.tables, sorted(unknown & device.whole["metrics"].keys())
    whole = {"metrics": device.whole["metrics"] | dict.fromkeys(null)}
    whole["null_reasons"] = device.whole["null_reasons"] | dict.fromkeys(null, why)
    steps = nulled(tables.steps, np.ones(len(tables.steps), bool), why, unknown)
    gaps = (*tables.gaps, *lacking(why, *lanes, seen=False))
    return replace(device, tables=replace(tables, steps=steps, gaps=gaps), whole=device.whole | whole)


def _unranked(trace: TraceTables) -> TraceTables:
    devices = [
        replace(device, tables=replace(device.tables, source=replace(device.tables.source, rank=UNKNOWN)))
        for device in trace.devices
    ]
    return replace(trace, facts=structs.replace(trace.facts, rank=None), devices=devices)


def _refuse_several_jobs(location: str, processes: Sequence[Sequence[TraceTables]]) -> None:
    """Raise an `InputError` where the folders below a location hold several jobs: a rank begins in two of them."""
    ranks_in: dict[str, set[int]] = {}
    for first in (windows[0] for windows in processes):
        ranks_in.setdefault(first.facts.path.rpartition("/")[0], set()).update({first.rank} - {UNKNOWN})
    if max(Counter(rank for ranks in ranks_in.values() for rank in ranks).values(), default=0) > 1:
        lines = [f"  {folder}: {name_ranks(sorted(ranks))}\n" for folder, ranks in ranks_in.items() if ranks]
        raise InputError(
            f"NOT COMPARABLE: the traces in {location} are of several jobs:\n{''.join(lines)}"
            "Report on the folder of one job, or compare two (aorta report A B). If they are nodes of one job, whose "
            "names number the ranks of each node anew, name files by the rank in the job"
        )


def _numbers(processes: Sequence[Sequence[DeviceTables]]) -> tuple[list[int], set[int], list[str]]:
    """Number the devices.

    The one process of a rank gets the rank's number. All others get a negative one.

    Returns:
        The number of each device; those of the ones that become ranks of the run (the busiest of a process, so that a
        rank's steps count once); and notes.
    """
    numbers: list[int] = []
    chosen: set[int] = set()
    notes: list[str] = []
    strangers = 0
    # A rank that several claim is nobody's: names may number the ranks of each node anew, and processes be of no group.
    claims = Counter(process[0].tables.source.rank for process in processes if process)
    nobody = {UNKNOWN, *(rank for rank, count in claims.items() if count > 1)}
    for process in processes:
        busiest = max(process, key=lambda device: device.busy_ns, default=None)
        for device in process:
            source = device.tables.source
            known = device is busiest and source.rank not in nobody
            strangers += not known
            numbers.append(source.rank if known else -strangers)
            if device is busiest:
                chosen.add(numbers[-1])
            if known:
                continue
            who = f"rank {source.rank}" if source.rank != UNKNOWN else "unknown rank"
            where = f"device {device.device}" if device.device != UNKNOWN else "its one device"
            what = (
                f"given as rank {-strangers}: its rank is unknown"
                if device is busiest
                else f"not the busiest of its trace: {-strangers} in traces.whole, and in no step"
            )
            notes.append(f"{source.path}: {who}, {where} is {what}")
    return numbers, chosen, notes


def _without_copies(traces: Sequence[TraceTables]) -> tuple[list[TraceTables], list[str]]:
    """Return the traces without those that repeat another one (`gzip -k` leaves both files), and a note about each: the
    same clock, rank, steps, and times to the nanosecond.
    """
    kept: dict[tuple[object, ...], TraceTables] = {}
    notes = []
    for trace in traces:
        facts = trace.facts
        steps = [item.tables.steps for item in trace.devices]
        times = [
            (item.global_step.tobytes(), item.start_mono_ns.tobytes(), item.end_mono_ns.tobytes()) for item in steps
        ]
        measured = [(item.device, item.busy_ns, *item.whole["metrics"].values()) for item in trace.devices]
        known = facts.clock != "unknown" or facts.rank is not None
        same = (facts.rank, facts.host, str(times), str(measured)) if known else (id(trace),)
        if same in kept:
            notes.append(f"{facts.path}: the same steps at the same times as {kept[same].facts.path}: a copy")
        else:
            kept[same] = trace
    return list(kept.values()), notes


def _windows_of_processes(traces: Sequence[TraceTables]) -> list[list[TraceTables]]:
    """Group the traces of one rank that are windows of one process: with other steps, one behind the other, or without
    marks of steps at other times of one clock, in one folder. Each group is in the order of its steps.
    """

    def order(trace: TraceTables) -> tuple[object, ...]:
        first = next(iter(trace.devices), None)
        begins = (0, 0) if first is None else (int(first.tables.steps.global_step[0]), first.whole["start_ns"])
        return trace.rank, trace.facts.steps == 0, begins

    groups: list[list[TraceTables]] = []
    last: dict[int, list[TraceTables]] = {}
    for trace in sorted(traces, key=order):
        group = last.get(trace.rank)
        if group is not None and trace.rank != UNKNOWN and _follows(group[-1], trace):
            group.append(trace)
        else:
            last[trace.rank] = [trace]
            groups.append(last[trace.rank])
    return sorted(groups, key=lambda group: min(map(traces.index, group)))


def _follows(before: TraceTables, trace: TraceTables) -> bool:
    """Return whether a trace may be a later window of the same process."""
    same = (before.facts.clock, before.facts.world_size) == (trace.facts.clock, trace.facts.world_size)
    if not before.devices or not trace.devices or not same:
        return False
    if not before.facts.steps and not trace.facts.steps:
        # Their names differ in no more than their last number beside the rank, or a letter.
        folders, _, names = zip(*(facts.path.rpartition("/") for facts in (before.facts, trace.facts)), strict=True)
        alike = {re.sub(r"^[a-z](?=\.)|[ _.(-]*\d+\)?(?=\D*$)", "", RANK_IN_PATH.sub("", name)) for name in names}
        ended = max(device.whole["end_ns"] for device in before.devices)
        one_place = len({*folders}) == len(alike) == 1 and before.facts.host == trace.facts.host
        return one_place and before.facts.clock != "unknown" and ended <= trace.devices[0].whole["start_ns"]
    ended, begun = (part.devices[0].tables.steps.global_step[index] for part, index in ((before, -1), (trace, 0)))
    return bool(before.facts.steps and trace.facts.steps and ended < begun)


def _join_devices(traces: Sequence[TraceTables]) -> list[DeviceTables]:
    """Return the devices of one process, with the steps of all its traces; those without marks are numbered from 0."""
    windows_of: dict[int, list[DeviceTables]] = {}
    for number, trace in enumerate(traces):
        for device in trace.devices:
            if not trace.facts.steps:
                steps = replace(device.tables.steps, global_step=device.tables.steps.global_step + number)
                device = replace(device, tables=replace(device.tables, steps=steps))
            windows_of.setdefault(device.device, []).append(device)
    return [windows[0] if len(windows) == 1 else _joined(windows) for windows in windows_of.values()]


def _joined(parts: Sequence[DeviceTables]) -> DeviceTables:
    segments, rows, names = [], [], list[CollectiveName]()
    steps = join_steps([part.tables.steps for part in parts])
    before = 0
    for part in parts:
        details, own = part.tables.details, part.tables.collectives
        assert isinstance(details, TraceDetails)
        segments.append(details.segments + np.array([before, 0, 0, 0]))
        rows.append(replace(own, step=own.step + before, name=own.name + len(names)))
        names += own.names
        before += len(part.tables.steps)
    columns = {name: [getattr(own, name) for own in rows] for name in declared(Collectives) if name != "backend_end_ns"}
    collectives = Collectives(names=tuple(names), **{name: np.concatenate(parts) for name, parts in columns.items()})
    return replace(
        parts[0],
        tables=replace(
            parts[0].tables,
            steps=steps,
            collectives=collectives,
            details=TraceDetails(np.concatenate(segments), steps.start_mono_ns, steps.end_mono_ns),
            gaps=tuple(gap for part in parts for gap in part.tables.gaps),
        ),
        whole=_whole([part.whole for part in parts]),
        busy_ns=sum(part.busy_ns for part in parts),
    )


def _whole(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the traces of one device measured as one: sums of times, and ratios of the sums."""
    metrics = [part["metrics"] for part in parts]
    reasons = dict(item for part in reversed(parts) for item in part["null_reasons"].items())
    values: dict[str, float | None] = {}
    for name in dict.fromkeys(name for values in metrics for name in values if name not in RATIO_PARTS):
        # A kind of collective that a window lacks took no time in it.
        times = [values.get(name, 0.0) for values in metrics]
        values[name] = None if None in times else sum(times)
    for name, (part, of) in RATIO_PARTS.items():
        if any(name in values for values in metrics):
            above, below = values[part], values[of]
            values[name] = above / below if above is not None and below else None
    return {
        "start_ns": min(part["start_ns"] for part in parts),
        "end_ns": max(part["end_ns"] for part in parts),
        "metrics": values,
        "null_reasons": {name: reasons[name] for name, value in values.items() if value is None and name in reasons},
    }
