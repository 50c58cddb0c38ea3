"""Predicts what a run would have measured with changes made, with an interval and flags for what is not known.

    predict(program, parse_changes(["network.bandwidth=x2"])).gain_ms

Gain, interval and stated errors are those of docs/dev/what-if-model.md. Ratio and exposed time are medians over the
replayed rank-steps. Must not recommend anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from aorta.documents.formatting import TEXT, rough_ms
from aorta.documents.statistics import median_or_none, step_medians
from aorta.errors import InputError
from aorta.read.frames import Floats, Ints
from aorta.timeline.overlap import NS_PER_MS
from aorta.whatif.changes import CommSpeed, WorldSize, apply, in_order
from aorta.whatif.program import Change, RunProgram
from aorta.whatif.replay import Measured, RankStepSample, Times, measure, replay, sample

FREE: Final = CommSpeed("comm=free", math.inf)
LAW_BOUND: Final = 1.25
"""At another number of ranks nothing was recorded: a network may be this many times slower or faster than its formula.
In the simulator a jitter of 20 % and a node that is 10 % slower stay within it (tests/whatif)."""
IDENTITY_BOUND: Final = 0.05
"""The replay of the unchanged program may miss at most this part of the recorded job step time."""
_WORTH_SAYING: Final = 0.10
"""Part of the exposed time by which gain and reduction of exposed time may differ without a note."""
BACKEND_BOUND: Final = 0.10
"""If the backend decided more than this part of the collectives, a flag says so: a faster network may gain less."""
LEVEL: Final = 0.95
_SEED: Final = 20_240_229


@dataclass(frozen=True)
class Value:
    value: float
    low: float
    high: float

    def reaching(self, other: float | None) -> Value:
        """Return the same with an interval that reaches as far as `other`."""
        return self if other is None else Value(self.value, min(self.low, other), max(self.high, other))


def step_gain_ms(before: Times, after: Times) -> Floats:
    return (before.job_step_ns() - after.job_step_ns()) / NS_PER_MS


def gain_of(gains_ms: Floats, wrong_by: float) -> Value:
    """Return the median gain of steps and its interval; the model may be wrong by `wrong_by` milliseconds."""
    return _value(gains_ms, np.arange(len(gains_ms)), wrong_by, -np.inf)


def _value(values: Floats, steps: Ints, wrong_by: float, least: float = 0.0, most: float = np.inf) -> Value:
    """Return the median of values of which none is NaN, and its interval between what the metric can be at least and at
    most; `steps`: of each value.
    """
    value = float(np.median(values))
    drawn = step_medians(values, steps, np.random.default_rng(_SEED))
    low, high = np.percentile(drawn, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return Value(value, max(min(float(low), value) - wrong_by, least), min(max(float(high), value) + wrong_by, most))


@dataclass(frozen=True)
class Identity:
    """The replay of the unchanged program, beside what was recorded. None: the record has no value."""

    recorded_ms: float
    replayed_ms: float
    recorded_ratio: float | None
    replayed_ratio: float | None
    recorded_exposed_ms: float | None
    replayed_exposed_ms: float | None

    @property
    def missed_ms(self) -> float:
        return abs(self.replayed_ms - self.recorded_ms)

    @property
    def residual(self) -> float:
        return self.missed_ms / self.recorded_ms

    def problem(self) -> str | None:
        """Return by how much the replay misses the record; None where it does not, as by construction wherever the
        record says what made a step as long as it was.
        """
        if f"{self.residual:.2%}" == "0.00%":
            return None
        return (
            f"the replay of the unchanged run takes {self.replayed_ms:.3f} ms a step, recorded are "
            f"{self.recorded_ms:.3f} ms: {self.residual:.2%} apart"
        )


@dataclass(frozen=True)
class Prediction:
    """A run with something changed.

    Attributes:
        changes: as they were written, in the order in which they were made.
        gain_ms: by how much a step is shorter: median over steps of the paired difference.
        overlap_ratio, exposed_comm_ms: medians over rank-steps; None: no communication.
        flags: what is not known; `notes`: why less exposed communication is not as much less of a step.
        real_network: the replay leaves out that communication slows computation beside it.
        launch_ms: the median of the changed steps, for comparison with a launch; less precise than `gain_ms`.
        steps, rank_steps: numbers of replayed steps, and of rank-steps in which the overlap was measured.
    """

    changes: tuple[str, ...]
    gain_ms: Value
    overlap_ratio: Value | None
    exposed_comm_ms: Value | None
    identity: Identity
    flags: tuple[str, ...]
    steps: int
    rank_steps: int
    launch_ms: Value
    real_network: bool
    notes: tuple[str, ...] = ()

    @property
    def job_step_ms(self) -> Value:
        gain = self.gain_ms
        return Value(*(max(self.identity.replayed_ms - each, 0.0) for each in (gain.value, gain.high, gain.low)))

    @property
    def upper_bound(self) -> bool:
        return self.real_network and self.gain_ms.value >= 0

    @property
    def significant(self) -> bool:
        return not self.real_network and (self.gain_ms.low > 0 or self.gain_ms.high < 0)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values, in a stable order; `base` is the unchanged run as replayed."""
        identity, values = self.identity, {**asdict(self), "job_step_ms": asdict(self.job_step_ms)}
        shown = ("changes", "gain_ms", "job_step_ms", "overlap_ratio", "exposed_comm_ms")
        return {
            **{name: values[name] for name in shown},
            "base": {
                "job_step_ms": identity.replayed_ms,
                "overlap_ratio": identity.replayed_ratio,
                "exposed_comm_ms": identity.replayed_exposed_ms,
            },
            "identity": {**asdict(identity), "residual": identity.residual},
            **{name: values[name] for name in ("flags", "steps", "rank_steps", "notes")},
            "significant": self.significant,
            "upper_bound": self.upper_bound,
        }


