"""How a trace becomes a file: an export is whole or an error, a slow upload holds nothing up, and a profiler session
begins once the trace of the last one is written: it would take the times from its kernels.
"""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, profile

from aorta.profiling import trace_saver
from aorta.profiling.sessions import before_next_session
from aorta.profiling.trace_saver import Job, Moment, SavedFile, Saver, TraceWindow, export
from aorta.profiling.upload import error_line
from tests.profiling.windows import files_below, listening, loop, preset


class There:
    """A place that takes everything, once it may; `loses`: names of which no whole copy is seen there."""

    def __init__(self, *loses: str) -> None:
        self.open, self.loses = threading.Event(), loses

    def put(self, path: Path, name: str) -> str:
        assert self.open.wait(60)
        return f"there://{name}"

    def holds(self, path: Path, name: str) -> bool:
        return name not in self.loses


def saved(
    saver: Saver,
    path: Path,
    write: Callable[[Path], object] = lambda path: path.write_text("{}"),
    there: Any = None,
    step: int = 0,
) -> SavedFile:
    """The file of a window of one step, handed to the saver."""
    file = SavedFile("trace", path, there, path.name)
    saver.submit(Job(TraceWindow(step, step, False, Moment(batch=step + 1)), write, [file]))
    return file


@pytest.mark.spec("E11")
def test_a_slow_server_holds_up_neither_training_nor_the_next_files(tmp_path):
    saver, there = Saver(keep=0), There()
    for step in range(3):
        saved(saver, tmp_path / f"{step}.json", there=there, step=step)
    assert not saver.drain(0.0)
    while len(saver.windows) < 3:  # all are written while the first upload still hangs
        assert not there.open.wait(0.01)
    assert files_below(tmp_path) == ["0.json", "1.json", "2.json"]
    assert not any(file.address for window in saver.windows for file in window.files)
    there.open.set()
    assert saver.drain(60)
    assert files_below(tmp_path) == []
    assert [window.files[0].address for window in saver.windows] == [f"there://{step}.json" for step in range(3)]


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.spec("E15")
def test_a_file_stays_here_unless_its_copy_is_seen_to_be_whole(tmp_path, keep):
    saver, there = Saver(keep=keep), There("0.json", "2.json", "4.json")
    there.open.set()
    for step in range(5):
        saved(saver, tmp_path / f"{step}.json", there=there, step=step)
    assert saver.drain(60)
    # The newest of those that could go stays where one is kept; those without a copy stay in any case, and count.
    assert files_below(tmp_path) == ["0.json", "2.json", "4.json"]


@pytest.mark.spec("E18")
def test_a_folder_that_is_being_filled_is_not_removed_with_an_old_window(tmp_path):
    saver, there, folder = Saver(keep=0), There(), tmp_path / "window"
    there.open.set()
    with saver.filling(folder):
        saved(saver, folder / "a.json", there=there)
        assert saver.drain(60)
        assert list(folder.iterdir()) == []  # its only file has gone, the folder stays


# --- an export ----------------------------------------------------------------------------------------------------


def test_without_room_no_part_is_left_and_the_error_is_the_disk_s(tmp_path):
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, room[1]))  # of a file: as a full disk
    try:
        with listening() as said:
            profiler = loop(tmp_path / "traces", preset("d9d", period=3, warmup=0, active=2, with_stack=True), 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    errors = [file.error for window in profiler.saver.windows for file in window.files]
    assert (files_below(tmp_path), len(errors)) == ([], 2)
    for number, steps, error in zip((3, 6), ("1 to 2", "4 to 5"), errors, strict=True):
        assert error.startswith(f"OSError: [Errno 27] File too large: '{tmp_path}/traces/step_{number}/")
        assert error.endswith("; make room there, or choose another folder for traces")
        assert any(f"the trace of steps {steps} could not be saved as " in line and error in line for line in said)


@pytest.mark.parametrize("content", [None, "", '{"traceEvents": ['], ids=["none", "empty", "half"])
def test_an_export_that_stops_half_way_without_a_word_is_an_error(tmp_path, content):
    def write(path):
        path.with_name(path.name + ".tmp").write_text("half")
        if content is not None:
            path.write_text(content)

    with pytest.raises(OSError, match="left no whole trace, and the disk is not full") as caught:
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


# --- the next session ---------------------------------------------------------------------------------------------


@pytest.fixture
def order(monkeypatch):
    """What happened in which order; a session that begins is "begun"."""
    told: list[str] = []
    prepare = torch_profiler._prepare_profiler

    def begun(*words, **named):
        told.append("begun")
        prepare(*words, **named)

    monkeypatch.setattr(torch_profiler, "_prepare_profiler", begun)
    return told


def session():
    with profile(activities=[ProfilerActivity.CPU]):
        pass


def test_a_session_waits_for_the_trace_of_the_last_one(order, tmp_path):
    saver, asked = Saver(), threading.Event()

    def write(path):
        assert asked.wait(60)
        path.write_text("{}")
        order.append("exported")

    before_next_session(asked.set)
    file = saved(saver, tmp_path / "trace.json", write)
    session()
    assert saver.drain(60)
    assert order == ["exported", "begun"]
    assert (file.on_disk, file.error) == (True, None)


def test_a_trace_that_takes_too_long_is_given_up(order, tmp_path, monkeypatch):
    monkeypatch.setattr(trace_saver, "_EXPORT_WAIT_S", 0.0)
    saver, begun = Saver(), threading.Event()

    def write(path):
        assert begun.wait(60)
        path.write_text("{}")

    file = saved(saver, tmp_path / "trace.json", write)
    session()
    begun.set()
    assert saver.drain(60)
    assert (file.on_disk, file.error) == (False, "TimeoutError: not exported within 0 s, when the next window began")
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_holds_nothing_up(order, tmp_path):
    saver = Saver()
    (tmp_path / "file").touch()
    file = saved(saver, tmp_path / "file" / "trace.json")
    assert saver.drain(60)
    session()
    assert (order, bool(file.error)) == (["begun"], True)


def test_torch_is_left_as_it_was():
    prepare, told = torch_profiler._prepare_profiler, []
    forget = before_next_session(lambda: told.append("one"))
    before_next_session(lambda: told.append("two"))
    forget()
    session()
    session()
    forget()
    assert told == ["two"]
    assert torch_profiler._prepare_profiler is prepare
