"""Exports where there is no room, or which stop half way: nothing half is left, and the true reason is told."""

from __future__ import annotations

import errno
import json
import sys

import pytest

from aorta.profiling.trace_files import error_line, export
from tests.profiling.windows import files_below
from tests.runs import ROOT, environment, finished, succeeded


@pytest.mark.thorough
def test_without_room_no_part_is_left_and_the_error_is_the_disk_s(tmp_path):
    command = [sys.executable, "-m", "tests.profiling.fill_a_disk", str(tmp_path)]
    done = succeeded(finished(command, own=environment(PYTHONPATH=str(ROOT))))
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["left"] == []
    assert len(found["errors"]) == 2
    for number, error in zip((3, 6), found["errors"], strict=True):
        assert error.startswith(f"OSError: [Errno 27] File too large: '{tmp_path}/traces/step_{number}/")
        assert error.endswith("; make room there, or choose another folder for traces")
        assert any(error in line for line in found["said"])


def test_a_whole_trace_is_left_as_it_is(tmp_path):
    export(lambda path: path.write_text('{"traceEvents": []}\n'), tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text() == '{"traceEvents": []}\n'


@pytest.mark.parametrize("content", [None, "", '{"traceEvents": ['], ids=["none", "empty", "half"])
def test_an_export_that_stops_half_way_without_a_word_is_an_error(tmp_path, content):
    def write(path):
        path.with_name(path.name + ".tmp").write_text("half")
        if content is not None:
            path.write_text(content)

    with pytest.raises(OSError, match="left no whole trace, and the disk takes more") as caught:
        export(write, tmp_path / "x.json")
    assert caught.value.errno == errno.EIO
    assert files_below(tmp_path) == []


def test_an_error_of_the_exporter_goes_on_as_it_is(tmp_path):
    def write(path):
        path.write_text("half")
        raise RuntimeError("Kineto has had enough")

    with pytest.raises(RuntimeError, match="had enough"):
        export(write, tmp_path / "x.json")
    assert files_below(tmp_path) == []
    assert error_line(RuntimeError("no")) == "RuntimeError: no"
