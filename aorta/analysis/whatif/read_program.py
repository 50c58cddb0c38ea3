"""Reads the program of a run from its records.

    program = read_program("artifacts/cuda", last=100)  # its last hundred steps
    program = program_of(run)                           # of a run that has been read from records

Only steps behind the warm-up that every rank has. Refuses, and says why, what a replay could not follow: a step of
which something was missed, ranks without a common clock, waits that were not recorded, sends and receives. Must not
guess a wait, an end or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial, reduce
from pathlib import Path

import msgspec
import numpy as np

from aorta.analysis.host_bound import Pace
from aorta.analysis.load.locations import load_source
from aorta.analysis.load.run_facts import FORMAT
from aorta.analysis.step_intervals import StepContents, contents_of
from aorta.analysis.tables import Ints, RankTables, Run
from aorta.analysis.whatif.program import RunProgram, not_replayable
from aorta.analysis.whatif.program_reader import LEAST_STEPS, ProgramReader, RankSteps
from aorta.config.groups.fabric import emulated_rules
from aorta.config.schema import Algorithm, EmulatedFabric, Sharing
from aorta.errors import InputError


def read_program(location: str | Path, last: int | None = None) -> RunProgram:
    """Return the program of one run folder.

    Args:
        location: where the records are.
        last: only the last so many steps; None: all.

    Raises:
        InputError: it cannot be read, or not be replayed.
    """
    return program_of(load_source(location, contents=True), last)


def program_of(run: Run, last: int | None = None) -> RunProgram:
    """Return the program of a run that has been read.

    Args:
        last: only the last so many steps; None: all.

    Raises:
        InputError: it cannot be replayed; the message says why.
    """
    _refuse(run)
    network = _network(run)
    steps = _common_steps(run, last)
    offsets_ns = _clock_offsets(run)
    of_rank = {
        rank: _rank_steps(tables, steps, None if offsets_ns is None else offsets_ns[rank])
        for rank, tables in run.ranks.items()
    }
    order = next(iter(run.ranks.values())).gradient_order
    return ProgramReader(run, network, steps, of_rank, gradient_order=order).program()


def _refuse(run: Run) -> None:
    health, no = run.health, partial(not_replayable, run.location)
    if run.source.format != FORMAT:
        raise no(f"it takes AORTA's own record of the run, and these are traces ({run.source.format})")
    if health.world_size == 1:
        emulated = health.emulated_ranks
        raise no("one rank communicates with nobody" if emulated is None else f"it has {health.ranks}")
    if health.ranks_missing:
        raise no(f"{len(health.ranks_missing)} of {health.world_size} ranks are missing")
    if health.uncovered_steps:
        reason = max(health.coverage_reasons, key=health.coverage_reasons.__getitem__)
        raise no(f"coverage is not complete in {sum(health.uncovered_steps.values())} step(s): {reason}")
    basis = Pace(run).basis("compute_ms")
    if basis.source != "marks":
        raise no(basis.reason or "when its device computed is known of the steps measured by kernels alone")
    if any(not tables.source.groups for tables in run.ranks.values()):
        raise no("a record has no footer, which names the ranks of each process group")


def _network(run: Run) -> EmulatedFabric | None:
    if run.manifest is None:
        raise not_replayable(run.location, run.health.manifest_problem)
    try:
        return network_of(run.health.fabric, run.health.world_size)
    except (TypeError, ValueError) as error:
        raise InputError(f"{run.location}: run.json states an emulated network that is none ({error})") from error


def network_of(fabric: Mapping[str, object] | None, world_size: int) -> EmulatedFabric | None:
    """Return the settings of an emulated network as a manifest states them; None: the network was real.

    Raises:
        ValueError: they are not settings of an emulated network.
    """
    if fabric is None:
        return None
    known = {each.name for each in fields(EmulatedFabric)}
    values = {name: value for name, value in fabric.items() if name in known}
    for name, kind in (("algorithm", Algorithm), ("sharing", Sharing)):
        if name in values:
            values[name] = kind(str(values[name]))
    try:
        settings = msgspec.convert(values, EmulatedFabric)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    problems = list(emulated_rules(settings, world_size))
    if problems:
        raise ValueError("; ".join(problems))
    return settings


def _common_steps(run: Run, last: int | None) -> Ints:
    columns = [tables.steps.global_step[tables.steps.used] for tables in run.ranks.values()]
    steps: Ints = reduce(np.intersect1d, columns)
    if len(steps) < LEAST_STEPS:
        raise not_replayable(
            run.location, f"{len(steps)} step(s) behind the warm-up are on all ranks; it takes {LEAST_STEPS}"
        )
    return steps if last is None else steps[-last:]


def _rank_steps(tables: RankTables, steps: Ints, offset_ns: int | None) -> RankSteps:
    """Return the steps of a rank. `offset_ns`: added to its wall clock; None: all share its monotonic clock."""
    columns = tables.steps
    places = np.searchsorted(columns.global_step, steps)
    began = columns.start_mono_ns[places] if offset_ns is None else columns.t_start_ns[places] + offset_ns
    return RankSteps(
        began,
        columns.length_ns[places],
        [_contents_at(tables, place) for place in places.tolist()],
        [columns.rows_of(place, place + 1) for place in places.tolist()],
        tables.collectives,
    )


def _contents_at(tables: RankTables, place: int) -> StepContents:
    """Return what ran inside the step with this index; read from the record's line where the tables were read without.

    Raises:
        InputError: it can no longer be read.
    """
    if tables.contents is not None:
        return tables.contents.of(place)
    inside = tables.details.step(place)
    return contents_of(inside.compute or (), inside.aux or (), inside.stalls or (), inside.waits, inside.ready)


def _clock_offsets(run: Run) -> Mapping[int, int] | None:
    """Return what to add to each rank's wall clock; None where all ranks share a host, and with it a monotonic clock.

    Raises:
        InputError: they are on several hosts whose clocks were not measured.
    """
    if len({tables.source.host for tables in run.ranks.values()}) == 1 and run.source.host is not None:
        return None
    offsets = {}
    for rank, tables in run.ranks.items():
        clock = run.clocks.get(rank)
        if clock is None or not clock.known:
            why = run.clocks_missing or "they were not measured"
            raise not_replayable(
                run.location,
                f"the ranks are on several hosts, and their clocks cannot be compared (rank {rank}): {why}",
            )
        offsets[rank] = clock.correction_ns(int(tables.steps.t_start_ns[0]))
    return offsets
