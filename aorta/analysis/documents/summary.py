"""`summary.json` as a whole: its datasets, the comparison of two of them, and what a gate decided."""

from __future__ import annotations

from typing import Literal

import msgspec

from aorta.analysis.documents import ABSENT, Unpublished
from aorta.analysis.documents.comparison import Comparison, GateEntry
from aorta.analysis.documents.dataset import DatasetEntry
from aorta.analysis.metrics import Better, Unit


class MetricDefinition(msgspec.Struct):
    """What a metric is."""

    unit: Unit
    better: Better | None
    definition: str


class Summary(msgspec.Struct, kw_only=True):
    """`summary.json`."""

    summary_version: Literal[1]
    aorta_version: str
    conventions: dict[str, str]
    datasets: dict[str, DatasetEntry]
    comparison: Comparison = ABSENT
    metrics: dict[str, MetricDefinition]
    gate: Unpublished[GateEntry] = ABSENT
