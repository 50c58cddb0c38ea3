"""What `summary.json` holds of a comparison (both sides of every metric, verdicts, where the difference is) and in all.

Must not compute anything but what a struct says of itself.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from aorta.documents import ABSENT, known
from aorta.documents.dataset import DatasetEntry, LaunchLeftOut, Statistics
from aorta.documents.explanations import ExposedBreakdown
from aorta.documents.metrics import NOT_SHOWN, Better, Unit

EffectKind: TypeAlias = Literal["difference", "quotient"]
Side: TypeAlias = Literal["reference", "candidate"]
SIDES: tuple[Side, Side] = ("reference", "candidate")

NOT_SET: Final = "(absent)"
"""Stands for a key that only the other side has."""


class Interval(msgspec.Struct):
    """A confidence interval of the effect."""

    low: float | None
    high: float | None


class Effect(msgspec.Struct):
    """The effect of the candidate against the reference with its confidence interval: a difference, or a quotient less
    1. No value where the reference is 0; no interval where the launches bound nothing.
    """

    kind: EffectKind
    value: float | None
    low: float | None
    high: float | None

    @property
    def bounded(self) -> Effect | None:
        """Itself, where it has an interval."""
        return None if self.low is None else self

    @property
    def holds_zero(self) -> bool:
        """Whether no difference at all lies within the interval."""
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high


class Power(msgspec.Struct):
    """What so many launches find with this probability: the smallest effect; and how many launches a side find the
    observed effect, or one of the margin. Null for a reason.
    """

    probability: float
    smallest_effect: float | None
    smallest_effect_reason: str | None
    launches: int | None
    launches_reason: str | None


class LaunchTest(msgspec.Struct, kw_only=True):
    """The test of a metric over the launches of both sides, and the verdict that follows from it.

    Attributes:
        p_corrected: of a metric that is tested together with others.
        interval_level: of both intervals.
        launch_sd: standard deviation between launches, in the unit of the effect.
        least_launches: launches a side that a verdict needs; null where they are enough.
    """

    role: str
    verdict: str | None = None
    verdict_reason: str | None = None
    p: float | None
    p_corrected: float | None = None
    margin: float
    effect: Effect
    difference_interval: Interval
    interval_level: float | None
    launch_sd: float | None
    power: Power
    least_launches: int | None = None


class ComparedMetric(msgspec.Struct, kw_only=True):
    """One metric of both sides, in its unit; of launch sets with the test. Difference and quotient are those of the
    values of the sides, candidate minus and over reference.
    """

    unit: Unit
    better: Better | None
    reference: Statistics
    candidate: Statistics
    difference: float | None
    quotient: float | None
    quotient_reason: str | None
    judgement: str | None
    judgement_reason: str | None
    test: LaunchTest = ABSENT

    @property
    def tested(self) -> bool:
        """Whether this is a metric of launch sets."""
        return self.test is not ABSENT

    @property
    def verdict(self) -> str | None:
        """The verdict of the test; None without one."""
        return self.test.verdict if self.tested else None

    @property
    def bounded(self) -> bool:
        """Whether a side has bounds in place of a value."""
        return self.reference.ends is not None or self.candidate.ends is not None

    @property
    def constant(self) -> bool:
        """Whether all launches of both sides have the same value."""
        return self.reference.min == self.reference.max == self.candidate.min == self.candidate.max

    @property
    def counts(self) -> tuple[int, int]:
        """Number of launches of each side that have a value."""
        return self.reference.count, self.candidate.count

    @property
    def unknown(self) -> bool:
        """Whether neither side has a value."""
        return self.reference.value is None and self.candidate.value is None

    def side(self, side: Side) -> Statistics:
        """Return the statistics of one side."""
        return self.reference if side == "reference" else self.candidate


class ComparedCollective(msgspec.Struct):
    """Collectives of one kind, group, group size and number of bytes that both sides issued; `group_title` is what a
    person calls the reference's group.
    """

    kind: str
    group: str
    group_title: str
    group_size: int | None
    bytes: int | None
    transfer_ms: ComparedMetric
    wait_ms: ComparedMetric
    queued_ms: ComparedMetric
    busbw_gb_per_s: ComparedMetric


class HostBoundSide(msgspec.Struct):
    """The side that is host-bound while the other is not, and how far the hosts of both are ahead."""

    side: Literal["reference", "candidate"]
    host_lead_ms: dict[str, float]
    sentence: str


class LossDifference(msgspec.Struct):
    """Losses of the ranks and steps that both sides have: how many there are, how many are the same to the last bit,
    and the largest difference, candidate minus reference (null where all are the same).
    """

    count: int
    equal: int
    largest: float | None
    rank: int | None
    global_step: int | None
    sentence: str


class FactDifference(msgspec.Struct):
    """A fact of what was run that differs between the sides."""

    key: str
    reference: Any
    candidate: Any

    def value(self, side: Side) -> Any:
        """Return the fact of one side."""
        return self.reference if side == "reference" else self.candidate


class AllowedDifference(msgspec.Struct):
    """A difference of the work that the caller allowed, between the sides or within one."""

    where: str
    key: str
    values: list[Any]
    paths: list[str]


class LaunchEntry(msgspec.Struct):
    """One launch of a side: where it is, when it began, and medians over its steps."""

    path: str
    run_id: str
    began_unix_s: float | None
    overlap_ratio: float | None
    job_step_ms: float | None
    throttled_ranks: list[int]


class LaunchOrderFacts(msgspec.Struct):
    """Whether the launches of both sides took turns in time (`launch_order`)."""

    comparable: bool | None
    sequence: str | None
    drift_inflation: float | None
    largest_inflation: float
    reason: str | None
    assume_no_drift: bool


class AccountChange(msgspec.Struct, kw_only=True):
    """A part of the mean step on both sides; `low_ms` to `high_ms` is the 95 % interval of `change_ms` over launches,
    null with one launch on either side. `parts` below it add up to it.
    """

    name: str
    reference_ms: float
    candidate_ms: float
    change_ms: float
    low_ms: float | None
    high_ms: float | None
    cause: bool
    parts: list[AccountChange]


class AccountComparison(msgspec.Struct, kw_only=True):
    """What makes the step of one side longer: parts whose changes add up to the step's, and `causes`, one sentence
    each, the largest first. `decided`: the step itself changed by more than its interval and 2 %. `sentence`: settings
    that differ, then the causes; or why the step changed and none is named; null otherwise. With a `reason` there is
    nothing else in it.
    """

    reason: str | None
    step: AccountChange = ABSENT
    decided: bool = ABSENT
    parts: list[AccountChange] = ABSENT
    causes: list[str] = ABSENT
    sentence: str | None = ABSENT


class Comparison(msgspec.Struct, kw_only=True):
    """A candidate against a reference."""

    reference: str
    candidate: str
    reference_overlap_ratio: float | None
    candidate_overlap_ratio: float | None
    ratio_delta: float | None
    ratio_delta_reason: str = ABSENT
    verdict: str
    verdict_reason: str | None
    host_bound: HostBoundSide | None
    warnings: list[str]
    manifest_differences: list[FactDifference]
    losses: LossDifference | None
    unlike: list[str]
    statistic: str
    metrics: dict[str, ComparedMetric]
    collectives: list[ComparedCollective]
    collectives_on_one_side: dict[str, int]
    launches: dict[str, list[LaunchEntry]] = ABSENT
    launch_order: LaunchOrderFacts = ABSENT
    left_out: dict[str, list[LaunchLeftOut]] = ABSENT
    primary: str = ABSENT
    alpha: float = ABSENT
    margin: float = ABSENT
    interval_level: float = ABSENT
    sequence: list[str] = ABSENT
    judge_milliseconds: bool = ABSENT
    refused: list[AllowedDifference] = ABSENT
    headline: str = ABSENT
    numbers: str = ABSENT
    account: AccountComparison = ABSENT
    attribution: ExposedBreakdown = ABSENT

    @property
    def shown(self) -> dict[str, ComparedMetric]:
        """The metrics that text and page show."""
        return {name: pair for name, pair in self.metrics.items() if name not in NOT_SHOWN}

    @property
    def tested(self) -> bool:
        """Whether it is one of launch sets, with verdicts."""
        return self.launches is not ABSENT

    @property
    def deciding(self) -> str:
        """The metric that the verdict, or the headline of single runs, is of."""
        return self.primary or "exposed_comm_ms"

    @property
    def sentence(self) -> str | None:
        """What makes the difference; None where nothing is known to."""
        if self.host_bound is not None:
            return self.host_bound.sentence  # before any cause in the step
        return known(self.account.sentence) if self.account else None

    def label(self, side: Side) -> str:
        """Return the label of one side."""
        return self.reference if side == "reference" else self.candidate


class JudgedCondition(msgspec.Struct):
    """One condition of the gate with its outcome. `value` is what was compared with the threshold, in its unit; `low`
    and `high` are the ends of its interval.
    """

    condition: str
    metric: str
    relative: bool
    threshold: float
    unit: str
    value: float | None
    low: float | None
    high: float | None
    p: float | None
    outcome: Literal["pass", "fail", "inconclusive"]
    reason: str


class GateEntry(msgspec.Struct):
    """The outcome of the gate."""

    outcome: Literal["pass", "fail", "inconclusive"]
    exit_code: int
    basis: Literal["launches", "single runs"]
    conditions: list[JudgedCondition]


class MetricDefinition(msgspec.Struct):
    """What a metric is."""

    unit: Unit
    better: Better | None
    definition: str


class Summary(msgspec.Struct, kw_only=True):
    """`summary.json`."""

    summary_version: Literal[1]
    aorta_version: str
    datasets: dict[str, DatasetEntry]
    comparison: Comparison = ABSENT
    metrics: dict[str, MetricDefinition]
    gate: GateEntry = ABSENT
