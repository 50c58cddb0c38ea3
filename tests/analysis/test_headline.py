"""What a comparison says first: a headline of at most 12 words and a line of numbers, neither against the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from aorta.analysis.compare.verdict import DECIDED, heed_means
from aorta.analysis.gate import evaluate, parse_condition
from aorta.analysis.headline import MOST_WORDS, evidence, headline, numbers, title
from aorta.documents import ABSENT
from aorta.documents.comparison import (
    AccountChange,
    AccountComparison,
    ComparedMetric,
    Comparison,
    Effect,
    EffectKind,
    FactDifference,
    HostBoundSide,
    LaunchTest,
    Power,
)
from aorta.documents.metrics import metric_named
from tests.analysis.builders import partial
from tests.analysis.compare.builders import metric


def entry(name: str, reference: float, candidate: float, verdict: str | None, p: float = 0.029) -> ComparedMetric:
    unit = metric_named(name).unit
    kind: EffectKind = "difference" if unit == "ratio" else "quotient"
    value = candidate - reference if kind == "difference" else candidate / reference - 1
    test = partial(
        LaunchTest,
        effect=Effect(kind, value, value - 0.05, value + 0.05),
        interval_level=0.95,
        p=p,
        verdict=verdict,
        verdict_reason="p = 0.34 is above 0.05",
        power=partial(Power, probability=0.8, smallest_effect=0.03, launches=9),
        margin=0.02,
    )
    return metric(reference, candidate, unit, test=test)


STEP = entry("job_step_ms", 178.0, 220.4, "inconclusive", p=0.34)
EXPOSED = entry("exposed_comm_ms", 33.1, 76.4, "regression")


def compared(verdict: str, *entries: ComparedMetric, primary: str = "exposed_comm_ms", **changes: Any) -> Comparison:
    metrics = dict(zip(("job_step_ms", "exposed_comm_ms", "overlap_ratio"), entries, strict=False))
    told = {"verdict": verdict, "verdict_reason": "p = 0.34 is above 0.05", "primary": primary, "launches": {}}
    return partial(Comparison, **told | {"alpha": 0.05, "metrics": metrics} | changes)


def said(found: Comparison) -> tuple[str, str]:
    return headline(found), numbers(found)


@pytest.mark.parametrize(
    "case", json.loads(Path(__file__).with_suffix(".json").read_text()), ids=lambda case: case["headline"]
)
def test_a_headline_and_its_numbers(case):
    """Of each metric the values of both sides, the verdict, and p where it is not 0.029."""
    metrics = {name: entry(name, *of) for name, of in case["metrics"].items()}
    changes = {name: case[name] for name in ("primary", "verdict_reason") if name in case}
    if "host_bound" in case:
        changes["host_bound"] = partial(HostBoundSide, side=case["host_bound"])
    found = compared(case["verdict"], **changes, metrics=metrics)
    assert said(found) == (case["headline"], case["numbers"])
    assert len(case["headline"].split()) <= MOST_WORDS


@pytest.mark.parametrize(
    ("steps_ms", "means_ms", "verdicts", "then", "first"),
    [  # a checkpoint every eighth step; medians that say less, or the other way; and a mean that agrees with them
        ((100, 100.2), (100, 143), ("equivalent",) * 2, ("inconclusive", "equivalent"), "step +43 %."),
        ((100, 101), (100, 143), ("inconclusive", "improvement"), ("inconclusive",) * 2, "step +43 %."),
        ((100, 95), (100, 120), ("improvement", "regression"), ("inconclusive", "regression"), "mean step +20 %."),
        ((100, 110), (100, 90), ("regression", "equivalent"), ("inconclusive", "equivalent"), "mean step -10 %."),
        (
            (100, 105),
            (100, 120),
            ("regression", "equivalent"),
            ("regression", "equivalent"),
            "Slower: step 100 -> 105 ms.",
        ),
    ],
)
def test_a_mean_that_a_few_steps_change_takes_back_what_medians_say(steps_ms, means_ms, verdicts, then, first):
    change_ms = means_ms[1] - means_ms[0]
    ends_ms = {"low_ms": change_ms - 1, "high_ms": change_ms + 1}
    change = partial(AccountChange, reference_ms=100, candidate_ms=means_ms[1], change_ms=change_ms, **ends_ms)
    entries = entry("job_step_ms", *steps_ms, verdicts[0]), entry("exposed_comm_ms", 33.1, 33.2, verdicts[1])
    account = AccountComparison(reason=None, step=change, parts=[])
    found = compared(next(filter(DECIDED.__contains__, verdicts), "equivalent"), *entries, account=account, margin=0.02)
    heed_means(found)
    assert tuple(each.verdict for each in found.metrics.values()) == then
    assert found.verdict == next(filter(DECIDED.__contains__, then), "inconclusive")
    assert said(found)[0].endswith(first)
    assert len(said(found)[0].split()) <= MOST_WORDS
    assert ("which medians do not show." in said(found)[1]) == (then[0] == "inconclusive")
    assert said(found)[1].endswith(" The mean step: +20 %.") == (then[0] == "regression")
    gate = evaluate([parse_condition("job_step_ms>15%")], found).conditions[0]
    assert (gate.outcome == "pass") == (then[0] == "regression")


UNLIKE = {
    "unlike": ["config.workload.model_dim"],
    "manifest_differences": [FactDifference("config.workload.model_dim", 64, 128)],
}


def test_not_comparable_is_the_headline_without_a_delta():
    assert said(compared("regression", STEP, EXPOSED, **UNLIKE)) == (
        "Not comparable: workload.model_dim differs.",
        "The runs did not do the same work: workload.model_dim is 64 in the reference, 128 in the candidate.",
    )
    more = UNLIKE | {"unlike": ["config.workload.model_dim"] * 3}
    assert said(compared("regression", **more))[0] == "Not comparable: workload.model_dim and 2 more differ."
    order = compared("not comparable in time", STEP, EXPOSED, verdict_reason="the launches (RRCC) did not take turns")
    assert said(order) == (
        "Not comparable in time: the launches did not take turns.",
        "The launches (RRCC) did not take turns.",
    )


def test_of_one_launch_a_side_nothing_is_tested():
    values = (("overlap_ratio", 0.5, 0.4), ("exposed_comm_ms", 9.0, 11.0), ("job_step_ms", 47.2, 42.7))
    metrics = {name: replace(entry(name, *sides, None), test=ABSENT) for name, *sides in values}
    why = "one launch per side; a verdict needs four"
    found = partial(Comparison, verdict="inconclusive", verdict_reason=why, metrics=metrics)
    assert title(found) == "not tested"
    assert said(found) == (
        "Not tested: exposed 9 -> 11 ms, step 47.2 -> 42.7 ms.",
        "Hidden 50 % -> 40 %; exposed +22 %; step -9.5 %. One launch per side; a verdict needs four.",
    )
    # The table below has means: a few steps may make them change the other way, a little more or less is chance.
    for after_ms, more in ((58.0, " The mean step: +16 %."), (45.0, "")):
        step = partial(AccountChange, reference_ms=50.0, candidate_ms=after_ms, change_ms=after_ms - 50.0)
        found.account = AccountComparison(reason=None, step=step, parts=[])
        assert numbers(found).endswith(f"a verdict needs four.{more}")


def test_the_evidence_has_interval_p_launches_and_power():
    found = compared("inconclusive", STEP, entry("exposed_comm_ms", 33.1, 34.0, "inconclusive", p=0.34))
    assert evidence(found) == (
        "exposed_comm_ms: +2.7 %, 95 % interval -2.3 to +7.7 %, p 0.34, 4 against 4 launches: p = 0.34 is above 0.05. "
        "Smallest detectable effect: 3 % (80 % power). To detect 2.7 %: 9 launches per side."
    )
    assert evidence(compared("regression", STEP, EXPOSED, **UNLIKE)) == ""
