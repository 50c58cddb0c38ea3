"""What people report in public is answered rightly, whatever tool and library wrote it (docs/dev/cases.md)."""

from __future__ import annotations

import pytest

from tests.analysis.load.public_cases import KINDS, Case

MENDED = ("1 names", "2 device unseen", "3 shares", "4 windows", "5 identifiers", "6 strays", "7 lag", "10 counts")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{kind}: {case.name}")
        for kind, cases in KINDS.items()
        if kind in MENDED
        for case in cases
    ],
)
def test_the_answer_is_right(case: Case) -> None:
    assert case.wrong() is None
