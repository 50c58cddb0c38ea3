"""artifacts/README.md names every field of the record, the manifest and the summary."""

from __future__ import annotations

from aorta.records import run_files, schema
from aorta.timeline.classes import KINDS
from tests.docs.pages import ROOT, code, first_column, section

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
