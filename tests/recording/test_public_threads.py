"""Loops beside threads that issue collectives between steps, each with how many of them have to be in the record.

A process group of one rank over gloo: what is lost or not is the same as with several, and no process is started.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aorta
from aorta.instrument import instrumentation
from tests.rank_records import read_rank

SWITCH_S = 1e-5
"""How long a thread keeps the interpreter: threads alternate within each line that a step writes."""
PAUSE_S = 2e-4
"""Between two collectives of a thread, so that they spread over many steps."""


class Loop:
    """A training loop of DDP that is recorded from `open` to the end; `step` trains once."""

    def __init__(self, folder: str) -> None:
        torch.manual_seed(0)
        self._model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), 1e-3)
        self._folder = folder
        self._open = ExitStack()
        self.groups: list[Any] = []

    def group(self) -> Any:
        self.groups.append(dist.new_group([0]))
        return self.groups[-1]

    def open(self) -> None:
        recording = aorta.record(self._folder, model=self._model, calibration="off")
        self._recording = self._open.enter_context(recording)

    def train(self) -> None:
        self._optimizer.zero_grad()
        self._model(torch.ones(4, 16)).square().mean().backward()
        self._optimizer.step()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.train()
            self._recording.step()

    def until(self, *threads: threading.Thread) -> None:
        """Train until these threads, started here, have ended, and once more."""
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.step()
        self.step()

    def close(self) -> None:
        self._open.close()


def reduces(group: Any, count: int, pause_s: float = PAUSE_S) -> None:
    for _ in range(count):
        dist.all_reduce(torch.ones(8), group=group)
        if pause_s:
            time.sleep(pause_s)


def _thread(group: Any, count: int) -> threading.Thread:
    return threading.Thread(target=reduces, args=(group, count, 0))


def threads_that_never_sleep(loop: Loop) -> None:
    loop.until(_thread(loop.group(), 250), _thread(loop.group(), 250))


def handles_of_a_thread_waited_for_by_the_loop(loop: Loop) -> None:
    group, issued = loop.group(), SimpleQueue[Any]()

    def issue() -> None:
        for _ in range(100):
            issued.put(dist.all_reduce(torch.ones(8), group=group, async_op=True))

    thread = threading.Thread(target=issue)
    thread.start()
    for _ in range(50):
        issued.get().wait()
        issued.get().wait()
        loop.step()
    thread.join()


def handles_waited_for_behind_the_step(loop: Loop) -> None:
    group = loop.group()
    for _ in range(20):
        works = [dist.all_reduce(torch.ones(8), group=group, async_op=True) for _ in range(3)]
        loop.step()
        for work in works:
            work.wait()


def thread_older_and_younger_than_the_recording(loop: Loop) -> None:
    group, before, begun, over, ended = loop.group(), *(threading.Event() for _ in range(4))

    def talk() -> None:
        reduces(group, 20)
        before.set()
        begun.wait()
        reduces(group, 60)
        over.set()
        ended.wait()
        reduces(group, 20)

    thread = threading.Thread(target=talk)
    thread.start()
    before.wait()
    loop.open()
    loop.step()
    begun.set()
    while not over.is_set():
        loop.step()
    loop.step()
    loop.close()
    ended.set()
    thread.join()


def thread_that_goes_on_behind_the_last_step(loop: Loop) -> None:
    group, half = loop.group(), threading.Event()

    def talk() -> None:
        reduces(group, 40)
        half.set()
        reduces(group, 40)

    thread = threading.Thread(target=talk)
    thread.start()
    while not half.is_set():
        loop.step()
    thread.join()


@dataclass
class ThreadCase:
    """A loop and its threads, and how many collectives these issue.

    Attributes:
        issued: by the threads, while a recording was open.
        behind: some of them may have been issued behind the last step, and then are counted as part of none.
        opens: the recording is opened before the loop runs.
    """

    name: str
    run: Callable[[Loop], None]
    issued: int
    behind: bool = False
    opens: bool = True

    def wrong(self) -> str | None:
        """Return what is wrong with the record; None where it is right."""
        interval = sys.getswitchinterval()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            sys.setswitchinterval(SWITCH_S)
            with tempfile.TemporaryDirectory() as folder:
                loop = Loop(folder)
                if self.opens:
                    loop.open()
                self.run(loop)
                loop.close()
                names = {group.group_name for group in loop.groups}
                read = read_rank(Path(folder) / "rank_0_metrics.jsonl")
        finally:
            sys.setswitchinterval(interval)
            dist.destroy_process_group()
        seen = [row for step in read.steps for row in step.collectives if row.group in names]
        outside = sum(step.coverage.outside for step in read.steps) + (read.footer.outside if read.footer else 0)
        # Threads that take the processor may have collectives open for longer than a step waits to be written.
        reasons = {step.coverage.reason for step in read.steps if not step.coverage.complete}
        incomplete = [why for why in reasons if "had not ended when their step was written" not in str(why)]
        numbers = len({(row.group, row.seq) for row in seen})
        counted = len(seen) + (outside if self.behind else 0)
        if (counted, numbers) == (self.issued, len(seen)) and (self.behind or not outside) and not incomplete:
            return None
        return f"issued {self.issued}, recorded {len(seen)}, outside {outside}, incomplete {incomplete}"


THREADS = [
    ThreadCase("threads that never sleep", threads_that_never_sleep, 500),
    ThreadCase("handles of a thread, waited for by the loop", handles_of_a_thread_waited_for_by_the_loop, 100),
    ThreadCase("handles waited for behind the step", handles_waited_for_behind_the_step, 60),
    ThreadCase(
        "a thread older and younger than the recording", thread_older_and_younger_than_the_recording, 60, opens=False
    ),
    ThreadCase("a thread that goes on behind the last step", thread_that_goes_on_behind_the_last_step, 80, behind=True),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in THREADS])
@pytest.mark.parametrize("timed", ["native", "python"])
def test_what_threads_issue_between_steps_is_recorded(
    case: ThreadCase, timed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if timed == "python":
        monkeypatch.setattr(instrumentation, "compiled", lambda *_, **__: (None, "not wanted"))
    assert case.wrong() is None
