"""Records of ranks. Every line survives the trip through JSON; whatever a killed, mixed or foreign file holds, it is
either read or refused with file and line; every line is written whole, nothing is overwritten, and a full disk leaves
the file as it was.

`read_rank` puts the product's `header_of` and `stream` together; rules of a whole record are those of `read_tables`.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from aorta.errors import InputError, RecordWriteError, RunIncomplete
from aorta.read.record_columns import read_tables
from aorta.records.record_file import RecordWriter, header_of
from aorta.records.run_files import RANK_FILE
from aorta.records.schema import COLUMNS, SCHEMA_VERSION, Anchor, Calibration, Header, Step
from aorta.timeline.classes import LANES
from tests import strategies
from tests.analysis import builders
from tests.rank_records import RankRecord, read_rank

HEADER, FOOTER = builders.header(3, 4), builders.footer(2)
NO_FOOTER = "rank_3_metrics.jsonl: no footer: the process was killed, or still runs"


def step(number: int = 0) -> Step:
    """A step of one rank of four."""
    reasons = {"loss": "not read in this step", "overlap_ratio": "no communication in this window"}
    return builders.step(3, 4, number, overlap=builders.metrics(10, 8, 0, 0), loss=None, reasons=reasons)


@pytest.fixture
def record(tmp_path):
    """Write structs or raw bytes as the lines of one record; return its path."""

    def write(*lines):
        path = tmp_path / RANK_FILE.format(rank=3)
        path.write_bytes(b"".join(x if isinstance(x, bytes) else msgspec.json.encode(x) + b"\n" for x in lines))
        return path

    return write


@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_run_is_read_as_far_as_it_came_and_a_truncated_line_is_named(record, torn):
    read = read_rank(record(HEADER, step(0), msgspec.json.encode(step(1))[:50] if torn else step(1)))
    assert (read.steps, read.footer) == ([step(0)] if torn else [step(0), step(1)], None)
    assert read.problems == ["rank_3_metrics.jsonl:3: cut off in mid-line; ignored"] * torn
    assert read_tables(read.path).problems == (*read.problems, NO_FOOTER)


BEGINS = "rank_3_metrics.jsonl:1: expected a header line of an AORTA record, saw "
FOREIGN = b'{"record":"header","schema_version":1,"everything":"else"}\n'


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "rank_3_metrics.jsonl: the file is empty: its rank was killed before"),
        ([b'{"record": "hea'], f"{BEGINS}.*cut off in mid-line"),
        ([b'[{"ph": "X"}]\n'], f"{BEGINS}.*Expected `object`, got `array`"),
        ([b"\xff\xfe\x00\n"], f"{BEGINS}.*not a line of this schema"),
        (["step", "header"], f"{BEGINS}another line"),
        ([b"\n", "header", "step"], f"{BEGINS}.*jsonl:1: not a line of this schema"),
        (["header", "step", {"run_id": "other"}, "step"], r"rank_3_metrics\.jsonl:3: a second header \(run other\)"),
        # By its number, even if nothing else is as it was
        ([{"schema_version": 3}], "jsonl:1: schema version 3; this AORTA reads version 2 "),
        ([FOREIGN], "jsonl:1: schema version 1; this AORTA reads version 2 "),
    ],
)
def test_what_is_no_record_is_refused_with_file_and_line(record, lines, why):
    made = {"header": HEADER, "step": step(0)}
    path = record(*(made.get(x, x) if isinstance(x, str | bytes) else replace(HEADER, **x) for x in lines))
    with pytest.raises(InputError, match=f"{why}") as refused:
        read_tables(path)
    assert "second" in why or f"(in {path.parent})" in str(refused.value)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_record_cut_anywhere_keeps_every_whole_line(record, data):
    whole = [HEADER, step(0), step(1), FOOTER]
    text = record(*whole).read_bytes()
    cut = data.draw(st.integers(text.index(b"\n") + 1, len(text)))
    read = read_rank(record(text[:cut]))
    assert 1 + len(read.steps) + (read.footer is not None) == text[:cut].count(b"\n")
    assert any("cut off in mid-line" in problem for problem in read.problems) is not text[:cut].endswith(b"\n")


def test_a_file_that_is_not_there_and_a_folder_are_named(tmp_path):
    with pytest.raises(InputError, match=r"rank_3_metrics\.jsonl: cannot be read: No such file or directory"):
        read_rank(tmp_path / "rank_3_metrics.jsonl")
    with pytest.raises(InputError, match=r"cannot be read: Is a directory"):
        read_rank(tmp_path)


def test_the_header_alone_is_read_from_a_record_of_any_length(record):
    assert header_of(record(HEADER, b"x" * (1 << 16) + b"\n", step(0))) == HEADER
    long = replace(HEADER, label="x" * 10_000)  # longer than what is read at once
    assert header_of(record(long)) == long


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new folder" / "rank_3_metrics.jsonl"


@pytest.mark.parametrize("most_bytes", [7, 1 << 20])
def test_a_line_is_on_the_disk_as_soon_as_it_is_written_and_a_short_write_is_continued(path, monkeypatch, most_bytes):
    # Nothing is buffered: a process killed after this point has lost nothing.
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, bytes(data)[:most_bytes]))
    with RecordWriter(path, rank=3) as writer:
        writer.write(HEADER)
        assert path.read_bytes() == encoded(HEADER)
        writer.write(step(0))
        assert path.read_bytes() == encoded(HEADER, step(0))


def encoded(*lines):
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def no_room_beyond(size, path, monkeypatch, taken=0):
    """A disk on which a file of that many bytes grows no more, but for `taken` bytes of a line."""
    write = os.write

    def fill_up(file, data):
        if path.stat().st_size + len(data) <= size:
            return write(file, data)
        if 0 <= path.stat().st_size - size < taken:
            return write(file, bytes(data)[:taken])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fill_up)


@pytest.mark.parametrize("full", [False, True])
def test_the_last_line_is_replaced_or_stays(path, monkeypatch, full):
    with RecordWriter(path, rank=3) as writer:
        for line in (HEADER, step(0), FOOTER):
            writer.write(line)
        before = path.read_bytes()
        code = replace(FOOTER, exit_code=5, error="e" * len(before))
        if not full:
            writer.replace_last(code)
            assert path.read_bytes() == encoded(HEADER, step(0), code)
            return
        no_room_beyond(len(before), path, monkeypatch)
        with pytest.raises(RecordWriteError, match="No space left"):
            writer.replace_last(code)
        assert path.read_bytes() == before


@pytest.mark.parametrize("taken", [0, 1, 100], ids="{} bytes taken".format)
def test_a_full_disk_leaves_the_file_as_it_was(path, monkeypatch, taken):
    writer = RecordWriter(path, rank=3)
    writer.write(HEADER)
    writer.write(step(0))
    before = path.read_bytes()
    no_room_beyond(len(before), path, monkeypatch, taken)
    with pytest.raises(RecordWriteError, match=r"rank 3 .*jsonl: No space left on device.*Free some") as full:
        writer.write(step(1))
    assert (path.read_bytes(), full.value.exit_code) == (before, 5)
    assert isinstance(full.value, RunIncomplete)
    # Space again: the record goes on where it was.
    monkeypatch.undo()
    writer.write(step(2))
    writer.write(FOOTER)
    writer.close()
    assert path.read_bytes().startswith(before)
    record = read_rank(path)
    assert ([line.global_step for line in record.steps], record.problems) == ([0, 2], [])


@pytest.mark.parametrize("known", [True, False], ids=["told", "counted"])
@pytest.mark.parametrize("torn", [b"", b'{"record":"step","ra'], ids=["whole", "torn"])
def test_who_goes_on_writes_behind_the_last_whole_line(path, monkeypatch, torn, known):
    first = RecordWriter(path, rank=3)
    first.write(HEADER)
    first.write(step(0))
    first.is_lent = True
    with pytest.raises(RecordWriteError, match="another process still writes to it"):
        first.write(step(1))
    other = RecordWriter.reopened(path, rank=3)
    other.resume(0, -1)
    assert (other.steps_written, other.last_start_ns) == (1, step(0).start_mono_ns)
    for number in range(1, 6):
        other.write(step(number))
    assert other.lock()
    assert not first.lock()
    other.close()
    assert first.lock()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + torn)
    first.resume(*((6, step(5).start_mono_ns) if known else (2, 77)))
    first.is_lent = False
    assert (first.steps_written, first.last_start_ns, first.has_ended) == (6, step(5).start_mono_ns, False)
    no_room_beyond(sum(map(len, lines)), path, monkeypatch)
    longer = replace(FOOTER, error="e" * len(lines[-1]))  # two steps have to give way
    written = first.write_last(lambda count: replace(longer, steps_written=count))
    assert path.read_bytes() == b"".join(lines[:5]) + msgspec.json.encode(written) + b"\n"
    first.resume(0, 0)
    assert (first.steps_written, first.has_ended) == (4, True)


def test_a_record_that_is_not_there_is_not_begun_by_who_goes_on(path):
    with pytest.raises(FileNotFoundError):
        RecordWriter.reopened(path, rank=3)
    assert not path.exists()


@pytest.mark.parametrize("steps", [0, 5])
def test_on_a_full_disk_the_footer_takes_the_place_of_the_last_steps(path, monkeypatch, steps):
    writer = RecordWriter(path, rank=3)
    writer.write(HEADER)
    for number in range(steps):
        writer.write(step(number))
    before = path.read_bytes()
    no_room_beyond(len(before), path, monkeypatch)
    lines = before.splitlines(keepends=True)
    longer = replace(FOOTER, error="e" * len(lines[-1]))  # two steps have to give way
    if not steps:
        with pytest.raises(RecordWriteError, match="No space left"):
            writer.write_last(lambda _: longer)
        assert path.read_bytes() == before
        return
    written = writer.write_last(lambda count: replace(longer, steps_written=count))
    writer.close()
    assert path.read_bytes() == b"".join(lines[:4]) + msgspec.json.encode(written) + b"\n"
    assert written.steps_written == writer.steps_written == 3
    assert read_rank(path).problems == []


def test_a_disk_that_is_gone_altogether_still_names_rank_and_path(path, monkeypatch):
    writer = RecordWriter(path, rank=3)
    writer.write(HEADER)
    gone = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(os, "write", gone)
    monkeypatch.setattr(os, "ftruncate", gone)
    with pytest.raises(RecordWriteError, match=r"rank 3 .*rank_3_metrics\.jsonl: Input/output error"):
        writer.write(step(0))
    monkeypatch.undo()
    writer.close()


def test_a_record_that_is_there_and_a_file_where_the_folder_should_be_are_refused(path):
    path.parent.mkdir()
    path.write_bytes(b"an earlier run\n")
    with pytest.raises(RecordWriteError, match=r"rank 3 cannot write .*jsonl: File exists"):
        RecordWriter(path, rank=3)
    assert path.read_bytes() == b"an earlier run\n"
    with pytest.raises(RecordWriteError, match=r"rank 3 .*/rank_3_metrics\.jsonl/x: (File exists|Not a dir)"):
        RecordWriter(path / "x", rank=3)


def test_closing_twice_is_harmless_and_writing_after_it_is_an_error(path):
    writer = RecordWriter(path, rank=3)
    writer.close()
    writer.close()
    with pytest.raises(RecordWriteError, match=r"rank 3 .*Bad file descriptor"):
        writer.write(HEADER)


BETWEEN = strategies.steps | strategies.anchors | strategies.calibrations


@given(strategies.headers, strategies.st.lists(BETWEEN, max_size=4), strategies.footers)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        calibrations=[line for line in body if isinstance(line, Calibration)],
        footer=footer,
    )


@given(strategies.steps)
def test_rows_are_arrays_in_the_order_the_header_declares_and_a_step_without_a_phase_is_one_of_training(step):
    plain = json.loads(msgspec.json.encode(step))
    for name, columns in COLUMNS.items():
        rows = getattr(step, name)
        if rows is msgspec.UNSET:  # no sample since the step before
            assert name not in plain
            continue
        for row, given_row in zip(plain[name], rows, strict=True):
            assert row == [getattr(given_row, column) for column in columns]
    del plain["phase"]  # as in an older record
    assert msgspec.json.decode(json.dumps(plain), type=Step) == msgspec.structs.replace(step, phase="train")


@given(strategies.headers)
def test_a_header_repeats_lanes_and_columns_by_default(header):
    fields = msgspec.structs.asdict(header)
    del fields["lanes"], fields["columns"]
    plain = json.loads(msgspec.json.encode(Header(**fields)))
    assert plain["lanes"] == list(LANES)
    assert plain["columns"] == {name: list(columns) for name, columns in COLUMNS.items()}
    assert set(plain["columns"]) < set(Step.__struct_fields__)


def test_following_a_rank_loads_no_library_of_columns(pytestconfig):
    code = "import sys; from aorta.records import progress, record_file, ring_record, run_files, schema\n"
    code += "print({'torch', 'numpy', 'pandas', 'matplotlib'} & sys.modules.keys())"
    seen = subprocess.run([sys.executable, "-c", code], cwd=pytestconfig.rootpath, capture_output=True, text=True)
    assert (seen.returncode, seen.stdout) == (0, "set()\n"), seen.stderr
