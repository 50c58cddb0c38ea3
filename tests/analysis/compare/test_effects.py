"""Effects and intervals, by hand, against the test turned round, and simulated plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.analysis.compare import effects
from aorta.analysis.compare.effects import (
    LEAST_POOL,
    POOL,
    Effect,
    accepted,
    detectable,
    effect_of,
    estimated,
    launches_needed,
    pooled_sd,
    step_medians,
)
from aorta.analysis.compare.launch_set import Sample
from aorta.analysis.compare.rank_tests import mann_whitney
from aorta.analysis.compare.verdict import Evidence, Rules, decide
from tests.analysis.by_json import numbers


def launches(*medians: float | None) -> list[Sample]:
    """Whose steps are all alike."""
    return [Sample(None, "not seen") if median is None else Sample(median) for median in medians]


def found(name: str, left: Sequence[float | None], right: Sequence[float | None], **rules: Any) -> dict[str, Any]:
    return numbers(name, launches(*left), launches(*right), Rules(**rules))


def test_the_interval_is_of_all_that_the_test_does_not_reject() -> None:
    """Four against four reject an effect only where all launches lie beyond it: the largest and smallest pair."""
    told = found("overlap_ratio", [0.1, 0.2, 0.3, 0.4], [0.6, 0.7, 0.8, 0.9])
    assert told["effect"]["value"] == pytest.approx(0.5)
    assert (told["effect"]["low"], told["effect"]["high"]) == (pytest.approx(0.2), pytest.approx(0.8))
    assert told["interval_level"] == 0.95
    few = found("overlap_ratio", [0.1, 0.2, 0.3], [0.6, 0.7, 0.8])
    assert (few["effect"]["low"], few["interval_level"]) == (None, None), "three against three bound nothing"


def test_a_quotient_has_an_interval_of_its_own_and_one_in_milliseconds() -> None:
    told = found("window_ms", [100.0] * 4, [110.0, 110.0, 110.0, 110.0])
    assert told["effect"] == {
        "kind": "quotient",
        "value": pytest.approx(0.1),
        "low": pytest.approx(0.1),
        "high": pytest.approx(0.1),
    }
    assert told["difference_interval"] == {"low": pytest.approx(10), "high": pytest.approx(10)}


LEFT, RIGHT = (98.0, 100.0, 102.0, 100.0), (108.0, 110.0, 112.0, 110.0)
RELATIVE = (16 / 6) ** 0.5 / 0.9594 / 100
"""Both sides deviate by 8 square milliseconds; c4 for 6 degrees of freedom is 0.9594; of a reference of 100 ms."""


def test_the_noise_of_milliseconds_is_relative_to_the_reference() -> None:
    told = found("job_step_ms", LEFT, RIGHT)
    assert told["launch_sd"] == pytest.approx(RELATIVE, rel=1e-4)
    assert told["detectable"]["effect"] == pytest.approx(detectable(4, 4, RELATIVE, 0.02, 0.05), rel=1e-3)
    assert 0.02 < told["detectable"]["effect"] < 0.1
    assert told["launches_needed"] == 4


def test_in_microseconds_every_relative_number_is_the_same() -> None:
    told, scaled = (
        found("job_step_ms", LEFT, RIGHT),
        found("job_step_ms", [1e3 * ms for ms in LEFT], [1e3 * ms for ms in RIGHT]),
    )
    for name in ("effect", "launch_sd", "detectable"):
        assert scaled[name] == pytest.approx(told[name]), name
    assert scaled["launches_needed"] == told["launches_needed"]


def test_the_noise_of_a_ratio_is_in_the_ratio() -> None:
    told = found("overlap_ratio", [ms / 200 for ms in LEFT], [ms / 200 for ms in RIGHT])
    assert told["launch_sd"] == pytest.approx(RELATIVE * 100 / 200, rel=1e-4)


def test_launches_are_asked_for_that_find_the_margin_where_the_effect_is_below_it() -> None:
    noisy = (97.0, 99.0, 101.0, 103.0)
    told = found("job_step_ms", noisy, [ms + 0.1 for ms in noisy])
    assert told["effect"]["value"] == pytest.approx(0.001)
    assert told["launches_needed"] == launches_needed(0.02, told["launch_sd"], 0.05)
    assert told["launches_needed"] is not None


def test_launches_without_a_value_do_not_count() -> None:
    told = found("overlap_ratio", [0.5, None, 0.6, None], [0.7, 0.8])
    assert told["launches"] == {"reference": 2, "candidate": 2}
    nothing = found("overlap_ratio", [None, None], [0.7, 0.8])
    assert (nothing["p"], nothing["effect"]["value"], nothing["launches"]["reference"]) == (None, None, 0)


def test_a_secondary_metric_states_its_noise_and_no_power() -> None:
    told = found("idle_ms", LEFT, RIGHT)
    assert told["launch_sd"] == pytest.approx(RELATIVE, rel=1e-4)
    assert (told["detectable"]["effect"], told["launches_needed"]) == (None, None)


def test_four_against_four_it_reaches_over_all_pairs() -> None:
    """Only U = 0 and U = 16 have p <= 0.05."""
    reference, candidate = np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 20.0, 30.0, 40.0])
    assert accepted(reference, candidate, 0.05, "difference") == (10 - 4, 40 - 1)
    assert accepted(reference, candidate, 0.05, "quotient") == (10 / 4 - 1, 40 / 1 - 1)


def test_five_against_five_it_leaves_two_pairs_out_on_each_side() -> None:
    """U <= 2 and U >= 23 have p <= 0.05 (tables): three pairs reject, so the third of 25 bounds it."""
    generator = np.random.default_rng(0)
    reference, candidate = generator.standard_normal(5), generator.standard_normal(5)
    pairs = np.sort((candidate[:, None] - reference).ravel())
    assert accepted(reference, candidate, 0.05, "difference") == (pairs[2], pairs[-3])


@pytest.mark.parametrize("sizes", [(4, 4), (5, 5), (4, 7), (8, 8)])
def test_what_lies_within_is_not_rejected_and_what_lies_outside_is(sizes: tuple[int, int]) -> None:
    generator = np.random.default_rng(sum(sizes))
    reference, candidate = (generator.standard_normal(size) for size in sizes)
    found = accepted(reference, candidate, 0.05, "difference")
    assert found is not None
    low, high = found
    for inside in np.linspace(low, high, 23)[1:-1]:
        assert mann_whitney(reference, candidate - inside) > 0.05
    for outside in (low - 1e-6, low - 1, high + 1e-6, high + 1):
        assert mann_whitney(reference, candidate - outside) <= 0.05


FEW = st.lists(st.integers(1, 6).map(float), min_size=5, max_size=5)


@given(FEW, FEW, st.sampled_from(["difference", "quotient"]), st.sampled_from([0.05, 0.01, 0.3]))
def test_where_p_is_above_the_level_it_holds_zero_and_always_the_effect(
    left: list[float], right: list[float], kind: str, level: float
) -> None:
    """Ties included, of which pairs alone do not say what the test does."""
    reference, candidate = np.array(left), np.array(right)
    p = mann_whitney(reference, candidate)
    found = estimated(kind, reference, candidate, p, level)  # type: ignore[arg-type]
    assert found.low is not None
    assert found.high is not None
    assert found.value is not None
    assert found.low <= found.value <= found.high
    assert found.holds_zero or p <= level


def test_the_effect_is_of_medians_of_launch_medians() -> None:
    reference, candidate = np.array([1.0, 2.0, 9.0]), np.array([4.0, 3.0])
    assert estimated("difference", reference, candidate, 0.4, 0.05).value == 1.5
    assert estimated("quotient", reference, candidate, 0.4, 0.05).value == 0.75


def test_over_zero_there_is_no_quotient() -> None:
    ones = np.ones(4)
    assert estimated("quotient", np.zeros(4), ones, 0.03, 0.05).value is None
    mixed = estimated("quotient", np.array([1.0, 1.0, 1.0, 0.0]), ones, 1.0, 0.05)
    assert (mixed.value, mixed.low, mixed.high) == (0, None, None)
    assert effect_of("quotient", 0.0, 1.0) is None


@pytest.mark.parametrize("launches", [4, 5, 8])
def test_the_interval_holds_the_truth_at_least_as_often_as_it_says(launches: int) -> None:
    """Exact: 1 less the p of the last value that rejects, 97.1, 96.8 and 95.0 % for 4, 5 and 8."""
    generator, held, plans = np.random.default_rng(launches), 0, 2000
    for _ in range(plans):
        reference, candidate = generator.standard_normal((2, launches))
        found = accepted(reference, candidate + 0.7, 0.05, "difference")
        assert found is not None
        held += found[0] <= 0.7 <= found[1]
    assert held / plans >= 0.95 - 4 * (0.05 * 0.95 / plans) ** 0.5


def test_medians_of_resampled_steps_are_those_of_the_very_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the steps that were drawn, put together step by step."""
    generator = np.random.default_rng(3)
    steps = np.repeat(np.arange(7), 3)[:-1]  # one step has lost a rank
    values = generator.standard_normal(len(steps))
    rows: list[np.ndarray] = []

    class Spy:
        def integers(self, high: int, size: tuple[int, int]) -> np.ndarray:
            rows.append(generator.integers(high, size=size))
            return rows[-1]

    found = step_medians(values, steps, Spy())  # type: ignore[arg-type]
    expected = [np.median(np.concatenate([values[steps == at] for at in row])) for row in np.concatenate(rows)]
    assert found == pytest.approx(expected)
    assert len(found) == POOL