@dataclass(frozen=True)
class Base:
    """The unchanged program, replayed and measured."""

    program: RunProgram
    chosen: RankStepSample
    times: Times
    measured: Measured
    identity: Identity

    def replayed(self, program: RunProgram) -> tuple[Times, Measured]:
        """Replay a changed program, and measure it where the unchanged one was."""
        times = replay(program, self.chosen.kept())
        return times, measure(program, times, self.chosen)


def base_of(program: RunProgram) -> Base:
    """Replay the unchanged program, and compare it with the record.

    Raises:
        InputError: it misses the recorded step times by more than `IDENTITY_BOUND`.
    """
    recorded = program.recorded_step_ms()
    if np.median(recorded) <= 0:
        raise InputError("no prediction: the recorded steps last 0 ns")
    chosen = sample(program)
    times = replay(program, chosen.kept())
    measured = measure(program, times, chosen)
    columns, steps = list(chosen.ranks), [program.steps[index] for index in chosen.steps]
    identity = Identity(
        float(np.median(recorded)),
        float(np.median(times.job_step_ms())),
        median_or_none(np.concatenate([step.recorded_ratio[columns] for step in steps])),
        median_or_none(measured.overlap_ratio),
        median_or_none(np.concatenate([step.recorded_exposed_ms[columns] for step in steps])),
        median_or_none(measured.exposed_comm_ms),
    )
    if not identity.residual <= IDENTITY_BOUND:
        raise InputError(
            f"no prediction: {identity.problem()}, and more than {IDENTITY_BOUND:.0%} is not accepted. The record "
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
    """Predict as `predict` does, for an unchanged run that was replayed already."""
    changes, identity = in_order(changes), base.identity
    wrong_by = [  # step, ratio, exposed; changes whose effects cancel may each be wrong
        identity.missed_ms,
        *(
            0.0 if replayed is None or recorded is None else abs(replayed - recorded)
            for replayed, recorded in (
                (identity.replayed_ratio, identity.recorded_ratio),
                (identity.replayed_exposed_ms, identity.recorded_exposed_ms),
            )
        ),
    ]
    program, flags = base.program, dict.fromkeys(flags_of(base.program))
    times, measured = base.times, base.measured
    for change in changes:
        program, of_change = apply(program, [change])
        flags |= dict.fromkeys(of_change)
        before, was = times, measured
        times, measured = base.replayed(program)
        moves = (  # of steps the time, of rank-steps overlap ratio and exposed time
            step_gain_ms(before, times),
            was.overlap_ratio - measured.overlap_ratio,
            was.exposed_comm_ms - measured.exposed_comm_ms,
        )
        for index, moved in enumerate(moves):
            wrong_by[index] += change.STATED_ERROR * abs(median_or_none(moved) or 0.0)

    def known(values: Floats, wrong_by: float, most: float = np.inf) -> Value | None:
        seen = ~np.isnan(values)
        return _value(values[seen], measured.step[seen], wrong_by, 0.0, most) if seen.any() else None

    found = Prediction(
        changes=tuple(change.text for change in changes),
        gain_ms=gain_of(step_gain_ms(base.times, times), wrong_by[0]),
        overlap_ratio=known(measured.overlap_ratio, wrong_by[1], 1.0),
        exposed_comm_ms=known(measured.exposed_comm_ms, wrong_by[2]),
        identity=identity,
        flags=tuple(flags),
        steps=len(base.program.steps),
        rank_steps=len(measured.step),
        launch_ms=_value(times.job_step_ms(), np.arange(len(base.program.steps)), wrong_by[0]),
        real_network=base.program.facts.network is None,
    )
    if any(isinstance(change, WorldSize) for change in changes):
        # Intervals hold while the larger world's network is within `LAW_BOUND` of its formula.
        for factor in (LAW_BOUND, 1 / LAW_BOUND):
            times, metrics = base.replayed(apply(program, [CommSpeed("the law", factor)]).program)
            ratio, exposed = found.overlap_ratio, found.exposed_comm_ms
            found = replace(
                found,
                gain_ms=found.gain_ms.reaching(float(np.median(step_gain_ms(base.times, times)))),
                overlap_ratio=ratio and ratio.reaching(median_or_none(metrics.overlap_ratio)),
                exposed_comm_ms=exposed and exposed.reaching(median_or_none(metrics.exposed_comm_ms)),
                launch_ms=found.launch_ms.reaching(float(np.median(times.job_step_ms()))),
            )
    return replace(found, notes=_where_exposed_went(found, base.measured, measured, free=FREE in changes))


def _where_exposed_went(prediction: Prediction, was: Measured, now: Measured, *, free: bool) -> tuple[str, ...]:
    """Return notes on why a change of the exposed communication is not the same change of a step."""
    exposed_ms, notes = prediction.identity.replayed_exposed_ms, list[str]()
    if prediction.exposed_comm_ms is None or not exposed_ms:
        return ()
    left_ms, gain_ms = prediction.exposed_comm_ms.value, prediction.gain_ms.value
    ranks = int((now.step == now.step[0]).sum())
    fell_ms = float(np.median((was.exposed_comm_ms - now.exposed_comm_ms).reshape(-1, ranks).mean(axis=1)))
    least_ms = _WORTH_SAYING * exposed_ms
    if free and left_ms > least_ms:
        notes.append(
            f"{rough_ms(left_ms)} of {rough_ms(exposed_ms)} stay exposed, because ranks wait for the last one to arrive"
        )
    paired = (
        f"step by step exposed communication {'falls' if fell_ms >= 0 else 'rises'} by {rough_ms(fell_ms)} (mean of "
        "the ranks, median of the steps)"
    )
    if abs(exposed_ms - left_ms - fell_ms) > least_ms:
        notes.append(
            f"{paired}; the medians before and after, {rough_ms(exposed_ms)} and {rough_ms(left_ms)}, are of different "
            "ranks and steps"
        )
    if fell_ms > 0 and fell_ms - gain_ms > least_ms:
        idle_ms = median_or_none(now.idle_ms - was.idle_ms) or 0.0
        rest = "more of the step is then outside timed blocks and collectives"
        if idle_ms <= 0:
            rest = "the slowest rank, which decides how long a step takes, exposed less than the typical one"
        step = f"a step gets {rough_ms(gain_ms)} {'shorter' if gain_ms >= 0 else 'longer'}"
        notes.append(f"{paired}, but {step}: {rest}")
    return tuple(f"free communication: {note}" if free else note for note in notes)


def verdict(significant: bool) -> str:
    return "significant" if significant else "not significant"


def flags_of(program: RunProgram) -> tuple[str, ...]:
    """Return what is not known, or doubtful, whatever is changed."""
    facts = program.facts
    flags = []
    if facts.network is None:
        flags.append(
            "real network: a gain is an upper bound, because contention of communication with computation is ignored, "
            "and because measured transfer times include the library's own overhead, which a faster network does not "
            "reduce"
        )
    elif not facts.law:
        flags.append("the emulated network's time is added to the backend's, which is assumed constant")
    part = facts.backend_was_limit / facts.collectives if facts.collectives else 0.0
    if part > BACKEND_BOUND:
        flags.append(
            f"in {TEXT.percent(part, 0)} of the collectives {facts.backend or 'the backend'} was slower than the "
            "emulated link, so what a faster network gains is rough"
        )
    if facts.arrival_unknown:
        flags.append(
            f"{facts.arrival_unknown} of {facts.collectives} collectives were queued behind another: when the device "
            "reached them is assumed to be the earliest possible, so a faster network may gain less"
        )
    return tuple(flags)
