"""A profiler session begins once the trace of the last one is written: it would take the times from its kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, profile

from aorta.profiling import trace_saver
from aorta.profiling.next_session import before_next_session
from aorta.profiling.trace_saver import Job, Moment, SavedFile, Saver, TraceWindow


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened in which order; a session that begins is "begun"."""
    told: list[str] = []
    prepare = torch_profiler._prepare_profiler

    def begun(*words: object, **named: object) -> None:
        told.append("begun")
        prepare(*words, **named)

    monkeypatch.setattr(torch_profiler, "_prepare_profiler", begun)
    return told


def session() -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        pass


def saved(saver: Saver, path: Path, export: Callable[[Path], object]) -> SavedFile:
    file = SavedFile("trace", path)
    saver.submit(Job(TraceWindow(0, 0, False, Moment(batch=1)), export, [file]))
    return file


def test_a_session_waits_for_the_trace_of_the_last_one(order: list[str], tmp_path: Path) -> None:
    saver, asked = Saver(), threading.Event()

    def export(path: Path) -> None:
        assert asked.wait(60)
        path.write_text("{}")
        order.append("exported")

    before_next_session(asked.set)
    file = saved(saver, tmp_path / "trace.json", export)
    session()
    assert saver.drain(60)
    assert order == ["exported", "begun"]
    assert (file.on_disk, file.error) == (True, None)


def test_a_trace_that_takes_too_long_is_given_up(
    order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_saver, "_EXPORT_WAIT_S", 0.0)
    saver, begun = Saver(), threading.Event()

    def export(path: Path) -> None:
        assert begun.wait(60)
        path.write_text("{}")

    file = saved(saver, tmp_path / "trace.json", export)
    session()
    begun.set()
    assert saver.drain(60)
    assert (file.on_disk, file.error) == (False, "TimeoutError: not exported within 0 s, when the next window began")
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_holds_nothing_up(order: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    saver = Saver()
    file = saved(saver, tmp_path / "file" / "trace.json", lambda _path: None)
    assert saver.drain(60)
    session()
    assert order == ["begun"]
    assert file.error


def test_torch_is_left_as_it_was() -> None:
    prepare, told = torch_profiler._prepare_profiler, []
    forget = before_next_session(lambda: told.append("one"))
    before_next_session(lambda: told.append("two"))
    forget()
    session()
    session()
    forget()
    assert told == ["two"]
    assert torch_profiler._prepare_profiler is prepare
