"""For tests of what a report says: its pictures are written, and empty.

Drawing them is most of the time of a report, and every test of numbers and words would draw the same ones again; the
pictures have tests of their own. Must not: be used where a test looks at a picture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture is rendered; each has its file."""

    def savefig(_figure: Any, path: Path, **_: Any) -> None:
        path.write_bytes(b"")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
