"""What is odd about a dataset's numbers is said, and nothing is said of ordinary ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.aggregate import aggregate
from aorta.analysis.cautions import FEW_STEPS, alerts, cautions
from aorta.documents.dataset import DatasetEntry
from aorta.report.files import write_report
from tests.analysis.builders import metrics, partial, simulated_run, step
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
def test_what_is_odd_is_said(tmp_path: Path, steps: int, of_step: Callable[[int], Any], said: list[str]) -> None:
    found = cautions(entry(tmp_path, steps, of_step))
    assert [any(text.startswith(words) for words in said) for text in found] == [True] * len(said)
    assert "training." not in "".join(found)  # a loop of one's own has no such key


def test_a_loss_that_is_not_finite_comes_first(tmp_path: Path) -> None:
    found = entry(tmp_path, 30, lambda at: {"reasons": {"loss": "was nan" if at >= 7 else "not read"}})
    assert alerts({"x": found})[0] == "the loss was NaN or infinite, first in step 7: what was timed may not train"


def test_collectives_that_were_timed_from_python_are_a_caution(tmp_path: Path) -> None:
    found = entry(tmp_path, ENOUGH)
    found.health.timed_from_python = "not built"
    assert alerts({"x": found})[-1] == "collectives were timed from Python: not built"


def test_a_run_without_steps_has_none() -> None:
    assert cautions(partial(DatasetEntry, count=0, reason="no step is left after warm-up")) == []


def test_what_is_wrong_stands_first_in_every_report_the_most_serious_first(tmp_path: Path) -> None:
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
