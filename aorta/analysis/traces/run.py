"""Traces of all ranks -> a `Run`, as if they were a record: tables, matching, report and pictures are the same.

Enters: a location. Leaves: a `TraceRun`. Must not: guess a rank; a trace that has none gets a negative number, which
belongs to no group and is said to be no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np

from aorta.analysis.readers.columns import Columns, Stored
from aorta.analysis.readers.engines import Engine, Local, progress
from aorta.analysis.readers.health import Health
from aorta.analysis.readers.run_folder import Record, Run
from aorta.analysis.readers.scan import Scan
from aorta.analysis.readers.store import Store
from aorta.analysis.traces.costs import Cost, Part, costs
from aorta.analysis.traces.health import Facts, TraceHealth, examine
from aorta.analysis.traces.placing import headers_near
from aorta.analysis.traces.scanning import SHOWN_SLOWDOWNS, DeviceScan, TraceScan, Whole, scan_unit
from aorta.analysis.traces.slowdown import Slowdown, largest_first
from aorta.analysis.traces.table import NULL
from aorta.analysis.traces.units import find_units
from aorta.errors import InputError
from aorta.telemetry.schema import ActiveSegment, Coverage, Step

_COMPLETED: Final = "completed"


@dataclass(frozen=True)
class ReportHealth(Health):
    """The health of a record's run, with what is only said of traces."""

    traces: TraceHealth = field(kw_only=True)
    said: tuple[str, ...] = field(kw_only=True)

    def notes(self) -> list[str]:
        """Sentences a reader of the results must see, the gravest first."""
        notes = [*self.traces.notes(), *self.said]
        if self.partial_steps:
            notes.append(
                f"{len(self.partial_steps)} step(s) not in all traces, the first: {self.partial_steps[0]}; left out of "
                "job_step_ms"
            )
        return notes

    def as_json(self) -> dict[str, object]:
        """Every fact, in stable order, as plain JSON values."""
        return {**super().as_json(), "numbering": list(self.said), "traces": self.traces.as_json()}


@dataclass(frozen=True)
class TraceRecord(Record):
    """One rank's trace. Its segments stand in the store, from `segments_offset` on."""

    segments_offset: int = field(kw_only=True)
    segment_count: int = field(kw_only=True)

    @property
    def steps(self) -> list[Step]:
        """Every step, with its active segments."""
        numbers = self.columns.integers_of(self.stored, "global_step").tolist()
        return [step for number in numbers if (step := self.step(number)) is not None]

    @property
    def isolated(self) -> list[Step]:
        """A trace has none."""
        return []

    def step(self, global_step: int) -> Step | None:
        """One step: its window and its active segments; the rest of a record's step is not in a trace."""
        stored, columns = self.stored, self.columns
        at = (columns.integers_of(stored, "global_step") == global_step).nonzero()[0]
        if not len(at):
            return None
        start, end = (int(columns.integers_of(stored, name)[at[0]]) for name in ("start_mono_ns", "end_mono_ns"))
        rows = columns.store.read(self.segments_offset, 3 * self.segment_count, np.int64).reshape(-1, 3)
        rows = rows[(rows[:, 0] >= start) & (rows[:, 1] <= end)]
        return Step(
            rank=self.header.rank,
            world_size=self.header.world_size,
            epoch=0,
            step=global_step,
            global_step=global_step,
            warmup=False,
            loss=None,
            lr=None,
            grad_norm=None,
            start_mono_ns=start,
            end_mono_ns=end,
            t_start_ns=start,
            t_end_ns=end,
            per_stream_ms={},
            overlap={},
            utilization={},
            concurrency={},
            coverage=Coverage(0, None, False, "a trace does not count what was issued"),
            active_segments=[ActiveSegment(a - start, b - start, mask) for a, b, mask in rows.tolist()],
            collectives=[],
            compute=[],
            stalls=[],
            aux=[],
        )


@dataclass(frozen=True)
class TraceRun(Run):
    """A run made of traces. `wholes`: each device of each trace as one window, under its number; a trace's busiest
    device has a record under that number too.
    """

    wholes: Mapping[int, Whole] = field(kw_only=True)
    costs: Sequence[Cost] = field(kw_only=True)
    slowdowns: Sequence[Slowdown] = field(kw_only=True)

    def as_json(self) -> dict[str, Any]:
        """What a report says of traces beside what it says of every run."""
        return {
            "whole": {
                str(number): {
                    "start_ns": whole.window[0],
                    "end_ns": whole.window[1],
                    "metrics": dict(whole.metrics),
                    "null_reasons": dict(whole.reasons),
                }
                for number, whole in self.wholes.items()
            },
            "costs": [msgspec.to_builtins(cost, str_keys=True) for cost in self.costs],
            "slowdowns": [msgspec.to_builtins(slowdown) for slowdown in self.slowdowns],
        }


