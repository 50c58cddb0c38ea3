"""One browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


@pytest.fixture(scope="session")
def browser() -> Iterator[Chrome]:
    """Without a network; only tests that need it import what drives it."""
    from tests.report.browsing import started

    yield from started()
