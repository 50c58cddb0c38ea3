"""Broken and hostile input of the readers of rocprofv3 and nsys.

`corpus/` holds one small file per way of being broken: each is an `InputError` (exit code 2) that names the file. What
chance finds (`scripts/fuzz`) goes there.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from aorta.errors import InputError
from aorta.read.traces.health import check_rows
from aorta.read.traces.interval_table import Trace
from aorta.read.traces.kernels import kernel_facts
from aorta.read.traces.nsys import NSYS
from aorta.read.traces.rocprof.csv_files import ROCPROF_CSV
from aorta.read.traces.rocprof.rocpd import ROCPD
from aorta.read.traces.rocprof.trace import ROCPROF_JSON
from aorta.read.traces.tables import device_timelines
from tests.read.tables import read_with

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())


def read_bytes(kind: str, data: bytes, name: str, folder: Path) -> list[Trace]:
    if kind in ("json", "csv"):
        return read_with(ROCPROF_JSON if kind == "json" else ROCPROF_CSV, {name: data})
    (folder / name).write_bytes(data)
    return read_with(NSYS if kind == "nsys" else ROCPD, folder / name)


def measure(traces: list[Trace]) -> None:
    """All that is done to a trace afterwards; a damaged one must survive it."""
    for trace in traces:
        clean, _ = check_rows(trace)
        kernel_facts(clean)
        for timeline in device_timelines(clean):
            timeline.measure(timeline.whole)


def from_sql(script: Path, folder: Path) -> bytes:
    path = folder / "made.db"
    db = sqlite3.connect(path)
    db.executescript(script.read_text())
    db.close()
    return path.read_bytes()


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_every_broken_file_is_an_error_that_names_it(path: Path, tmp_path: Path) -> None:
    kind = path.name.split("-")[0]
    data = from_sql(path, tmp_path) if path.suffix == ".sql" else path.read_bytes()
    with pytest.raises(InputError) as caught:
        measure(read_bytes(kind, data, path.name, tmp_path))
    assert path.name in str(caught.value)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("json-time-is-text.json", r"\$\.rocprofiler-sdk-tool\[0\]|kernel_dispatch\[\.\.\.\]\.start_timestamp"),
        (
            "csv-time-is-text.csv",
            r"csv-time-is-text\.csv: row 1: start_timestamp is 'soon'; an integer of 64 bits is needed",
        ),
        (
            "csv-row-too-short.csv",
            r"csv-row-too-short\.csv: not CSV: row 2 has fewer fields than there are columns: cut off, or",
        ),
        ("csv-row-too-long.csv", r"csv-row-too-long\.csv: not CSV: .*: cut off, or edited by hand\?"),
        ("nsys-time-is-text.sql", "table CUPTI_ACTIVITY_KIND_KERNEL, row 1: start is 'soon'"),
        ("rocpd-time-negative.sql", "kernel 1: its start is -7 ns"),
    ],
)
def test_the_place_inside_the_file_is_named(name: str, place: str, tmp_path: Path) -> None:
    path = Path(__file__).parent / "corpus" / name
    data = from_sql(path, tmp_path) if path.suffix == ".sql" else path.read_bytes()
    with pytest.raises(InputError, match=place):
        read_bytes(name.split("-")[0], data, name, tmp_path)
