"""What is wrong, or merely unusual, with a run that was read: facts for people and for `summary.json`.

Enters: the records that are used and the sentences of what was left out. Leaves: a `Health`. Must not: repair or
guess anything; a fact that is not known is said to be unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aorta.analysis.readers.manifest import Manifest, emulated_fabric
from aorta.analysis.readers.scan import Scan
from aorta.telemetry.schema import Footer

KILLED = "killed (no footer)"


@dataclass(frozen=True)
class Held:
    """Rows of collectives on an emulated fabric, those of warm-up left out.

    `slower`: the backend itself took longer than the emulated link, so the row's times are the backend's. None where
    that cannot be known: on a device the emulated time is added behind the backend's (`end_source: event`).
    """

    rows: int
    slower: int | None

    def sentence(self) -> str:
        """How far the emulation held."""
        if not self.rows:
            return "no collective was seen"
        if self.slower is None:
            return "on a device they come on top of the backend's own times"
        if not self.slower:
            return f"the emulation decided all {self.rows} collectives"
        return (
            f"the backend itself was slower in {self.slower} of {self.rows} collectives "
            f"({self.slower / self.rows:.1%}), whose times are the backend's"
        )


@dataclass(frozen=True)
class Health:
    """Facts about one run. `notes()` is the readable form, `as_json()` the complete one."""

    world_size: int
    ranks_read: tuple[int, ...]
    ranks_missing: tuple[int, ...]
    files_left_out: tuple[str, ...]
    problems: tuple[str, ...]
    endings: Mapping[int, str]
    attempt: int
    partial_steps: tuple[int, ...]
    """Global steps that some of the ranks read do not have."""
    uncovered_steps: Mapping[int, int]
    """Rank -> steps in which not every collective is known to have been seen (R8); ranks with none are left out."""
    coverage_reasons: Mapping[str, int]
    instrument_modes: tuple[str, ...]
    fabric: Mapping[str, object] | None
    held: Held | None
    """How far the emulated fabric decided the times; None on a real one."""
    manifest_problem: str | None

    def notes(self) -> list[str]:
        """Sentences a reader of the results must see, the gravest first; empty for a clean, real, complete run."""
        notes = []
        if self.fabric is not None:
            settings = ", ".join(f"{key}={value}" for key, value in self.fabric.items())
            held = f"; {self.held.sentence()}" if self.held is not None else ""
            notes.append(f"EMULATED FABRIC ({settings}): communication times are those of the emulation{held}")
        if self.ranks_missing:
            notes.append(
                f"{len(self.ranks_missing)} of {self.world_size} ranks missing: {_ranks(self.ranks_missing)}; what "
                "needs every rank is null"
            )
        notes += [f"left out: {sentence}" for sentence in self.files_left_out]
        for ending, ranks in _by_ending(self.endings).items():
            if ending != "completed":
                notes.append(f"rank {_ranks(ranks)}: {ending}")
        if self.problems:
            notes.append(f"{len(self.problems)} problem(s) in the records, the first: {self.problems[0]}")
        if self.partial_steps:
            notes.append(
                f"{len(self.partial_steps)} global step(s) not on all ranks, the first: {self.partial_steps[0]}; left "
                "out of job_step_ms"
            )
        if self.uncovered_steps:
            reason = max(self.coverage_reasons, key=self.coverage_reasons.__getitem__)
            notes.append(
                f"coverage not complete in {sum(self.uncovered_steps.values())} rank-step(s) of rank "
                f"{_ranks(tuple(self.uncovered_steps))}: {reason}"
            )
        if len(self.instrument_modes) > 1:
            notes.append(f"ranks were instrumented differently: {', '.join(self.instrument_modes)}")
        if self.manifest_problem:
            notes.append(f"{self.manifest_problem}; whether the fabric was emulated is not known")
        return notes

    def as_json(self) -> dict[str, object]:
        """Every fact, in stable order, as plain JSON values."""
        return {
            "ranks_expected": self.world_size,
            "ranks_read": list(self.ranks_read),
            "ranks_missing": list(self.ranks_missing),
            "files_left_out": list(self.files_left_out),
            "problem_count": len(self.problems),
            "problems": list(self.problems),
            "endings": {str(rank): ending for rank, ending in self.endings.items()},
            "attempt": self.attempt,
            "steps_not_on_all_ranks": list(self.partial_steps),
            "steps_not_covered": {str(rank): count for rank, count in self.uncovered_steps.items()},
            "coverage_reasons": dict(self.coverage_reasons),
            "instrument_modes": list(self.instrument_modes),
            "emulated_fabric": dict(self.fabric) if self.fabric is not None else None,
            "emulated_fabric_rows": None if self.held is None else self.held.rows,
            "emulated_fabric_backend_slower_rows": None if self.held is None else self.held.slower,
            "emulated_fabric_known": self.manifest_problem is None,
            "manifest_problem": self.manifest_problem,
        }


def examine(
    records: Mapping[int, Scan],
    partial_steps: tuple[int, ...],
    files_left_out: Sequence[str],
    manifest: Manifest | None,
    manifest_problem: str | None,
) -> Health:
    """Collect the facts. `records` is not empty and of one run, one attempt and one world size."""
    headers = [record.header for record in records.values()]
    reasons = Counter[str]()
    for record in records.values():
        reasons.update(record.coverage_reasons)
    problems = [problem for record in records.values() for problem in record.problems]
    hashes = sorted({header.manifest_hash for header in headers})
    if len(hashes) > 1:
        problems.append(f"the ranks ran with different configurations: manifest hashes {', '.join(hashes)}")
    fabric = emulated_fabric(manifest)
    return Health(
        world_size=headers[0].world_size,
        ranks_read=tuple(records),
        ranks_missing=tuple(sorted(set(range(headers[0].world_size)) - records.keys())),
        files_left_out=tuple(files_left_out),
        problems=tuple(problems),
        endings={rank: _ending(record.footer) for rank, record in records.items()},
        attempt=headers[0].attempt,
        partial_steps=partial_steps,
        uncovered_steps={rank: record.uncovered for rank, record in records.items() if record.uncovered},
        coverage_reasons=dict(reasons.most_common()),
        instrument_modes=tuple(sorted({header.instrument_mode for header in headers})),
        fabric=fabric,
        held=None if fabric is None else _held(records),
        manifest_problem=manifest_problem,
    )


def _held(records: Mapping[int, Scan]) -> Held:
    sources = Counter[str | None]()
    for record in records.values():
        sources.update(record.end_sources)
    slower = None if sources["event"] else sources["future"] + sources["wait"]
    return Held(sources.total(), slower)


def _ending(footer: Footer | None) -> str:
    match footer:
        case None:
            return KILLED
        case Footer(reason="signal"):
            return f"stopped by {footer.signal or 'a signal'}, exit code {footer.exit_code}"
        case Footer(reason="error"):
            return f"ended by an error, exit code {footer.exit_code}: {footer.error or 'not recorded'}"
        case _:
            return "completed"


def _by_ending(endings: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    grouped: dict[str, tuple[int, ...]] = {}
    for rank, ending in endings.items():
        grouped[ending] = (*grouped.get(ending, ()), rank)
    return grouped


def _ranks(ranks: Sequence[int], shown: int = 12) -> str:
    rest = f" and {len(ranks) - shown} more" if len(ranks) > shown else ""
    return ", ".join(map(str, ranks[:shown])) + rest
