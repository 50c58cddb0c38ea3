"""64 ranks x 1,000 steps, twice: how large the page is, what it leaves out, and that a browser still opens it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("bokeh", reason="the extra 'html' is not installed")

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.load.records import load_run
from benchmarks.jsonl_scale import generate
from tests.analysis.report.by_json import write_page
from tests.analysis.report.pages import compared, launched, text_of

pytestmark = pytest.mark.slow
RANKS, STEPS, COLLECTIVES = 64, 1_000, 10
LIMIT_BYTES = 5_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("AORTA_PAGE_LARGE", tmp_path_factory.mktemp("large") / "run"))
    if not folder.exists():
        generate(folder, RANKS, STEPS, COLLECTIVES)
    run = load_run(folder)
    datasets = {label: LabelledRun(label, run) for label in ("reference", "candidate")}
    path = folder.parent / "large.html"
    write_page(datasets, launched(compared(datasets)), path)
    return path


def test_the_page_of_64_ranks_and_1000_steps_is_small_and_says_what_it_draws(large: Path) -> None:
    assert large.stat().st_size < LIMIT_BYTES
    text = text_of(large.read_text(encoding="utf-8"))
    assert "ranks can be chosen here" not in text  # all of them can
    assert "drawn as one" not in text
    assert "All 64 ranks. A cell is the mean of 1 rank(s) x 4 step(s)." in text


def test_a_browser_opens_it_and_answers(large: Path) -> None:
    pytest.importorskip("selenium")
    from tests.analysis.report import browsing

    if browsing.BROWSER is None or browsing.DRIVER is None:
        pytest.skip("no chromium or no chromedriver: apt-get install chromium chromium-driver")
    for browser in browsing.started():
        browsing.opened(browser, large)
        assert browsing.complaints(browser) == []
        browsing.clicked(browser, "#timeline-all")
        assert browsing.asked(browser, "new Set(model('timeline-spans-0').data.rank).size") > 8
