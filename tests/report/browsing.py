"""A real browser for pages, from disk, with the network off, and what is asked of it.

Needs Debian's `chromium` and `chromium-driver`, and selenium; tests skip with a reason where one is missing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
PATIENCE_S = 60
NEEDED = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.skipif(DRIVER is None, reason="no chromedriver: apt-get install chromium-driver"),
    pytest.mark.xdist_group("browser"),
]
"""Marks of a file whose tests use a browser."""


def started() -> Iterator[Chrome]:
    """A browser without a network, closed at the end."""
    options = ChromeOptions()
    options.binary_location = str(BROWSER)
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(word)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(str(DRIVER)))
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd(
        "Network.emulateNetworkConditions",
        {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1},
    )
    yield driver
    driver.quit()


def opened(browser: Chrome, path: Path) -> Chrome:
    """The page, once its charts are there. What the browser said before is forgotten."""
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())
    WebDriverWait(browser, PATIENCE_S).until(
        lambda it: it.find_element(By.TAG_NAME, "html").get_attribute("data-ready")
    )
    return browser


def asked(browser: Chrome, code: str) -> Any:
    """The value of an expression in the page; `model(name)` is a model of Bokeh."""
    return browser.execute_script(
        f"const model = (name) => Bokeh.documents[0].get_model_by_name(name); return ({code});"
    )


def settled(browser: Chrome, code: str) -> None:
    """Wait until an expression is true."""
    WebDriverWait(browser, PATIENCE_S).until(lambda it: asked(it, code))


def requests(browser: Chrome) -> list[str]:
    """Every address that was asked for, in frames and workers as well."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]


def complaints(browser: Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def clicked(browser: Chrome, selector: str) -> None:
    element = browser.find_element(By.CSS_SELECTOR, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    element.click()


def unfolded(browser: Chrome) -> None:
    """Open every fold, and wait until the charts in them are drawn."""
    browser.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
    settled(browser, "Object.keys(data.roots).every((name) => model(name).inner_width > 0)")


EVERYWHERE = (
    "(function all(node) { return [...node.querySelectorAll('*')]"
    ".flatMap((each) => [each, ...(each.shadowRoot ? all(each.shadowRoot) : [])]); })(document)"
)
"""Every element, those in shadow roots as well."""


def told(browser: Chrome, chart: str) -> str:
    """What the tooltips of a chart say, somewhere over it."""
    element = browser.find_element(By.ID, chart)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    width, height = element.size["width"], element.size["height"]
    for across in range(4, 20, 3):
        for down in range(1, 9):
            at = round(width * (across / 20 - 0.5)), round(height * (down / 10 - 0.5))
            ActionChains(browser, duration=0).move_to_element_with_offset(element, *at).perform()
            shown = asked(
                browser,
                f"{EVERYWHERE}.filter((each) => each.classList?.contains('bk-Tooltip') && each.checkVisibility())"
                ".map((each) => each.shadowRoot.textContent).join(' ')",
            )
            if shown:
                return str(shown)
    return ""
