"""Records of ranks. Whatever a killed, mixed or foreign file holds, it is either read or refused with file and line;
every line is written whole, nothing is overwritten, and a full disk leaves the file as it was.

`read_rank` puts the product's `header_of` and `stream` together; rules of a whole record are those of `read_tables`.
"""

from __future__ import annotations

import errno
import os

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aorta.errors import InputError, RecordWriteError, RunIncomplete
from aorta.read.record_columns import read_tables
from aorta.records.record_file import RecordWriter, header_of
from aorta.records.run_files import RANK_FILE
from tests.rank_records import read_rank

NO_FOOTER = "rank_3_metrics.jsonl: no footer: the process was killed, or still runs"


@pytest.fixture
def record(tmp_path):
    """Write structs or raw bytes as the lines of one record; return its path."""

    def write(*lines):
        path = tmp_path / RANK_FILE.format(rank=3)
        path.write_bytes(b"".join(x if isinstance(x, bytes) else msgspec.json.encode(x) + b"\n" for x in lines))
        return path

    return write


def test_a_whole_record(record, header, step, anchor, footer):
    read = read_rank(record(header, step(0), anchor, step(1), footer))
    assert (read.header, read.steps, read.anchors, read.footer) == (header, [step(0), step(1)], [anchor], footer)
    assert read.problems == []


def test_a_killed_run_is_read_as_far_as_it_came(record, header, step):
    read = read_rank(record(header, step(0), step(1)))
    assert (len(read.steps), read.footer, read.problems) == (2, None, [])
    assert read_tables(read.path).problems == (NO_FOOTER,)


def test_a_truncated_last_line_is_left_out_and_named(record, header, step):
    read = read_rank(record(header, step(0), msgspec.json.encode(step(1))[:50]))
    assert read.steps == [step(0)]
    assert read.problems == ["rank_3_metrics.jsonl:3: cut off in mid-line; ignored"]
    assert read_tables(read.path).problems == (*read.problems, NO_FOOTER)


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_record_cut_anywhere_keeps_every_whole_line(record, header, step, footer, data):
    whole = [header, step(0), step(1), footer]
    text = record(*whole).read_bytes()
    cut = data.draw(st.integers(text.index(b"\n") + 1, len(text)))
    read = read_rank(record(text[:cut]))
    assert 1 + len(read.steps) + (read.footer is not None) == text[:cut].count(b"\n")
    assert any("cut off in mid-line" in problem for problem in read.problems) is not text[:cut].endswith(b"\n")


def test_an_empty_file_is_called_empty(record):
    with pytest.raises(
        InputError, match=r"rank_3_metrics\.jsonl: the file is empty: its rank was killed before .*\(in /"
    ):
        read_rank(record(b""))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b'{"record": "hea', "cut off in mid-line", id="cut off in the header"),
        pytest.param(b'[{"ph": "X"}]\n', "Expected `object`, got `array`", id="foreign JSON"),
        pytest.param(b"\xff\xfe\x00\n", "not a line of this schema", id="not text"),
    ],
)
def test_what_does_not_begin_with_a_header_is_refused(record, content, why):
    with pytest.raises(InputError, match=rf"rank_3_metrics\.jsonl:1: expected a header line .*{why}.*\(in /"):
        read_rank(record(content))


def test_a_step_where_the_header_belongs_is_refused(record, header, step):
    with pytest.raises(InputError, match=r"jsonl:1: expected a header line of an AORTA record, saw another line"):
        read_rank(record(step(0), header))


@pytest.mark.parametrize("first", [b"\n", b"garbage\n"], ids=["blank", "garbage"])
def test_a_header_behind_something_else_is_refused(record, header, step, first):
    with pytest.raises(InputError, match=r"jsonl:1: expected a header line .*jsonl:1: not a line of this schema"):
        read_rank(record(first, header, step(0)))


def test_a_second_header_means_two_runs_in_one_file(record, header, step):
    other = msgspec.structs.replace(header, run_id="other")
    with pytest.raises(InputError, match=r"rank_3_metrics\.jsonl:3: a second header \(run other\)"):
        read_tables(record(header, step(0), other, step(0)))


