"""Loads the traces of all ranks as a `Run`, so that matching, reports and pictures treat them like records.

A trace of unknown rank gets a negative number, which belongs to no process group and is reported as no rank. Must not:
guess a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from aorta.analysis.documents.traces import SlowdownEntry, TraceEntries
from aorta.analysis.health import Health
from aorta.analysis.load.collective_costs import CostPart, costs
from aorta.analysis.load.engines import Engine, Local, progress
from aorta.analysis.load.kernel_facts import KernelFacts, entries, largest_first
from aorta.analysis.load.rank_inference import headers_near
from aorta.analysis.load.trace_files import find_units
from aorta.analysis.load.trace_health import TraceFacts, TraceHealth, examine
from aorta.analysis.load.trace_tables import SHOWN_SLOWDOWNS, DeviceTables, read_trace_tables
from aorta.analysis.tables import UNKNOWN, RankTables, Run, Whole, partial_steps
from aorta.errors import InputError


def load_traces(location: str, engine: Engine | None = None, comm_patterns: Sequence[str] = ()) -> Run:
    """Read every trace of a file, directory, glob or URL, one process per file.

    Returns:
        A run whose `ranks` hold the busiest device of each trace. Its `extras` hold what a report shows of traces only:
        each device measured as one window, costs of collectives, kernels and their slowdown.

    Raises:
        InputError: nothing there can be read.
    """
    units, left_out = find_units(location, comm_patterns, headers_near(location))
    found: list[_Found] = []
    facts: list[TraceFacts] = []
    parts: list[CostPart] = []
    slow: list[SlowdownEntry] = []
    slow_left_out = 0
    kernels: list[KernelFacts] = []
    with progress(len(units), f"reading {location}") as tick:
        for unit, result in enumerate((engine or Local()).map(read_trace_tables, units)):
            tick()
            if isinstance(result, InputError):
                if len(units) == 1:
                    raise result
                left_out.append(str(result))
                continue
            facts += result.facts
            parts += result.parts
            slow += result.slowdowns
            kernels += result.kernels
            slow_left_out += result.slowdowns_left_out
            found += [_Found(unit, device) for device in result.devices]
    if not found:
        raise InputError(f"{location}: none of its {len(units)} trace(s) can be read:\n  " + "\n  ".join(left_out))
    numbered, chosen, said = _numbers(found)
    health = examine(facts, left_out, measured=numbered)
    world = health.world_size if health.world_size is not None else sum(number >= 0 for number in numbered)
    if health.world_size is None:
        said.append("no trace says how many ranks there were: the world size is the number of ranks read")
    if slow_left_out:
        said.append(f"slowdowns: the first {SHOWN_SLOWDOWNS} kernels of each trace are kept, {slow_left_out} left out")
    ranks: dict[int, RankTables] = {}
    wholes: dict[int, Whole] = {}
    for place in sorted(range(len(found)), key=lambda place: (numbered[place] < 0, abs(numbered[place]))):
        number, device = numbered[place], found[place].device
        if place in chosen:
            ranks[number] = _as_rank(device.tables, number, world)
        wholes[number] = device.whole
    return Run(
        location, ranks, None, _health(ranks, health, left_out, said, world), _extras(wholes, parts, slow, kernels)
    )


def _extras(
    wholes: Mapping[int, Whole],
    parts: Sequence[CostPart],
    slow: Sequence[SlowdownEntry],
    kernels: Sequence[KernelFacts],
) -> dict[str, Any]:
    return {
        "traces": TraceEntries(
            whole={
                str(number): {
                    "start_ns": whole.window[0],
                    "end_ns": whole.window[1],
                    "metrics": dict(whole.metrics),
                    "null_reasons": dict(whole.reasons),
                }
                for number, whole in wholes.items()
            },
            costs=[msgspec.to_builtins(cost, str_keys=True) for cost in costs(parts)],
            slowdowns=sorted(slow, key=largest_first),
            kernels=entries(kernels),
        )
    }


@dataclass(frozen=True)
class _Found:
    """A device, and the unit it was read from."""

    unit: int
    device: DeviceTables


def _numbers(found: Sequence[_Found]) -> tuple[list[int], set[int], list[str]]:
    """Number the devices. The first trace of a rank gets the rank's number, all others a negative one.

    Returns:
        The number of each device; the indices of those that become ranks of the run (the busiest of each trace, so that
        a rank's steps count once); and notes.
    """
    busiest: dict[tuple[int, int], int] = {}
    for place, each in enumerate(found):
        best = busiest.setdefault((each.unit, each.device.trace), place)
        if each.device.busy_ns > found[best].device.busy_ns:
            busiest[each.unit, each.device.trace] = place
    chosen = set(busiest.values())
    numbers = [UNKNOWN] * len(found)
    said: list[str] = []
    taken: set[int] = set()
    next_number = -1
    for place, each in enumerate(found):
        device, source = each.device, each.device.tables.source
        if place in chosen and source.rank != UNKNOWN and source.rank not in taken:
            numbers[place] = source.rank
            taken.add(source.rank)
            continue
        numbers[place] = next_number
        who = f"rank {source.rank}" if source.rank != UNKNOWN else "unknown rank"
        where = f"device {device.device}" if device.device != UNKNOWN else "its one device"
        what = (
            f"given as rank {next_number}: its rank is unknown"
            if place in chosen
            else f"not the busiest of its trace: {next_number} in traces.whole, and in no step"
        )
        said.append(f"{source.path}: {who}, {where} is {what}")
        next_number -= 1
    return numbers, chosen, said


def _as_rank(tables: RankTables, number: int, world_size: int) -> RankTables:
    # Groups belong to a rank; a number that stands for an unknown rank has none.
    groups = tables.source.groups if number >= 0 else {}
    return replace(tables, source=replace(tables.source, rank=number, world_size=world_size, groups=groups))


def _health(
    ranks: Mapping[int, RankTables],
    traces: TraceHealth,
    left_out: Sequence[str],
    said: Sequence[str],
    world_size: int,
) -> Health:
    known = {number: tables for number, tables in ranks.items() if number >= 0}
    return Health(
        world_size=world_size,
        ranks_read=tuple(known),
        ranks_missing=traces.ranks_missing or (),
        files_left_out=tuple(left_out),
        problems=(),
        endings={},
        attempt=None,
        partial_steps=partial_steps(known.values()),
        uncovered_steps={},
        coverage_reasons={},
        instrument_modes=tuple(sorted({tables.source.instrument_mode for tables in ranks.values()})),
        fabric=None,
        held=None,
        manifest_problem=None,
        traces={"numbering": list(said), "traces": traces.as_json()},
        trace_notes=(*traces.notes(), *said),
    )
