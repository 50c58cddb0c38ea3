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
from aorta.instrument.python_interceptor import PythonInterceptor, RowInFlight
from aorta.records import ring_file as rf
from aorta.records.schema import Stall, Step, Wait
from aorta.records.step_line import Name
from tests.instrument.steps import MS, ring_in_memory
from tests.instrument.taps import compiled_part
from tests.instrument.test_rows import ByHand
from tests.runs import HANGS_S, program, succeeded


def waits(line: Step) -> list[tuple[int, float, float]]:
    assert isinstance(line.waits, list)
    return [(wait.seq, wait.enter_ns / MS, wait.leave_ns / MS) for wait in line.waits]


def test_a_wait_stands_in_the_step_in_which_it_happened() -> None:
    hand = ByHand()
    hand.step(0, 10, lambda: hand.collective(2, 12), issued=1)

    def inside() -> None:
        hand.row(rf.WAIT, 11, 12, flags=rf.BLOCKED | rf.OVER, group=hand.group)
        hand.row(rf.WAIT, 15, 15, flags=rf.OVER, group=hand.group, op=1)

    hand.step(10, 20, inside)
    first, second = hand.steps.take()
    assert (first.waits, second.waits) == ([], [Wait("0", 0, 1 * MS, 2 * MS), Wait("0", 0, 5 * MS, 5 * MS, "send")])
    assert second.stalls == [Stall(1 * MS, 2 * MS, "wait")]


def test_ddp_waits_in_the_order_of_issue_and_goes_on_at_each_end() -> None:
    """The tail is [10, 20]: 0 has ended before, 1 ends inside, 2 before 1 does, 3 last."""
    hand = ByHand(lanes=4)

    def inside() -> None:
        for seq, end_ms in enumerate((5, 13, 12, 19)):
            hand.collective(1 + seq, end_ms, y=seq, flags=rf.BY_FUTURE)
        hand.row(rf.WAIT, 6, 7, flags=rf.BLOCKED, group=hand.group, y=3)  # it failed
        hand.row(rf.TAIL, 10, 20)

    hand.step(0, 30, inside, issued=4)
    (line,) = hand.steps.take()
    assert waits(line) == [(0, 10, 10), (1, 10, 13), (2, 13, 13), (3, 13, 19)]
    assert [(stall.start_ns / MS, stall.end_ns / MS) for stall in line.stalls] == [(6, 7), (10, 19)]


def test_ddp_does_not_wait_for_what_is_not_its_own() -> None:
    """Whose future nobody took, which was waited for by hand, which ended long after, and which came later."""
    hand = ByHand(lanes=8)

    def bucket(seq: int, issue_ms: float, end_ms: float, flags: int = rf.BY_FUTURE) -> None:
        hand.collective(issue_ms, end_ms, y=seq, flags=flags)

    def inside() -> None:
        bucket(0, 1, 12, flags=0)
        bucket(1, 1, 8)
        hand.row(rf.WAIT, 7, 8, flags=rf.BLOCKED | rf.OVER, group=hand.group, y=1)
        bucket(2, 2, 35)
        bucket(3, 3, 15)
        hand.row(rf.TAIL, 10, 20)
        bucket(4, 22, 27)
        hand.row(rf.TAIL, 25, 28)

    hand.step(0, 40, inside, issued=5)
    (line,) = hand.steps.take()
    assert waits(line) == [(1, 7, 8), (3, 10, 15), (4, 25, 27)]


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
