"""Says in sentences what is wrong, or merely unusual, with a run that was read. Must not: repair or guess anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from aorta.command_line import name_ranks
from aorta.documents import known
from aorta.documents.dataset import Health
from aorta.documents.formatting import TEXT

_LISTED: Final = 12
"""Ranks that a sentence names."""


DAMAGED, MISSING, UNLIKE, EMULATED, ALONE, MODES, NOTED = range(7)
"""How urgent a fact is, the most urgent first; `NOTED` does not head a report."""


class Fact(NamedTuple):
    """What is wrong with a run, as the top of a report says it, and what its notes say besides."""

    urgency: int
    short: str
    more: str = ""


def facts(health: Health) -> Iterator[Fact]:
    """Yield what is wrong with a run that was read, each once."""
    if health.emulated_ranks is not None:
        yield Fact(
            EMULATED,
            f"ONE RANK OF {health.emulated_ranks}, EMULATED: the others are assumed to be as fast, and never late",
            "; stragglers, waiting for other ranks and their losses are not known",
        )
    if health.emulated_fabric is not None:
        shared = health.emulated_fabric.get("sharing") == "link"
        more = f"; {'groups of a rank share its links' if shared else 'each process group has a link of its own'}"
        rows, slower = health.emulated_fabric_rows, health.emulated_fabric_backend_slower_rows
        if rows == 0:
            more += "; no collective was seen"
        elif rows is not None and slower is None:
            more += "; on a device they come on top of the backend's own times"
        elif rows and slower == 0:
            more += f"; the emulation decided all {rows} collectives"
        elif rows and slower is not None:
            more += f"; in {slower} of {rows} collectives ({TEXT.percent(slower / rows)}) the backend was slower than "
            more += "the emulated link, and its time counts"
        yield Fact(EMULATED, "EMULATED FABRIC: communication times are those of the emulation", more)
    elif health.manifest_problem:
        yield Fact(EMULATED, f"whether the network was emulated is not known: {health.manifest_problem}")
    if health.is_alone:
        yield Fact(ALONE, "one rank: start one process per device (torchrun --standalone --nproc_per_node N ...)")
    for why in dict.fromkeys(gap.why for gap in health.gaps):
        alike = [gap for gap in health.gaps if gap.why == why]
        ranks = sorted({gap.rank for gap in alike if gap.rank is not None})
        steps = max((gap.steps or 0 for gap in alike), default=0)
        lanes = ", ".join(dict.fromkeys(lane for gap in alike for lane in gap.lanes))
        much = "at least" if all(gap.observed for gap in alike) else "unknown"
        who = name_ranks(ranks, _LISTED) if ranks else f"{len(alike)} trace(s) of unknown rank"
        more = (f" (in {steps} steps)" if steps else "") + (f": {much}: {lanes}" if lanes else "")
        yield Fact(MISSING if lanes else NOTED, f"{who}: {why}", more)
    if missing := health.ranks_missing:
        text = f"{len(missing)} of {health.world_size} ranks missing: {listed(missing)}"
        yield Fact(MISSING, text, "; what needs every rank is not available")
    if left_out := health.files_left_out:
        first, *others = left_out
        of_first, _, why = first.partition(";")
        text = f"{TEXT.count(len(left_out), 'file')} left out, the first: {of_first}"
        yield Fact(DAMAGED, text, "; ".join([f";{why}" if why else "", *others]))
    if problems := [problem for problem in health.problems if "no footer" not in problem]:  # the ending says it
        yield Fact(DAMAGED, f"{TEXT.count(len(problems), 'problem')} in the records, the first: {problems[0]}")
    for ending in sorted({ending for ending in health.endings.values() if ending != "completed"}):
        ranks = [int(rank) for rank, other in health.endings.items() if other == ending]
        yield Fact(DAMAGED, f"{name_ranks(ranks, _LISTED)}: {ending}")
    if partial := health.steps_not_on_all_ranks:
        where = "global step(s) not on all ranks" if known(health.traces) is None else "step(s) not in all traces"
        yield Fact(NOTED, f"{len(partial)} {where}, the first: {partial[0]}", "; left out of job_step_ms")
    if health.timed_from_python is not None:
        text = f"collectives were timed from Python: {health.timed_from_python}"
        yield Fact(MODES, text, "; less may have overlapped than without AORTA")
    if len(health.instrument_modes) > 1:
        yield Fact(MODES, f"ranks used different instrument modes: {', '.join(health.instrument_modes)}")


def notes_of(health: Health, of_traces: Sequence[str] = ()) -> list[str]:
    """Return what readers of results must know. `of_traces`: what the loader of traces has to say."""
    return [*(f"{fact.short}{fact.more}" for fact in facts(health)), *of_traces]


def listed(numbers: Sequence[int]) -> str:
    """List numbers of ranks or devices: the first `_LISTED`, and how many more there are."""
    rest = f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else ""
    return ", ".join(map(str, numbers[:_LISTED])) + rest
