"""Which steps are observed, and what may be said of the others from them."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from aorta.documents.statistics import median_interval
from aorta.instrument import sampling
from aorta.instrument.sampling import FOR_ANOTHER_REASON, PASSED, Choice, Sampler, chosen, drawn, drawn_of, seed_of
from tests.distributed.conftest import DeadStore

SEED = seed_of("run-1")


@pytest.mark.parametrize("every", [1, 2, 10, 16, 50])
def test_one_step_of_each_block_is_drawn_wherever_the_run_begins(every: int) -> None:
    """On every rank, and after a resume: the answer depends on the run and the step alone."""
    found = [step for step in range(20 * every) if drawn(step, every, SEED)]
    assert [step // every for step in found] == list(range(20))
    resumed = Sampler(every, SEED, first=7 * every + 1)
    asked = [step for step in range(7 * every + 1, 20 * every) if resumed.draw(step) == every]
    assert asked == [step for step in found if step > 7 * every]


@pytest.mark.parametrize("every", [10, 16])
def test_each_place_of_a_block_is_drawn_alike_often(every: int) -> None:
    """Never every Nth step: what happens every 50 steps is met as often as it happens."""
    places = Counter(drawn_of(block, every, SEED) % every for block in range(200 * every))
    assert sorted(places) == list(range(every))
    assert all(120 < count < 280 for count in places.values()), places  # 200 each, and 5 standard deviations
    assert len({drawn_of(3, every, seed) for seed in range(50)}) > every // 2


def test_steps_of_larger_blocks_are_some_of_those_of_smaller_ones() -> None:
    """So ranks that could not agree have the steps of the largest N in common."""
    found = [{step for step in range(4096) if drawn(step, every, SEED)} for every in (2, 4, 8, 64, 1024)]
    assert all(larger < smaller for smaller, larger in itertools.pairwise(found))


def test_a_profilers_window_is_observed_and_not_counted_as_drawn() -> None:
    sampler = Sampler(10, SEED, always=lambda step: 20 <= step < 30)
    answers = {step: sampler.draw(step) for step in range(40)}
    assert Counter(answers[step] for step in range(20, 30)) == {10: 1, FOR_ANOTHER_REASON: 9}
    assert Counter(answers[step] for step in range(20)) == {10: 2, PASSED: 18}
    assert sampler.draw(41, always=True) in (10, FOR_ANOTHER_REASON)


class Clock:
    def __init__(self, step_ns: int) -> None:
        self.now_ns, self.step_ns = 0, step_ns

    def perf_counter_ns(self) -> int:
        return self.now_ns


def together(samplers: list[Sampler], clock: Clock, steps: range, observed_ns: int, passed_ns: int) -> list[list[int]]:
    """What each rank answers, of steps that all of them are in at once."""
    answers: list[list[int]] = [[] for _ in samplers]
    for step in steps:
        clock.now_ns += clock.step_ns
        for said, sampler in zip(answers, samplers, strict=True):
            said.append(sampler.draw(step))
            sampler.took(observed_ns if said[-1] != PASSED else passed_ns, observed=said[-1] != PASSED)
    return answers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(60_000_000)
    monkeypatch.setattr(sampling, "time", clock)
    return clock


def test_auto_chooses_by_what_it_costs_and_all_ranks_observe_the_same_steps(clock: Clock) -> None:
    store, told = dist.HashStore(), list[Choice]()
    ranks = [Sampler(None, SEED, 100, 5, store, is_first=rank == 0, tell=told.append) for rank in range(3)]
    answers = together(ranks, clock, range(100, 612), 300_000, 20_000)
    assert answers[0] == answers[1] == answers[2]
    (choice,) = told  # of the first rank alone
    assert (choice.observed_us, choice.passed_us, choice.step_ms) == (300.0, 20.0, 60.0)
    assert choice.every == 16  # (300 + 15 * 20) / 16 = 37.5 us of 48; 1 in 8 is 55 us
    assert answers[0][:13] == [FOR_ANOTHER_REASON] * 5 + [PASSED] * 8
    later = answers[0][choice.from_step - 100 :]
    assert set(later) == {16, PASSED}
    assert abs(later.count(16) - len(later) / 16) <= 1


def test_a_rank_that_cannot_read_the_choice_makes_its_own(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    gone: Any = DeadStore()
    ranks = [Sampler(None, SEED, 0, 5, gone, is_first=is_first) for is_first in (True, False)]
    answers = together(ranks, clock, range(400), 300_000, 20_000)
    assert [rank.every for rank in ranks] == [16, 16]
    assert answers[0][100:] == answers[1][100:]
    assert "choice is not known" in caplog.text


@pytest.mark.parametrize(
    ("observed_us", "passed_us", "step_ms", "every"),
    [(30, 1, 60, 1), (300, 20, 60, 16), (300, 0.1, 1, 512), (300, 70, 60, 64)],
)
def test_the_smallest_power_of_two_that_keeps_the_share(observed_us, passed_us, step_ms, every):
    assert chosen(observed_us, passed_us, step_ms, 0).every == every


@pytest.mark.parametrize("every", [10, 50])
@pytest.mark.parametrize(
    ("drift", "spikes"), [(0, 0), (25, 0), (0, 60), (25, 60)], ids=["steady", "drift", "spikes", "drift and spikes"]
)
def test_intervals_of_drawn_steps_hold_the_median_of_all_steps(drift: int, spikes: int, every: int) -> None:
    """Of a metric of 1,000 steps."""
    generator = np.random.default_rng(every)
    values = 40 + generator.gamma(2.0, 1.5, 1000) + np.linspace(0, drift, 1000)
    values[::50] += spikes
    whole, held, widths = float(np.median(values)), 0, []
    for seed in generator.integers(2**62, size=1000).tolist():
        steps = np.array([drawn_of(block, every, seed) for block in range(1000 // every)])
        interval = median_interval(values[steps], steps)
        held += interval[0] <= whole <= interval[1]
        widths.append(interval[1] - interval[0])
    assert held >= 930
    assert np.mean(widths) < np.ptp(values) / 2  # it says something


def test_ranks_of_a_step_are_not_more_steps() -> None:
    """Four ranks that wait for each other know no more of other steps than one does."""
    values, steps = np.random.default_rng(3).gamma(2.0, 1.5, 20), np.arange(0, 1000, 50)
    assert median_interval(values, steps) == median_interval(np.repeat(values, 4), np.repeat(steps, 4))
    assert median_interval(values[:5], np.arange(5)) is None
    assert median_interval(values[:6], np.arange(6)) == (values[:6].min(), values[:6].max())
