"""What a run would have measured with something changed, how sure that is, and what is not known.

    predict(program, parse_changes(["network.bandwidth=x2"])).gain_ms

What a step gains is the median of paired differences: each step as replayed with the change against the same one as
replayed unchanged. Whoever states a gain states this one (`gain_of`). Ratio and exposed time are medians over the
replayed rank-steps. An interval has two parts: how the median varies when the record's own steps are drawn again
(bootstrap), and by how much the model may be wrong: what the replay of the unchanged program misses (the identity
check), plus a share of the predicted change (`Change.STATED_ERROR`). What another launch would have measured is in
neither. Must not recommend anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from aorta.analysis.compare.effects import step_medians
from aorta.analysis.formatting import rough_ms
from aorta.analysis.frames import Floats, Ints
from aorta.analysis.stats import median_or_none
from aorta.analysis.whatif.changes import apply, in_order
from aorta.analysis.whatif.network_changes import CommSpeed, WorldSize
from aorta.analysis.whatif.program import Change, RunProgram
from aorta.analysis.whatif.replay import Measured, RankStepSample, Times, measure, replay, sample
from aorta.errors import InputError
from aorta.timeline.overlap import NS_PER_MS

FREE: Final = CommSpeed("comm=free", math.inf)
LAW_BOUND: Final = 1.25
"""At another number of ranks nothing was recorded: a network may be so many times as slow or as fast as its law says.
In the simulator a jitter of 20 % and a node that is 10 % slower stay within it (tests/analysis/whatif)."""
IDENTITY_BOUND: Final = 0.05
"""The replay of the unchanged program may miss this part of the recorded job step time, no more."""
_WORTH_SAYING: Final = 0.10
"""From this part of the exposed time on it is said why a step is not shorter by what is no longer exposed."""
BACKEND_BOUND: Final = 0.10
"""From here on the part of collectives that the backend decided is said: a faster network's gain is then doubtful."""
LEVEL: Final = 0.95
_SEED: Final = 20_240_229


@dataclass(frozen=True)
class Value:
    value: float
    low: float
    high: float

    def reaching(self, other: float) -> Value:
        """Return the same with an interval that reaches as far as `other`."""
        return Value(self.value, min(self.low, other), max(self.high, other))


def step_gain_ms(before: Times, after: Times) -> Floats:
    return (before.job_step_ns() - after.job_step_ns()) / NS_PER_MS


def gain_of(gains_ms: Floats, wrong_by: float) -> Value:
    return value_of(gains_ms, np.arange(len(gains_ms)), wrong_by)


