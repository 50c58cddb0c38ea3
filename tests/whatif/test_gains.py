"""What is named as a gain: what lasts, once, and with all that may be wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aorta import whatif
from aorta.config.schema import EmulatedFabric
from aorta.documents.dataset import GainEntry
from aorta.documents.formatting import rough_interval
from aorta.whatif.changes import CommSpeed
from aorta.whatif.gains import gains, marginals
from aorta.whatif.prediction import FREE, base_of, predict_from
from aorta.whatif.program import RankLayout, RunProgram
from tests.whatif.hand_made import issue, program, recorded, wait
from tests.whatif.simulated_job import Job
from tests.whatif.simulated_record import record

MS = 1_000_000


def noisy(ranks: int, late_ms: float = 0.0, seed: int = 0) -> RunProgram:
    """Equal ranks whose own time comes and goes by 10 %; the last of them is late before its collective, each step."""
    words = [5 * MS, issue(ranks=tuple(range(ranks))), 5 * MS, wait(0)]
    made = program([words] * ranks, [1 * MS], steps=60, network=EmulatedFabric())
    chance = np.random.default_rng(seed)
    for step in made.steps:
        step.host_ns[:] = np.rint(step.host_ns * chance.normal(1, 0.1, step.host_ns.shape).clip(0.5))
        step.host_ns[1, -1] += round(late_ms * MS)
    return recorded(made)


def of_other_bytes(made: RunProgram) -> RunProgram:
    """The same with collectives of another size in every step, as batches of any length make them."""
    layouts = [
        RankLayout(one.operations, tuple(each._replace(bytes=each.bytes + number) for each in one.issued))
        for number in range(len(made.steps))
        for one in made.layouts
    ]
    of_step = [replace(step, layouts=(number,) * len(made.ranks)) for number, step in enumerate(made.steps)]
    return replace(made, layouts=tuple(layouts), steps=of_step)


def of_stragglers(made: RunProgram) -> list[GainEntry]:
    return [each for each in gains(base_of(made), shown=9).gains if each.change == "stragglers=none"]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_comes_and_goes_is_no_straggler(ranks: int) -> None:
    named = sum(len(of_stragglers(noisy(ranks, seed=seed))) for seed in range(20))
    assert named <= 1


def test_what_comes_and_goes_is_no_straggler_where_every_step_is_of_its_own_size() -> None:
    named = sum(len(of_stragglers(of_other_bytes(noisy(2, seed=seed)))) for seed in range(20))
    assert named <= 1
    assert len(of_stragglers(of_other_bytes(noisy(2, late_ms=2.0)))) == 1


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_lasts_is_one_and_its_gain_is_significant(ranks: int) -> None:
    (found,) = of_stragglers(noisy(ranks, late_ms=2.0))
    # Medians of 60 steps of 5 ms, give or take 10 %: the excess is known to 0.11 ms, three times which is allowed.
    without = np.median(noisy(ranks).recorded_step_ms())
    really = np.median(noisy(ranks, late_ms=2.0).recorded_step_ms()) - without
    assert found.gain_ms == pytest.approx(really, abs=0.35)
    assert found.significant
    (note,) = found.notes
    excess = re.fullmatch(
        rf"slower than the typical rank in a step, waits left out: rank {ranks - 1} by ([\d.]+) ms", note
    )
    assert excess is not None
    assert float(excess[1]) == pytest.approx(2.0, abs=0.35)


def test_two_words_for_one_change_are_one(tmp_path: Path) -> None:
    record(Job("fsdp", ranks=4, prefetch=0), tmp_path / "run")
    named = {each.change for each in gains(base_of(whatif.read_program(tmp_path / "run")), shown=9).gains}
    assert len({"overlap=on", "prefetch=1"} & named) == 1


def test_a_marginal_cost_holds_what_the_model_may_be_wrong_by() -> None:
    made = program([[10 * MS, issue(), wait(0)]] * 2, [4 * MS], steps=5)
    (kind, *_) = marginals(made).marginals
    wrong_by = 4 * CommSpeed.STATED_ERROR
    assert (kind.gain_ms, kind.low_ms, kind.high_ms) == pytest.approx((4, 4 - wrong_by, 4 + wrong_by))
    missed = replace(made, steps=[replace(step, recorded_ns=step.recorded_ns + 1 * MS // 2) for step in made.steps])
    assert marginals(missed).marginals[0].low_ms == pytest.approx(4 - wrong_by - 0.5)


@pytest.mark.parametrize(
    ("before_issue_ms", "changes", "gain_ms", "said"),
    [
        (
            (5, 5),
            ["comm=free"],
            2.0,
            "free communication: step by step exposed communication falls by 12 ms (mean of the ranks, median of the "
            "steps), but a step gets 2 ms shorter: more of the step is then outside timed blocks and collectives",
        ),
        (
            (5, 5),
            ["comm=x2", "rank.0.late_ms=10", "rank.1.late_ms=10"],
            -8.0,
            "step by step exposed communication falls by 6 ms (mean of the ranks, median of the steps), but a step "
            "gets 8 ms longer: more of the step is then outside timed blocks and collectives",
        ),
        (
            (5, 5, 15),
            ["rank.2.late_ms=-10"],
            10.0,
            "step by step exposed communication falls by 6.67 ms (mean of the ranks, median of the steps); the medians "
            "before and after, 22 ms and 12 ms, are of different ranks and steps",
        ),
    ],
)
def test_what_is_no_longer_exposed_and_no_gain_is_said(
    before_issue_ms: tuple[int, ...], changes: list[str], gain_ms: float, said: str
) -> None:
    """12 ms of communication beside 10 ms of work that no block brackets: all of it is exposed, 2 ms are waited for."""
    ranks = tuple(range(len(before_issue_ms)))
    words = [[own * MS, issue(ranks=ranks), 10 * MS, wait(0)] for own in before_issue_ms]
    made = recorded(program(words, [12 * MS], steps=5))
    found = predict_from(base_of(made), whatif.parse_changes(changes))
    assert found.gain_ms.value == gain_ms
    assert found.notes == (said,)
    if changes == ["comm=free"]:
        assert gains(base_of(made)).notes == found.notes
    waited_for = recorded(program([[5 * MS, issue(), wait(0)]] * 2, [12 * MS], steps=5))
    assert predict_from(base_of(waited_for), [FREE]).notes == ()


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((20.311, 16.191, 23.230), "20 ms (16 to 23)"),
        ((1.665, 0.630, 2.857), "1.7 ms (0.6 to 2.9)"),
        ((0.3142, 0.2611, 0.3672), "0.31 ms (0.26 to 0.37)"),
        ((210.688, 195.422, 217.309), "211 ms (195 to 217)"),
        ((4.0, 4.0, 4.0), "4.000 ms (4.000 to 4.000)"),
        ((-1.2, -3.1, 0.4), "-1.2 ms (-3.1 to 0.4)"),
        ((2.1, 0.3, 7.0), "2.1 ms (0.3 to 7.0)"),  # significant: without a 0 in it
        ((1.73, -0.04, 5.12), "2 ms (0 to 5)"),
        ((-0.0001, -0.0002, 0.0001), "0 ms"),
        ((0.0, 0.0, 0.0), "0 ms"),
    ],
)
def test_an_interval_has_the_digits_that_its_width_gives_a_meaning(
    numbers: tuple[float, float, float], said: str
) -> None:
    assert rough_interval(*numbers) == said