@pytest.mark.parametrize("version", [1, 3])
def test_another_schema_version_is_refused_by_number_even_if_nothing_else_is_as_it_was(record, header, version):
    newer = msgspec.structs.replace(header, schema_version=version)
    foreign = b'{"record":"header","schema_version":%d,"everything":"else"}\n' % version
    for line in (newer, foreign):
        with pytest.raises(InputError, match=rf"jsonl:1: schema version {version}; this AORTA reads version 2 "):
            read_rank(record(line))


def test_a_file_that_is_not_there_and_a_folder_are_named(tmp_path):
    with pytest.raises(InputError, match=r"rank_3_metrics\.jsonl: cannot be read: No such file or directory"):
        read_rank(tmp_path / "rank_3_metrics.jsonl")
    with pytest.raises(InputError, match=r"cannot be read: Is a directory"):
        read_rank(tmp_path)


def test_the_header_alone_is_read_from_a_record_of_any_length(record, header, step):
    assert header_of(record(header, b"x" * (1 << 16) + b"\n", step(0))) == header


def test_a_header_longer_than_what_is_read_at_once_is_whole(record, header):
    long = msgspec.structs.replace(header, label="x" * 10_000)
    assert header_of(record(long)) == long


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new folder" / "rank_3_metrics.jsonl"


def test_a_line_is_on_the_disk_as_soon_as_it_is_written(path, header, step):
    # Nothing is buffered: a process killed after this point has lost nothing.
    with RecordWriter(path, rank=3) as writer:
        writer.write(header)
        assert path.read_bytes() == msgspec.json.encode(header) + b"\n"
        writer.write(step(0))
        assert path.read_bytes().count(b"\n") == 2
        assert path.read_bytes().endswith(b"\n")


def test_an_existing_record_is_refused_and_left_alone(path, header):
    path.parent.mkdir()
    path.write_bytes(b"an earlier run\n")
    with pytest.raises(RecordWriteError, match=r"rank 3 cannot write .*rank_3_metrics\.jsonl: File exists"):
        RecordWriter(path, rank=3)
    assert path.read_bytes() == b"an earlier run\n"


def test_a_short_write_is_continued(path, header, step, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, bytes(data)[:7]))
    with RecordWriter(path, rank=3) as writer:
        writer.write(header)
        writer.write(step(0))
    assert path.read_bytes() == msgspec.json.encode(header) + b"\n" + msgspec.json.encode(step(0)) + b"\n"


def no_room_beyond(size, path, monkeypatch):
    """A disk on which a file of that many bytes grows no more."""
    write = os.write

    def fill_up(file, data):
        if path.stat().st_size + len(data) <= size:
            return write(file, data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fill_up)


@pytest.mark.parametrize("full", [False, True])
def test_the_last_line_is_replaced_or_stays(path, header, step, footer, monkeypatch, full):
    with RecordWriter(path, rank=3) as writer:
        for line in (header, step(0), footer):
            writer.write(line)
        before = path.read_bytes()
        code = msgspec.structs.replace(footer, exit_code=5, error="e" * len(before))
        if not full:
            writer.replace_last(code)
            assert path.read_bytes() == b"".join(msgspec.json.encode(line) + b"\n" for line in (header, step(0), code))
            return
        no_room_beyond(len(before), path, monkeypatch)
        with pytest.raises(RecordWriteError, match="No space left"):
            writer.replace_last(code)
        assert path.read_bytes() == before


@pytest.mark.parametrize("taken", [0, 1, 100], ids="{} bytes taken".format)
def test_a_full_disk_leaves_the_file_as_it_was(path, header, step, footer, monkeypatch, taken):
    write = os.write
    writer = RecordWriter(path, rank=3)
    writer.write(header)
    writer.write(step(0))
    before = path.read_bytes()

    def fill_up(file, data):
        if path.stat().st_size - len(before) < taken:
            return write(file, bytes(data)[:taken])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(RecordWriteError, match=r"rank 3 .*rank_3_metrics\.jsonl: No space left on device.*Free some"):
        writer.write(step(1))
    assert path.read_bytes() == before

    # Space again: the record goes on where it was.
    monkeypatch.setattr(os, "write", write)
    writer.write(step(2))
    writer.write(footer)
    writer.close()
    assert path.read_bytes().startswith(before)
    record = read_rank(path)
    assert ([line.global_step for line in record.steps], record.problems) == ([0, 2], [])


