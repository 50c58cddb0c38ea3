"""Which verdict follows from which evidence."""

from __future__ import annotations

from typing import Any

import pytest

from aorta.analysis.compare.verdict import Evidence, Rules, decide, least_launches
from aorta.analysis.documents.comparison import Effect
from aorta.errors import InputError
from tests.analysis.by_json import slower


def seen(value: float | None, low: float | None, high: float | None, p: float = 0.008, **changes: Any) -> Evidence:
    words: dict[str, Any] = {"better": "higher", "launches": (5, 5), "alpha": 0.05, "margin": 0.02}
    return Evidence(effect=Effect("difference", value, low, high), p=p, **words | changes)


@pytest.mark.parametrize(
    ("evidence", "word"),
    [
        (seen(-0.1, -0.15, -0.05), "regression"),
        (seen(0.1, 0.05, 0.15), "improvement"),
        (seen(0.1, 0.05, 0.15, better="lower"), "regression"),
        (seen(-0.1, -0.15, -0.05, better="lower"), "improvement"),
        (seen(-0.1, -0.15, 0.05, p=0.06), "inconclusive"),
        (seen(-0.1, -0.15, -0.05, p=0.05), "regression"),
        (seen(-0.015, -0.03, -0.01), "inconclusive"),
        (seen(-0.01, -0.015, -0.005), "equivalent"),
        (seen(0.02, 0.01, 0.03), "inconclusive"),  # of the margin is not beyond it
        (seen(-0.02, -0.03, -0.01), "inconclusive"),
        (seen(0.01, 0.0, 0.02, p=0.9), "equivalent"),  # to the margin is within it
        (seen(-0.01, -0.02, 0.0, p=0.9), "equivalent"),
        (seen(0.0, -0.01, 0.01, p=0.9), "equivalent"),
        (seen(0.0, -0.01, 0.03, p=0.9), "inconclusive"),
        (seen(0.0, None, None, p=0.9), "inconclusive"),
        (seen(None, None, None), "inconclusive"),
        (seen(-0.1, -0.15, 0.0, p=0.05), "inconclusive"),  # tied launches: the interval holds 0
        (seen(-0.1, -0.15, -0.05, launches=(3, 9)), "not tested"),
        (seen(0.0, -0.01, 0.01, p=0.9, launches=(9, 3)), "not tested"),
    ],
)
def test_the_word(evidence: Evidence, word: str) -> None:
    assert decide(evidence)[0] == word


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        (
            seen(-0.1, -0.2, 0, launches=(3, 1)),
            "needs 4 launches per side .* 3 against 1 launches, 1 more of the reference and 3",
        ),
        (seen(-0.1, -0.2, 0.0, p=0.2), "p = 0.2 is above 0.05"),
        (seen(-0.1, -0.2, 0.0, p=0.02), "p = 0.02, but the interval holds 0: launches share values"),
        (seen(-0.015, -0.03, -0.01), "not beyond the margin of 0.02"),
        (seen(0.0, -0.01, 0.01), "interval lies within"),
        (seen(None, None, None), "the reference is 0"),
    ],
)
def test_the_reason_says_what_is_lacking(evidence: Evidence, said: str) -> None:
    import re

    assert re.search(said, decide(evidence)[1])


def test_a_smaller_alpha_needs_more_launches() -> None:
    """2 / C(8, 4) = 0.029, 2 / C(10, 5) = 0.0079, 2 / C(12, 6) = 0.0022."""
    assert [least_launches(alpha) for alpha in (0.5, 0.05, 0.02, 0.005)] == [4, 4, 5, 6]
    assert [least_launches(alpha) for alpha in (2 / 70, 2 / 252)] == [4, 5]  # a p of alpha is significant


def guard(value: float | None, p: float | None) -> dict[str, Any]:
    return {"effect": {"value": value}, "p": p, "margin": 0.02}


def test_a_slower_step_withholds_and_so_does_an_unknown_one() -> None:
    assert slower(guard(0.01, 0.001), 0.05) is None
    assert slower(guard(0.02, 0.001), 0.05) is None
    assert slower(guard(-0.5, 0.001), 0.05) is None
    assert slower(guard(0.5, 0.05), 0.05) == "the step takes 50 % longer (p = 0.05)"
    assert slower(guard(0.5, 0.06), 0.05) == "the step takes 50 % longer (p = 0.06, which may be chance)"
    for unknown in (None, guard(None, 0.01), guard(0.5, None)):
        assert slower(unknown, 0.05) == "the step time is not known on both sides"


@pytest.mark.parametrize(
    "words",
    [{"alpha": 0}, {"alpha": 0.7}, {"margin": 0}, {"margin": 1}, {"primary": "comm_ms"}, {"primary": "nonsense"}],
)
def test_rules_that_cannot_be_followed_are_refused(words: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"--{next(iter(words))}"):
        Rules(**words)


def test_an_alpha_of_a_half_is_the_largest() -> None:
    assert Rules(alpha=0.5).alpha == 0.5


def test_one_metric_decides_one_guards_a_few_come_in_turn_and_the_others_are_secondary() -> None:
    names = ("overlap_ratio", "job_step_ms", "exposed_comm_ms", "idle_ms")
    assert [Rules().role(name) for name in names] == ["sequence", "guard", "primary", "secondary"]
    assert [Rules(primary="job_step_ms").role(name) for name in names] == [
        "sequence",
        "primary",
        "sequence",
        "secondary",
    ]


def test_the_sequence_begins_with_the_primary_metric() -> None:
    assert Rules().sequence == ("exposed_comm_ms", "overlap_ratio", "compute_stall_ms")
    assert Rules(primary="compute_stall_ms").sequence == ("compute_stall_ms", "exposed_comm_ms", "overlap_ratio")
    assert Rules(primary="job_step_ms").sequence[:2] == ("job_step_ms", "exposed_comm_ms")


def test_keys_are_allowed_whole_without_their_root_by_their_beginning_or_all() -> None:
    rules = Rules(allow_unlike=("workload.model_dim", "config.training"))
    assert rules.allows("config.workload.model_dim")
    assert rules.allows("config.training.batch_size")
    assert not rules.allows("config.workload.model_dimension")
    assert not rules.allows("config.workload")
    assert Rules(allow_unlike=("all",)).allows("header.world_size")
