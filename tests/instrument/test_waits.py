"""Who waited for which collective, on a clock that is set by the test, and on two ranks against the caller's own."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from aorta.instrument import python_interceptor
from aorta.instrument.device_streams import StreamOrder
from aorta.instrument.in_flight import InFlight, Waited, name_of
from aorta.instrument.python_interceptor import PythonInterceptor, RowInFlight
from aorta.records import ring_file as rf
from aorta.records.schema import Stall, Step, Wait
from aorta.records.step_line import Name, StepFacts
from tests.instrument.steps import MS, Rig, ring_in_memory
from tests.instrument.taps import compiled_part
from tests.instrument.test_rows import ByHand
from tests.runs import HANGS_S, program, succeeded


def waits(line: Step) -> list[tuple[int, float, float]]:
    assert isinstance(line.waits, list)
    return [(wait.seq, wait.enter_ns / MS, wait.leave_ns / MS) for wait in line.waits]


def bucket(rig: Rig, seq: int, issue_ms: float, end_ms: float, *, by_future: bool = True) -> InFlight:
    """A collective of the host, as DDP issues them."""
    issued = rig.collective(None, None, issue_ms)
    issued.seq = issued.number = seq
    issued.end, issued.end_source, issued.by_future = round(end_ms * MS), "future", by_future
    return issued


def test_a_wait_stands_in_the_step_in_which_it_happened() -> None:
    rig = Rig()
    with rig.step(0, 10):
        issued = bucket(rig, 0, 2, 12, by_future=False)
    with rig.step(10, 20):
        rig.recorder.on_wait(Waited(name_of(issued), rig.clock.at(11), rig.clock.at(12)))
        rig.recorder.on_wait(Waited(Name("0", 0, "send"), rig.clock.at(15), rig.clock.at(15), blocked=False))
    rig.recorder.finish()
    assert [line.waits for line in rig.lines] == [
        [],
        [Wait("0", 0, 1 * MS, 2 * MS), Wait("0", 0, 5 * MS, 5 * MS, "send")],
    ]
    assert rig.lines[1].stalls == [Stall(1 * MS, 2 * MS, "wait")]


def test_the_marks_of_an_abandoned_step_and_of_none_go_back() -> None:
    rig = Rig()
    forgotten: list[object] = []
    rig.clock.forget = forgotten.append  # type: ignore[assignment,method-assign]
    with rig.step(0, 10):
        rig.recorder.on_wait(Waited(Name("0", 0), first := rig.clock.at(1), second := rig.clock.at(4)))
        rig.recorder.on_stream_wait(third := rig.clock.at(5), fourth := rig.clock.at(6), (Name("0", 1),))
        rig.recorder.abandon()
        rig.recorder.begin(StepFacts(0, 1, 1, 0.0, warmup=False))
    rig.recorder.on_wait(Waited(Name("0", 0), fifth := rig.clock.at(1), sixth := rig.clock.at(4)))
    rig.recorder.abandon()
    assert [mark for mark in forgotten if mark in (first, second, third, fourth, fifth, sixth)] == [
        first,
        second,
        third,
        fourth,
        fifth,
        sixth,
    ]


def test_ddp_waits_in_the_order_of_issue_and_goes_on_at_each_end() -> None:
    """The tail is [10, 20]: 0 has ended before, 1 ends inside, 2 before 1 does, 3 last."""
    rig = Rig()
    with rig.step(0, 30):
        for seq, end_ms in enumerate((5, 13, 12, 19)):
            bucket(rig, seq, 1 + seq, end_ms)
        rig.recorder.on_backward_tail(rig.clock.at(10), rig.clock.at(20))
    rig.recorder.finish()
    assert waits(rig.lines[0]) == [(0, 10, 10), (1, 10, 13), (2, 13, 13), (3, 13, 19)]


def test_of_rows_ddp_waits_likewise() -> None:
    hand = ByHand()

    def inside() -> None:
        for seq, (end_ms, flags) in enumerate(((5, rf.BY_FUTURE), (13, rf.BY_FUTURE), (14, 0), (19, rf.BY_FUTURE))):
            hand.collective(1, end_ms, y=seq, flags=flags)
        hand.row(rf.WAIT, 6, 7, flags=rf.BLOCKED, group=hand.group, y=3)  # it failed
        hand.row(rf.TAIL, 10, 20)

    hand.step(0, 30, inside, issued=4)
    (line,) = hand.steps.take()
    assert waits(line) == [(0, 10, 10), (1, 10, 13), (3, 13, 19)]
    assert [(stall.start_ns / MS, stall.end_ns / MS) for stall in line.stalls] == [(6, 7), (10, 19)]


def test_ddp_does_not_wait_for_what_is_not_its_own() -> None:
    """Whose future nobody took, which was waited for by hand, which ended long after, and which came later."""
    rig = Rig()
    with rig.step(0, 40):
        bucket(rig, 0, 1, 12, by_future=False)
        issued = bucket(rig, 1, 1, 8)
        rig.recorder.on_wait(Waited(name_of(issued), rig.clock.at(7), rig.clock.at(8)))
        bucket(rig, 2, 2, 35)
        bucket(rig, 3, 3, 15)
        rig.recorder.on_backward_tail(rig.clock.at(10), rig.clock.at(20))
        bucket(rig, 4, 22, 27)
        rig.recorder.on_backward_tail(rig.clock.at(25), rig.clock.at(28))
    rig.recorder.finish()
    assert waits(rig.lines[0]) == [(1, 7, 8), (3, 10, 15), (4, 25, 27)]


class Event:
    pass


def test_an_event_stands_for_what_its_stream_has_joined_and_each_is_waited_for_once() -> None:
    seen: dict[int, list[Name]] = {}
    order, names = StreamOrder(lambda stream: seen.pop(stream, [])), [Name("0", seq) for seq in range(4)]
    early, late, passed = Event(), Event(), Event()
    seen[7] = names[:2]
    order.recorded(7, early)
    seen[7] = names[2:3]
    order.recorded(7, late)
    order.passed_on(8, late)
    seen[8] = names[3:]
    order.recorded(8, passed)
    assert order.awaited(early) == tuple(names[:2])
    assert order.awaited(early) == ()
    assert order.awaited(passed) == (names[2], names[3])
    assert order.awaited(late) == order.awaited(stream=7) == order.awaited(stream=8) == ()
    order.recorded(7, early)
    assert order.awaited(early) == order.awaited(object()) == ()


def test_closing_leaves_no_callback_of_a_future_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who drops the process group next joins the thread that calls back, with the interpreter locked."""
    monkeypatch.setattr(python_interceptor, "CALLBACKS_S", HANGS_S)
    interceptor = PythonInterceptor({}, ring_in_memory())
    future, issued = torch.futures.Future[Any](), RowInFlight("allreduce", "0", 0, 8, "float32", 1)
    interceptor._notice_end("allreduce_", issued, cast(Any, SimpleNamespace(get_future=lambda: future)))
    timer = threading.Timer(0.05, future.set_result, (None,))
    timer.start()
    interceptor.close()
    assert issued.end is not None
    timer.join()


@pytest.mark.dist
@pytest.mark.parametrize("ends", ["python", "native"])
def test_both_interceptors_tell_every_wait(tmp_path: Path, ends: str) -> None:
    """Against the caller's own clock round each wait, in one launch of two ranks."""
    if ends == "native":
        compiled_part()
    succeeded(program("tests.instrument.waits_of_two", str(tmp_path), ends))
    for rank in (0, 1):
        told = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        for name, scene in told["scenes"].items():
            rows = [(group, seq, kind) for group, seq, _, _, kind in scene["waits"]]
            assert rows == [tuple(row) for row in scene["expected"]], name
            for (_, _, enter, leave, _), (before, after) in zip(scene["waits"], scene["round"], strict=True):
                assert before <= enter <= leave <= after, name
