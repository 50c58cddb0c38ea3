"""The writer: every line whole, nothing overwritten, a full disk leaves the file as it was."""

from __future__ import annotations

import errno
import os

import msgspec
import pytest

from aorta.errors import RecordWriteError, RunIncomplete
from aorta.records.writer import RecordWriter
from tests.rank_records import read_rank


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
        write = os.write

        def fill_up(file, data):
            if path.stat().st_size + len(data) <= len(before):
                return write(file, data)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", fill_up)
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


@pytest.mark.parametrize("steps", [0, 5])
def test_on_a_full_disk_the_footer_takes_the_place_of_the_last_steps(path, header, step, footer, monkeypatch, steps):
    writer = RecordWriter(path, rank=3)
    writer.write(header)
    for number in range(steps):
        writer.write(step(number))
    before, write = path.read_bytes(), os.write

    def fill_up(file, data):
        if path.stat().st_size + len(data) <= len(before):
            return write(file, data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fill_up)
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
