"""artifacts/README.md names every field of the record, the manifest and the summary, docs/metrics.md every metric."""

from __future__ import annotations

from typing import get_args

from aorta.documents.metrics import COLLECTIVE_METRIC_NAMES, HOST_LEAD, OWN_TIME, STEP_METRIC_NAMES, UNDECIDED
from aorta.records import run_files, schema
from aorta.records.schema import CopyDirection
from aorta.timeline.classes import AUX, BUBBLE, COMPUTE, COPY, KINDS
from aorta.timeline.overlap import copy_rates
from tests.docs.pages import ROOT, code, first_column, section
from tests.windows import measure_window

PAGE = ROOT / "artifacts" / "README.md"
PLACES = {
    "`header`": schema.Header,
    "`step`": schema.Step,
    "`anchor`": schema.Anchor,
    "`calibration`": schema.Calibration,
    "block kernels object": schema.BlockKernels,
    "`footer`": schema.Footer,
    "`collectives` row": schema.Collective,
    "`compute` row": schema.ComputeRange,
    "`stalls` row": schema.Stall,
    "`aux` row": schema.AuxRange,
    "`active_segments` row": schema.ActiveSegment,
    "`device` row": schema.DeviceSample,
    "`ranges` row": schema.UserRange,
    "`waits` row": schema.Wait,
    "`copies` row": schema.Copy,
    "device telemetry object": schema.DeviceTelemetry,
    "stall cut-off object": schema.StallCutoff,
    "calibration plan object": schema.CalibrationPlan,
    "`coverage` object": schema.Coverage,
    "clock reading object": schema.ClockReading,
    "device clock object": schema.DeviceClockFacts,
}


def test_fields_in_their_order() -> None:
    for heading, struct in PLACES.items():
        documented = [field for cell in first_column(section(PAGE, heading)) for field in code(cell)]
        assert documented == list(struct.__struct_fields__), heading


def test_every_struct_of_the_schema_has_a_place() -> None:
    structs = {
        value for value in vars(schema).values() if isinstance(value, type) and issubclass(value, schema.msgspec.Struct)
    }
    assert structs == set(PLACES.values())


def test_versions_and_kinds() -> None:
    text = PAGE.read_text()
    assert f"`schema_version` {schema.SCHEMA_VERSION} " in text
    assert f"`{' '.join(KINDS)}`" in text


def test_recorded_variables() -> None:
    text = section(PAGE, "The manifest: `run.json`")
    assert all(f"{prefix}*" in text for prefix in run_files.ENVIRONMENT_PREFIXES)


METRICS_PAGE = ROOT / "docs" / "metrics.md"


def documented(*headings: str) -> set[str]:
    names = {
        name for heading in headings for cell in first_column(section(METRICS_PAGE, heading)) for name in code(cell)
    }
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
    text = section(METRICS_PAGE, "The window")
    assert all(f"**{kind}**" in text for kind in (COMPUTE, COPY, AUX, BUBBLE))
    assert all(f"`{kind}`" in text for kind in KINDS)
