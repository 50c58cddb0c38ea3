"""Which candidate is best, from simulated launches: none where nothing differs, the right one where there is a gain."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from aorta.analysis.compare import launch_comparison
from aorta.analysis.compare.launch_comparison import judged
from aorta.analysis.compare.launch_set import Launch, LaunchSet
from aorta.analysis.compare.run_comparison import pairs
from aorta.analysis.compare.verdict import NOT_TESTED, Rules
from aorta.documents import known
from aorta.documents.comparison import ComparedMetric, Comparison, Effect, LaunchOrderFacts, LaunchTest
from aorta.documents.formatting import PAGE
from aorta.documents.statistics import describe
from aorta.report.command import overlap_report
from aorta.report.launch_table import Candidates, format_effect
from tests.analysis.builders import partial
from tests.report.page_states import plan
from tests.report.pages import text_of
from tests.runs import once


def side(medians: npt.NDArray[np.float64]) -> LaunchSet:
    """Launches of one setting, with these median step times in ms."""
    return LaunchSet(
        Path(),
        tuple(
            Launch(Path(), str(number), {"job_step_ms": describe([value])}, {}, ())
            for number, value in enumerate(map(float, medians))
        ),
        (),
    )


def comparison(verdict: str, reason: str, metrics: dict[str, ComparedMetric]) -> Comparison:
    """A comparison of which no more is known."""
    return partial(Comparison, verdict=verdict, verdict_reason=reason, metrics=metrics)


def rules(candidates: int) -> Rules:
    """Those of each of several candidates."""
    return Rules(primary="job_step_ms", alpha=Rules().alpha / candidates)


def decided(base: LaunchSet, candidates: list[LaunchSet], judged_by: Rules) -> str | None:
    """What is recommended."""
    judgements: dict[str, Comparison] = {}
    for number, candidate in enumerate(candidates, start=1):
        metrics = pairs(base.statistics, candidate.statistics)
        found = judged(metrics, base, candidate, judged_by)
        judgements[f"candidate-{number}"] = comparison(*found, metrics)
    return Candidates(Path(), {}, judgements, judged_by).best


def test_more_candidates_have_to_be_surer_and_the_largest_gain_is_recommended():
    base = side(np.array([100.0, 101, 102, 103, 104]))
    candidate = side(np.array([90.0, 91, 92, 93, 101.5]))  # U = 2: p = 0.032
    assert decided(base, [candidate], rules(1)) == "candidate-1"
    assert decided(base, [candidate, base], rules(2)) is None
    slower, faster, fastest = (side(np.linspace(mean, mean + 4, 5)) for mean in (120.0, 85.0, 70.0))
    assert decided(base, [slower, faster, fastest], rules(3)) == "candidate-3"


@pytest.mark.parametrize(
    ("least", "verdict", "says"),
    [
        (4, "not tested (needs 4 launches)", "no recommendation: a verdict takes 4 launches per side"),
        # It is not known where launches have equal values: then there are enough of them.
        (None, "not tested", "keep the reference: none of the 1"),
    ],
)
def test_how_many_launches_a_verdict_takes_is_said_where_that_is_known(least, verdict, says):
    effect = Effect("quotient", -0.4, None, None)
    step = partial(ComparedMetric, test=partial(LaunchTest, verdict=NOT_TESTED, least_launches=least, effect=effect))
    found = Candidates(Path(), {"a": "x=1"}, {"a": comparison("inconclusive", "", {"job_step_ms": step})}, Rules())
    assert found.verdict("a") == verdict
    assert found.conclusion().startswith(says)
    assert format_effect(Effect("quotient", 0.234, 0.05, 0.4)) == "+23.4 % (+5 to +40 %)"
    assert format_effect(effect) == "-40 %"


def test_a_candidate_that_cannot_be_compared_is_named_with_the_reason():
    lost = comparison("regression", "", {})
    found = Candidates(
        Path("plan"), {"reference": "", "a": "x=1", "b": "x=2"}, {"a": lost, "b": "different work"}, Rules()
    )
    assert found.best is None
    assert "none of the 1 of 2 candidates that were compared is" in found.conclusion()
    assert Candidates(Path(), {}, {"a": "lost"}, Rules()).conclusion().startswith("no recommendation: no candidate")
    both = Candidates(Path("plan"), {}, {"a": lost, "b": lost}, Rules())
    assert both.conclusion() == "keep the reference: both candidates are slower"
    assert found.as_json()["candidates"][1] == {
        "side": "b",
        "changes": "x=2",
        "comparison": None,
        "reason": "different work",
    }


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan of four candidates, launched."""
    return once(tmp_path_factory, "plan of four candidates", plan)


def test_a_plan_has_a_page_with_every_candidate_its_interval_and_its_account(planned, tmp_path, capsys):
    output = tmp_path / "out"
    assert overlap_report([str(planned), "--assume-no-drift", "--output", str(output)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    found = json.loads((output / "candidates.json").read_text())
    text = text_of((output / "report.html").read_text())
    assert found["recommendation"] == "candidate-1"
    assert "Recommendation: candidate-1" in text
    by_side = {row["side"]: row for row in found["candidates"]}
    for name, place in (("candidate-1", -1), ("candidate-3", 1)):
        compared = by_side[name]["comparison"]
        effect = compared["metrics"]["job_step_ms"]["test"]["effect"]
        assert effect["value"] * place > 0.02
        assert PAGE.effect(effect["value"], effect["kind"]).replace("\u00a0", " ") in text
        assert compared["account"]["sentence"] in text
        assert sum(part["change_ms"] for part in compared["account"]["parts"]) == pytest.approx(
            compared["account"]["step"]["change_ms"]
        )
    assert by_side["candidate-4"]["reason"] in text
    assert "candidate-4: NOT COMPARABLE: header.world_size" in printed
    html = (output / "report.html").read_text()
    assert len(re.findall('<div class="bar-row"', html)) == 5  # the reference and four candidates
    assert len(html) < 200_000, "no chart of this page needs Bokeh"


def test_candidates_whose_launches_took_no_turns_have_no_account(planned, monkeypatch):
    order = LaunchOrderFacts(
        comparable=False,
        sequence="RRRRRRCCCCCC",
        drift_inflation=3.0,
        largest_inflation=1.5,
        assume_no_drift=False,
        reason="the launches of the two sides did not take turns",
    )
    monkeypatch.setattr(launch_comparison, "launch_order", lambda *_sides, assume_no_drift: order)
    judged_anyway = Candidates.read(planned, Rules(assume_no_drift=True)).judged
    assert all(each.account.parts for each in judged_anyway.values())
    withheld = Candidates.read(planned, Rules()).judged
    assert set(withheld) == set(judged_anyway)
    assert not any(known(each.account) for each in withheld.values())
