"""Predicts what a run would have measured with changes made, with an interval, and notes on what is not known; and
lists what would gain most: changes that nobody can launch, parts of the communication if they were free, and bounds.

    predict(program, parse_changes(["network.bandwidth=x2"])).gain_ms
    gains(base_of(program)).gains[0].sentence

docs/dev/what-if-model.md defines gain and interval. Ratio and exposed time are medians over the replayed rank-steps.
Must not recommend anything, or add gains up: a collective may hide another one's time.
"""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from aorta.documents.explanations import GainEntry, WhatIf
from aorta.documents.formatting import TEXT, rough_interval, rough_ms
from aorta.documents.statistics import median_interval, median_or_none
from aorta.errors import InputError
from aorta.read.frames import Floats, Ints
from aorta.timeline.overlap import NS_PER_MS
from aorta.whatif.changes import Change, CommSpeed, NoStragglers, WorldSize, apply, in_order, parse_changes
from aorta.whatif.program import RunProgram
from aorta.whatif.replay import Measured, RankStepSample, Times, measure, replay, sample

FREE: Final = CommSpeed("comm=free", math.inf)
STATED_ERROR: Final = 0.10
"""The part of a predicted change that may be wrong: assumed, then measured (docs/dev/what-if-model.md)."""
LAW_BOUND: Final = 1.25
"""At another number of ranks nothing was recorded: a network may be this many times slower or faster than its formula.
In the simulator a jitter of 20 % and a node that is 10 % slower stay within it (tests/whatif)."""
IDENTITY_BOUND: Final = 0.05
"""The replay of the unchanged program may miss at most this part of the recorded job step time."""
_WORTH_SAYING: Final = 0.10
"""Part of the exposed time by which gain and reduction of exposed time may differ without a note."""
BACKEND_BOUND: Final = 0.10
"""If the backend decided more than this part of the collectives, a flag says so: a faster network may gain less."""
QUEUED_BOUND: Final = 0.01
"""If collectives were queued behind others for more than this part of their time, a faster network may gain more: in
the simulator with 0.028 of it, more than the interval holds (tests/whatif)."""
LEVEL: Final = 0.95


@dataclass(frozen=True)
class Value:
    value: float
    low: float
    high: float

    def reaching(self, other: float | None) -> Value:
        """Return the same with an interval that reaches as far as `other`."""
        return self if other is None else Value(self.value, min(self.low, other), max(self.high, other))


def gain_of(gains_ms: Floats, wrong_by: float) -> Value:
    """Return the median gain of steps and its interval; the model may be wrong by `wrong_by` milliseconds."""
    return _value(gains_ms, np.arange(len(gains_ms)), wrong_by, -np.inf)


