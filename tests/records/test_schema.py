"""The schema: every line survives the trip through JSON, and its readers start without the heavy libraries."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from aorta.records.record_file import RecordWriter
from aorta.records.run_files import RANK_FILE
from aorta.records.schema import COLUMNS, SCHEMA_VERSION, Anchor, Footer, Header, Line, Step
from aorta.timeline.classes import LANES
from tests import strategies
from tests.rank_records import RankRecord, read_rank

DECODER = msgspec.json.Decoder(Line)


@given(strategies.lines)
def test_every_line_survives_the_round_trip_and_fits_one_line(line):
    data = msgspec.json.encode(line)
    assert DECODER.decode(data) == line
    assert b"\n" not in data
    assert json.loads(data)["record"] == type(line).__name__.lower()


@given(strategies.headers, strategies.st.lists(strategies.steps | strategies.anchors, max_size=4), strategies.footers)
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_whole_file_survives_the_round_trip(tmp_path, header, body, footer):
    header = msgspec.structs.replace(header, schema_version=SCHEMA_VERSION)
    path = tmp_path / RANK_FILE.format(rank=3)
    path.unlink(missing_ok=True)
    with RecordWriter(path, rank=3) as writer:
        for line in (header, *body, footer):
            writer.write(line)
    steps = [line for line in body if isinstance(line, Step)]
    assert read_rank(path) == RankRecord(
        path,
        header,
        steps=[step for step in steps if step.phase == "train"],
        isolated=[step for step in steps if step.phase != "train"],
        anchors=[line for line in body if isinstance(line, Anchor)],
        footer=footer,
    )


@given(strategies.steps)
def test_a_step_of_an_older_record_is_one_of_training(step):
    plain = json.loads(msgspec.json.encode(step))
    del plain["phase"]
    assert msgspec.json.decode(json.dumps(plain), type=Step) == msgspec.structs.replace(step, phase="train")


@given(strategies.steps)
def test_rows_are_arrays_in_the_order_the_header_declares(step):
    plain = json.loads(msgspec.json.encode(step))
    for name, columns in COLUMNS.items():
        rows = getattr(step, name)
        if rows is msgspec.UNSET:  # no sample since the step before
            assert name not in plain
            continue
        for row, given_row in zip(plain[name], rows, strict=True):
            assert row == [getattr(given_row, column) for column in columns]


@given(strategies.headers)
def test_a_header_repeats_lanes_and_columns_by_default(header):
    fields = msgspec.structs.asdict(header)
    del fields["lanes"], fields["columns"]
    plain = json.loads(msgspec.json.encode(Header(**fields)))
    assert plain["lanes"] == list(LANES)
    assert plain["columns"] == {name: list(columns) for name, columns in COLUMNS.items()}
    assert set(plain["columns"]) < set(Step.__struct_fields__)


def test_unknown_is_null_never_nan():
    clock = {"realtime_ns": 1, "boottime_ns": 2, "monotonic_ns": 3, "uncertainty_ns": 4}
    line = json.loads(
        msgspec.json.encode(msgspec.convert({"record": "anchor", "global_step": 7, "clock": clock}, Line))
    )
    assert line == {"record": "anchor", "global_step": 7, "clock": clock}
    assert msgspec.json.encode(float("nan")) == b"null"


def test_a_footer_knows_the_three_ways_to_end():
    with pytest.raises(msgspec.ValidationError, match=r"Invalid enum value 'bored'.*reason"):
        msgspec.convert({"reason": "bored", "exit_code": 0, "steps_written": 0, "clock": {}}, Footer)


NUMPY_SIDE = (
    "aorta.timeline.arrays",
    *(f"aorta.records.{name}" for name in ("ring_file", "ring_steps", "step_rows", "device_rows", "device_steps")),
    *(f"aorta.records.{name}" for name in ("ring_record", "ring_rows")),
    "aorta.records.window_kernels",
)
"""Columns: intervals of traces of millions of rows, and rows of a ring."""
LIGHT = f"""
import importlib, pkgutil, sys
HEAVY = {{"torch", "numpy", "pandas", "matplotlib"}}
for room in ("aorta.timeline", "aorta.records"):
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, room + "."):
        if module.name not in {NUMPY_SIDE}:
            importlib.import_module(module.name)
print(sorted(HEAVY & sys.modules.keys()), sorted(set({NUMPY_SIDE}) & sys.modules.keys()))
for name in {NUMPY_SIDE}:
    importlib.import_module(name)
print(sorted(HEAVY & sys.modules.keys()))
"""


def test_the_waist_loads_no_heavy_library_but_numpy_where_intervals_are_columns(pytestconfig):
    seen = subprocess.run([sys.executable, "-c", LIGHT], cwd=pytestconfig.rootpath, capture_output=True, text=True)
    assert (seen.returncode, seen.stdout.splitlines()) == (0, ["[] []", "['numpy']"]), seen.stderr
