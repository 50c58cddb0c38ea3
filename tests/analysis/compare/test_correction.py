"""Holm by hand."""

from __future__ import annotations

import pytest

from aorta.analysis.compare.multiple_testing import holm


def test_holm_by_hand() -> None:
    """Sorted: 4 x 0.005, 3 x 0.01, 2 x 0.03, 1 x 0.04, of which none may fall below the one before."""
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})


def test_holm_never_exceeds_one_and_leaves_a_single_one_alone() -> None:
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({"a": 0.03}) == {"a": 0.03}
    assert holm({}) == {}
