"""Describes what is wrong, or merely unusual, with a run that was read, for people and for `summary.json`.

Loaders collect the facts; reports print `notes()` and write `facts()`. Must not: repair or guess anything; an unknown
fact is reported as unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aorta.documents.dataset import GapEntry, HealthFacts
from aorta.documents.formatting import TEXT
from aorta.records.schema import python_cost

_LISTED: Final = 12


@dataclass(frozen=True)
class EmulationCounts:
    """How often the emulated network, and not the backend, determined a collective's times; warm-up left out.

    `slower` counts rows whose backend took longer than the emulated link, so that their times are the backend's. It is
    None where that cannot be known: on a device the emulated time is added behind the backend's (`end_source: event`).
    """

    rows: int
    slower: int | None


@dataclass(frozen=True)
class Health:
    """Facts about one run. `notes()` is the readable form, `facts()` the complete one.

    Attributes:
        partial_steps: global steps that some of the ranks read do not have.
        endings: rank -> how its process ended; empty for traces, which have no end.
        attempt: None where the source does not number attempts.
        uncovered_steps: rank -> steps in which not every collective is known to have been seen (R8), `outside` ->
            collectives that are part of no step, as of checkpoints; ranks without any are left out.
        unwatched: rank -> share of the collectives seen that were issued by a model that is not recorded.
        held: in how many rows the emulated network determined the times; None on a real one.
        timed_from_python: why the collectives were timed from Python; None where they were not, or were to be.
        emulated_ranks: how many ranks the only process stands for; None where every rank is a process.
        gaps: what the books of each rank lack, or what in them does not add up.
        traces: what only loaders of traces know, as JSON (None for records); `trace_notes` are their sentences.
    """

    world_size: int
    ranks_read: tuple[int, ...]
    ranks_missing: tuple[int, ...]
    files_left_out: tuple[str, ...]
    partial_steps: tuple[int, ...]
    instrument_modes: tuple[str, ...]
    problems: tuple[str, ...] = ()
    endings: Mapping[int, str] = field(default_factory=dict)
    attempt: int | None = None
    uncovered_steps: Mapping[int, int] = field(default_factory=dict)
    coverage_reasons: Mapping[str, int] = field(default_factory=dict)
    outside: Mapping[int, int] = field(default_factory=dict)
    unwatched: Mapping[int, float] = field(default_factory=dict)
    fabric: Mapping[str, object] | None = None
    held: EmulationCounts | None = None
    manifest_problem: str | None = None
    timed_from_python: str | None = None
    platform: str | None = None
    backend: str | None = None
    emulated_ranks: int | None = None
    gaps: tuple[GapEntry, ...] = ()
    traces: Mapping[str, Any] | None = None
    trace_notes: Sequence[str] = field(default=())

    @property
    def is_alone(self) -> bool:
        """Whether a recorded run has one rank that communicates with nobody, not even on an emulated network."""
        return self.world_size == 1 and self.traces is None and self.emulated_ranks is None

    @property
    def ranks(self) -> str:
        """The ranks read, and of how many."""
        if self.emulated_ranks is not None:
            return f"one rank of {self.emulated_ranks}, emulated"
        return f"{len(self.ranks_read)} of {self.world_size} ranks" if self.world_size else "ranks unknown"

    def notes(self) -> list[str]:
        """Return what readers of results must know, the most serious first; empty for a clean, real, complete run."""
        notes = [*_gap_notes(self.gaps), *self.trace_notes]
        if self.emulated_ranks is not None:
            notes.append(
                f"ONE RANK OF {self.emulated_ranks}, EMULATED: all ranks are assumed to be as fast as this one; "
                "stragglers, waiting for other ranks and their losses are not known"
            )
        if self.fabric is not None:
            shared = self.fabric.get("sharing") == "link"
            links = "groups of a rank share its links" if shared else "each process group has a link of its own"
            note = f"EMULATED FABRIC: communication times are those of the emulation; {links}"
            match self.held:
                case EmulationCounts(rows=0):
                    note += "; no collective was seen"
                case EmulationCounts(slower=None):
                    note += "; on a device they come on top of the backend's own times"
                case EmulationCounts(rows=rows, slower=0):
                    note += f"; the emulation decided all {rows} collectives"
                case EmulationCounts(rows=rows, slower=int(slower)):
                    note += f"; in {slower} of {rows} collectives ({TEXT.percent(slower / rows)}) "
                    note += f"{self.backend or 'the backend'} was slower than the emulated link, and its time counts"
            notes.append(note)
        if self.is_alone:
            notes.append(
                "one rank: it has no other rank to communicate with; start one process per device "
                "(torchrun --standalone --nproc_per_node N ...)"
            )
        if self.ranks_missing and self.traces is None:  # the notes of traces already say it
            notes.append(
                f"{len(self.ranks_missing)} of {self.world_size} ranks missing: {listed(self.ranks_missing)}; what "
                "needs every rank is not available"
            )
        if self.traces is None:
            notes += [f"left out: {sentence}" for sentence in self.files_left_out]
        for ending in dict.fromkeys(self.endings.values()):
            if ending != "completed":
                ranks = [rank for rank, other in self.endings.items() if other == ending]
                notes.append(f"rank {listed(ranks)}: {ending}")
        if self.problems:
            notes.append(f"{len(self.problems)} problem(s) in the records, the first: {self.problems[0]}")
        if self.partial_steps:
            where = "global step(s) not on all ranks" if self.traces is None else "step(s) not in all traces"
            first = self.partial_steps[0]
            notes.append(f"{len(self.partial_steps)} {where}, the first: {first}; left out of job_step_ms")
        if self.uncovered_steps:
            reason = max(self.coverage_reasons, key=self.coverage_reasons.__getitem__)
            notes.append(
                f"coverage not complete in {sum(self.uncovered_steps.values())} step(s) of rank "
                f"{listed(tuple(self.uncovered_steps))}: {reason}"
            )
        if self.outside:
            notes.append(
                f"{max(self.outside.values())} collectives of a rank were issued between steps (checkpoints, "
                "evaluation) and are in no metric"
            )
        if self.unwatched:
            notes.append(
                f"unwatched: {max(self.unwatched.values()):.0%} of a rank's collectives belong to a model that is not "
                "recorded; its computation counts as idle: record every model, model=[first, second]"
            )
        if self.timed_from_python is not None:
            notes.append(
                f"collectives were timed from Python ({self.timed_from_python}): {python_cost(self.platform)}, so less "
                "may have overlapped than without AORTA"
            )
        if len(self.instrument_modes) > 1 and self.traces is None:
            notes.append(f"ranks used different instrument modes: {', '.join(self.instrument_modes)}")
        if self.manifest_problem:
            notes.append(f"{self.manifest_problem}; whether the fabric was emulated is not known")
        return notes

    def facts(self, throttled_ranks: list[int]) -> HealthFacts:
        """Return every fact, as `summary.json` has them."""
        return HealthFacts(
            ranks_expected=self.world_size or None,
            ranks_read=list(self.ranks_read),
            ranks_missing=list(self.ranks_missing),
            files_left_out=list(self.files_left_out),
            problem_count=len(self.problems),
            problems=list(self.problems),
            endings={str(rank): ending for rank, ending in self.endings.items()},
            attempt=self.attempt,
            steps_not_on_all_ranks=list(self.partial_steps),
            steps_not_covered={str(rank): count for rank, count in self.uncovered_steps.items()},
            coverage_reasons=dict(self.coverage_reasons),
            collectives_outside_steps={str(rank): count for rank, count in self.outside.items()},
            collectives_unwatched_share={str(rank): share for rank, share in self.unwatched.items()},
            timed_from_python=self.timed_from_python,
            instrument_modes=list(self.instrument_modes),
            emulated_fabric=dict(self.fabric) if self.fabric is not None else None,
            emulated_fabric_rows=None if self.held is None else self.held.rows,
            emulated_fabric_backend_slower_rows=None if self.held is None else self.held.slower,
            emulated_fabric_known=self.manifest_problem is None,
            manifest_problem=self.manifest_problem,
            gaps=list(self.gaps),
            throttled_ranks=throttled_ranks,
            **(self.traces or {}),
        )


def _gap_notes(gaps: Sequence[GapEntry]) -> Iterator[str]:
    """Yield each gap once, with the ranks that have it."""
    ranks: dict[str, list[GapEntry]] = {}
    for gap in gaps:
        ranks.setdefault(gap.why, []).append(gap)
    for why, alike in ranks.items():
        known = sorted({gap.rank for gap in alike if gap.rank is not None})
        who = f"rank {listed(known)}" if known else f"{len(alike)} trace(s) of unknown rank"
        steps = max((gap.steps or 0 for gap in alike), default=0)
        lanes = ", ".join(dict.fromkeys(lane for gap in alike for lane in gap.lanes))
        much = "at least" if all(gap.observed for gap in alike) else "unknown"
        yield f"{who}: {why}" + (f" (in {steps} steps)" if steps else "") + f": {much}: {lanes}"


def listed(numbers: Sequence[int]) -> str:
    """List numbers of ranks or devices: the first `_LISTED`, and how many more there are."""
    rest = f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else ""
    return ", ".join(map(str, numbers[:_LISTED])) + rest
