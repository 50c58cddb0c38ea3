"""Which candidate is best, from simulated launches: none where nothing differs, the right one where there is a gain."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from aorta.analysis.compare.verdict import NOT_TESTED, Rules
from aorta.documents import ABSENT
from aorta.documents.comparison import ComparedMetric, Comparison, Effect, LaunchTest
from aorta.documents.dataset import Statistics
from aorta.documents.formatting import PAGE
from aorta.report.candidates import Candidates, format_effect, write_candidates
from aorta.report.command import overlap_report
from tests.analysis.builders import partial
from tests.report.page_states import plan
from tests.report.pages import text_of


def comparison(verdict: str, reason: str, metrics: dict[str, ComparedMetric]) -> Comparison:
    """A comparison of which no more is known."""
    return partial(Comparison, verdict=verdict, verdict_reason=reason, metrics=metrics)


def test_of_the_improvements_that_with_the_shortest_step_is_recommended():
    judged = {
        side: comparison(verdict, "", {"job_step_ms": partial(ComparedMetric, candidate=partial(Statistics, value=ms))})
        for side, verdict, ms in (("a", "inconclusive", 60), ("b", "improvement", 85), ("c", "improvement", 70))
    }
    assert Candidates(Path(), {}, judged, Rules()).best == "c"


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
    drifted = comparison("not settled", "the candidate: steps get faster", {})
    for alone in ("lost", drifted):  # of a verdict that is withheld nothing follows
        assert Candidates(Path(), {}, {"a": alone}, Rules()).conclusion().startswith("no recommendation: no candidate")
    half = Candidates(Path("plan"), {}, {"a": lost, "b": drifted}, Rules())
    assert "none of the 1 of 2 candidates that were compared is" in half.conclusion()
    both = Candidates(Path("plan"), {}, {"a": lost, "b": lost}, Rules())
    assert both.conclusion() == "keep the reference: both candidates are slower"
    assert found.as_json()["candidates"][1] == {
        "side": "b",
        "changes": "x=2",
        "comparison": None,
        "reason": "different work",
    }


def test_of_candidates_whose_verdict_is_withheld_no_part_is_said_to_be_the_same(tmp_path):
    found = Candidates.read(plan(tmp_path / "plan", 4), Rules())
    for judged in found.judged.values():
        judged.verdict, judged.verdict_reason, judged.account = "not settled", "steps get faster", ABSENT
    write_candidates(found, tmp_path / "report.html")
    text = text_of((tmp_path / "report.html").read_text())
    assert "not settled: steps get faster." in text
    assert "no part of the step is certain" not in text


def test_a_plan_has_a_page_with_every_candidate_its_interval_and_its_account(tmp_path, capsys):
    output = tmp_path / "out"
    assert overlap_report([str(plan(tmp_path / "plan")), "--assume-no-drift", "--output", str(output)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    found = json.loads((output / "candidates.json").read_text())
    text = text_of((output / "report.html").read_text())
    assert (found["recommendation"], found["alpha_each"]) == ("candidate-1", 0.05 / 4)
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