def test_a_large_launch_gets_fewer_resamples_and_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, steps = 64, 1000
    drawn: list[int] = []
    real = effects._weighted_medians

    def watched(ordered: np.ndarray, rows: np.ndarray, cluster: np.ndarray) -> np.ndarray:
        drawn.append(rows.shape[0] * len(ordered))
        return real(ordered, rows, cluster)

    monkeypatch.setattr(effects, "_weighted_medians", watched)
    values = np.random.default_rng(0).standard_normal(ranks * steps)
    found = step_medians(values, np.tile(np.arange(steps), ranks), np.random.default_rng(0))
    assert LEAST_POOL <= len(found) < POOL
    assert max(drawn) <= 1 << 20


def share_found(sizes: tuple[int, int], sd: float, shift: float, margin: float) -> float:
    generator, found = np.random.default_rng(1), 0
    for _ in range(1500):
        left, right = (sd * generator.standard_normal(size) for size in sizes)
        right = right + shift
        seen = Effect("difference", float(np.median(right) - np.median(left)), None, None)
        evidence = Evidence("lower", seen, mann_whitney(left, right), sizes, 0.05, margin)
        found += decide(evidence)[0] == "regression"
    return found / 1500


@pytest.mark.parametrize(("sizes", "sd", "margin"), [((4, 4), 1.0, 0.1), ((5, 5), 0.01, 0.02), ((4, 7), 0.05, 0.02)])
def test_the_smallest_detectable_effect_is_found_in_80_percent_of_plans(
    sizes: tuple[int, int], sd: float, margin: float
) -> None:
    shift = detectable(*sizes, sd, margin, 0.05)
    assert shift is not None
    assert share_found(sizes, sd, shift, margin) == pytest.approx(0.8, abs=0.04)


def test_without_noise_what_is_beyond_the_margin_is_found() -> None:
    assert detectable(4, 4, 0.0, 0.02, 0.05) == 0.02


def test_with_three_launches_nothing_is() -> None:
    assert detectable(3, 3, 0.01, 0.02, 0.05) is None


def test_launches_needed_are_those_that_find_it_in_80_percent_of_plans() -> None:
    needed = launches_needed(1.5, 1.0, 0.05)
    assert needed is not None
    assert share_found((needed, needed), 1.0, 1.5, 0.0) >= 0.77
    assert share_found((needed - 1, needed - 1), 1.0, 1.5, 0.0) <= 0.83
    assert launches_needed(-1.5, 1.0, 0.05) == needed
    assert launches_needed(100, 1.0, 0.05) == 4
    assert launches_needed(0.1, 1.0, 0.05) is None


def test_the_pooled_deviation_is_not_too_small_on_average() -> None:
    generator = np.random.default_rng(4)
    draws = [pooled_sd(generator.normal(0, 2, 4), generator.normal(9, 2, 3)) for _ in range(4000)]
    assert np.mean([draw for draw in draws if draw is not None]) == pytest.approx(2, rel=0.02)
    assert pooled_sd(np.ones(1), np.ones(1)) is None
