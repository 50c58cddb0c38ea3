"""What the marks of a step tell one by one: what certainly ran, what may have, and which marks are whose (W28, R2); and
ranges that the caller names.
"""

from __future__ import annotations

import heapq
import threading

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aorta.errors import ConfigError
from aorta.instrument import open_step as module
from aorta.instrument.compute_ranges import Range
from aorta.instrument.in_flight import Group, InFlight, Waited
from aorta.instrument.open_step import MOST_NAME_CHARS, OTHER_NAMES, Copied, OpenStep, UserMarks
from aorta.instrument.step_marks import MarkReader, ReadMarks
from aorta.records.device_rows import Stretch
from aorta.records.schema import UserRange
from aorta.records.step_line import GlooWorkers, Name, StepFacts
from tests.instrument.steps import Pending, SetClock


def simulate(count: int, jobs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """First in, first out on `count` threads: (issue, duration) -> (start, end)."""
    free = [0] * count
    heapq.heapify(free)
    spans = []
    for issue, duration in jobs:
        start = max(issue, heapq.heappop(free))
        heapq.heappush(free, start + duration)
        spans.append((start, start + duration))
    return spans


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50)), max_size=30),
)
def test_starts_are_those_of_a_thread_pool(count: int, jobs: list[tuple[int, int]]) -> None:
    issue, ordered = 0, []
    for gap, duration in jobs:
        issue += gap
        ordered.append((issue, duration))
    lanes = GlooWorkers(count)
    expected = simulate(count, ordered)
    assert [lanes.start_ns(i, end) for (i, _), (_, end) in zip(ordered, expected, strict=True)] == [
        start for start, _ in expected
    ]


def test_an_end_before_its_issue_is_not_turned_round() -> None:
    assert GlooWorkers(2).start_ns(10, 8) == 8


MARK_NS = 3
WINDOW = (0, 1_000)
REDUCED = Name("0", 0)


@pytest.fixture
def reader() -> MarkReader:
    return MarkReader(SetClock(), {"0": Group((0, 1), 1)})  # type: ignore[arg-type]


def opened() -> OpenStep:
    """A step whose first two marks follow each other at once: the device writes one in 3 ns."""
    step = OpenStep(StepFacts(0, 0, 0, 1e-3, warmup=False), Pending(0), {})
    step.compute.append(Range("empty", "forward", Pending(50, 0), Pending(50 + MARK_NS, 1)))
    return step


def collective(start: Pending | int, end: Pending | int, launch: int | None = None) -> InFlight:
    return InFlight("allreduce", "0", 0, 8, "float32", 0, start=start, end=end, communicator="0", launch=launch)


def read(reader: MarkReader, *collectives: InFlight) -> ReadMarks:
    step = opened()
    step.collectives += collectives
    return reader.read(step, WINDOW)


def test_writing_the_marks_round_a_collective_is_no_communication(reader: MarkReader) -> None:
    (one,) = read(reader, collective(Pending(200, 10), Pending(300, 20))).communication
    assert one.possible == (200, 300)
    assert one.certain == [(200 + MARK_NS, 300 - 2 * MARK_NS)]
    assert one.on_device


def test_a_collective_that_the_host_launched_late_may_have_begun_at_any_time(reader: MarkReader) -> None:
    (one,) = read(reader, collective(Pending(200, 10), Pending(300, 280))).communication
    assert (one.possible, one.certain) == ((200, 300), [(280, 294)])


def test_readings_of_the_hosts_clock_are_no_devices(reader: MarkReader) -> None:
    (one,) = read(reader, collective(200, 300)).communication
    assert (one.certain, one.on_device) == ([(200, 300)], False)


@pytest.mark.parametrize(("sent_ns", "first_ns"), [(20, 300 - 2 * MARK_NS), (299, 300 - 2 * MARK_NS), (300, 250)])
def test_a_queued_collective_may_have_begun_before_the_mark_behind_the_one_before(
    reader: MarkReader, sent_ns: int, first_ns: int
) -> None:
    """By as much as that mark takes; at any time, where the host recorded it after the end."""
    first = collective(Pending(200, 10), Pending(300, sent_ns))
    second, third = (collective(Pending(low, 15), Pending(high, 30)) for low, high in ((250, 400), (280, 500)))
    found = read(reader, first, second, third)
    assert [one.possible for one in found.communication] == [
        (200, 300),
        (first_ns, 400),
        (400 - 2 * MARK_NS, 500),
    ]
    assert [row.start_ns for row in found.rows] == [200, 300, 400]


def test_what_is_launched_together_begins_together(reader: MarkReader) -> None:
    found = read(reader, *(collective(Pending(200, 10), Pending(end_ns, 20), launch=1) for end_ns in (300, 310)))
    assert [row.start_ns for row in found.rows] == [200, 200]


