"""Fixtures of this room: the lines of one rank of four, its steps numbered from 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aorta.records.schema import Anchor, Footer, Header, Step
from tests.analysis import builders


@pytest.fixture
def header() -> Header:
    return builders.header(3, 4)


@pytest.fixture
def step() -> Callable[..., Step]:
    def build(number: int = 0) -> Step:
        overlap = builders.metrics(10, 8, 0, 0)
        reasons = {"loss": "not read in this step", "overlap_ratio": "no communication in this window"}
        return builders.step(3, 4, number, overlap=overlap, loss=None, reasons=reasons)

    return build


@pytest.fixture
def anchor() -> Anchor:
    return Anchor(global_step=1, clock=builders.CLOCK)


@pytest.fixture
def footer() -> Footer:
    return builders.footer(2)