def value_of(values: Floats, steps: Ints, wrong_by: float, bounds: tuple[float, float] = (-np.inf, np.inf)) -> Value:
    """Return the median of `values` and its interval.

    Args:
        values: at least one, none NaN.
        steps: of each value.
        wrong_by: by how much the model may be wrong, in the unit of the values.
        bounds: what the metric can be.
    """
    value = float(np.median(values))
    drawn = step_medians(values, steps, np.random.default_rng(_SEED))
    low, high = np.percentile(drawn, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return Value(
        value, max(min(float(low), value) - wrong_by, bounds[0]), min(max(float(high), value) + wrong_by, bounds[1])
    )


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
        return abs(self.replayed_ms - self.recorded_ms)

    @property
    def residual(self) -> float:
        return self.missed_ms / self.recorded_ms

    def problem(self) -> str | None:
        """Return the check in words where the replay is not what was recorded; None where it is, as it is by
        construction wherever the record says what made a step as long as it was.
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
        gain_ms: by how much a step is shorter: median over steps of the paired difference. Everything else that is
            stated of the step time follows from it.
        overlap_ratio, exposed_comm_ms: medians over rank-steps; None: no communication.
        identity: the unchanged run, replayed and as recorded.
        flags: sentences about what is not known; `notes`: about why less exposed communication is not as much less of a
            step.
        upper_bound: the network was real: what communication costs computation beside it is not in the replay.
        launch_ms: the median of the changed steps, with an interval in which they vary too: what a launch with the
            change is held to. Of the difference it knows less than `gain_ms`, so nobody states it.
        steps: how many were replayed; `rank_steps`: how many of them the overlap was measured in.
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
    upper_bound: bool
    notes: tuple[str, ...] = ()

    @property
    def job_step_ms(self) -> Value:
        gain = self.gain_ms
        return Value(*(max(self.identity.replayed_ms - each, 0.0) for each in (gain.value, gain.high, gain.low)))

    @property
    def significant(self) -> bool:
        return not self.upper_bound and (self.gain_ms.low > 0 or self.gain_ms.high < 0)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values, in a stable order; `base` is the unchanged run as replayed."""
        identity, values = self.identity, {**asdict(self), "job_step_ms": asdict(self.job_step_ms)}
        base = {
            "job_step_ms": identity.replayed_ms,
            "overlap_ratio": identity.replayed_ratio,
            "exposed_comm_ms": identity.replayed_exposed_ms,
        }
        shown = ("changes", "gain_ms", "job_step_ms", "overlap_ratio", "exposed_comm_ms")
        return {
            **{name: values[name] for name in shown},
            "base": base,
            "identity": {**asdict(identity), "residual": identity.residual},
            **{name: values[name] for name in ("flags", "steps", "rank_steps", "notes")},
            "significant": self.significant,
            "upper_bound": self.upper_bound,
        }


@dataclass(frozen=True)
class Base:
    program: RunProgram
    chosen: RankStepSample
    times: Times
    measured: Measured
    identity: Identity


def base_of(program: RunProgram) -> Base:
    """Replay the unchanged program, and hold it against the record.

    Raises:
        InputError: it misses the recorded step times by more than `IDENTITY_BOUND`.
    """
    recorded = program.recorded_step_ms()
    if np.median(recorded) <= 0:
        raise InputError("no prediction: the recorded steps last 0 ns")
    chosen = sample(program)
    times = replay(program, chosen.kept())
    measured = measure(program, times, chosen)
    ratios = np.concatenate([program.steps[index].recorded_ratio[list(chosen.ranks)] for index in chosen.steps])
    exposed = np.concatenate([program.steps[index].recorded_exposed_ms[list(chosen.ranks)] for index in chosen.steps])
    identity = Identity(
        float(np.median(recorded)),
        float(np.median(times.job_step_ms())),
        median_or_none(ratios),
        median_or_none(measured.overlap_ratio),
        median_or_none(exposed),
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
    changes = in_order(changes)
    identity, every = base.identity, np.arange(len(base.program.steps))
    wrong_by = [  # step, ratio, exposed; changes whose effects cancel may each be wrong
        identity.missed_ms,
        _apart(identity.replayed_ratio, identity.recorded_ratio),
        _apart(identity.replayed_exposed_ms, identity.recorded_exposed_ms),
    ]
    program, flags = base.program, dict[str, None]()
    times, measured = base.times, base.measured
    for change in changes:
        changed = apply(program, [change])
        program = changed.program
        flags |= dict.fromkeys(changed.flags)
        now = replay(program, base.chosen.kept())
        metrics = measure(program, now, base.chosen)
        moves = (  # of steps the time, of rank-steps overlap ratio and exposed time
            step_gain_ms(times, now),
            measured.overlap_ratio - metrics.overlap_ratio,
            measured.exposed_comm_ms - metrics.exposed_comm_ms,
        )
        for index, moved in enumerate(moves):
            wrong_by[index] += change.STATED_ERROR * abs(median_or_none(moved) or 0.0)
        times, measured = now, metrics
    found = Prediction(
        changes=tuple(change.text for change in changes),
        gain_ms=gain_of(step_gain_ms(base.times, times), wrong_by[0]),
        overlap_ratio=_known(measured.overlap_ratio, measured.step, wrong_by[1], (0.0, 1.0)),
        exposed_comm_ms=_known(measured.exposed_comm_ms, measured.step, wrong_by[2]),
        identity=identity,
        flags=(*flags_of(base.program), *flags),
        steps=len(base.program.steps),
        rank_steps=len(measured.step),
        launch_ms=value_of(times.job_step_ms(), every, wrong_by[0], (0.0, np.inf)),
        upper_bound=base.program.facts.network is None,
    )
    if any(isinstance(change, WorldSize) for change in changes):
        found = _widened(found, base, program)
    notes = _where_exposed_went(found, base.measured, measured, free=FREE in changes)
    return replace(found, notes=tuple(notes))


def _where_exposed_went(prediction: Prediction, was: Measured, now: Measured, *, free: bool) -> Iterator[str]:
    """Yield why the step is not shorter by what was exposed; nothing where it is."""
    exposed_ms = prediction.identity.replayed_exposed_ms
    if prediction.exposed_comm_ms is None or not exposed_ms:
        return
    left_ms, gain_ms = prediction.exposed_comm_ms.value, prediction.gain_ms.value
    fell_ms, least_ms = exposed_ms - left_ms, _WORTH_SAYING * exposed_ms
    if free and left_ms > least_ms:
        yield (
            f"{rough_ms(left_ms)} of {rough_ms(exposed_ms)} stay exposed although communication is free: ranks "
            "wait for the last one to arrive"
        )
    if fell_ms <= 0 or fell_ms - gain_ms <= least_ms:
        return
    idle_ms = median_or_none(now.idle_ms - was.idle_ms) or 0.0
    rest = "the rest overlapped untimed code or remaining waits"
    if idle_ms <= 0:
        rest = "the slowest rank, which decides how long a step takes, exposed less than the typical one"
    change = "free communication" if free else "the change"
    yield f"{change} saves {rough_ms(gain_ms)} of {rough_ms(fell_ms)} exposed; {rest}"


def _widened(prediction: Prediction, base: Base, program: RunProgram) -> Prediction:
    """Widen intervals so that they hold while the larger world's network is within `LAW_BOUND` of its law."""
    for factor in (LAW_BOUND, 1 / LAW_BOUND):
        other = apply(program, [CommSpeed("the law", factor)]).program
        times = replay(other, base.chosen.kept())
        measured = measure(other, times, base.chosen)
        prediction = replace(
            prediction,
            gain_ms=prediction.gain_ms.reaching(float(np.median(step_gain_ms(base.times, times)))),
            overlap_ratio=_reaching(prediction.overlap_ratio, measured.overlap_ratio),
            exposed_comm_ms=_reaching(prediction.exposed_comm_ms, measured.exposed_comm_ms),
            launch_ms=prediction.launch_ms.reaching(float(np.median(times.job_step_ms()))),
        )
    return prediction


def _reaching(value: Value | None, others: Floats) -> Value | None:
    median = median_or_none(others)
    return value if value is None or median is None else value.reaching(median)


def verdict(significant: bool, upper_bound: bool) -> str:
    return "upper bound" if upper_bound else "significant" if significant else "not significant"


def flags_of(program: RunProgram) -> tuple[str, ...]:
    """Return what is not known, or doubtful, whatever is changed."""
    facts = program.facts
    found = []
    if facts.network is None:
        found.append(
            "real network: predictions are upper bounds that ignore contention of communication with computation; "
            "measured cost includes backend overhead"
        )
    elif not facts.law:
        found.append("the emulated network's time is added to the backend's, which is assumed constant")
    part = facts.backend_was_limit / facts.collectives if facts.collectives else 0.0
    if part > BACKEND_BOUND:
        found.append(
            f"the backend, not the network, decided {part:.0%} of the collectives: the gain of a faster network is a "
            "rough guess"
        )
    if facts.arrival_unknown:
        found.append(
            f"{facts.arrival_unknown} of {facts.collectives} collectives were queued behind another: when the device "
            "reached them is assumed to be the earliest possible, so a faster network may gain less"
        )
    return tuple(found)


def _known(values: Floats, steps: Ints, wrong_by: float, bounds: tuple[float, float] = (0.0, np.inf)) -> Value | None:
    known = ~np.isnan(values)
    return value_of(values[known], steps[known], wrong_by, bounds) if known.any() else None


def _apart(replayed: float | None, recorded: float | None) -> float:
    return 0.0 if replayed is None or recorded is None else abs(replayed - recorded)
