"""The page in each state that it can be in, on a phone, on screens, on paper, in both themes."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.webdriver import Chrome

from aorta.analysis.compare.launch_set import read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.report.page.page_content import write_page
from aorta.report.summary import summarize
from tests.read.kineto_files import document, kernel
from tests.read.kineto_files import step as kineto_step
from tests.report.browsing import NEEDED, asked, clicked, complaints, opened, settled
from tests.report.page_states import CANDIDATES, STATES, write_state

pytestmark = NEEDED


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page in every state."""
    folder = tmp_path_factory.mktemp("states")
    return {name: write_state(name, folder / name) for name in (*STATES, CANDIDATES)}


def screen(browser: Chrome, width: int, theme: str) -> None:
    """A screen of that width, 900 pixels high, for a reader who prefers that theme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


@pytest.fixture
def any_screen(browser: Chrome) -> Iterator[Chrome]:
    """The browser, whose window is as before at the end."""
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.thorough
def test_of_many_kernels_ten_are_shown_until_somebody_asks(browser: Chrome, tmp_path: Path) -> None:
    kernels = [kernel(f"kernel_{at:02d}", 100 * at, 10 + at) for at in range(14)]
    (tmp_path / "rank0.json").write_text(json.dumps(document([kineto_step(0, 0, 10_000), *kernels])))
    subjects = read_subjects({"x": tmp_path / "rank0.json"}, Rules())
    page = tmp_path / "page.html"
    write_page({"x": subjects["x"].dataset}, summarize(subjects), page)
    opened(browser, page)
    rows = "[...document.querySelectorAll('#kernels .scroll tbody')[0].rows].filter((row) => row.checkVisibility())"
    longest = f"{rows}.map((row) => row.cells[0].textContent.trim())"
    assert asked(browser, longest) == [f"kernel_{at:02d}" for at in range(13, 3, -1)]
    clicked(browser, "#kernels thead button")  # by name: the first ten of that order
    assert asked(browser, longest) == [f"kernel_{at:02d}" for at in range(10)]
    clicked(browser, "#kernels .scroll + button")
    assert asked(browser, f"{rows}.length") == 14


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*STATES, CANDIDATES])
def test_in_every_state_it_fits_a_phone_a_screen_and_four_pages(
    any_screen: Chrome, states: dict[str, Path], name: str
) -> None:
    """The first screen answers, nothing is wider than the page, text can be read in both themes, and it prints."""
    browser = any_screen
    for width, theme in ((1400, "light"), (1400, "dark"), (800, "light"), (390, "light"), (390, "dark")):
        screen(browser, width, theme)
        opened(browser, states[name])
        drawn = "Object.keys(data.roots).filter((name) => document.getElementById(`chart-${name}`).checkVisibility())"
        settled(browser, f"{drawn}.every((name) => model(name).outer_width <= {width})")
        assert asked(browser, "document.documentElement.scrollWidth") <= width
        assert asked(browser, _WIDER) == []
        assert asked(browser, "document.querySelector('.bar').offsetHeight") < 60  # one line
        assert asked(browser, "isDark()") is (theme == "dark")
        assert (
            asked(browser, "document.querySelector('.cards')?.innerText.includes('\u2013') ?? false") is False
        )  # no dashes
        wide = width >= 1024
        assert asked(browser, "document.querySelector('.menu').open") is wide
        if not wide:
            clicked(browser, ".menu summary")
        links = asked(browser, "[...document.querySelectorAll('nav a')].map((each) => each.checkVisibility())")
        assert links == [True] * len(links)
        settled(browser, _HINTED)
        if width == 1400:
            ends = asked(browser, _LOWER_EDGES)
            if name == "hung":  # which rank and why comes first, charts after it
                ends = {"autopsy": asked(browser, _ACCUSED)}
            assert all(edge <= 900 for edge in ends.values()), ends
            shown = asked(browser, _LOWER_EDGES)
            assert asked(browser, "'timeline-0' in data.roots") is ("chart-timeline-0" in shown)
            assert asked(browser, _SIDEWAYS) == []
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    opened(browser, states[name])
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True, "preferCSSPageSize": True})
    pages = re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed["data"]))
    assert 1 <= len(pages) <= 4
    assert complaints(browser) == []


_HINTED = (
    "[...document.querySelectorAll('.scroll')].filter((each) => each.checkVisibility())"
    ".every((each) => each.classList.contains('more') === each.scrollWidth > each.clientWidth + 1)"
)
"""A table that goes on to the right says so."""
_WIDER = (
    "[...document.querySelectorAll('main *')].filter((each) => !each.closest('.scroll') && each.checkVisibility() && "
    "each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML.slice(0, 80))"
)
_SIDEWAYS = (
    "(() => { for (const each of document.querySelectorAll('details')) each.open = true;"
    "return [...document.querySelectorAll('.scroll')].filter((each) => each.scrollWidth > each.clientWidth + 1)"
    ".map((each) => each.ariaLabel); })()"
)
"""Tables that do not fit, folded ones as well."""
_LOWER_EDGES = (
    "Object.fromEntries(['breakdown', 'chart-timeline-0'].map((name) => [name, document.getElementById(name)])"
    ".filter(([, each]) => each).map(([name, each]) => [name, each.getBoundingClientRect().bottom]))"
)
_ACCUSED = "document.querySelector('#autopsy p, #autopsy li').getBoundingClientRect().bottom"
