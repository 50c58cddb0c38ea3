"""What is odd about a dataset's numbers, or has not settled, is said, and nothing is said of ordinary ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aorta.analysis.aggregate import aggregate
from aorta.analysis.cautions import FEW_STEPS, alerts, cautions
from aorta.analysis.pace import LevelChange, level_change, slow_steps, unsettled
from aorta.documents.dataset import DatasetEntry
from aorta.documents.kernels import TraceEntry
from aorta.read.frames import Floats
from aorta.report.command import overlap_report
from aorta.report.summary import write_report
from tests.analysis.builders import metrics, partial, simulated_run, step, strict_json
from tests.analysis.compare.builders import WOBBLE, launch_set
from tests.analysis.run_builders import recorded

USUAL = metrics(20, 16, 8, 4)
ENOUGH = FEW_STEPS + 1


def entry(folder: Path, steps: int, of_step: Callable[[int], dict[str, Any]] = lambda at: {}) -> DatasetEntry:
    """The entry of a run of two ranks, of whose usual steps this is different."""
    made = recorded(
        folder, lambda rank: [step(rank, 2, at, **{"overlap": USUAL} | of_step(at)) for at in range(steps)], 2
    )
    return aggregate(made)


@pytest.mark.parametrize(
    ("steps", "of_step", "said"),
    [
        (ENOUGH, lambda at: {}, []),
        (3, lambda at: {}, ["only 3 steps after warm-up"]),
        (
            30,
            lambda at: {"reasons": {"boundary": "x came before it"} if at < 3 else {}},
            ["6 of 60 steps of ranks may be longer or shorter"],
        ),
        (
            ENOUGH + 2,
            lambda at: {"overlap": metrics(20, 16, 0, 0)} if at >= ENOUGH else {},
            ["overlap_ratio is known in 42 of 46 steps of ranks; in the others: the record gives no reason"],
        ),
    ],
    ids=["ordinary", "few steps", "ends that are not clear", "a denominator of zero"],
)
def test_what_is_odd_is_said(tmp_path, steps, of_step, said):
    found = cautions(entry(tmp_path, steps, of_step))
    assert [any(text.startswith(words) for words in said) for text in found] == [True] * len(said)
    assert "training." not in "".join(found)  # a loop of one's own has no such key


def test_a_loss_that_is_not_finite_comes_first(tmp_path):
    found = entry(tmp_path, 30, lambda at: {"reasons": {"loss": "was nan" if at >= 7 else "not read"}})
    assert alerts({"x": found})[0] == "the loss was NaN or infinite, first in step 7: what was timed may not train"


@pytest.mark.parametrize("marked", [0, 1])
def test_a_whole_trace_is_not_taken_for_a_step_unsaid(tmp_path, marked):
    found = entry(tmp_path, 30)
    found.health.traces = [partial(TraceEntry, steps=0), partial(TraceEntry, steps=marked)]
    said = "no step is marked: what is called a step is the whole trace" in alerts({"x": found})
    assert said is not bool(marked)


def test_a_run_without_steps_has_none():
    assert cautions(partial(DatasetEntry, count=0, reason="no step is left after warm-up")) == []


def test_what_is_wrong_stands_first_in_every_report_the_most_serious_first(tmp_path):
    """A record lost its middle and its end, a rank is missing, the network was emulated."""
    folder = simulated_run(tmp_path / "run", label="x", ranks=3, fabric="emulated")
    record = folder / "rank_0_metrics.jsonl"
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(lines[:15] + lines[18:-1]))
    (folder / "rank_2_metrics.jsonl").unlink()
    expected = [
        "rank 0: killed (no footer)",
        "1 of 3 ranks missing: 2",
        "27 steps on 2 ranks; 3 of 54 records are missing",
        "EMULATED FABRIC: communication times are those of the emulation",
    ]
    for brief in (False, True):
        report = write_report({"x": folder}, tmp_path / "out", brief=brief)
        found = [line for line in report.text.splitlines() if line.startswith("Warning: ")]
        assert found == [f"Warning: {alert}" for alert in expected]
    strip = (tmp_path / "out" / "report.html").read_text().partition('<ul class="warnings alerts">')[2]
    assert re.findall("<li>(.*?)</li>", strip.partition("</ul>")[0]) == expected
    whole = write_report({"x": simulated_run(tmp_path / "whole", label="y", ranks=2)}, tmp_path / "out2", html=False)
    assert "Warning: " not in whole.text


# --- steps that have not settled are found and said, and no verdict rests on them; so are the steps that make the mean


def steps(*levels_ms: tuple[int, float], noise: float = 0.02) -> Floats:
    """So many steps of each level."""
    level = np.concatenate([np.full(count, ms) for count, ms in levels_ms])
    return np.array(level * np.random.default_rng(0).normal(1, noise, len(level)))


@pytest.mark.parametrize(
    ("times_ms", "first"),
    [
        (steps((9, 180.0), (6, 100.0)), 9),  # 14 of 20 steps cold, 5 of them as warm-up
        (steps((6, 100.0), (9, 180.0)), 6),
        (steps((6, 180.0), (4, 100.0)), 6),  # of few steps
        (steps((3, 180.0), (2, 100.0)), None),
        (steps((10, 115.0), (30, 100.0)), 10),
        (steps((10, 105.0), (30, 100.0)), None),  # less than a tenth
        (steps((2, 180.0), (38, 100.0)), None),  # the median does not rest on them
        (steps((40, 100.0), noise=0.2), None),
        (np.full(40, 100.0), None),
        (np.empty(0), None),
    ],
)
def test_a_change_of_level_is_found_where_it_is(times_ms, first):
    found = level_change(times_ms)
    assert (None if found is None else found.first) == first


def test_equal_steps_change_their_level_in_no_more_than_a_twentieth_of_launches():
    draw = np.random.default_rng(0)
    for count in (8, 11, 15, 35, 95):
        found = [level_change(draw.gamma(4, 25, count)) for _ in range(300)]
        assert sum(each is not None for each in found) <= 15


def test_a_side_has_not_settled_where_nearly_all_launches_change_alike():
    faster, slower = LevelChange(9, 15, 180.0, 100.0), LevelChange(5, 15, 100.0, 120.0)
    assert str(unsettled([faster] * 4)).startswith("in 4 of 4 launches steps get faster: the first 9 of 15 steps")
    assert "slower" in str(unsettled([slower] * 4 + [None]))
    for mixed in ([faster] * 3 + [None], [faster, faster, slower, slower], [faster] * 3 + [slower], [None] * 4):
        assert unsettled(mixed) is None


def test_no_verdict_rests_on_steps_that_have_not_settled(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    began_s = {"reference": [0.0, 180.0, 240.0, 420.0], "candidate": [60.0, 120.0, 300.0, 360.0]}
    cold = (0, *[800] * 9, *WOBBLE[1:])
    for side, wobble in (("reference", (0, *[0] * 9, *WOBBLE[1:])), ("candidate", cold)):
        launch_set(tmp_path / "plan" / side, [0.8, 0.81, 0.82, 0.83], began_s=began_s[side], wobble=wobble)
    assert overlap_report(["plan", "--fail-on", "job_step_ms>5%", "--output", "out"]) == 4
    assert capsys.readouterr().out.startswith("[?] Not settled: ")
    found = strict_json(tmp_path / "out" / "summary.json")
    comparison = found["comparison"]
    assert comparison["verdict"] == "not settled"
    assert comparison["verdict_reason"].startswith("the candidate: in 4 of 4 launches steps get faster: the first 9 of")
    assert {entry["test"]["verdict"] for entry in comparison["metrics"].values()} == {None}
    assert [each["rule"] for each in found["datasets"]["candidate"]["findings"]][:1] == ["not_settled"]


@pytest.mark.parametrize(
    ("times_ms", "said"),
    [
        ([100.0] * 28 + [560.0, 400.0], "2 slow steps of 30 make the difference: 128 (560 ms), 129 (400 ms)"),
        ([100.0] * 12 + [1.0] * 4, "4 fast steps of 16 make the difference: 112 (1 ms), 113 (1 ms),"),
        ([100.0] * 16 + [300.0] * 14, "14 slow steps of 30 make the difference"),
        ([100.0, 105.0, 103.0, 110.0], None),
        ([], None),
    ],
)
def test_the_steps_that_make_the_mean_are_named(times_ms, said):
    found = slow_steps(np.array(times_ms), np.arange(100, 100 + len(times_ms)))
    assert (found is None) == (said is None)
    assert said is None or said in found[0]
