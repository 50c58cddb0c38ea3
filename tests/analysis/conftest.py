"""For tests of the analysis: reports without what only some tests look at."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have no pictures: these have tests of their own, and take a second a report."""
    monkeypatch.setattr("aorta.analysis.report.report_folder.pictures", lambda *_: ())
