"""Records and traces that are broken on purpose: an error with its place, or a counted drop; never a traceback.

`tests/corpus/jsonl` keeps records, whose first word says what must become of them (`used-`: read with problems,
`refused-`), and `tests/read/corpus` traces of rocprofv3 and nsys, each an error that names it: what a search finds.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tracemalloc
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.analysis.dataframes import ranges_frame
from aorta.documents import as_json
from aorta.errors import InputError
from aorta.read.frames import NO_TIME, Lane
from aorta.read.record import load_run
from aorta.read.record_columns import METRIC_LIMIT
from aorta.read.traces.health import check_rows
from aorta.read.traces.kernels import kernel_facts
from aorta.read.traces.nsys import NSYS
from aorta.read.traces.rocprof.rocpd import ROCPD
from aorta.read.traces.rocprof.text_files import ROCPROF_CSV, ROCPROF_JSON
from aorta.read.traces.tables import device_timelines
from aorta.records.record_file import LINE_LIMIT, PROBLEM_LIMIT, StepLine
from aorta.records.schema import Step
from tests.analysis.builders import collective, footer, header, line_of, metrics, step, write_rank
from tests.rank_records import read_rank
from tests.read.tables import read_with

HERE = Path(__file__).resolve()
CORPUS = HERE.parents[1] / "corpus" / "jsonl"
HALF = metrics(10, 8, 4, 2)
GOOD = step(0, 1, 0, overlap=HALF, collectives=[collective()])


def summary_of(folder: Path) -> dict[str, object]:
    """The entry as it is written: strict JSON."""
    return json.loads(json.dumps(as_json(aggregate(LabelledRun("x", load_run(folder)))), allow_nan=False))


def with_line(folder: Path, line: str | bytes) -> Path:
    """A record of one rank: header, a good step, `line`, another good step, footer."""
    text = line.encode() if isinstance(line, str) else line
    last = line_of(msgspec.structs.replace(GOOD, global_step=2)) + line_of(footer(3))
    path = folder / "rank_0_metrics.jsonl"
    path.write_bytes((line_of(header()) + line_of(GOOD)).encode() + text + b"\n" + last.encode())
    return path


def changed(**fields: object) -> str:
    return json.dumps(json.loads(line_of(GOOD)) | {"global_step": 1} | fields)


NESTED = '{"a":' * 50_000 + "0" + "}" * 50_000
BAD = {
    name: changed(**fields) for name, fields in json.loads(HERE.with_name("broken_lines.json").read_text()).items()
} | {
    "a float beyond floats": changed(loss=0).replace('"loss": 0', '"loss": 1e999'),
    "a huger integer": changed().replace('"epoch": 0', '"epoch": 1' + "0" * 5000),
    "deep nesting": changed(aux=0).replace('"aux": 0', '"aux": ' + "[" * 100_000 + "]" * 100_000),
    "deep nesting where nothing is known": changed(x=0).replace('"x": 0', f'"x": {NESTED}'),
    "not UTF-8": changed(reasons={"comm_ms": "@"}).encode().replace(b"@", b"\xff\xfe"),
    "a surrogate alone": changed(reasons={"comm_ms": "@"}).replace("@", "\\ud800"),
    "zeros": b"\x00" * 300,
    **{
        f"without {name}": json.dumps({k: v for k, v in json.loads(changed()).items() if k != name})
        for name in ("record", "rank", "overlap", "coverage", "collectives", "aux", "warmup", "t_end_ns")
    },
}


@pytest.mark.parametrize("line", BAD.values(), ids=BAD)
def test_a_bad_line_is_dropped_counted_and_said_with_its_place(tmp_path: Path, line: str | bytes) -> None:
    with_line(tmp_path, line)
    entry = summary_of(tmp_path)
    assert entry["count"] == 2
    problems = entry["health"]["problems"]
    assert any(said.startswith("rank_0_metrics.jsonl:3: ") and said.endswith("ignored") for said in problems)
    assert any("footer counts 3 steps, 2 could be read" in said for said in problems)
    assert ranges_frame(load_run(tmp_path)).empty


def test_a_step_is_read_by_the_fields_by_which_it_is_written() -> None:
    read, written = (msgspec.structs.fields(type_) for type_ in (StepLine, Step))
    assert [(field.encode_name, field.required) for field in read] == [
        (field.encode_name, field.required) for field in written
    ]
    assert StepLine.__struct_config__.tag == Step.__struct_config__.tag


def test_waits_are_read_where_a_record_has_them(tmp_path: Path) -> None:
    """Beside steps that tell nothing of waits."""
    rows = [["allreduce", "w", 7, 1, None, 0, 0, 90, "emulated", 60]]
    with_line(tmp_path, changed(collectives=rows, waits=[["w", 7, 5, 90]]))
    tables = load_run(tmp_path).ranks[0]
    spans = tables.details.spans(np.arange(3))
    assert spans.waits_known is not None
    assert spans.waits_known.tolist() == [False, True, False]
    waits = spans.of_step(1).of_lanes(Lane.WAIT)
    assert [spans.names[code].name for code in waits.name.tolist()] == ["w"]
    assert (waits.ref.tolist(), waits.start_ns.tolist(), waits.end_ns.tolist()) == ([7], [5], [90])
    assert tables.collectives.backend_end_ns is not None
    assert [end for end in tables.collectives.backend_end_ns.tolist() if end != NO_TIME] == [60]


def test_what_a_later_version_adds_does_no_harm(tmp_path: Path) -> None:
    with_line(tmp_path, changed(added_later={"a": 1}, ranges=[["r", 0, 0, -5, 7, None, "more"]]))
    entry = summary_of(tmp_path)
    assert (entry["count"], entry["health"]["problems"]) == (3, [])
    assert ranges_frame(load_run(tmp_path))["duration_ms"].tolist() == [12e-6]


@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_a_line_of_a_gigabyte_is_refused_in_little_memory(tmp_path: Path, newline: bytes) -> None:
    path = write_rank(tmp_path, header(), [GOOD], None)
    with path.open("ab") as file:
        file.truncate(file.tell() + 2**30)  # a sparse file: a gigabyte of zeros that takes no room
        file.seek(0, 2)
        file.write(newline)
    tracemalloc.start()
    for read in (load_run, lambda folder: read_rank(folder / path.name)):
        with pytest.raises(InputError, match=rf"rank_0_metrics\.jsonl:3: this line is longer than {LINE_LIMIT} bytes"):
            read(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 4 * LINE_LIMIT
    tracemalloc.stop()


def test_bad_lines_without_end_are_counted_not_kept(tmp_path: Path) -> None:
    with_line(tmp_path, b"\n".join([b"rubbish"] * 5000))
    problems = load_run(tmp_path).health.problems
    assert len(problems) == PROBLEM_LIMIT + 2
    assert f"rank_0_metrics.jsonl: {5000 - PROBLEM_LIMIT} more line(s) could not be read; ignored" in problems


def test_a_new_metric_in_each_step_is_refused(tmp_path: Path) -> None:
    with_line(tmp_path, "\n".join(changed(overlap={f"m{n}": 1.0}, global_step=n + 9) for n in range(METRIC_LIMIT + 1)))
    with pytest.raises(InputError, match=rf"jsonl:\d+: more than {METRIC_LIMIT} different metrics"):
        load_run(tmp_path)


@pytest.mark.parametrize("size", [10**15, 0, -4])
def test_a_world_that_cannot_be_is_left_out_by_name(tmp_path: Path, size: int) -> None:
    write_rank(tmp_path, header(0, size), [], None)
    with pytest.raises(InputError, match=rf"rank_0_metrics\.jsonl:1: a world of {size} ranks"):
        load_run(tmp_path)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_corpus_is_used_or_refused_as_its_names_say(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "rank_0_metrics.jsonl")
    if path.name.startswith("refused-"):
        with pytest.raises(InputError, match=r"rank_0_metrics\.jsonl:\d+: "):
            load_run(tmp_path)
    else:
        assert path.name.startswith("used-")
        health = summary_of(tmp_path)["health"]
        assert health["problems"]
        assert all(problem.startswith("rank_0_metrics.jsonl:") for problem in health["problems"])


BROKEN_TRACES = sorted((HERE.parent / "corpus").iterdir())
TRACE_READERS = {"json": ROCPROF_JSON, "csv": ROCPROF_CSV, "nsys": NSYS, "rocpd": ROCPD}


def read_and_measure(path: Path, folder: Path) -> None:
    """All that is done to a trace; a damaged one must survive it."""
    reader = TRACE_READERS[path.name.split("-")[0]]
    made: Path | dict[str, bytes] = {path.name: path.read_bytes()}
    if path.suffix == ".sql":
        made = folder / path.name
        with closing(sqlite3.connect(made)) as database:
            database.executescript(path.read_text())
    for trace in read_with(reader, made):
        clean, _ = check_rows(trace)
        kernel_facts(clean)
        for timeline in device_timelines(clean):
            timeline.measure(timeline.whole)


PLACES = {
    "json-time-is-text.json": r"\$\.rocprofiler-sdk-tool\[0\]|kernel_dispatch\[\.\.\.\]\.start_timestamp",
    "csv-time-is-text.csv": r"row 1: start_timestamp is 'soon'; an integer of 64 bits is needed",
    "csv-header-only.csv": "no kernel dispatches: record with --kernel-trace and give its",
    "csv-row-too-short.csv": r"not CSV: row 2 has fewer fields than there are columns: cut off, or",
    "csv-row-too-long.csv": r"not CSV: .*: cut off, or edited by hand\?",
    "nsys-time-is-text.sql": "table CUPTI_ACTIVITY_KIND_KERNEL, row 1: start is 'soon'",
    "rocpd-time-negative.sql": "kernel 1: its start is -7 ns",
    "nsys-no-tables.sql": r"no table CUPTI_ACTIVITY_KIND_KERNEL; .*--trace=cuda,nvtx",
    "nsys-kernels-have-other-columns.sql": r"no column start, end, deviceId, streamId; it has begin, finish",
    "rocpd-of-schema-4.sql": r"rocpd schema version 4\.1\.0; this AORTA reads version 3",
}
"""What is said of the place inside of a file, or of what it lacks."""


@pytest.mark.parametrize("path", BROKEN_TRACES, ids=lambda path: path.name)
def test_every_broken_file_is_an_error_that_names_it(path: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=PLACES.get(path.name, ".")) as caught:
        read_and_measure(path, tmp_path)
    assert path.name in str(caught.value)
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 1000
