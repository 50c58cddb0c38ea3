"""Ranges that the caller names: nested, on any thread, with any name, and bounded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

from aorta.errors import ConfigError
from aorta.instrument import user_marks as module
from aorta.instrument.user_marks import MOST_NAME_CHARS, OTHER_NAMES, UserMarks
from aorta.records.schema import UserRange
from aorta.records.step_line import user_ranges
from tests.runs import HANGS_S


def rows(marks: UserMarks) -> tuple[list[UserRange], dict[str, str]]:
    taken = marks.take()
    return user_ranges(taken.ranges, 0, taken.left_out, module.MOST_PER_STEP)


def test_ranges_have_their_depth_lie_in_each_other_and_an_error_ends_and_names_them() -> None:
    marks = UserMarks()
    with pytest.raises(KeyError), marks.range("outer"):  # noqa: PT012  what is raised ends two ranges
        with marks.range("first"):
            pass
        with marks.range("second"):
            raise KeyError
    with marks.range("after"):
        pass
    found = outer, first, second, after = rows(marks)[0]
    assert [(row.name, row.depth, row.thread, row.error) for row in found] == [
        ("outer", 0, 0, "KeyError"),
        ("first", 1, 0, None),
        ("second", 1, 0, "KeyError"),
        ("after", 0, 0, None),
    ]
    assert outer.start_ns <= first.start_ns <= first.end_ns <= second.start_ns <= second.end_ns <= outer.end_ns
    assert outer.end_ns <= after.start_ns
    assert not marks.has_ranges  # taken once


def test_threads_are_told_apart_and_nest_by_themselves() -> None:
    marks = UserMarks()
    inside, go_on = threading.Event(), threading.Event()

    def load() -> None:
        with marks.range("load"):
            inside.set()
            assert go_on.wait(HANGS_S)

    thread = threading.Thread(target=load)
    with marks.range("train"):
        thread.start()
        assert inside.wait(HANGS_S)
    go_on.set()
    thread.join()
    ranges, _ = rows(marks)
    assert sorted((row.name, row.thread, row.depth) for row in ranges) == [("load", 1, 0), ("train", 0, 0)]


def test_many_threads_lose_nothing() -> None:
    marks, taken = UserMarks(), []

    def work() -> None:
        for _ in range(200):
            with marks.range("r"):
                pass

    with ThreadPoolExecutor(8) as pool:
        at_work = [pool.submit(work) for _ in range(8)]
        while not all(each.done() for each in at_work):
            taken.append(marks.take())
    taken.append(marks.take())
    assert sum(len(found.ranges) for found in taken if found is not None) == 1600


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("数据 📦 e\u0301", "数据 📦 e\u0301"),
        ("<script>\n\x00", "<script>\n\x00"),
        ("lone \ud800", "lone ?"),
        ("x" * 5000, "x" * MOST_NAME_CHARS + "..."),
        ("y" * MOST_NAME_CHARS, "y" * MOST_NAME_CHARS),
    ],
)
def test_any_name_can_be_written_and_is_bounded(name: str, recorded: str) -> None:
    marks = UserMarks()
    for _ in range(2):
        with marks.range(name):
            pass
    ranges, _ = rows(marks)
    assert {row.name for row in ranges} == {recorded}
    assert msgspec.json.decode(msgspec.json.encode(ranges), type=list[UserRange]) == ranges


def test_too_many_names_and_rows_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_NAMES", 3)
    monkeypatch.setattr(module, "MOST_PER_STEP", 5)
    marks = UserMarks()
    for number in range(8):
        with marks.range(f"name {number}"):
            pass
    ranges, reasons = rows(marks)
    assert [row.name for row in ranges] == ["name 0", "name 1", "name 2", OTHER_NAMES, OTHER_NAMES]
    assert reasons == {"ranges": "3 more than 5 in this step are left out"}


@pytest.mark.parametrize("name", ["", None, 3, b"bytes"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"recording\.range\(.*a name must be a string"):
        UserMarks().range(name)


def test_the_profilers_trace_has_the_range_while_it_records() -> None:
    marks = UserMarks()
    with marks.range("before"):
        pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, marks.range("step 3"):
        torch.ones(2).sum()
    names = {event.name for event in profiler.events()}
    assert "range step 3" in names
    assert "range before" not in names
