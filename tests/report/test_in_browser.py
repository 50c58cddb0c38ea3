"""The page in a real browser: what happens when it is used, and that every state of it fits a phone, screens and
paper, in both themes.
"""

from __future__ import annotations

import base64
import json
import re

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.webdriver import Chrome
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from aorta.analysis.compare.launch_set import read_subjects
from aorta.analysis.compare.verdict import Rules
from aorta.report.page.page_content import PAGE_FILE, write_page
from aorta.report.palette import MEANINGS, SURFACES, light
from aorta.report.summary import summarize
from tests.read.kineto_files import document, kernel
from tests.read.kineto_files import step as kineto_step
from tests.report.browsing import (
    EVERYWHERE,
    NEEDED,
    asked,
    clicked,
    complaints,
    opened,
    requests,
    settled,
    told,
    unfolded,
)
from tests.report.page_states import CANDIDATES, STATES, write_state
from tests.report.pages import HOSTILE, compared, hostile_run, page, two_sets
from tests.runs import once

pytestmark = NEEDED


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return once(tmp_path_factory, "page of two sets", lambda at: page(*two_sets(at), at / PAGE_FILE)) / PAGE_FILE


def test_it_opens_from_disk_without_a_word_or_a_request(browser, report):
    opened(browser, report)
    assert [url for url in requests(browser) if not url.startswith(("data:", "blob:"))] == [report.as_uri()]
    assert complaints(browser) == []
    assert asked(browser, "document.querySelector('h1').textContent.trim().endsWith('Slower')")
    roots = asked(browser, "Bokeh.documents[0].roots().length")
    drawn = asked(browser, "[...document.querySelectorAll('.plot')].filter((each) => each.children.length).length")
    assert drawn == roots >= 6
    # Bars have names, the colours of the pictures, and ranks in order.
    settled(browser, "model('timeline-labels-0').data.text.length > 0")
    spans = asked(browser, "({...model('timeline-spans-0').data})")
    colors = {
        part: color for what, color in zip(spans["what"], spans["color"], strict=True) for part in what.split(",")
    }
    assert (colors[" forward"], colors[" backward"]) == (light("forward"), light("backward"))
    assert colors["allreduce"] == light("allreduce")
    labels = asked(browser, "model('timeline-labels-0').data.text")
    assert any(each.startswith("block") for each in labels)
    assert any(each.startswith(("allreduce", "AR")) for each in labels)
    ticks = asked(browser, "[...model('timeline-0').left[0].major_label_overrides.entries()].map(([, text]) => text)")
    ranks = [int(text.split()[1]) for text in ticks if text.startswith("rank")]
    assert ranks == sorted(ranks) == [0, 1]
    # Its policy is in force: a script that it does not name does not run.
    script = "const script = document.createElement('script'); script.textContent = 'window.ran = 1';"
    browser.execute_script(f"{script} document.body.append(script)")
    assert asked(browser, "window.ran === undefined")


@pytest.mark.thorough
def test_timelines_zoom_move_and_reset_together(browser, report):
    opened(browser, report)
    both = "['timeline-0', 'timeline-1'].map((name) => [model(name).x_range.start, model(name).x_range.end])"
    (start, end), other = asked(browser, both)
    assert start == 0 < end
    assert [start, end] == other
    for move, view in (("in", [0.25, 0.75]), ("right", [0.375, 0.875]), ("reset", [0, 1])):
        clicked(browser, f"#timelines [data-move={move}]")
        assert asked(browser, both) == [pytest.approx([each * end for each in view])] * 2, move
    plot = browser.find_element(By.ID, "chart-timeline-1")  # keys do the same, over whatever chart
    middle = [0.25, 0.75]
    for key, view in zip("wadswr", (middle, [0.125, 0.625], middle, [0, 1], middle, [0, 1]), strict=True):
        plot.send_keys(key)
        assert asked(browser, both)[0] == pytest.approx([each * end for each in view]), key


@pytest.mark.thorough
def test_timelines_are_filtered_by_rank_stream_kind_and_step(browser, report):
    opened(browser, report)
    seen = "new Set(model('timeline-spans-0').data.rank).size"
    spans = "model('timeline-spans-0').data.left.length"
    whats = "[...new Set(model('timeline-spans-0').data.what)]"
    assert asked(browser, seen) == 2
    whole, rows = asked(browser, spans), asked(browser, "model('timeline-0').y_range.start")
    clicked(browser, "#timelines .more summary")
    field = browser.find_element(By.ID, "timeline-ranks")
    field.clear()
    field.send_keys("1", Keys.TAB)
    assert asked(browser, seen) == 1
    assert asked(browser, spans) == whole / 2
    assert asked(browser, "model('timeline-0').y_range.start") < rows
    assert "of 1 of 2 ranks" in browser.find_element(By.ID, "timeline-told-0").text
    clicked(browser, "#timeline-all")
    assert asked(browser, spans) == whole
    clicked(browser, "input[data-kind][value=forward]")
    assert not any("forward" in what for what in asked(browser, whats))
    assert asked(browser, spans) == whole - 8  # four blocks on two ranks
    clicked(browser, "input[data-lane][value=compute]")
    assert asked(browser, spans) == whole - 16
    assert asked(browser, "model('timeline-waits-0').data.left.length") == 0
    told = browser.find_element(By.ID, "timeline-told-0").text
    Select(browser.find_element(By.ID, "timeline-step")).select_by_visible_text("slowest job step")
    assert browser.find_element(By.ID, "timeline-told-0").text != told
    field.clear()
    field.send_keys("one", Keys.TAB)
    assert field.get_attribute("aria-invalid") == "true"
    assert "0-3, 8" in browser.find_element(By.ID, "timeline-problem").text


