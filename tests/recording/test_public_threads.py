"""Loops beside threads that issue collectives between steps, each with how many of them have to be in the record.

A process group of one rank over gloo: what is lost or not is the same as with several, and no process is started.
"""

from __future__ import annotations

import sys
import threading
import time
from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import aorta
from tests.recording.test_watched_models import timed_by
from tests.runs import record

__all__ = ["timed_by"]  # a fixture

SWITCH_S = 1e-5
"""How long a thread keeps the interpreter: threads alternate within each line that a step writes."""
PAUSE_S = 2e-4
"""Between two collectives of a thread, so that they spread over many steps."""


class Loop:
    """A training loop of DDP that is recorded from `open` to `close`; `step` trains once."""

    def __init__(self, folder):
        self.folder, self.names = folder, set()
        self._model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), 1e-3)

    def group(self):
        """Of the threads, whose collectives are counted."""
        group = dist.new_group([0])
        self.names.add(group.group_name)
        return group

    def open(self):
        self._recording = aorta.start(self.folder, model=self._model, calibration="off")

    def close(self):
        self._recording.close()

    def step(self):
        self._optimizer.zero_grad()
        self._model(torch.ones(4, 16)).square().mean().backward()
        self._optimizer.step()
        self._recording.step()


def started(run, *arguments):
    thread = threading.Thread(target=run, args=arguments)
    thread.start()
    return thread


def reduces(group, count, pause_s=PAUSE_S):
    for _ in range(count):
        dist.all_reduce(torch.ones(8), group=group)
        if pause_s:
            time.sleep(pause_s)


def threads_that_never_sleep(loop):
    loop.open()
    threads = [started(reduces, loop.group(), 250, 0) for _ in range(2)]
    while any(thread.is_alive() for thread in threads):
        loop.step()
    loop.step()


def handles_of_a_thread_waited_for_by_the_loop(loop):
    loop.open()
    group, issued = loop.group(), SimpleQueue()

    def issue():
        for _ in range(100):
            issued.put(dist.all_reduce(torch.ones(8), group=group, async_op=True))

    thread = started(issue)
    for _ in range(50):
        issued.get().wait()
        issued.get().wait()
        loop.step()
    thread.join()


def thread_older_and_younger_than_the_recording_and_its_steps(loop):
    group, before, begun, half, over, ended = loop.group(), *(threading.Event() for _ in range(5))

    def talk():
        reduces(group, 20)
        before.set()
        begun.wait()
        reduces(group, 40)
        half.set()
        reduces(group, 40)
        over.set()
        ended.wait()
        reduces(group, 20)

    thread = started(talk)
    before.wait()
    loop.open()
    loop.step()
    begun.set()
    while not half.is_set():
        loop.step()
    over.wait()
    loop.close()
    ended.set()
    thread.join()


@pytest.mark.parametrize(
    ("talks", "issued"),
    [
        (threads_that_never_sleep, 500),
        (handles_of_a_thread_waited_for_by_the_loop, 100),
        (thread_older_and_younger_than_the_recording_and_its_steps, 80),
    ],
)
def test_what_threads_issue_between_steps_is_recorded(tmp_path, world_of_one, timed_by, talks, issued):
    loop, interval = Loop(tmp_path), sys.getswitchinterval()
    try:
        sys.setswitchinterval(SWITCH_S)
        talks(loop)
    finally:
        loop.close()
        sys.setswitchinterval(interval)
    read = record(tmp_path)
    seen = [(row.group, row.seq) for step in read.steps for row in step.collectives if row.group in loop.names]
    # What is issued behind the last step is counted as part of none.
    outside = sum(step.coverage.outside for step in read.steps) + read.footer.outside
    assert (len(seen) + outside, len(set(seen))) == (issued, len(seen))
    assert not outside or talks is thread_older_and_younger_than_the_recording_and_its_steps
    # Threads that take the processor may have collectives open for longer than a step waits to be written.
    reasons = {step.coverage.reason for step in read.steps if not step.coverage.complete}
    assert [why for why in reasons if "had not ended when their step was written" not in why] == []
