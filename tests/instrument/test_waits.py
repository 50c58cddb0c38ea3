"""Who waited for which collective, on a clock that is set by the test, and against the caller's own; and the stall
cut-off: measured on the host, used by the run, and its record says how much the ratio rests on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from aorta.instrument import backend_calls as measuring
from aorta.instrument import python_interceptor
from aorta.instrument.backend_calls import cutoff_from, slowest_of_host, stall_cutoff
from aorta.instrument.device_streams import StreamOrder
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.python_interceptor import PythonInterceptor
from aorta.instrument.timed_work import InFlight
from aorta.records import ring_file as rf
from aorta.records.clocks import read_clocks
from aorta.records.run_files import read_manifest
from aorta.records.schema import STALL_CUTOFF_NS, StallCutoff, Step
from aorta.records.step_line import Name, StepFacts
from aorta.report.summary import write_report
from tests.instrument.taps import CPU, MS, compiled_part, ring_in_memory
from tests.instrument.test_rows import ByHand
from tests.runs import HANGS_S, record, train


def waits(line: Step) -> list[tuple[int, float, float]]:
    return [(wait.seq, wait.enter_ns / MS, wait.leave_ns / MS) for wait in line.waits]


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
    future, issued = torch.futures.Future[Any](), InFlight("allreduce", "0", 0, 8, 1)
    interceptor._notice_end("allreduce_", issued, SimpleNamespace(get_future=lambda: future))
    timer = threading.Timer(0.05, future.set_result, (None,))
    timer.start()
    interceptor.close()
    assert issued.end is not None
    timer.join()


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # renamed in torch 2.13, not before
@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("ends", ["python", "native"])
def test_both_interceptors_tell_every_wait(ends: str) -> None:
    """In the order of the waits, within the caller's own times round each; a wait in a later step stands there."""
    if ends == "native":
        compiled_part()
    waited, steps, late, ones = list[list[tuple[int, int, int]]](), list[Step](), list[Any](), torch.ones

    def waiting(seq: int, wait: Callable[[], Any]) -> None:
        before = time.perf_counter_ns()
        wait()
        waited[-1].append((seq, before, time.perf_counter_ns()))

    def in_another_order() -> None:
        first, second = (dist.all_reduce(ones(1 << 16), async_op=True) for _ in range(2))
        waiting(1, second.wait)
        waiting(0, first.wait)
        first.wait()  # again: it returns at once, and is no row

    def never() -> None:
        dist.all_reduce(ones(1 << 16), async_op=True)  # its handle goes before it has ended
        late.append(dist.all_reduce(ones(8), async_op=True))

    def synchronous() -> None:
        waiting(4, lambda: dist.all_reduce(ones(4)))
        waiting(5, lambda: dist.reduce_scatter_tensor(ones(3), ones(3)))
        waiting(6, dist.barrier)

    def by_tensor() -> None:
        reduced = functional.all_reduce(ones(4), "sum", dist.group.WORLD)
        waiting(7, lambda: functional.wait_tensor(reduced))

    with Instrumentation(CPU, "observe", 0, 1, read_clocks(), steps.append, native=ends == "native") as instrument:
        for body in (in_another_order, never, lambda: waiting(3, late[0].wait), synchronous, by_tensor):
            waited.append([])
            with instrument.recorder.step(StepFacts(0, len(waited), len(waited), 0.0, warmup=False)):
                body()
        instrument.recorder.finish()
    assert all(step.coverage.complete for step in steps)
    for step, of_caller in zip(steps, waited, strict=True):
        assert [wait.seq for wait in step.waits] == [seq for seq, _, _ in of_caller]
        for wait, (_, before, after) in zip(step.waits, of_caller, strict=True):
            assert before <= step.start_mono_ns + wait.enter_ns <= step.start_mono_ns + wait.leave_ns <= after


US = 1_000


FEW = "only 199 calls in 200 ms, 200 are needed"


@pytest.mark.parametrize(
    ("calls_us", "expected"),
    [
        ([10] * 985 + [60] * 10 + [5_000] * 5, StallCutoff(300 * US, "calibrated", 60 * US)),
        ([4] * 1_000, StallCutoff(100 * US, "calibrated", 4 * US)),
        ([900] * 1_000, StallCutoff(1_000 * US, "calibrated", 900 * US)),
        ([10] * 199, StallCutoff(STALL_CUTOFF_NS, "default", problem=FEW)),
    ],
    ids=["of the 99th percentile", "the least", "the most", "too few"],
)
def test_it_is_five_times_the_99th_percentile_of_the_calls_within_bounds(calls_us, expected):
    assert cutoff_from([call_us * US for call_us in calls_us]) == expected


def test_where_it_is_measured_configured_or_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stall_cutoff(350.0, CPU, "observe") == StallCutoff(350 * US, "configured")
    assert stall_cutoff(None, CPU, "off") is stall_cutoff(None, torch.device("meta"), "dedicated") is None
    measured = stall_cutoff(None, CPU, "dedicated")
    assert measuring.LEAST_NS <= measured.cutoff_ns <= measuring.MOST_NS
    assert not dist.is_initialized()  # no group of the run is touched
    monkeypatch.delattr(dist, "ProcessGroupGloo")
    without_gloo = stall_cutoff(None, CPU, "dedicated")
    assert (without_gloo.cutoff_ns, without_gloo.source) == (STALL_CUTOFF_NS, "default")
    assert str(without_gloo.problem).startswith("not measured: ")


def test_ranks_of_a_host_use_its_largest() -> None:
    mine, slower = StallCutoff(200 * US, "calibrated", 40 * US), StallCutoff(400 * US, "calibrated", 80 * US)
    facts = [
        {"host": "a", "stall_cutoff": {"cutoff_ns": 400 * US, "source": "calibrated", "hand_over_ns": 80 * US}},
        {"host": "a", "stall_cutoff": None},
        {"host": "b", "stall_cutoff": {"cutoff_ns": 900 * US, "source": "calibrated", "hand_over_ns": 180 * US}},
    ]
    assert slowest_of_host(mine, "a", facts) == slower
    assert slowest_of_host(None, "a", facts) is None


@pytest.mark.dist
def test_a_run_records_its_cutoff_in_header_and_manifest_and_the_report_says_it(tmp_path: Path) -> None:
    train(tmp_path / "measured", "parallel=ddp")
    headers = [record(tmp_path / "measured", rank).header.stall_cutoff for rank in (0, 1)]
    assert headers[0] is not None
    assert headers[0] == headers[1]
    assert headers[0].source in ("calibrated", "default")
    told = [rank["stall_cutoff"] for rank in read_manifest(tmp_path / "measured")["topology"]]
    assert max(each["cutoff_ns"] for each in told) == headers[0].cutoff_ns

    train(tmp_path / "asked", "instrument.stall_cutoff_us=350", ranks=1)
    assert record(tmp_path / "asked").header.stall_cutoff == StallCutoff(350 * US, "configured")
    report = write_report({"asked": tmp_path / "asked"}, tmp_path / "out")
    entry = report.summary["datasets"]["asked"]["stall_cutoff"]
    assert (entry["lowest_ns"], entry["highest_ns"], entry["sources"]) == (350 * US, 350 * US, ["configured"])
    assert "stall cut-off 0.35 ms (configured)" in " ".join(report.text.split())
    assert "stall cut-off 0.35 ms" in (tmp_path / "out" / "report.html").read_text()
