"""What is odd about a dataset's numbers is said, and nothing is said of ordinary ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.cautions import FEW_STEPS, alerts, cautions
from aorta.documents.dataset import DatasetEntry
from aorta.read.record import load_run
from aorta.report.files import write_report
from tests.analysis.builders import header, metrics, partial, simulated_run, step, write_rank

USUAL = metrics(20, 16, 8, 4)


def entry(folder: Path, overlaps: list[dict[str, Any]]) -> DatasetEntry:
    """The entry of a run of two ranks whose steps have these metrics."""
    folder.mkdir()
    for rank in range(2):
        write_rank(folder, header(rank, 2), [step(rank, 2, at, overlap=found) for at, found in enumerate(overlaps)])
    return aggregate(LabelledRun("x", load_run(folder)))


def test_few_steps_are_said_to_be_few(tmp_path: Path) -> None:
    (said,) = cautions(entry(tmp_path / "few", [USUAL] * 3))
    assert said.startswith("only 3 steps after warm-up")
    assert "training." not in said  # a loop of one's own has no such key
    assert cautions(entry(tmp_path / "enough", [USUAL] * (FEW_STEPS + 1))) == []


def test_steps_whose_ends_are_not_clear_are_counted(tmp_path: Path) -> None:
    lines = [
        step(0, 1, at, overlap=USUAL, reasons={"boundary": "x came before it"} if at < 3 else {}) for at in range(30)
    ]
    write_rank(tmp_path, header(0, 1), lines)
    found = aggregate(LabelledRun("x", load_run(tmp_path)))
    assert found.steps.unclear_rank_steps == {"x came before it": 3}
    (said,) = (text for text in cautions(found) if "not clear" in text)
    assert said.startswith("3 of 30 steps of ranks may be longer or shorter")
    assert said.endswith(": x came before it")


def test_a_loss_that_is_not_finite_comes_first(tmp_path: Path) -> None:
    lines = [step(0, 1, at, overlap=USUAL, reasons={"loss": "was nan" if at >= 7 else "not read"}) for at in range(30)]
    write_rank(tmp_path, header(0, 1), lines)
    found = aggregate(LabelledRun("x", load_run(tmp_path)))
    assert alerts({"x": found})[0] == "the loss was NaN or infinite, first in step 7: what was timed may not train"


def test_a_denominator_of_zero_is_counted(tmp_path: Path) -> None:
    overlaps = [USUAL] * (FEW_STEPS + 1) + [metrics(20, 16, 0, 0)] * 2
    (said,) = cautions(entry(tmp_path / "x", overlaps))
    assert said == ("overlap_ratio is known in 42 of 46 steps of ranks; in the others: the record gives no reason")


def test_collectives_that_were_timed_from_python_are_a_caution(tmp_path: Path) -> None:
    found = entry(tmp_path / "x", [USUAL] * (FEW_STEPS + 1))
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
