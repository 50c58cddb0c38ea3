"""What a run would have measured with something changed, how sure that is, and what is not known.

    predict(program, parse_changes(["network.bandwidth=x2"])).job_step_ms

A value is the median over the replayed steps. Its interval (`predicted_value`) counts as the model's error what the
replay of the unchanged program misses (the identity check) and a share of the predicted change. Must not recommend
anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from aorta.analysis.tables import Floats, Ints
from aorta.analysis.whatif.apply import apply
from aorta.analysis.whatif.changes import Change, CommSpeed, Selection, WorldSize, in_order
from aorta.analysis.whatif.predicted_value import STATED_ERROR, Value, value_of
from aorta.analysis.whatif.program import RunProgram
from aorta.analysis.whatif.replay import Times, replay
from aorta.analysis.whatif.windows import Measured, RankStepSample, measure, sample
from aorta.errors import InputError

LAW_BOUND: Final = 1.25
"""At another number of ranks nothing was recorded: a network may be so many times as slow or as fast as its law says.
In the simulator a jitter of 20 % and a node that is 10 % slower stay within it (tests/analysis/whatif)."""
IDENTITY_BOUND: Final = 0.05
"""The replay of the unchanged program may miss this part of the recorded job step time, no more."""
BACKEND_BOUND: Final = 0.10
"""From here on the part of collectives that the backend decided is said: a faster network's gain is then doubtful."""


@dataclass(frozen=True)
class Identity:
    """What the replay of the unchanged program gives, beside what was recorded. None: the record has no value."""

    recorded_ms: float
    replayed_ms: float
    recorded_ratio: float | None
    replayed_ratio: float | None
    recorded_exposed_ms: float | None
    replayed_exposed_ms: float | None

    @property
    def missed_ms(self) -> float:
        """By how much the replay misses the recorded job step time."""
        return abs(self.replayed_ms - self.recorded_ms)

    @property
    def residual(self) -> float:
        """The same, as a part of it."""
        return self.missed_ms / self.recorded_ms

    def sentence(self) -> str:
        """The check in words."""
        return (
            f"the replay of the unchanged run takes {self.replayed_ms:.3f} ms a step, recorded are "
            f"{self.recorded_ms:.3f} ms: {self.residual:.2%} apart"
        )


