"""What people report in public is answered rightly, whatever tool and library wrote it (docs/dev/cases.md)."""

from __future__ import annotations

import pytest

from tests.read.public_cases import KINDS, Case


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"{kind}: {case.name}") for kind, cases in KINDS.items() for case in cases],
)
def test_the_answer_is_right(case: Case) -> None:
    assert case.wrong() is None
