"""One browser for all tests of the page."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def browser():
    """Without a network; only tests that need it import what drives it."""
    from tests.report.browsing import started

    yield from started()
