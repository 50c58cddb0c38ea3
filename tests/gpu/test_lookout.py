"""While a loop stands still, a thread notes in the rank's ring what the device has begun and completed; otherwise it
asks nothing, and it is gone when nobody records any more.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aorta.instrument.instrumentation import Instrumentation
from aorta.records.clocks import read_clocks
from aorta.records.progress import ProgressSeen, read_progress
from aorta.records.ring_file import RingFile
from aorta.records.schema import InstrumentMode, Step
from aorta.records.step_line import StepFacts
from tests.gpu.device import compiled_part, needs_gpu, simulated_only, standing_still
from tests.records.test_progress import facts
from tests.runs import HANGS_S, until
from tests.simulated import device as simulated
from tests.simulated.load import native as simulator

pytestmark = [pytest.mark.gpu, needs_gpu, simulated_only("what stands still for longer than a sleep of its kernels")]
MODES: tuple[InstrumentMode, ...] = ("dedicated", "observe")
NEVER_PAUSED_S = 0.1
"""Between two rows of a loop that goes on; a look follows on 0.25 s without one."""
GOES_ON_S = 1.0
PACE_S = 0.02
"""Between two steps, so that there are no thousands of them."""


@contextmanager
def recording(device: torch.device, path: Path, mode: InstrumentMode = "dedicated") -> Iterator[Instrumentation]:
    """An instrument whose ring is a file."""
    compiled_part(wanted=True)
    lines: list[Step] = []
    ring = RingFile.create(path, facts())
    with Instrumentation(device, mode, 0, 1, read_clocks(), lines.append, native=True, ring=ring) as instrument:
        yield instrument
        instrument.recorder.finish()
    ring.close()


def step(number: int = 0) -> StepFacts:
    return StepFacts(0, number, number, 0.0, warmup=False)


def looks() -> int:
    """How many questions the thread has asked the device."""
    return sum(simulator().counts("relaxed_queries").values())


def threads() -> int:
    """How many there are of it in this process."""
    return sum(task.read_text() == "aorta device\n" for task in Path("/proc/self/task").glob("*/comm"))


def look_again() -> None:
    """Wait until the thread has asked twice more: the first time it may have been about to."""
    before = looks()
    until(lambda: looks() >= before + 2)


def known(path: Path) -> list[tuple[bool, bool]]:
    """Of each collective of a step whether it has begun and completed."""
    collectives = read_progress(path).collectives
    return [(one.has_begun, one.has_completed) for one in collectives if not one.is_unmarked]


@pytest.mark.parametrize("mode", MODES)
def test_what_has_begun_is_known_while_the_device_stands_still(
    device: torch.device, tmp_path: Path, mode: InstrumentMode
) -> None:
    """And looks keep no memory and take no events."""

    def live() -> tuple[int, int]:
        counts = simulated.counters(0)
        return counts.live_bytes, counts.events_created

    path, x = tmp_path / "rank_0.bin", torch.ones(4, device=device)
    with recording(device, path, mode) as instrument:
        dist.all_reduce(x)  # in no step: it stays unknown
        with instrument.recorder.step(step()):
            dist.all_reduce(x)
            with standing_still(device):
                dist.all_reduce(x)
                until(lambda: known(path)[:2] == [(True, True), (True, False)])
                before = live()
                look_again()
                assert live() == before
                assert known(path) == [(True, True), (True, False), (False, False)]
                seen: ProgressSeen = read_progress(path)
                assert seen.looked_ns is not None
                assert seen.looked_ns >= seen.collectives[-1].issued_ns
            until(lambda: known(path) == [(True, True)] * 3)
            found = read_progress(path)
            assert found.state.progress_ns >= seen.looked_ns
            assert [one.is_unmarked for one in found.collectives] == [True, False, False, False]


def test_a_capture_goes_on_while_the_device_is_asked(device: torch.device, tmp_path: Path) -> None:
    x = torch.ones(4, device=device)
    with (
        recording(device, tmp_path / "rank_0.bin") as instrument,
        instrument.recorder.step(step()),
        standing_still(device),
    ):
        graph = simulated.begin_capture()
        x.add_(1)
        look_again()
        graph.end()
        look_again()


def test_nothing_is_asked_while_the_loop_goes_on(device: torch.device, tmp_path: Path) -> None:
    x = torch.ones(4, device=device)
    with recording(device, tmp_path / "rank_0.bin") as instrument, standing_still(device):
        began_s = last_s = time.monotonic()
        number, before = 0, looks()
        while last_s - began_s < GOES_ON_S:
            number += 1
            with instrument.recorder.step(step(number)):
                if number == 1:  # more of them than a queue has room for would wait for the device
                    dist.all_reduce(x, async_op=True)
            time.sleep(PACE_S)
            now_s = time.monotonic()
            if now_s - last_s > NEVER_PAUSED_S or now_s - began_s < NEVER_PAUSED_S:  # as on a host that has no time
                began_s = now_s if now_s - last_s > NEVER_PAUSED_S else began_s
                before = looks()
            last_s = now_s
        assert looks() == before


def test_the_thread_ends_with_the_recording(device: torch.device, tmp_path: Path) -> None:
    """And there is none where nobody can see the ring."""
    for number in range(3):
        with recording(device, tmp_path / f"rank_{number}.bin") as instrument:
            until(lambda: threads() == 1)
            with instrument.recorder.step(step()):
                dist.all_reduce(torch.ones(4, device=device))
        until(lambda: threads() == 0)  # one that has been joined is listed for a moment more
    with Instrumentation(device, "dedicated", 0, 1, read_clocks(), lambda _line: None, native=True):
        assert threads() == 0


def test_a_forked_child_has_no_such_thread_and_does_not_wait_for_it(device: torch.device, tmp_path: Path) -> None:
    with recording(device, tmp_path / "rank_0.bin") as instrument:
        until(lambda: threads() == 1)
        child = os.fork()
        if child == 0:
            signal.alarm(int(HANGS_S))
            instrument.recorder.leave()
            instrument.close()
            os._exit(threads())
        assert os.waitpid(child, 0)[1] == 0
        assert threads() == 1
