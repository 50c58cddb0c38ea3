"""What a comparison says first: a headline of at most 12 words and a line of numbers, neither against the table."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from aorta.analysis.compare.headline import MOST_WORDS, evidence, headline, numbers, title
from aorta.analysis.compare.launch_comparison import judged
from aorta.analysis.compare.run_comparison import pairs
from aorta.analysis.compare.verdict import DECIDED, GUARD, SEQUENCE, SHIFTED, Rules
from aorta.documents import ABSENT
from aorta.documents.comparison import (
    ComparedMetric,
    Comparison,
    Effect,
    EffectKind,
    FactDifference,
    HostBoundSide,
    LaunchTest,
    Power,
)
from aorta.documents.dataset import Statistics
from aorta.documents.metrics import metric_named
from benchmarks.verdict_error_rates import recorded, side_of
from tests.analysis.builders import partial

CHANGED = {"job_step_ms": "step", "exposed_comm_ms": "exposed", "overlap_ratio": "hidden"}


def entry(name: str, reference: float, candidate: float, verdict: str | None, p: float = 0.029) -> ComparedMetric:
    unit = metric_named(name).unit
    kind: EffectKind = "difference" if unit == "ratio" else "quotient"
    value = candidate - reference if kind == "difference" else candidate / reference - 1
    return partial(
        ComparedMetric,
        unit=unit,
        reference=partial(Statistics, value=reference, count=4),
        candidate=partial(Statistics, value=candidate, count=4),
        difference=candidate - reference,
        quotient=candidate / reference,
        test=partial(
            LaunchTest,
            effect=Effect(kind, value, value - 0.05, value + 0.05),
            interval_level=0.95,
            p=p,
            verdict=verdict,
            verdict_reason="p = 0.34 is above 0.05",
            power=partial(Power, probability=0.8, smallest_effect=0.03, launches=9),
            margin=0.02,
        ),
    )


STEP = entry("job_step_ms", 178.0, 220.4, "inconclusive", p=0.34)
EXPOSED = entry("exposed_comm_ms", 33.1, 76.4, "regression")
HIDDEN = entry("overlap_ratio", 0.476, 0.0001, "regression")


def hidden(verdict: str) -> ComparedMetric:
    return entry("overlap_ratio", 0.476, 0.0001, verdict)


def compared(verdict: str, *entries: ComparedMetric, primary: str = "exposed_comm_ms", **changes: Any) -> Comparison:
    metrics = dict(zip(("job_step_ms", "exposed_comm_ms", "overlap_ratio"), entries, strict=False))
    told = {"verdict": verdict, "verdict_reason": "p = 0.34 is above 0.05", "primary": primary, "launches": {}}
    return partial(Comparison, **told | {"alpha": 0.05, "metrics": metrics} | changes)


def said(found: Comparison) -> tuple[str, str]:
    return headline(found), numbers(found)


def step(candidate: float, verdict: str | None) -> ComparedMetric:
    return entry("job_step_ms", 178.0, candidate, verdict)


def exposed(candidate: float, verdict: str | None) -> ComparedMetric:
    return entry("exposed_comm_ms", 33.1, candidate, verdict)


@pytest.mark.parametrize(
    ("found", "first", "second"),
    [
        (
            compared("regression", STEP, EXPOSED, HIDDEN),
            "More exposed communication: 33.1 -> 76.4 ms; step time inconclusive.",
            "Hidden 48 % -> <1 % (significant); exposed +131 % (significant); step +24 % (inconclusive).",
        ),
        (
            compared("regression", step(220.4, "regression"), EXPOSED, HIDDEN),
            "Slower: step 178 -> 220 ms, 43.3 ms more exposed.",
            "Hidden 48 % -> <1 % (significant); exposed +131 % (significant); step +24 % (significant).",
        ),
        (
            compared("improvement", step(160.2, "improvement"), EXPOSED, hidden(SHIFTED)),
            "Faster: step 178 -> 160 ms, although 43.3 ms more exposed.",
            "Hidden 48 % -> <1 % (shifted); exposed +131 % (significant); step -10 % (significant).",
        ),
        (
            compared("improvement", step(178.0, "equivalent"), exposed(20.0, "improvement")),
            "Less exposed communication: 33.1 -> 20 ms; step time unchanged.",
            "Exposed -40 % (significant); step 0 % (equivalent).",
        ),
        (
            compared(
                "inconclusive",
                step(176.0, "inconclusive"),
                exposed(33.4, "inconclusive"),
                hidden("not tested"),
            ),
            "Inconclusive: exposed 33.1 -> 33.4 ms; step time inconclusive.",
            "Hidden 48 % -> <1 % (not tested); exposed +0.9 % (inconclusive); step -1.1 % (inconclusive).",
        ),
        (
            compared(
                SHIFTED,
                step(176.0, "inconclusive"),
                exposed(33.2, "equivalent"),
                entry("overlap_ratio", 0.41, 0.48, SHIFTED),
            ),
            "Shifted, nothing gained: 41 % -> 48 % hidden.",
            "Hidden 41 % -> 48 % (shifted); exposed +0.3 % (equivalent); step -1.1 % (inconclusive).",
        ),
        (
            compared("regression", step(220.4, None), exposed(76.4, None), HIDDEN, primary="overlap_ratio"),
            "Less communication hidden: 48 % -> <1 %; step time not judged.",
            "Hidden 48 % -> <1 % (significant); exposed +131 % (not judged); step +24 % (not judged).",
        ),
        (
            compared("inconclusive", step(220.4, "not tested"), exposed(76.4, "not tested")),
            "Not tested: exposed 33.1 -> 76.4 ms; step time not tested.",
            "Exposed +131 % (not tested); step +24 % (not tested). Needs 4 launches per side.",
        ),
        (
            compared("inconclusive", step(220.4, "inconclusive"), exposed(20.0, "inconclusive")),
            "Inconclusive: exposed 33.1 -> 20 ms; step time inconclusive.",
            "Exposed -40 % (inconclusive); step +24 % (inconclusive). "
            "No gain: the step takes 23.8 % longer (p = 0.029).",
        ),
        (
            compared("regression", STEP, EXPOSED, host_bound=partial(HostBoundSide, side="candidate")),
            "More exposed communication: 33.1 -> 76.4 ms; step time inconclusive.",
            "The candidate is host-bound, the reference is not. "
            "Exposed +131 % (significant); step +24 % (inconclusive).",
        ),
        (
            compared("inconclusive", verdict_reason="exposed_comm_ms, the primary metric, is in neither record"),
            "Inconclusive: exposed not known; step time not known.",
            "Exposed_comm_ms, the primary metric, is in neither record.",
        ),
    ],
)
def test_a_headline_and_its_numbers(found: Comparison, first: str, second: str) -> None:
    assert said(found) == (first, second)
    assert len(first.split()) <= MOST_WORDS


@pytest.mark.parametrize(
    ("name", "verdict", "first"),
    [
        ("exposed_share", "regression", "More exposed communication: 20 % -> 30 %; step time inconclusive."),
        ("compute_stall_ms", "regression", "Longer stalls: 0.2 -> 0.3 ms; step time inconclusive."),
        ("overlap_efficiency", "improvement", "Better overlap_efficiency: 20 % -> 30 %; step time inconclusive."),
        ("idle_ms", "equivalent", "Equivalent: idle_ms 0.2 -> 0.3 ms; step time inconclusive."),
    ],
)
def test_another_primary_metric_is_named(name: str, verdict: str, first: str) -> None:
    found = compared(verdict, STEP, primary=name)
    found.metrics[name] = entry(name, 0.2, 0.3, verdict)
    assert said(found)[0] == first


UNLIKE = {
    "unlike": ["config.workload.model_dim"],
    "manifest_differences": [FactDifference("config.workload.model_dim", 64, 128)],
}


def test_not_comparable_is_the_headline_without_a_delta() -> None:
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


def test_of_one_launch_a_side_nothing_is_tested() -> None:
    values = (("overlap_ratio", 0.5, 0.4), ("exposed_comm_ms", 9.0, 11.0), ("job_step_ms", 47.2, 42.7))
    metrics = {name: replace(entry(name, *sides, None), test=ABSENT) for name, *sides in values}
    why = "one launch per side; a verdict needs four"
    found = partial(Comparison, verdict="inconclusive", verdict_reason=why, metrics=metrics)
    assert title(found) == "not tested"
    assert said(found) == (
        "Not tested: exposed 9 -> 11 ms, step 47.2 -> 42.7 ms.",
        "Hidden 50 % -> 40 %; exposed +22 %; step -9.5 %. One launch per side; a verdict needs four.",
    )


def test_the_evidence_has_interval_p_launches_and_power() -> None:
    found = compared("inconclusive", STEP, entry("exposed_comm_ms", 33.1, 34.0, "inconclusive", p=0.34))
    assert evidence(found) == (
        "exposed_comm_ms: +2.7 %, 95 % interval -2.3 to +7.7 %, p 0.34, 4 against 4 launches: p = 0.34 is above 0.05. "
        "Smallest detectable effect: 3 % (80 % power). To detect 2.7 %: 9 launches per side."
    )
    assert evidence(compared("regression", STEP, EXPOSED, **UNLIKE)) == ""


def generated(generator: np.random.Generator, noise: list[dict[str, Any]]) -> Comparison:
    """A comparison of launches whose metrics are made up, or drawn from those of identical ones that were really made,
    with step time, exposed time and hidden share changed independently of each other.
    """
    launches = int(generator.choice([2, 3, 4, 4, 4, 5, 6]))
    changes = 1 + generator.choice([0, 0, 0.01, 0.03, 0.1, 0.5, -0.03, -0.1, -0.5], size=3)
    if generator.random() < 0.5:
        chosen = generator.permutation(len(noise))[: 2 * launches]
        made = [{name: noise[at][name] for name in CHANGED} for at in chosen]
    else:
        variation = generator.choice([0.0, 0.001, 0.01, 0.05])
        level = 1 + variation * generator.standard_normal((2 * launches, 3))
        scales = dict(zip(CHANGED, [*generator.choice([0.2, 5.0, 120.0], size=2).tolist(), 0.5], strict=True))
        made = [
            {name: np.full((2, 1), scale * row[at]) for at, (name, scale) in enumerate(scales.items())} for row in level
        ]
    for launch in made[launches:]:
        for name, change in zip(CHANGED, changes, strict=True):
            launch[name] = np.minimum(launch[name] * change, 1.0 if name == "overlap_ratio" else np.inf)
    missing = [name for name in CHANGED if generator.random() < 0.03]
    for launch in made:
        for name in missing:
            launch.pop(name)
    sides = [side_of(part) for part in (made[:launches], made[launches:])]
    why = "only ratios are judged across platforms" if generator.random() < 0.1 else None
    primary = str(generator.choice([*SEQUENCE[:2], SEQUENCE[0], SEQUENCE[0], GUARD]))
    rules = Rules(primary=SEQUENCE[1] if why else primary)
    metrics = pairs(sides[0].statistics, sides[1].statistics, why)
    verdict, reason = judged(metrics, *sides, rules)
    told = {"metrics": metrics, "verdict": verdict, "verdict_reason": reason, "launches": {}}
    return partial(Comparison, **told, primary=rules.primary, alpha=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_no_headline_contradicts_its_table(seed: int) -> None:
    """A thousand comparisons: what a headline announces is decided in the table, with the sign that it has there."""
    generator, noise, seen = np.random.default_rng([41, seed]), recorded(), set()
    for _ in range(250):
        found = generated(generator, noise)
        first, second, metrics = headline(found), numbers(found), found.metrics
        values = {name: (m.verdict, m.reference.value, m.candidate.value) for name, m in metrics.items()}
        told = f"{first}\n{second}\n{values}"
        seen.add(first.partition(":")[0])
        assert len(first.split()) <= MOST_WORDS, told
        words = {name: metrics[name].verdict for name in CHANGED if name in metrics}
        bad, good = (word in (words.get(GUARD), words.get(found.deciding)) for word in DECIDED)
        match found.verdict:
            case "regression":
                assert bad, told
                assert words.get(GUARD) != "improvement", told
            case "improvement":
                assert good, told
                assert words.get(GUARD) != "regression", told
            case _:
                assert words.get(GUARD) not in DECIDED, told
                assert words.get(found.deciding) not in DECIDED, told
        if any(metrics[name].verdict is not None for name in (GUARD, SEQUENCE[0]) if name in metrics):
            assert words.get(SEQUENCE[1]) not in DECIDED or words[SEQUENCE[1]] in (
                words.get(GUARD),
                words.get(SEQUENCE[0]),
            ), told
        if first.startswith(("Slower", "More exposed", "Less communication")):
            assert found.verdict == "regression", told
        if first.startswith(("Faster", "Less exposed", "More communication")):
            assert found.verdict == "improvement", told
        for name, label in CHANGED.items():
            part = re.search(rf"\b{label} ([^;.]*(?:\.\d[^;.]*)?) \((.*?)\)", second, re.IGNORECASE)
            if part is None:
                continue
            word = metrics[name].verdict
            assert part[2] == ("significant" if word in DECIDED else word or "not judged"), told
            change = metrics[name].difference
            if part[1][0] in "+-" and change:
                assert (part[1][0] == "+") == (change > 0), told
        shown = re.search(r"([\d.]+)(?: %)? -> ([\d.]+)", first)
        if shown is not None and found.verdict in DECIDED:
            assert shown[1] != shown[2], told
            more = float(shown[2]) > float(shown[1])
            assert more == (first.startswith(("Slower", "More"))), told
    assert {"Slower", "Faster", "More exposed communication", "Inconclusive", "Not tested"} <= seen
    assert "Equivalent" in seen
