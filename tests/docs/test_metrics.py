"""Every metric of the code is on docs/metrics.md, and the page names no other."""

from __future__ import annotations

from typing import get_args

from aorta.documents.metrics import COLLECTIVE_METRIC_NAMES, HOST_LEAD, OWN_TIME, STEP_METRIC_NAMES, UNDECIDED
from aorta.records.schema import CopyDirection
from aorta.timeline.classes import AUX, BUBBLE, COMPUTE, COPY, KINDS
from aorta.timeline.overlap import copy_rates, measure_window
from tests.docs.pages import ROOT, code, first_column, section

PAGE = ROOT / "docs" / "metrics.md"


def documented(*headings: str) -> set[str]:
    names = {name for heading in headings for cell in first_column(section(PAGE, heading)) for name in code(cell)}
    per_kind = {name for name in names if "<kind>" in name}
    return (names - per_kind) | {name.replace("<kind>", kind) for name in per_kind for kind in KINDS}


def test_the_record_s_metrics() -> None:
    everything = measure_window(
        (0, 10), compute=[(0, 5)], comm={kind: [(3, 8)] for kind in KINDS}, pipeline=[(0, 9)], bubbles=[(5, 8)]
    )
    rates = copy_rates((direction, 1, (0, 1)) for direction in get_args(CopyDirection))
    assert documented("In the record, and in the report") == {
        *everything.metrics()[0],
        *rates,
        HOST_LEAD,
        OWN_TIME,
        UNDECIDED,
    }


def test_the_report_s_metrics() -> None:
    assert documented("In the record, and in the report", "Only in the report") == set(STEP_METRIC_NAMES)


def test_the_collectives_metrics() -> None:
    assert documented("Of single collectives") == set(COLLECTIVE_METRIC_NAMES)


def test_classes_and_kinds() -> None:
    text = section(PAGE, "The window")
    assert all(f"**{kind}**" in text for kind in (COMPUTE, COPY, AUX, BUBBLE))
    assert all(f"`{kind}`" in text for kind in KINDS)