def _value(values: Floats, steps: Ints, wrong_by: float, least: float = 0.0, most: float = np.inf) -> Value:
    """Return the median of values of which none is NaN, and its interval between what the metric can be at least and at
    most; `steps`: of each value.
    """
    value = float(np.median(values))
    low, high = median_interval(values, steps) or (float(values.min()), float(values.max()))
    return Value(value, max(min(low, value) - wrong_by, least), min(max(high, value) + wrong_by, most))


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
        notes: why less exposed communication is not as much less of a step, and what is not known.
        real_network: the replay leaves out that communication slows computation beside it.
        queued: it takes the time in which collectives were queued for a part of their transfer.
        launch_ms: the median of the changed steps, for comparison with a launch; less precise than `gain_ms`.
        steps, rank_steps: numbers of replayed steps, and of rank-steps in which the overlap was measured.
    """

    changes: tuple[str, ...]
    gain_ms: Value
    overlap_ratio: Value | None
    exposed_comm_ms: Value | None
    identity: Identity
    steps: int
    rank_steps: int
    launch_ms: Value
    real_network: bool
    queued: bool = False
    notes: tuple[str, ...] = ()

    @property
    def job_step_ms(self) -> Value:
        gain = self.gain_ms
        return Value(*(max(self.identity.replayed_ms - ms, 0.0) for ms in (gain.value, gain.high, gain.low)))

    @property
    def upper_bound(self) -> bool:
        return self.real_network and not self.queued and self.gain_ms.value >= 0

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; `identity` has the unchanged run."""
        return {
            **asdict(self),
            "job_step_ms": asdict(self.job_step_ms),
            "identity": {**asdict(self.identity), "residual": self.identity.residual},
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
    sampled = np.ix_(*chosen)
    identity = Identity(
        float(np.median(recorded)),
        float(np.median(times.job_step_ms())),
        median_or_none(program.recorded_ratio[sampled]),
        median_or_none(measured.overlap_ratio),
        median_or_none(program.recorded_exposed_ms[sampled]),
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
    program, notes = base.program, dict.fromkeys(_limits(base.program))
    times, measured = base.times, base.measured
    for change in changes:
        program, of_change = apply(program, [change])
        notes |= dict.fromkeys(of_change)
        before, was = times, measured
        times, measured = base.replayed(program)
        moves = (  # of steps the time, of rank-steps overlap ratio and exposed time
            times.gained_ms(before),
            was.overlap_ratio - measured.overlap_ratio,
            was.exposed_comm_ms - measured.exposed_comm_ms,
        )
        for index, moved in enumerate(moves):
            wrong_by[index] += STATED_ERROR * abs(median_or_none(moved) or 0.0)

    def known(values: Floats, wrong_by: float, most: float = np.inf) -> Value | None:
        seen = ~np.isnan(values)
        return _value(values[seen], measured.step[seen], wrong_by, 0.0, most) if seen.any() else None

    prediction = Prediction(
        changes=tuple(change.text for change in changes),
        gain_ms=gain_of(times.gained_ms(base.times), wrong_by[0]),
        overlap_ratio=known(measured.overlap_ratio, wrong_by[1], 1.0),
        exposed_comm_ms=known(measured.exposed_comm_ms, wrong_by[2]),
        identity=identity,
        steps=len(base.program.steps),
        rank_steps=len(measured.step),
        launch_ms=_value(times.job_step_ms(), np.arange(len(base.program.steps)), wrong_by[0]),
        real_network=base.program.network is None,
        queued=_queued(base.program) and [*changes] != [FREE],  # where nothing is transferred nothing queues
    )
    if any(isinstance(change, WorldSize) for change in changes):
        # Intervals hold while the larger world's network is within `LAW_BOUND` of its formula.
        for factor in (LAW_BOUND, 1 / LAW_BOUND):
            times, metrics = base.replayed(apply(program, [CommSpeed("the law", factor)]).program)
            ratio, exposed = prediction.overlap_ratio, prediction.exposed_comm_ms
            prediction = replace(
                prediction,
                gain_ms=prediction.gain_ms.reaching(float(np.median(times.gained_ms(base.times)))),
                overlap_ratio=ratio and ratio.reaching(median_or_none(metrics.overlap_ratio)),
                exposed_comm_ms=exposed and exposed.reaching(median_or_none(metrics.exposed_comm_ms)),
                launch_ms=prediction.launch_ms.reaching(float(np.median(times.job_step_ms()))),
            )
    why_not_less = _where_exposed_went(prediction, base.measured, measured, free=FREE in changes)
    return replace(prediction, notes=(*why_not_less, *notes))


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
    paired = f"in a median step exposed communication {'falls' if fell_ms >= 0 else 'rises'} by {rough_ms(fell_ms)}"
    if abs(exposed_ms - left_ms - fell_ms) > least_ms:
        notes.append(
            f"{paired} (mean of its ranks), and its median over all ranks and steps goes from {rough_ms(exposed_ms)} "
            f"to {rough_ms(left_ms)}"
        )
    if fell_ms > 0 and fell_ms - gain_ms > least_ms:
        idle_ms = median_or_none(now.idle_ms - was.idle_ms) or 0.0
        rest = "code outside timed blocks ran beside the rest"
        if idle_ms <= 0:
            rest = "on the slowest rank, which decides how long a step takes, less was exposed"
        step = f"the step gets {rough_ms(gain_ms)} {'shorter' if gain_ms >= 0 else 'longer'}"
        notes.append(f"{paired}, but {step}: {rest}")
    return tuple(f"free communication: {note}" if free else note for note in notes)


def _queued(program: RunProgram) -> bool:
    return program.queued_share > QUEUED_BOUND


def _limits(program: RunProgram) -> Iterator[str]:
    if _queued(program):
        yield (
            f"real network: in {TEXT.percent(program.queued_share, 0)} of their time collectives were queued behind "
            "others, which is taken for a part of their transfer: a gain is no upper bound, and contention with "
            "computation is ignored"
        )
    elif program.network is None:
        yield (
            "real network: a gain is an upper bound, because contention of communication with computation is ignored, "
            "and because measured transfer times include the library's own overhead, which a faster network does not "
            "reduce"
        )
    elif not program.law:
        yield "the emulated network's time is added to the backend's, which is assumed constant"
    part = program.backend_was_limit / program.collectives if program.collectives else 0.0
    if part > BACKEND_BOUND:
        yield (
            f"in {TEXT.percent(part, 0)} of the collectives {program.backend or 'the backend'} was slower than the "
            "emulated link, so what a faster network gains is rough"
        )
    if program.arrival_unknown:
        yield (
            f"{program.arrival_unknown} of {program.collectives} collectives were queued behind another: the earliest "
            "possible arrival at them is assumed, so a faster network may gain less"
        )


NO_SLOWER_RANKS: Final = "every rank as fast as the typical one"
"""Name of the bound of a replay in which no rank takes more own time than the typical one."""
WORTH: Final = 0.005
"""A gain below this part of the step is not named."""
_NETWORKS: Final = {
    "network.bandwidth=x2": "twice the bandwidth",
    "network.latency=x0.5": "half the latency",
}
"""Another network -> in words."""
_LAUNCHED_BY: Final = {
    "network.bandwidth=x2": {"fabric.intra_bandwidth_gb_per_s", "fabric.inter_bandwidth_gb_per_s"},
    "network.latency=x0.5": {"fabric.intra_latency_us", "fabric.inter_latency_us"},
    "stragglers=none": {"fabric.straggler_rank", "fabric.straggler_ms"},
}
"""A change -> the settings of an emulated network that make it in a launch."""
_What: TypeAlias = Literal["network", "ranks", "kind", "group", "bound"]


def gains(
    base: Base, differing: Collection[str] = (), ask: str = "aorta whatif RUN", *, no_straggler: str | None = None
) -> WhatIf:
    """Return what a step would gain, the largest gain first: every change alone, every kind and group of collectives if
    it alone were free, and bounds.

    Args:
        ask: the command that is asked for more.
        differing: settings in which the run differs from the one that it is compared with. What they changed was
            measured, and is not predicted.
        no_straggler: why no rank is named that holds the others up, if none is. Then no gain without one is predicted:
            the replay takes lateness away that the test over steps takes for chance.
    """
    program, step_ms = base.program, base.identity.replayed_ms

    def entry(what: _What, name: str, change: str | None, gains_ms: Floats, notes: Sequence[str] = ()) -> GainEntry:
        upper_bound = program.network is None and (change == FREE.text or not _queued(program))
        gain = gain_of(gains_ms, base.identity.missed_ms + STATED_ERROR * abs(float(np.median(gains_ms))))
        share = gain.value / step_ms
        sentence = f"{name}: {'at most ' if upper_bound else ''}{rough_interval(gain.value, gain.low, gain.high)}"
        sentence += f" of the {rough_ms(step_ms)} step, {TEXT.percent(share)}"
        if gain.low <= 0 and not upper_bound:
            sentence += ", which may be nothing"
        return GainEntry(what, name, change, gain.value, gain.low, gain.high, share, upper_bound, list(notes), sentence)

    def replayed(what: _What, name: str, change: Change) -> GainEntry:
        changed = apply(program, [change])
        return entry(what, name, change.text, replay(changed.program).gained_ms(base.times), changed.notes)

    notes = list(predict_from(base, [FREE]).notes)
    free = replay(apply(program, [FREE]).program)
    bounds = [entry("bound", "all communication free", FREE.text, free.gained_ms(base.times))]
    tried = []
    if no_straggler is not None:
        notes.append(f"{NO_SLOWER_RANKS}: not predicted, as no rank is named: {no_straggler}")
    else:
        try:
            bounds.append(replayed("bound", NO_SLOWER_RANKS, NoStragglers("stragglers=none")))
            tried.append(msgspec.structs.replace(bounds[-1], what="ranks"))
        except InputError as error:
            notes.append(str(error))
    # Perfect overlap: a step takes the longer of its time without communication and the time of its busiest link.
    overlapped_ns = np.maximum(free.job_step_ns(), _busiest_link_ns(program))
    hidden_ms = np.maximum(base.times.job_step_ns() - overlapped_ns, 0) / NS_PER_MS
    bounds.append(entry("bound", "perfect overlap", None, hidden_ms))
    for text, words in _NETWORKS.items():
        with suppress(InputError):  # of a real network the latency is not known
            tried.append(replayed("network", words, *parse_changes([text])))
    worth = []
    for gain in tried:
        if differing and _LAUNCHED_BY[gain.change or ""].issuperset(differing):
            notes.append(f"{gain.name}: not predicted, because this comparison measured {', '.join(sorted(differing))}")
        elif gain.share > WORTH:
            worth.append(gain)
    worth.sort(key=lambda gain: -gain.gain_ms)
    first = worth[0].change if worth else None
    return WhatIf(
        reason=None,
        steps=len(program.steps),
        ranks=len(program.ranks),
        level=LEVEL,
        step_ms=step_ms,
        check=base.identity.problem(),
        gains=worth,
        marginals=sorted((replayed(*part) for part in _parts(program)), key=lambda gain: -gain.gain_ms),
        bounds=bounds,
        notes=notes,
        command=f"{ask} --set {shlex.quote(first or 'network.bandwidth=x2')}",
    )


def _parts(program: RunProgram) -> Iterator[tuple[_What, str, CommSpeed]]:
    """Yield the kinds of collectives, and the groups where there are several: what, name, the change that frees it.
    Groups that other ranks use in each other's place (the disjoint groups of a mesh) are one.
    """
    every = [(position, issued) for layout in program.layouts for position, issued in enumerate(layout.issued)]
    for kind in sorted({issued.kind for _, issued in every}):
        yield "kind", kind, CommSpeed(f"comm.kind.{kind}=free", np.inf, kind=kind)
    together: dict[tuple[int, str, int], set[str]] = defaultdict(set)  # position, kind, number of ranks -> groups
    for position, issued in every:
        together[position, issued.kind, len(issued.ranks)].add(issued.group)
    family = {issued.group: {issued.group} for _, issued in every}
    for names in together.values():
        merged = set().union(*(family[name] for name in names))
        family |= dict.fromkeys(merged, merged)
    families = sorted({tuple(sorted(names)) for names in family.values()})
    for groups in families if len(families) > 1 else ():
        named = "default group" if groups == ("0",) else f"group{'s' * (len(groups) > 1)} {', '.join(groups)}"
        yield "group", named, CommSpeed(f"comm.group.{','.join(groups)}=free", np.inf, groups=groups)


def _busiest_link_ns(program: RunProgram) -> Ints:
    """Return for how long the busiest link of each step transfers."""
    busiest_ns = np.zeros(len(program.steps), np.int64)
    for index, step in enumerate(program.steps):
        costs_ns = step.cost_ns.T
        # Where a collective costs the same on all ranks, ranks of one layout have the same links.
        ranks = (
            zip(step.layouts, costs_ns, strict=True) if len(costs_ns) > 1 else zip({*step.layouts}, repeat(costs_ns[0]))
        )
        for layout, cost_ns in ranks:
            busy_ns: dict[object, int] = defaultdict(int)
            for position, issued in enumerate(program.layouts[layout].issued):
                # Without a link it waits for no other: it can run beside all of them.
                link = ("alone", position) if issued.link is None else issued.link
                busy_ns[link] += int(cost_ns[position])
            busiest_ns[index] = max(busiest_ns[index], *busy_ns.values(), 0)
    return busiest_ns
