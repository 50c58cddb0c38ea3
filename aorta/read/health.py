"""Says in sentences what is wrong, or merely unusual, with a run that was read. Must not: repair or guess anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from aorta.documents import known
from aorta.documents.dataset import GapEntry, Health
from aorta.documents.formatting import TEXT

_LISTED: Final = 12


def notes_of(health: Health, of_traces: Sequence[str] = ()) -> list[str]:
    """Return what readers of results must know. `of_traces`: what the loader of traces has to say."""
    recorded = known(health.traces) is None
    notes = []
    if health.emulated_ranks is not None:
        notes.append(
            f"ONE RANK OF {health.emulated_ranks}, EMULATED: all ranks are assumed to be as fast as this one; "
            "stragglers, waiting for other ranks and their losses are not known"
        )
    if health.emulated_fabric is not None:
        shared = health.emulated_fabric.get("sharing") == "link"
        links = "groups of a rank share its links" if shared else "each process group has a link of its own"
        note = f"EMULATED FABRIC: communication times are those of the emulation; {links}"
        rows, slower = health.emulated_fabric_rows, health.emulated_fabric_backend_slower_rows
        if rows == 0:
            note += "; no collective was seen"
        elif rows is not None and slower is None:
            note += "; on a device they come on top of the backend's own times"
        elif rows and slower == 0:
            note += f"; the emulation decided all {rows} collectives"
        elif rows and slower is not None:
            note += f"; in {slower} of {rows} collectives ({TEXT.percent(slower / rows)}) the backend was slower than "
            note += "the emulated link, and its time counts"
        notes.append(note)
    if health.is_alone:
        notes.append(
            "one rank: it has no other rank to communicate with; start one process per device "
            "(torchrun --standalone --nproc_per_node N ...)"
        )
    notes += [*_gap_notes(health.gaps), *of_traces]
    if health.ranks_missing:
        notes.append(
            f"{len(health.ranks_missing)} of {health.world_size} ranks missing: {listed(health.ranks_missing)}; what "
            "needs every rank is not available"
        )
    notes += [f"left out: {sentence}" for sentence in health.files_left_out]
    for ending in dict.fromkeys(health.endings.values()):
        if ending != "completed":
            ranks = [int(rank) for rank, other in health.endings.items() if other == ending]
            notes.append(f"rank {listed(ranks)}: {ending}")
    if health.problems:
        notes.append(f"{len(health.problems)} problem(s) in the records, the first: {health.problems[0]}")
    if partial := health.steps_not_on_all_ranks:
        where = "global step(s) not on all ranks" if recorded else "step(s) not in all traces"
        notes.append(f"{len(partial)} {where}, the first: {partial[0]}; left out of job_step_ms")
    if health.timed_from_python is not None:
        notes.append(
            f"collectives were timed from Python ({health.timed_from_python}), so less may have overlapped than "
            "without AORTA"
        )
    if recorded and len(health.instrument_modes) > 1:
        notes.append(f"ranks used different instrument modes: {', '.join(health.instrument_modes)}")
    if health.manifest_problem:
        notes.append(f"{health.manifest_problem}; whether the fabric was emulated is not known")
    return notes


def _gap_notes(gaps: Sequence[GapEntry]) -> Iterator[str]:
    """Yield each gap once, with the ranks that have it."""
    ranks: dict[str, list[GapEntry]] = {}
    for gap in gaps:
        ranks.setdefault(gap.why, []).append(gap)
    for why, alike in ranks.items():
        of_ranks = sorted({gap.rank for gap in alike if gap.rank is not None})
        who = f"rank {listed(of_ranks)}" if of_ranks else f"{len(alike)} trace(s) of unknown rank"
        steps = max((gap.steps or 0 for gap in alike), default=0)
        lanes = ", ".join(dict.fromkeys(lane for gap in alike for lane in gap.lanes))
        much = "at least" if all(gap.observed for gap in alike) else "unknown"
        yield f"{who}: {why}" + (f" (in {steps} steps)" if steps else "") + (f": {much}: {lanes}" if lanes else "")


def listed(numbers: Sequence[int]) -> str:
    """List numbers of ranks or devices: the first `_LISTED`, and how many more there are."""
    rest = f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else ""
    return ", ".join(map(str, numbers[:_LISTED])) + rest