def load_traces(location: str, engine: Engine | None = None, comm_patterns: Sequence[str] = ()) -> TraceRun:
    """Read every trace of a file, directory, glob or URL, one process a file at a time.

    Raises:
        InputError: nothing there can be read.
    """
    units, left_out = find_units(location, comm_patterns, headers_near(location))
    store = Store()
    found: list[_Found] = []
    facts: list[Facts] = []
    parts: list[Part] = []
    slow: list[Slowdown] = []
    slow_left_out = 0
    # The engines map over paths; a unit has what they ask of a path.
    task = cast("Callable[[Path], TraceScan]", scan_unit)
    with progress(len(units), f"reading {location}") as tick:
        for unit, result in enumerate((engine or Local()).map(task, cast("list[Path]", units))):
            tick()
            if isinstance(result, InputError):
                if len(units) == 1:
                    raise result
                left_out.append(str(result))
                continue
            facts += result.facts
            parts += result.parts
            slow += result.slowdowns
            slow_left_out += result.slowdowns_left_out
            for device in result.devices:
                offset = store.append(np.ascontiguousarray(device.segments).tobytes())
                found.append(_Found(unit, replace(device, segments=device.segments[:0]), offset, len(device.segments)))
    if not found:
        raise InputError(f"{location}: none of its {len(units)} trace(s) can be read:\n  " + "\n  ".join(left_out))
    numbered, chosen, said = _numbers(found)
    health = examine(facts, left_out, measured=numbered)
    world = health.world_size if health.world_size is not None else sum(number >= 0 for number in numbered)
    if health.world_size is None:
        said.append("no trace says how many ranks there were: the world size is the number of ranks read")
    if slow_left_out:
        said.append(f"slowdowns: the first {SHOWN_SLOWDOWNS} kernels of each trace are kept, {slow_left_out} left out")
    ranks: dict[int, Stored] = {}
    by_number: dict[int, _Found] = {}
    for place in sorted(range(len(found)), key=lambda place: (numbered[place] < 0, abs(numbered[place]))):
        number, each = numbered[place], found[place]
        if place in chosen:
            ranks[number] = Stored.of(_as_rank(each.device.scan, number, world), store)
        by_number[number] = each
    columns = Columns(store, ranks)
    records: dict[int, Record] = {
        number: TraceRecord(
            stored, columns, segments_offset=by_number[number].offset, segment_count=by_number[number].segments
        )
        for number, stored in ranks.items()
    }
    return TraceRun(
        cast("Any", location),
        records,
        columns,
        None,
        _health(columns, health, left_out, said, world),
        wholes={number: each.device.whole for number, each in by_number.items()},
        costs=costs(parts),
        slowdowns=sorted(slow, key=largest_first),
    )


@dataclass(frozen=True)
class _Found:
    """A device of a unit, and where its segments stand in the store."""

    unit: int
    device: DeviceScan
    offset: int
    segments: int


def _numbers(found: Sequence[_Found]) -> tuple[list[int], set[int], list[str]]:
    """The number of each device, the places of those that make a record (the busiest of each trace: a rank's steps
    count once), and what is to be said. The first trace of a rank has its number; all others get a negative one.
    """
    busiest: dict[tuple[int, int], int] = {}
    for place, each in enumerate(found):
        best = busiest.setdefault((each.unit, each.device.trace), place)
        if each.device.busy_ns > found[best].device.busy_ns:
            busiest[each.unit, each.device.trace] = place
    chosen = set(busiest.values())
    numbers = [NULL] * len(found)
    said: list[str] = []
    taken: set[int] = set()
    next_number = -1
    for place, each in enumerate(found):
        device = each.device
        if place in chosen and device.rank != NULL and device.rank not in taken:
            numbers[place] = device.rank
            taken.add(device.rank)
            continue
        numbers[place] = next_number
        who = f"rank {device.rank}" if device.rank != NULL else "unknown rank"
        where = f"device {device.device}" if device.device != NULL else "its one device"
        what = (
            f"given as rank {next_number}: a number, no rank"
            if place in chosen
            else f"not the busiest of its trace: {next_number} in traces.whole, and in no step"
        )
        said.append(f"{device.scan.path}: {who}, {where} is {what}")
        next_number -= 1
    return numbers, chosen, said


def _as_rank(scan: Scan, number: int, world_size: int) -> Scan:
    header = msgspec.structs.replace(scan.header, rank=number, world_size=world_size)
    # A group is that of its rank; a number that is no rank belongs to none.
    footer = scan.footer if number >= 0 or scan.footer is None else msgspec.structs.replace(scan.footer, groups={})
    return replace(scan, header=header, footer=footer)


def _health(
    columns: Columns, traces: TraceHealth, left_out: Sequence[str], said: Sequence[str], world_size: int
) -> ReportHealth:
    numbers = tuple(columns.ranks)
    known = Columns(columns.store, {number: stored for number, stored in columns.ranks.items() if number >= 0})
    return ReportHealth(
        world_size=world_size,
        ranks_read=tuple(known.ranks),
        ranks_missing=traces.ranks_missing or (),
        files_left_out=tuple(left_out),
        problems=(),
        endings=dict.fromkeys(numbers, _COMPLETED),
        attempt=0,
        partial_steps=known.partial_steps(),
        uncovered_steps={},
        coverage_reasons={},
        instrument_modes=tuple(sorted({str(stored.scan.header.instrument_mode) for stored in columns.ranks.values()})),
        fabric=None,
        held=None,
        manifest_problem=None,
        traces=traces,
        said=tuple(said),
    )
