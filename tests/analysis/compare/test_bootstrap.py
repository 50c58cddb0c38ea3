"""Intervals against a slow, direct bootstrap, and against the truth that simulated data has."""

from __future__ import annotations

import numpy as np
import pytest

from aorta.analysis.compare import bootstrap
from aorta.analysis.compare.bootstrap import LEAST_POOL, POOL, effect, effect_of, step_medians

Side = list[tuple[np.ndarray, np.ndarray]]
"""Values and the global step of each, per launch."""


def directly(reference: Side, candidate: Side, resamples: int, generator: np.random.Generator) -> tuple[float, float]:
    """Launches, then steps of a launch, with replacement, value by value; the 95 % interval of the quotient less 1."""

    def side(launches: Side) -> float:
        medians = []
        for place in generator.integers(len(launches), size=len(launches)):
            values, steps = launches[place]
            numbers = np.unique(steps)
            drawn = generator.choice(numbers, size=len(numbers))
            medians.append(np.median(np.concatenate([values[steps == step] for step in drawn])))
        return float(np.median(medians))

    found = [side(candidate) / side(reference) - 1 for _ in range(resamples)]
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def a_side(generator: np.random.Generator, level: float, launches: int = 5, steps: int = 20, ranks: int = 2) -> Side:
    made = []
    for _ in range(launches):
        shared = level * (1 + 0.03 * generator.standard_normal()) * (1 + 0.1 * generator.standard_normal((steps, 1)))
        values = shared * (1 + 0.02 * generator.standard_normal((steps, ranks)))
        made.append((values.ravel(), np.repeat(np.arange(steps), ranks)))
    return made


def sampled(side: Side, generator: np.random.Generator) -> list[tuple[float, np.ndarray]]:
    return [(float(np.median(values)), step_medians(values, steps, generator)) for values, steps in side]


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


def test_the_interval_is_that_of_a_direct_bootstrap() -> None:
    generator = np.random.default_rng(11)
    reference, candidate = a_side(generator, 10.0), a_side(generator, 10.8)
    low, high = directly(reference, candidate, 3000, generator)
    found = effect("quotient", sampled(reference, generator), sampled(candidate, generator), 0.95, generator)
    assert found.low is not None
    assert found.high is not None
    width = high - low
    assert found.low == pytest.approx(low, abs=0.12 * width)
    assert found.high == pytest.approx(high, abs=0.12 * width)


@pytest.mark.parametrize("launches", [5, 8])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(launches: int) -> None:
    """Known to be a little too narrow with few launches: 0.90 is the least that docs/comparing.md states."""
    generator, held = np.random.default_rng(launches), 0
    for _ in range(200):
        sides = [sampled(a_side(generator, level, launches), generator) for level in (10.0, 11.0)]
        found = effect("quotient", *sides, 0.95, generator)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.1 <= found.high
    assert 0.86 <= held / 200 <= 1.0


def test_the_effect_is_of_medians_of_launch_medians() -> None:
    pools = [(value, np.full(3, value)) for value in (1.0, 2.0, 9.0)]
    others = [(value, np.full(3, value)) for value in (4.0, 3.0)]
    assert effect("difference", pools, others, 0.95, np.random.default_rng(0)).value == 1.5
    assert effect("quotient", pools, others, 0.95, np.random.default_rng(0)).value == 0.75


def test_over_zero_there_is_no_quotient() -> None:
    zeros, ones = [(0.0, np.zeros(3))] * 4, [(1.0, np.ones(3))] * 4
    assert effect("quotient", zeros, ones, 0.95, np.random.default_rng(0)).value is None
    mixed = effect("quotient", [*ones[:3], *zeros[:1]], ones, 0.95, np.random.default_rng(0))
    assert mixed.value == 0
    assert (mixed.low, mixed.high) == (None, None)
    nothing = effect("quotient", [(1.0, np.array([0.0, 1.0]))] * 4, ones, 0.95, np.random.default_rng(0))
    assert (nothing.value, nothing.low, nothing.high) == (0, None, None)
    assert effect_of("quotient", 0.0, 1.0) is None


def test_a_large_launch_gets_fewer_resamples_and_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, steps = 64, 1000
    drawn: list[int] = []
    real = bootstrap._weighted_medians

    def watched(ordered: np.ndarray, rows: np.ndarray, cluster: np.ndarray) -> np.ndarray:
        drawn.append(rows.shape[0] * len(ordered))
        return real(ordered, rows, cluster)

    monkeypatch.setattr(bootstrap, "_weighted_medians", watched)
    values = np.random.default_rng(0).standard_normal(ranks * steps)
    found = step_medians(values, np.tile(np.arange(steps), ranks), np.random.default_rng(0))
    assert LEAST_POOL <= len(found) < POOL
    assert max(drawn) <= 1 << 20


def test_the_same_seed_gives_the_same_interval() -> None:
    side = a_side(np.random.default_rng(1), 10)
    first, second = (
        effect("quotient", *([sampled(side, np.random.default_rng(2))] * 2), 0.95, np.random.default_rng(3))
        for _ in range(2)
    )
    assert first == second
