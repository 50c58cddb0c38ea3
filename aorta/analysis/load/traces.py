"""Loads the traces of all ranks as a `Run`, so that matching, reports and pictures treat them like records.

A trace of unknown rank gets a negative number, which belongs to no process group and is reported as no rank. Must not:
guess a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from aorta.analysis.documents.dataset import TraceEntries
from aorta.analysis.frames import UNKNOWN
from aorta.analysis.health import Health
from aorta.analysis.join import join
from aorta.analysis.load.collective_costs import costs
from aorta.analysis.load.engines import Engine, Local, progress
from aorta.analysis.load.kernels import entries, largest_first
from aorta.analysis.load.rank_inference import headers_near
from aorta.analysis.load.trace_files import find_units
from aorta.analysis.load.trace_health import examine
from aorta.analysis.load.trace_tables import (
    SHOWN_SLOWDOWNS,
    DeviceTables,
    TraceTables,
    join_devices,
    read_trace_tables,
    windows_of_processes,
    without_copies,
)
from aorta.analysis.run import Run, partial_steps
from aorta.command_line import name_ranks
from aorta.errors import InputError


def load_traces(location: str, engine: Engine | None = None, comm_patterns: Sequence[str] = ()) -> Run:
    """Read every trace of a file, directory, glob or URL. Files of a rank with other steps are windows of one process.

    Returns:
        A run whose `ranks` hold the busiest device of each trace. Its `traces` are what a report shows of traces only:
        each device measured as one window, costs of collectives, kernels and their slowdown.

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
    traces, copies = without_copies(traces)
    left_out += copies
    windows_of = windows_of_processes(traces)
    _refuse_several_jobs(location, windows_of)
    processes = [join_devices(windows) for windows in windows_of]
    devices = [device for process in processes for device in process]
    if not devices:
        left_out += [f"{trace.facts.path}: no row of it has a known class and a length" for trace in traces]
        raise InputError(f"{location}: none of its {len(units)} trace(s) can be read:\n  " + "\n  ".join(left_out))
    numbered, chosen, numbering = _numbers(processes)
    claimed = [process[0].source.rank for process in processes if process]
    examined = examine([trace.facts for trace in traces], left_out, measured=numbered, claimed=claimed)
    world = examined.world_size
    if world is None:
        world = sum(number >= 0 for number in numbered)
        numbering.append("no trace says how many ranks there were: the world size is the number of ranks read")
    if slow_left_out := sum(trace.slowdowns_left_out for trace in traces):
        numbering.append(
            f"slowdowns: the first {SHOWN_SLOWDOWNS} kernels of each trace are kept, {slow_left_out} left out"
        )
    ordered = sorted(range(len(devices)), key=lambda index: (numbered[index] < 0, abs(numbered[index])))
    ranks = {numbered[at]: devices[at].as_rank(numbered[at], world) for at in ordered if at in chosen}
    parts = [  # each trace of unknown rank is a rank of its own
        replace(part, rank=UNKNOWN - at) if part.rank == UNKNOWN else part
        for at, trace in enumerate(traces)
        for part in trace.parts
    ]
    shown = TraceEntries(
        whole={str(numbered[at]): devices[at].whole for at in ordered},
        costs=[msgspec.to_builtins(cost, str_keys=True) for cost in costs(parts)],
        slowdowns=sorted((row for trace in traces for row in trace.slowdowns), key=largest_first),
        kernels=entries(trace.kernels for trace in traces),
    )
    known = {number: tables for number, tables in ranks.items() if number >= 0}
    health = Health(
        world_size=world,
        ranks_read=tuple(known),
        ranks_missing=examined.ranks_missing or (),
        files_left_out=tuple(left_out),
        partial_steps=partial_steps(known.values()),
        instrument_modes=tuple(sorted({tables.source.instrument_mode for tables in ranks.values()})),
        traces={"numbering": numbering, "traces": examined.document},
        trace_notes=(*examined.notes, *numbering),
    )
    return Run(location, join(ranks.values(), len(ranks)), None, health, shown)


def _refuse_several_jobs(location: str, processes: Sequence[Sequence[TraceTables]]) -> None:
    """Check that the folders below a location hold one job: no rank begins in two of them.

    Raises:
        InputError: they hold several; with the list.
    """
    ranks_in: dict[str, set[int]] = {}
    for facts in (windows[0].facts for windows in processes):
        ranks_in.setdefault(facts.path.rpartition("/")[0], set()).update({facts.rank} - {UNKNOWN})
    if max(Counter(rank for ranks in ranks_in.values() for rank in ranks).values(), default=0) > 1:
        lines = [f"  {folder}: {name_ranks(sorted(ranks))}\n" for folder, ranks in ranks_in.items() if ranks]
        raise InputError(
            f"NOT COMPARABLE: the traces in {location} are of several jobs:\n{''.join(lines)}"
            "Report on the folder of one job, or compare two (aorta report A B)"
        )


def _numbers(processes: Sequence[Sequence[DeviceTables]]) -> tuple[list[int], set[int], list[str]]:
    """Number the devices. The first process of a rank gets the rank's number, all others a negative one.

    Returns:
        The number of each device; the indices of those that become ranks of the run (the busiest of a process, so that
        a rank's steps count once); and notes.
    """
    numbers: list[int] = []
    chosen: set[int] = set()
    notes: list[str] = []
    strangers = 0
    for process in processes:
        busiest = max(process, key=lambda device: device.busy_ns, default=None)
        for device in process:
            source = device.source
            if device is busiest:
                chosen.add(len(numbers))
                if source.rank != UNKNOWN and source.rank not in numbers:
                    numbers.append(source.rank)
                    continue
            strangers += 1
            numbers.append(-strangers)
            who = f"rank {source.rank}" if source.rank != UNKNOWN else "unknown rank"
            where = f"device {device.device}" if device.device != UNKNOWN else "its one device"
            what = (
                f"given as rank {-strangers}: its rank is unknown"
                if device is busiest
                else f"not the busiest of its trace: {-strangers} in traces.whole, and in no step"
            )
            notes.append(f"{source.path}: {who}, {where} is {what}")
    return numbers, chosen, notes
