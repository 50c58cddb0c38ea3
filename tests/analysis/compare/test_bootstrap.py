"""The interval of a side's median against a slow, direct bootstrap, and against the truth that simulated data has."""

from __future__ import annotations

import numpy as np
import pytest

from aorta.analysis.compare import effects
from aorta.analysis.compare.effects import LEAST_POOL, POOL, median_interval, step_medians

Side = list[tuple[np.ndarray, np.ndarray]]
"""Values and the global step of each, per launch."""


def directly(launches: Side, resamples: int, generator: np.random.Generator) -> tuple[float, float]:
    """Launches, then steps of a launch, with replacement, value by value; the 95 % interval of the median."""

    def median() -> float:
        medians = []
        for place in generator.integers(len(launches), size=len(launches)):
            values, steps = launches[place]
            numbers = np.unique(steps)
            drawn = generator.choice(numbers, size=len(numbers))
            medians.append(np.median(np.concatenate([values[steps == step] for step in drawn])))
        return float(np.median(medians))

    low, high = np.percentile([median() for _ in range(resamples)], [2.5, 97.5])
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
    side = a_side(generator, 10.0)
    low, high = directly(side, 3000, generator)
    found = median_interval(sampled(side, generator), 0.95, generator)
    assert found == pytest.approx((low, high), abs=0.12 * (high - low))


def test_the_interval_holds_the_middle_95_percent_of_resamples() -> None:
    """Of 6 launches drawn from 0 to 5 tenths the median is 0 in 0.9 % of draws and 0.05 in 2.6 %, so that 2.5 % of the
    median are at 0.05, and 5 % of it at 0.1; the same at the other end.
    """
    side = [(value, np.array([value])) for value in (0, 0.1, 0.2, 0.3, 0.4, 0.5)]
    assert median_interval(side, 0.95, np.random.default_rng(1)) == pytest.approx((0.05, 0.45))


@pytest.mark.parametrize("launches", [5, 8])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(launches: int) -> None:
    """Known to be a little too narrow with few launches."""
    generator, held = np.random.default_rng(launches), 0
    for _ in range(200):
        low, high = median_interval(sampled(a_side(generator, 10.0, launches), generator), 0.95, generator)
        held += low <= 10.0 <= high
    assert 0.84 <= held / 200 <= 1.0


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