def test_only_marks_of_the_stream_that_computes_cut_a_block(reader: MarkReader) -> None:
    """The first mark inside tells that all before it had been launched; the host recorded the block's end late."""
    certain = {}
    for computes in (False, True):
        step = opened()
        step.compute.append(Range("block", "forward", Pending(100, 40), Pending(200, 190)))
        step.copies.append(Copied("d2d", 8, Pending(150, 60), Pending(160, 70), computes=computes))
        found = reader.read(step, WINDOW)
        certain[computes] = reader.pace.block(found.blocks[-1][2])
        assert found.gaps == ([Stretch(150, 160, 70)] if computes else [])
        assert found.copies == [(step.copies[0], 150, 160)]
    assert certain == {False: [(190, 197)], True: [(100, 147), (150, 157), (190, 197)]}


def test_marks_of_the_step_before_are_not_this_ones(reader: MarkReader) -> None:
    """Its stream may be another one, and run behind."""
    before = opened()
    before.stalls.append((Pending(140, 60), Pending(150, 61)))
    reader.read(before, WINDOW)
    step = OpenStep(StepFacts(0, 1, 1, 1e-3, warmup=False), Pending(0), {})
    step.compute.append(Range("block", "forward", Pending(100, 40), Pending(200, 190)))
    found = reader.read(step, WINDOW)
    assert reader.pace.block(found.blocks[0][2]) == [(190, 197)]


def test_a_wait_that_failed_was_for_nothing_and_one_for_what_had_ended_is_no_stall(reader: MarkReader) -> None:
    step = opened()
    step.waits += [
        Waited(REDUCED, Pending(100, 10), Pending(110, 11), blocked=True, over=False),
        Waited(REDUCED, Pending(120, 12), Pending(130, 13), blocked=False, over=True),
    ]
    found = reader.read(step, WINDOW)
    failed, ended = Stretch(100, 110, 11), Stretch(120, 130, 13)
    assert found.waits == [(REDUCED, ended)]
    assert found.blocked == [failed]
    assert found.gaps == [failed, ended]


def test_a_range_without_an_end_is_none(reader: MarkReader) -> None:
    ended, lost = (Range(name, "forward", Pending(100), Pending(end)) for name, end in (("a", 200), ("b", None)))
    assert reader.ranges([ended, lost]) == [("a", "forward", 100, 200)]


def rows(marks: UserMarks) -> tuple[list[UserRange], dict[str, str]]:
    taken = marks.take()
    assert taken is not None
    return taken.rows(0)


def test_nested_ranges_have_their_depth_and_lie_in_each_other() -> None:
    marks = UserMarks()
    with marks.range("outer"):
        with marks.range("first"):
            pass
        with marks.range("second"):
            pass
    outer, first, second = rows(marks)[0]
    assert [(row.name, row.depth, row.thread) for row in (outer, first, second)] == [
        ("outer", 0, 0),
        ("first", 1, 0),
        ("second", 1, 0),
    ]
    assert outer.start_ns <= first.start_ns <= first.end_ns <= second.start_ns <= second.end_ns <= outer.end_ns
    assert marks.take() is None  # taken once


def test_an_error_ends_the_range_is_named_and_goes_on() -> None:
    marks = UserMarks()
    with pytest.raises(KeyError), marks.range("outer"), marks.range("inner"):
        raise KeyError
    with marks.range("after"):
        pass
    assert [(row.name, row.depth, row.error) for row in rows(marks)[0]] == [
        ("outer", 0, "KeyError"),
        ("inner", 1, "KeyError"),
        ("after", 0, None),
    ]


def test_threads_are_told_apart_and_nest_by_themselves() -> None:
    marks = UserMarks()
    inside, go_on = threading.Event(), threading.Event()

    def load() -> None:
        with marks.range("load"):
            inside.set()
            assert go_on.wait(10)

    thread = threading.Thread(target=load)
    with marks.range("train"):
        thread.start()
        assert inside.wait(10)
    go_on.set()
    thread.join()
    ranges, _ = rows(marks)
    assert sorted((row.name, row.thread, row.depth) for row in ranges) == [("load", 1, 0), ("train", 0, 0)]


def test_many_threads_lose_nothing() -> None:
    marks = UserMarks()

    def work() -> None:
        for _ in range(200):
            with marks.range("r"):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    taken = []
    while any(thread.is_alive() for thread in threads):
        taken.append(marks.take())
    taken.append(marks.take())
    found = [each for each in taken if each is not None]
    assert sum(len(each.ranges) for each in found) == 1600


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
