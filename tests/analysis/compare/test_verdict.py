"""Which verdict follows from which evidence: of one metric, and of all metrics of two launch sets together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from aorta.analysis.compare.rank_tests import detectable, launches_needed, mann_whitney
from aorta.analysis.compare.verdict import GUARD, Rules, add_intervals, decide, judge, launch_test, slower
from aorta.documents.comparison import ComparedMetric, Effect, Interval, LaunchTest
from aorta.documents.statistics import describe
from aorta.errors import InputError
from tests.analysis.builders import partial

CASES = json.loads(Path(__file__).with_suffix(".json").read_text())


def decided(
    value: float | None, low: float | None, high: float | None, p: float = 0.008, **changes: Any
) -> tuple[str, str]:
    words: dict[str, Any] = {"better": "higher", "launches": (5, 5), "alpha": 0.05, "margin": 0.02}
    return decide(Effect("difference", value, low, high), p, **words | changes)


@pytest.mark.parametrize(("evidence", "changes", "word", "why"), CASES["one metric"])
def test_the_verdict_on_one_metric(evidence, changes, word, why):
    """An effect of the margin is not beyond it, and one up to the margin is within it."""
    found, reason = decided(*evidence, **changes)
    assert found == word
    assert why in reason


def guarding(value: float | None, p: float | None) -> ComparedMetric:
    return partial(ComparedMetric, test=partial(LaunchTest, effect=partial(Effect, value=value), p=p, margin=0.02))


def test_a_slower_step_withholds_and_so_does_an_unknown_one():
    assert [slower(guarding(value, 0.001), 0.05) for value in (0.01, 0.02, -0.5)] == [None] * 3
    assert slower(guarding(0.5, 0.05), 0.05) == "the step takes 50 % longer (p = 0.05)"
    assert slower(guarding(0.5, 0.06), 0.05) == "the step takes 50 % longer (p = 0.06, which may be chance)"
    for unknown in (None, guarding(None, 0.01), guarding(0.5, None)):
        assert slower(unknown, 0.05) == "the step time is not known on both sides"


@pytest.mark.parametrize(
    "words",
    [{"alpha": 0}, {"alpha": 0.7}, {"margin": 0}, {"margin": 1}, {"primary": "comm_ms"}, {"primary": "nonsense"}],
)
def test_rules_that_cannot_be_followed_are_refused(words):
    with pytest.raises(InputError, match=f"--{next(iter(words))}"):
        Rules(**words)
    assert Rules(alpha=0.5).alpha == 0.5


def test_a_primary_metric_that_is_longer_than_its_name_is_explained():
    with pytest.raises(InputError, match=r"^--primary exposed_comm_ms\.p99: did you mean exposed_comm_ms\?$"):
        Rules(primary="exposed_comm_ms.p99")


@pytest.mark.parametrize(("primary", "sequence", "roles"), CASES["primary"])
def test_the_primary_metric_decides_and_is_the_first_of_the_sequence(primary, sequence, roles):
    rules = Rules(primary=primary)
    assert list(rules.sequence) == sequence
    assert [rules.role(name) for name in ("overlap_ratio", "job_step_ms", "exposed_comm_ms", "idle_ms")] == roles


def test_keys_are_allowed_whole_without_their_root_by_their_beginning_or_all():
    rules = Rules(allow_unlike=("workload.model_dim", "config.training"))
    assert rules.allows("config.workload.model_dim")
    assert rules.allows("config.training.batch_size")
    assert not rules.allows("config.workload.model_dimension")
    assert not rules.allows("config.workload")
    assert Rules(allow_unlike=("all",)).allows("header.world_size")


def found(name: str, left: Sequence[float], right: Sequence[float]) -> LaunchTest:
    return launch_test(name, np.array(left), np.array(right), Rules())


LEFT, RIGHT = (98.0, 100.0, 102.0, 100.0), (108.0, 110.0, 112.0, 110.0)
RELATIVE = (16 / 6) ** 0.5 / 0.9594 / 100
"""Both sides deviate by 8 square milliseconds; c4 for 6 degrees of freedom is 0.9594; of a reference of 100 ms."""


def test_effect_and_interval_of_a_ratio_and_of_milliseconds():
    """Four against four reject an effect only where all launches lie beyond it: the largest and smallest pair."""
    ratio = found("overlap_ratio", [0.1, 0.2, 0.3, 0.4], [0.6, 0.7, 0.8, 0.9])
    assert ratio.effect.kind == "difference"
    assert (ratio.effect.value, ratio.effect.low, ratio.effect.high) == pytest.approx((0.5, 0.2, 0.8))
    assert ratio.interval_level == 0.95
    few = found("overlap_ratio", [0.1, 0.2, 0.3], [0.6, 0.7, 0.8])
    assert (few.effect.low, few.interval_level) == (None, None), "three against three bound nothing"
    same = found("window_ms", [100.0] * 4, [110.0] * 4)
    assert same.effect.kind == "quotient"
    assert (same.effect.value, same.effect.low, same.effect.high) == pytest.approx((0.1, 0.1, 0.1))
    assert (same.difference_interval.low, same.difference_interval.high) == pytest.approx((10, 10))
    nothing = found("overlap_ratio", [], [0.7, 0.8])
    assert (nothing.p, nothing.effect.value) == (None, None)
    assert "one launch per side" in str(found("window_ms", [100.0], [110.0]).power.smallest_effect_reason)


def test_noise_and_power_are_in_the_unit_of_the_effect():
    told = found("job_step_ms", LEFT, RIGHT)
    assert told.launch_sd == pytest.approx(RELATIVE, rel=1e-4)
    assert told.power.smallest_effect == pytest.approx(detectable(4, 4, RELATIVE, 0.02, 0.05), rel=1e-3)
    assert 0.02 < (told.power.smallest_effect or 0) < 0.1
    assert told.power.launches == 4
    scaled = found("job_step_ms", [1e3 * ms for ms in LEFT], [1e3 * ms for ms in RIGHT])
    assert scaled.launch_sd == pytest.approx(told.launch_sd), "in microseconds"
    assert scaled.effect.value == pytest.approx(told.effect.value)
    assert scaled.power.smallest_effect == pytest.approx(told.power.smallest_effect)
    ratio = found("overlap_ratio", [ms / 200 for ms in LEFT], [ms / 200 for ms in RIGHT])
    assert ratio.launch_sd == pytest.approx(RELATIVE * 100 / 200, rel=1e-4)
    noisy = (97.0, 99.0, 101.0, 103.0)
    below = found("job_step_ms", noisy, [ms + 0.1 for ms in noisy])
    assert below.power.launches == launches_needed(0.02, below.launch_sd or 0, 0.05), "that find the margin"
    secondary = found("idle_ms", LEFT, RIGHT)
    assert secondary.launch_sd == pytest.approx(RELATIVE, rel=1e-4)
    assert (secondary.power.smallest_effect, secondary.power.launches) == (None, None)


LEVEL = [0.50, 0.51, 0.52, 0.53, 0.54]
FIRST, LABEL = "exposed_comm_ms", "exposed communication"
SEQUENCE = (FIRST, "overlap_ratio", "compute_stall_ms")
Sides = tuple[np.ndarray, np.ndarray]


class Made(NamedTuple):
    """A metric, and the values of its launches."""

    pair: ComparedMetric
    values: Sides

    @property
    def test(self) -> LaunchTest:
        return self.pair.test


Metrics = dict[str, Made]


def entry(
    shift: float,
    role: str = "secondary",
    launches: int = 5,
    order: int = 0,
    values: Any = None,
    p: float | None = None,
    **changes: Any,
) -> Made:
    """A metric of which more is better; `order` rolls its launches, so that a labelling is not extreme in two metrics.

    A shift of 0.2 or more separates the sides; one of 0.01 does not.
    """
    level = np.array(LEVEL[:launches] if launches <= len(LEVEL) else np.linspace(0.5, 0.54, launches))
    left, right = (np.roll(level, order), level + shift) if values is None else values
    test = partial(LaunchTest, role=role, margin=0.02, p=mann_whitney(left, right) if p is None else p)
    test.effect, test.difference_interval = partial(Effect, kind="difference"), Interval(None, None)
    add_intervals(test, left, right, 0.05)
    told = {"unit": "ratio", "better": "higher", "judgement": "better"} | changes
    return Made(
        partial(ComparedMetric, reference=describe(left), candidate=describe(right), test=test, **told), (left, right)
    )


def constant(role: str = "secondary", launches: int = 5) -> Made:
    return entry(0.0, role, launches, p=1.0, values=(np.zeros(launches),) * 2)


def guard(shift: float, role: str = "guard", launches: int = 5, **changes: Any) -> Made:
    return entry(shift, role, launches, better="lower", **changes)


def announced(metrics: Metrics, rules: Rules | None = None) -> tuple[str, str]:
    pairs = {name: made.pair for name, made in metrics.items()}
    return judge(pairs, rules or Rules(), {name: made.values for name, made in metrics.items()})


def judged(metrics: Metrics, rules: Rules | None = None) -> dict[str, str | None]:
    announced(metrics, rules)
    return {name: found.test.verdict for name, found in metrics.items()}


def test_a_slower_step_withholds_every_improvement_and_nothing_else():
    def metrics(step: float) -> Metrics:
        return {FIRST: entry(0.2, "primary"), "better": entry(0.2), "worse": entry(-0.2), GUARD: guard(step)}

    assert list(judged(metrics(-0.2)).values()) == ["improvement", "improvement", "regression", "improvement"]
    late = metrics(0.2)
    assert list(judged(late).values()) == ["inconclusive", "inconclusive", "regression", "regression"]
    assert "better by itself" in late["better"].test.verdict_reason
    unknown = metrics(0.0)
    del unknown[GUARD]
    assert judged(unknown)["better"] == "inconclusive", "a step time that nobody knows withholds too"
    asked = judged({GUARD: guard(0.2, role="primary"), "better": entry(0.2)}, Rules(primary=GUARD))
    assert asked == {GUARD: "regression", "better": "improvement"}, "one that was itself asked about does not"


def in_turn(*shifts: float, launches: int = 4) -> Metrics:
    roles = ("primary", "sequence", "sequence")
    made = {name: entry(shift, role, launches) for name, shift, role in zip(SEQUENCE, shifts, roles, strict=True)}
    return made | {GUARD: guard(0.0, launches=launches)}


TIGHT = np.array([0.500, 0.5001, 0.5002, 0.5003])
UNJUDGED = {"judgement": "not judged", "judgement_reason": "only ratios"}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (in_turn(-0.2, -0.2, -0.2), ["regression", "regression", "regression"]),  # at 2 / 70 each, none corrected
        (in_turn(0.01, -0.2, -0.2), ["inconclusive", "not tested", "not tested"]),
        (in_turn(-0.2, 0.01, -0.2), ["regression", "inconclusive", "not tested"]),
        # A difference that is too small to matter was found, and the sequence goes on.
        (
            in_turn(0.0, -0.2, -0.2) | {FIRST: entry(0.0, "primary", 4, values=(TIGHT, TIGHT + 0.001))},
            ["equivalent", "shifted", "regression"],
        ),
        # Neither a metric of one value nor one that is not judged stops it.
        (
            in_turn(-0.2, 0.0, -0.2) | {"overlap_ratio": constant("sequence", 4)},
            ["regression", "equivalent", "regression"],
        ),
        (
            in_turn(0.0, -0.2, 0.0)
            | {FIRST: entry(-0.2, "primary", 4, p=0.9, **UNJUDGED), GUARD: guard(0, **UNJUDGED)},
            [None, "regression", "inconclusive"],
        ),
    ],
)
def test_each_of_the_sequence_is_tested_where_the_one_before_it_differs(metrics, words):
    found = judged(metrics)
    assert [found[name] for name in SEQUENCE] == words
    assert [metrics[name].test.p_corrected for name in SEQUENCE] == [None] * 3
    if words[-1] == "not tested":
        last = metrics["compute_stall_ms"].test
        assert last.p == pytest.approx(2 / 70), "its own p stays"
        assert last.least_launches is None, "more launches of this metric are not what it lacks"


def test_only_secondary_metrics_that_are_judged_and_vary_are_tested_together():
    metrics = {
        FIRST: entry(0.2, "primary"),
        "one": entry(0.2),
        "two": entry(0.01, order=2),
        "constant": constant(),
        "neutral": entry(0.2, better=None),
        "elsewhere": entry(0.2, **UNJUDGED),
        GUARD: guard(0.0),
    }
    found = judged(metrics)
    tests = {name: metric.test for name, metric in metrics.items()}
    corrected = {name: test.p_corrected for name, test in tests.items() if test.p_corrected is not None}
    # Each has two labellings of 252 that are as extreme.
    assert corrected == {"one": pytest.approx(4 / 252), "two": metrics["two"].test.p}
    words = [found[name] for name in ("one", "constant", "neutral", "elsewhere")]
    assert words == ["improvement", "equivalent", None, None]


def test_what_these_launches_cannot_decide_is_not_tested_and_says_how_many_would():
    def metrics(launches: int) -> Metrics:
        return {
            FIRST: entry(0.2, "primary", launches),
            "apart": entry(-0.2, "secondary", launches),
            "null": entry(0.001, "secondary", launches, order=2),
            GUARD: guard(0.0, launches=launches),
        }

    four = metrics(4)
    assert judged(four)["apart"] == "not tested"
    assert four["apart"].test.least_launches == four["null"].test.least_launches == 5
    assert four["apart"].test.p == pytest.approx(2 / 70), "the raw p stays"
    assert judged(metrics(5))["apart"] == "regression", "and with as many it is decided"


def test_the_interval_of_a_metric_tested_beside_others_is_that_of_its_test():
    """At 6 against 6 a raw p of 0.026 may be too much beside others: then the interval holds 0, as at that level."""
    generator = np.random.default_rng(7)
    nulls = {f"null {at}": entry(0.0, launches=6, values=generator.normal(0.5, 0.02, (2, 6))) for at in range(5)}
    judged({FIRST: entry(0.2, "primary", 6), GUARD: guard(0.0)} | nulls)
    for found in (null.test for null in nulls.values()):
        assert found.interval_level > 0.95
        assert (found.effect.low <= 0 <= found.effect.high) == (found.p_corrected > 0.05)


def test_the_same_value_in_too_few_launches_says_nothing():
    few = entry(0.0, p=1.0, values=(np.zeros(3), np.zeros(5)))
    assert judged({"metric": few}) == {"metric": "not tested"}
    assert few.test.least_launches == 4
    assert "1 more of the reference" in few.test.verdict_reason


@pytest.mark.parametrize(
    ("first", "step", "verdict"),
    [
        (-0.2, 0.0, "regression"),
        (0.2, 0.0, "improvement"),
        (0.01, 0.2, "regression"),
        (0.01, -0.2, "improvement"),
        (-0.2, -0.2, "improvement"),
        (0.2, 0.2, "regression"),
        (0.01, 0.0, "inconclusive"),
    ],
)
def test_step_time_leads_and_then_the_primary_metric(first, step, verdict):
    found = announced({FIRST: entry(first, role="primary"), GUARD: guard(step)})
    assert found[0] == verdict
    assert found[1].startswith("step time: ") == (step != 0)


def test_a_comparison_without_its_primary_metric_or_launches_enough_is_inconclusive():
    assert announced({"better": entry(0.2)}) == ("inconclusive", f"{LABEL}, the primary metric, is in neither record")
    found = announced({FIRST: entry(-0.2, "primary", 3)})
    assert found[0] == "inconclusive"
    assert found[1].startswith(f"{LABEL}: needs 4 launches per side")


@pytest.mark.parametrize(
    ("ratio", "exposed", "step", "verdict"),
    [
        (0.2, 0.01, -0.01, "shifted"),
        (0.2, 0.2, 0.0, "improvement"),
        (0.2, 0.01, -0.2, "improvement"),
        (0.2, -0.2, 0.0, "shifted"),
        (-0.2, 0.01, 0.0, "shifted"),
        (-0.2, -0.2, 0.0, "regression"),
        (-0.2, 0.01, 0.2, "regression"),
        (-0.2, 0.01, -0.2, "shifted"),
    ],
)
def test_a_share_counts_only_with_exposed_or_step_time(ratio, exposed, step, verdict):
    """Of each more is better here, of the step time less."""
    metrics = {"overlap_ratio": entry(ratio, "primary"), FIRST: entry(exposed, "sequence"), GUARD: guard(step)}
    word, reason = announced(metrics, Rules(primary="overlap_ratio"))
    assert metrics["overlap_ratio"].test.verdict == verdict
    assert (word == "shifted") == (verdict == "shifted" and abs(step) < 0.1)
    assert ("shifted, nothing" in reason) == (word == "shifted")


def test_across_platforms_where_only_shares_are_judged_a_share_stands():
    metrics = {
        "overlap_ratio": entry(-0.2, "primary"),
        FIRST: entry(0.0, "sequence", **UNJUDGED),
        GUARD: guard(0.0, **UNJUDGED),
    }
    assert announced(metrics, Rules(primary="overlap_ratio"))[0] == "regression"