@pytest.mark.parametrize("known", [True, False], ids=["told", "counted"])
@pytest.mark.parametrize("torn", [b"", b'{"record":"step","ra'], ids=["whole", "torn"])
def test_who_goes_on_writes_behind_the_last_whole_line(path, header, step, footer, monkeypatch, torn, known):
    first = RecordWriter(path, rank=3)
    first.write(header)
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
    longer = msgspec.structs.replace(footer, error="e" * len(lines[-1]))  # two steps have to give way
    written = first.write_last(lambda count: msgspec.structs.replace(longer, steps_written=count))
    assert path.read_bytes() == b"".join(lines[:5]) + msgspec.json.encode(written) + b"\n"
    first.resume(0, 0)
    assert (first.steps_written, first.has_ended) == (4, True)


def test_a_record_that_is_not_there_is_not_begun_by_who_goes_on(path):
    with pytest.raises(FileNotFoundError):
        RecordWriter.reopened(path, rank=3)
    assert not path.exists()


@pytest.mark.parametrize("steps", [0, 5])
def test_on_a_full_disk_the_footer_takes_the_place_of_the_last_steps(path, header, step, footer, monkeypatch, steps):
    writer = RecordWriter(path, rank=3)
    writer.write(header)
    for number in range(steps):
        writer.write(step(number))
    before = path.read_bytes()
    no_room_beyond(len(before), path, monkeypatch)
    lines = before.splitlines(keepends=True)
    longer = msgspec.structs.replace(footer, error="e" * len(lines[-1]))  # two steps have to give way
    if not steps:
        with pytest.raises(RecordWriteError, match="No space left"):
            writer.write_last(lambda _: longer)
        assert path.read_bytes() == before
        return
    written = writer.write_last(lambda count: msgspec.structs.replace(longer, steps_written=count))
    writer.close()
    assert path.read_bytes() == b"".join(lines[:4]) + msgspec.json.encode(written) + b"\n"
    assert written.steps_written == writer.steps_written == 3
    assert read_rank(path).problems == []


def test_a_disk_that_is_gone_altogether_still_names_rank_and_path(path, header, step, monkeypatch):
    writer = RecordWriter(path, rank=3)
    writer.write(header)

    def gone(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", gone)
    monkeypatch.setattr(os, "ftruncate", gone)
    with pytest.raises(RecordWriteError, match=r"rank 3 .*rank_3_metrics\.jsonl: Input/output error"):
        writer.write(step(0))
    monkeypatch.undo()
    writer.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
def test_a_read_only_folder_is_named(path):
    path.parent.mkdir(mode=0o500)
    with pytest.raises(RecordWriteError, match=r"rank 3 .*rank_3_metrics\.jsonl: Permission denied.*output_dir"):
        RecordWriter(path, rank=3)


def test_a_file_where_the_folder_should_be_is_named(path):
    path.parent.write_text("in the way")
    with pytest.raises(RecordWriteError, match=r"rank 3 .*new folder/rank_3_metrics\.jsonl: (File exists|Not a dir)"):
        RecordWriter(path, rank=3)


def test_closing_twice_is_harmless_and_writing_after_it_is_an_error(path, header):
    writer = RecordWriter(path, rank=3)
    writer.close()
    writer.close()
    with pytest.raises(RecordWriteError, match=r"rank 3 .*Bad file descriptor"):
        writer.write(header)


def test_a_record_that_cannot_be_written_ends_the_run_as_incomplete():
    assert issubclass(RecordWriteError, RunIncomplete)
    assert RecordWriteError.exit_code == 5
