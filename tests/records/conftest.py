"""Fixtures of this room: the lines of one rank of four, its steps numbered from 0."""

from __future__ import annotations

import pytest

from aorta.records.schema import Anchor, Step
from tests.analysis import builders


@pytest.fixture
def header():
    return builders.header(3, 4)


@pytest.fixture
def step():
    def build(number: int = 0) -> Step:
        overlap = builders.metrics(10, 8, 0, 0)
        reasons = {"loss": "not read in this step", "overlap_ratio": "no communication in this window"}
        return builders.step(3, 4, number, overlap=overlap, loss=None, reasons=reasons)

    return build


@pytest.fixture
def anchor():
    return Anchor(global_step=1, clock=builders.CLOCK)


@pytest.fixture
def footer():
    return builders.footer(2)