@pytest.mark.thorough
def test_a_dataset_is_switched_off_everywhere(browser, report):
    opened(browser, report)
    clicked(browser, "#steps input[data-dataset='1']")
    boxes = asked(browser, "[...document.querySelectorAll('input[data-dataset=\"1\"]')].map((each) => each.checked)")
    assert boxes == [False] * len(boxes)
    assert len(boxes) >= 3
    visible = "model('steps-overlap_ratio').renderers.map((each) => each.visible)"
    assert asked(browser, visible) == [True, True, True, False, False, False]
    assert not browser.find_element(By.ID, "chart-timeline-1").is_displayed()
    assert browser.find_element(By.ID, "chart-timeline-0").is_displayed()


@pytest.mark.thorough
def test_tables_sort_by_a_column_and_back_and_collectives_are_chosen_by_run(browser, report):
    opened(browser, report)
    unfolded(browser)
    keys = (
        "[...document.querySelectorAll('#table-metrics tbody tr')]"
        ".map((row) => row.cells[5].dataset.sort).filter(Boolean).map(Number)"
    )
    head = "#table-metrics thead th:nth-child(6)"
    clicked(browser, f"{head} button")
    values = asked(browser, keys)
    assert values == sorted(values, reverse=True)
    assert browser.find_element(By.CSS_SELECTOR, head).get_attribute("aria-sort") == "descending"
    # By keyboard, as anybody can who does not use a mouse.
    browser.find_element(By.CSS_SELECTOR, f"{head} button").send_keys(Keys.ENTER)
    assert asked(browser, keys) == sorted(values)
    assert browser.find_element(By.CSS_SELECTOR, head).get_attribute("aria-sort") == "ascending"
    rows = "[...document.querySelectorAll('#table-collectives tbody tr')].filter((row) => !row.hidden)"
    whole = asked(browser, f"{rows}.length")
    Select(browser.find_element(By.CSS_SELECTOR, "select[data-column='1']")).select_by_visible_text("rocm")
    assert asked(browser, f"[...new Set({rows}.map((row) => row.cells[1].textContent.trim()))]") == ["rocm"]
    assert asked(browser, f"{rows}.length") < whole


@pytest.mark.thorough
def test_the_theme_recolours_the_page_and_the_charts(browser, report):
    opened(browser, report)
    page_color = "getComputedStyle(document.body).backgroundColor"
    label = "model('timeline-0').below[0].major_label_text_color"
    line = "model('steps-overlap_ratio').renderers[1].glyph.line_color"
    before = [asked(browser, each) for each in (page_color, label)]
    spans = asked(browser, "model('timeline-spans-0').data.color[0]")
    clicked(browser, "#theme")
    assert browser.find_element(By.ID, "theme").text == "Light theme"
    dark = [asked(browser, each) for each in (page_color, label)]
    assert dark[1] == SURFACES["ink"].dark != before[1]
    assert MEANINGS["reference"].dark in json.dumps(asked(browser, line))
    assert asked(browser, "model('timeline-spans-0').data.color[0]") != spans
    assert dark[0] == "rgb(22, 25, 29)" != before[0]
    clicked(browser, "#theme")
    assert [asked(browser, each) for each in (page_color, label)] == before
    assert complaints(browser) == []