@dataclass(frozen=True)
class Prediction:
    """A run with something changed.

    Attributes:
        changes: as they were written, in the order in which they were made.
        job_step_ms: median over steps; `overlap_ratio` and `exposed_comm_ms` over rank-steps; None: no communication.
        base: the same three of the unchanged run, as replayed.
        flags: sentences about what is not known.
        steps: how many were replayed; `rank_steps`: how many of them the overlap was measured in.
    """

    changes: tuple[str, ...]
    job_step_ms: Value
    overlap_ratio: Value | None
    exposed_comm_ms: Value | None
    base: dict[str, float | None]
    identity: Identity
    flags: tuple[str, ...]
    steps: int
    rank_steps: int

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, in a stable order."""
        return {
            **asdict(self),
            "changes": list(self.changes),
            "identity": {**asdict(self.identity), "residual": self.identity.residual},
            "flags": list(self.flags),
        }


@dataclass(frozen=True)
class Base:
    """The unchanged run, replayed and checked; several predictions share it."""

    program: RunProgram
    chosen: RankStepSample
    times: Times
    measured: Measured
    identity: Identity


def base_of(program: RunProgram, rank_steps: int | None = None) -> Base:
    """Replay the unchanged program, and hold it against the record.

    Raises:
        InputError: it misses the recorded step times by more than `IDENTITY_BOUND`.
    """
    recorded = program.recorded_step_ms()
    if np.median(recorded) <= 0:
        raise InputError("no prediction: the recorded steps last 0 ns")
    chosen = sample(program) if rank_steps is None else sample(program, rank_steps)
    times = replay(program, chosen.kept())
    measured = measure(program, times, chosen)
    ratios = np.concatenate([program.steps[index].recorded_ratio[list(chosen.ranks)] for index in chosen.steps])
    exposed = np.concatenate([program.steps[index].recorded_exposed_ms[list(chosen.ranks)] for index in chosen.steps])
    identity = Identity(
        float(np.median(recorded)),
        float(np.median(times.job_step_ms())),
        _median(ratios),
        _median(measured.overlap_ratio),
        _median(exposed),
        _median(measured.exposed_comm_ms),
    )
    if not identity.residual <= IDENTITY_BOUND:
        raise InputError(
            f"no prediction: {identity.sentence()}, and more than {IDENTITY_BOUND:.0%} is not accepted. The record "
            "does not hold what made these steps as long as they were"
        )
    return Base(program, chosen, times, measured, identity)


def predict(program: RunProgram, changes: Sequence[Change]) -> Prediction:
    """Predict what the run would have measured with changes made.

    Raises:
        InputError: a change cannot be made in this run, or its replay does not reproduce the record.
    """
    return predict_from(base_of(program), changes)


def predict_from(base: Base, changes: Sequence[Change]) -> Prediction:
    """As `predict`, for an unchanged run that was replayed already."""
    changes = in_order(changes)
    wrong_by = [0.0, 0.0, 0.0]  # step, ratio, exposed; changes whose effects cancel may each be wrong
    medians = _medians(base.times, base.measured)
    program, flags = base.program, dict[str, None]()
    times, measured = base.times, base.measured
    for change in changes:
        changed = apply(program, [change])
        program = changed.program
        flags |= dict.fromkeys(changed.flags)
        times = replay(program, base.chosen.kept())
        measured = measure(program, times, base.chosen)
        now = _medians(times, measured)
        for index, (before, after) in enumerate(zip(medians, now, strict=True)):
            wrong_by[index] += STATED_ERROR[type(change)] * abs((after or 0.0) - (before or 0.0))
        medians = now
    identity, every = base.identity, np.arange(len(base.program.steps))
    found = Prediction(
        changes=tuple(change.text for change in changes),
        job_step_ms=value_of(times.job_step_ms(), every, identity.missed_ms + wrong_by[0], (0.0, np.inf)),
        overlap_ratio=_known(
            measured.overlap_ratio,
            measured.step,
            _apart(identity.replayed_ratio, identity.recorded_ratio),
            wrong_by[1],
            (0.0, 1.0),
        ),
        exposed_comm_ms=_known(
            measured.exposed_comm_ms,
            measured.step,
            _apart(identity.replayed_exposed_ms, identity.recorded_exposed_ms),
            wrong_by[2],
        ),
        base={
            "job_step_ms": identity.replayed_ms,
            "overlap_ratio": identity.replayed_ratio,
            "exposed_comm_ms": identity.replayed_exposed_ms,
        },
        identity=identity,
        flags=(*flags_of(base.program), *flags),
        steps=len(base.program.steps),
        rank_steps=len(measured.step),
    )
    if any(isinstance(change, WorldSize) for change in changes):
        return _widened(found, base, program)
    return found


def _widened(found: Prediction, base: Base, program: RunProgram) -> Prediction:
    """With intervals that hold while the larger world's network is within `LAW_BOUND` of its law."""
    for factor in (LAW_BOUND, 1 / LAW_BOUND):
        other = apply(program, [CommSpeed("the law", Selection(), factor)]).program
        times = replay(other, base.chosen.kept())
        measured = measure(other, times, base.chosen)
        ratio, exposed = found.overlap_ratio, found.exposed_comm_ms
        found = replace(
            found,
            job_step_ms=_reaching(found.job_step_ms, times.job_step_ms()),
            overlap_ratio=None if ratio is None else _reaching(ratio, measured.overlap_ratio),
            exposed_comm_ms=None if exposed is None else _reaching(exposed, measured.exposed_comm_ms),
        )
    return found


def _reaching(value: Value, others: Floats) -> Value:
    """The interval reaches as far as the median of other values."""
    median = _median(others)
    return value if median is None else Value(value.value, min(value.low, median), max(value.high, median))


def flags_of(program: RunProgram) -> tuple[str, ...]:
    """What is not known, or doubtful, whatever is changed."""
    facts = program.facts
    found = list(facts.flags)
    if facts.network is None:
        found.append("the network was real: what it costs is known only as recorded, the backend's own time included")
    elif not facts.law:
        found.append("the emulated network's time came on top of the backend's own, which is taken to stay as it was")
    part = facts.backend_was_limit / facts.collectives if facts.collectives else 0.0
    if part > BACKEND_BOUND:
        found.append(
            f"the backend, not the network, decided {part:.0%} of the collectives; its own time is taken to stay as it "
            "was, so what a faster network gains is a rough guess"
        )
    if facts.arrival_unknown:
        found.append(
            f"{facts.arrival_unknown} of {facts.collectives} collectives were queued behind another, so that the "
            "device's arrival at them is known within bounds only; the earliest is taken, which suits a faster network"
        )
    return tuple(found)


def _known(
    values: Floats, steps: Ints, missed: float, wrong_by: float, bounds: tuple[float, float] = (0.0, np.inf)
) -> Value | None:
    """The value of a metric that some rank-steps have none of; None: none has one."""
    known = ~np.isnan(values)
    return value_of(values[known], steps[known], missed + wrong_by, bounds) if known.any() else None


def _apart(replayed: float | None, recorded: float | None) -> float:
    return 0.0 if replayed is None or recorded is None else abs(replayed - recorded)


def _medians(times: Times, measured: Measured) -> tuple[float | None, ...]:
    """Job step, overlap ratio, and exposed communication."""
    return _median(times.job_step_ms()), _median(measured.overlap_ratio), _median(measured.exposed_comm_ms)


def _median(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None
