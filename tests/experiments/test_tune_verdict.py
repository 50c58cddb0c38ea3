"""When `aorta study` recommends, from simulated launches: not where nothing differs, and where there is a gain."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

from aorta.analysis.compare.launch_comparison import judged, medians_side
from aorta.analysis.compare.launch_set import Launch, LaunchSet, Sample
from aorta.analysis.compare.run_comparison import pairs
from aorta.analysis.compare.verdict import Rules
from aorta.analysis.documents.comparison import ComparedMetric, Comparison
from aorta.errors import InputError
from aorta.experiments.recommendation import ALPHA, check_launches, recommended, rules
from tests.analysis.by_json import built

SEEDS: Final = 200
LAUNCHES: Final = 5
VARIATION: Final = 0.04
"""From launch to launch, twice the margin: an effect beyond it by chance alone is common."""


def side(medians: npt.NDArray[np.float64]) -> LaunchSet:
    """Launches of one setting, with these median step times in ms."""
    return LaunchSet(
        Path(),
        tuple(
            Launch(Path(), str(number), {"job_step_ms": Sample(value, np.array([value]), None)}, {}, ())
            for number, value in enumerate(map(float, medians))
        ),
        (),
    )


def comparison(verdict: str, reason: str, metrics: dict[str, ComparedMetric]) -> Comparison:
    """A comparison of which no more is known."""
    found: Comparison = built(Comparison, {"verdict": verdict, "verdict_reason": reason})
    found.metrics = metrics
    return found


def decided(base: LaunchSet, candidates: list[LaunchSet], judged_by: Rules) -> str | None:
    """What is recommended."""
    judgements: dict[str, Comparison] = {}
    for number, candidate in enumerate(candidates, start=1):
        metrics = pairs(medians_side(base), medians_side(candidate))
        found = judged(metrics, base, candidate, judged_by)
        judgements[f"candidate-{number}"] = comparison(*found, metrics)
    return recommended(judgements)[0]


def tuned(seed: int, factors: list[float], variation: float = VARIATION) -> str | None:
    """What is recommended when the candidates take so many times the base's 100 ms, and launches vary."""
    generator = np.random.default_rng([7, seed])
    base, *candidates = (
        side(100 * factor * (1 + variation * generator.standard_normal(LAUNCHES))) for factor in (1.0, *factors)
    )
    return decided(base, candidates, rules(len(factors), 0.02))


@pytest.mark.thorough
@pytest.mark.parametrize("candidates", [1, 3])
def test_where_nothing_differs_there_is_no_recommendation_in_19_of_20(candidates: int) -> None:
    wrong = sum(tuned(seed, [1.0] * candidates) is not None for seed in range(SEEDS))
    assert wrong <= ALPHA * SEEDS


def test_more_candidates_have_to_be_surer() -> None:
    base = side(np.array([100.0, 101, 102, 103, 104]))
    candidate = side(np.array([90.0, 91, 92, 93, 101.5]))  # U = 2: p = 0.032
    assert decided(base, [candidate], rules(1, 0.02)) == "candidate-1"
    assert decided(base, [candidate, base], rules(2, 0.02)) is None


def test_a_real_gain_is_found_and_the_largest_is_recommended() -> None:
    found = [tuned(seed, [1.05, 0.85, 0.99], 0.02) for seed in range(40)]
    assert sum(each == "candidate-2" for each in found) >= 38
    assert set(found) <= {"candidate-2", None}


def test_of_two_improvements_the_shorter_step_is_recommended() -> None:
    assert tuned(0, [0.8, 0.6], 0.005) == "candidate-2"


def test_no_recommendation_says_why() -> None:
    assert recommended({}) == (None, "there was nothing to launch against the base")
    lost = comparison("regression", "", {})
    assert recommended({"candidate-1": lost})[1] == "none of the 1 launched was shown to be better than the base"


@pytest.mark.parametrize(("candidates", "least"), [(1, 4), (2, 5), (6, 5), (7, 6)])
def test_launches_that_can_reach_no_verdict_are_refused(candidates: int, least: int) -> None:
    check_launches(least, candidates, "--vary")
    with pytest.raises(InputError, match=f"fewer than {least} a side"):
        check_launches(least - 1, candidates, "--vary")