def test_hostile_words_do_nothing(browser, tmp_path):
    labels = (f"a{HOSTILE}", f"b{HOSTILE}")
    datasets = {label: hostile_run(tmp_path / str(at), label) for at, label in enumerate(labels)}
    path = tmp_path / "hostile.html"
    page(datasets, compared(datasets), path)
    opened(browser, path)
    unfolded(browser)
    for name in ("chart-timeline-0", "chart-steps-job_step"):
        assert "</script><img src=x onerror=alert(1)>" in told(browser, name), name
    assert asked(browser, f"{EVERYWHERE}.filter((each) => ['IMG', 'B'].includes(each.tagName)).length") == 0
    assert HOSTILE in browser.find_element(By.CSS_SELECTOR, "#health h3").text
    assert [url for url in requests(browser) if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
    assert complaints(browser) == []


@pytest.mark.thorough
def test_a_collective_is_zoomed_to_with_what_waited_for_it(browser, report):
    """From the list, which a keyboard reaches, and by a click on its bar."""
    opened(browser, report)
    whole = asked(browser, "model('timeline-x').end - model('timeline-x').start")
    select = browser.find_element(By.ID, "timeline-collective")
    options = [each.get_attribute("value") for each in select.find_elements(By.TAG_NAME, "option")]
    last = [each for each in options if each and each.startswith("0:")][-1]
    Select(select).select_by_value(last)
    settled(browser, f"model('timeline-x').end - model('timeline-x').start < {whole}")
    panel = browser.find_element(By.ID, "timeline-detail")
    assert panel.is_displayed()
    rows = [row.text for row in panel.find_elements(By.CSS_SELECTOR, "tbody th")]
    assert [int(row.split()[0]) for row in rows] == [0, 1]
    instance = int(last.split(":")[1])
    found = asked(
        browser,
        "(() => { const found = collectivesOf(timelines[0], stepOf(timelines[0], 0));"
        f"return found.byInstance.get({instance}).map((each) => ({{...each, blocked: blockedBy(each, found)}})); }})()",
    )
    slowest = min(found, key=lambda each: each["wait"])
    assert f"Rank {slowest['rank']} arrived last" in panel.text
    assert f"{slowest['rank']} (last to arrive)" in rows
    ended = [each for each in found if any(stall["endedByIt"] for stall in each["blocked"])]
    assert ended, "the last collective of a step is what computation waits for"
    assert all(f"on rank {each['rank']} (" in panel.text for each in ended)
    assert asked(browser, "model('timeline-chosen-0').data.left.length") == 2
    panel.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert not panel.is_displayed()
    assert asked(browser, "model('timeline-x').end - model('timeline-x').start") == pytest.approx(whole)

    view = "Bokeh.index.find_one_by_id(data.roots['timeline-0'])"
    plot = browser.find_element(By.ID, "chart-timeline-0")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    at = asked(
        browser,
        f"(() => {{ const view = {view}, bars = model('timeline-spans-0').data;"
        f"const place = bars.instance.indexOf({instance}), box = view.el.getBoundingClientRect();"
        "const x = view.frame.x_scale.compute((bars.left[place] + bars.right[place]) / 2) ;"
        "const y = view.frame.y_scale.compute((bars.top[place] + bars.bottom[place]) / 2);"
        "return [x - box.width / 2, y - box.height / 2]; })()",
    )
    top = "document.getElementById('chart-timeline-0').getBoundingClientRect().top"
    panel_of = "document.getElementById('timeline-detail').previousElementSibling"
    before = asked(browser, top)
    ActionChains(browser).move_to_element_with_offset(plot, *map(round, at)).click().perform()
    settled(browser, f"document.getElementById('timeline-collective').value === {last!r}")
    assert panel.is_displayed()
    # The panel is below its timeline, which has not moved from under the pointer.
    assert asked(browser, top) == before
    assert asked(browser, f"{panel_of} === document.getElementById('chart-timeline-0').closest('figure')")


@pytest.fixture
def state(request, tmp_path_factory):
    """The page in a state."""
    name = request.getfixturevalue("name")
    return once(tmp_path_factory, f"page {name}", lambda folder: write_state(name, folder)) / PAGE_FILE


def screen(browser: Chrome, width: int, theme: str) -> None:
    """A screen of that width, 900 pixels high, for a reader who prefers that theme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


@pytest.fixture
def any_screen(browser):
    """The browser, whose window is as before at the end."""
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.thorough
def test_of_many_kernels_ten_are_shown_until_somebody_asks(browser, tmp_path):
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
def test_in_every_state_it_fits_a_phone_a_screen_and_four_pages(any_screen, state, name):
    """The first screen answers, nothing is wider than the page, text can be read in both themes, and it prints."""
    browser = any_screen
    for width, theme in ((390, "dark"), (800, "light"), (1400, "light")):
        screen(browser, width, theme)
        opened(browser, state)
        drawn = "Object.keys(data.roots).filter((name) => document.getElementById(`chart-${name}`).checkVisibility())"
        settled(browser, f"{drawn}.every((name) => model(name).outer_width <= {width})")
        assert asked(browser, "document.documentElement.scrollWidth") <= width
        assert asked(browser, _WIDER) == []
        assert asked(browser, "document.querySelector('.bar').offsetHeight") < 60  # one line
        assert asked(browser, "isDark()") is (theme == "dark")
        assert not asked(browser, "document.querySelector('.cards')?.innerText.includes('\u2013')")  # no dashes
        wide = width >= 1024
        assert asked(browser, "document.querySelector('.menu').open") is wide
        if not wide:
            clicked(browser, ".menu summary")
        links = asked(browser, "[...document.querySelectorAll('nav a')].map((each) => each.checkVisibility())")
        assert links == [True] * len(links)
        settled(browser, _HINTED)
    ends = shown = asked(browser, _LOWER_EDGES)
    if name == "hung":  # which rank and why comes first, charts after it
        ends = {"autopsy": asked(browser, _ACCUSED)}
    assert all(edge <= 900 for edge in ends.values()), ends
    assert asked(browser, "'timeline-0' in data.roots") is ("chart-timeline-0" in shown)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True, "preferCSSPageSize": True})
    pages = re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed["data"]))
    assert 1 <= len(pages) <= 4
    assert asked(browser, _SIDEWAYS) == []
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
