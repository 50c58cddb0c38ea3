"""Mutants of the device path's Python: each takes one rule away. Data, and how one is put in the place of the code.

The compiled tap has the same rules and is held to the same loop (`test_rules`); mutants of C++ would need a build each.
`mutated(taken)` imports an `Instrumentation` of mutated modules beside the real ones. Must not: touch a file, or
change what this process has imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from tests.mutation import mutant

PACKAGE = "aorta.instrument"
KEPT = f"{PACKAGE}.native"
"""Compiled code is loaded once a process."""
DEVICE, STREAMS = f"{PACKAGE}.device_interceptor", f"{PACKAGE}.device_streams"
CLOCK, WORKS = f"{PACKAGE}.event_clock", f"{PACKAGE}.timed_work"
READING, RECORDER = f"{PACKAGE}.step_builder", f"{PACKAGE}.step_recorder"
Seen = Literal["loop", "use"]


@dataclass(frozen=True)
class Mutant(mutant.Mutant):
    """`seen` by the loop's agreement, or by what the loop used."""

    mode: Literal["dedicated", "observe"] = "dedicated"
    seen: Seen = "loop"


MUTANTS = (
    # --- order ---
    Mutant(
        "our stream does not wait for what the inputs were written by",
        DEVICE,
        "        self._streams.order(self._streams.current(), side)  # the inputs must be ready (W2)\n",
        "",
    ),
    Mutant(
        "our stream does not wait for the backend's",
        DEVICE,
        "            work.wait()  # blocks the stream",
        "            pass  # blocks the stream",
    ),
    Mutant(
        "who waits for a moved collective does not",
        DEVICE,
        "self._stalling(issued, lambda: done.event.wait(self._streams.current()))",
        "self._stalling(issued, lambda: None)",
    ),
    Mutant(
        "a synchronous caller goes on at once",
        DEVICE,
        "            self._join(issued, done)\n        return result if",
        "            pass\n        return result if",
    ),
    Mutant(
        "who waits for a collective that was left where it is does not",
        DEVICE,
        "outcome = bool(self._stalling(issued, inner))",
        "outcome = bool(self._stalling(issued, lambda: True))",
        "observe",
    ),
    Mutant(
        "who waits for one waits for all that came behind it",
        DEVICE,
        "                self._join(issued, done)\n            issued.alive",
        "                self._stalling(issued, lambda: self._streams.order(side, self._streams.current()))\n"
        "            issued.alive",
    ),
    Mutant(
        "only the first wait for a handle counts",
        WORKS,
        "if self._repeatable or not self._waited:",
        "if not self._waited:",
        "observe",
    ),
    Mutant(
        "collectives run on the caller's stream",
        STREAMS,
        "        return self._sides[key, priority]\n",
        "        return self.current() if isinstance(key, str) else self._sides[key, priority]\n",
    ),
    Mutant(
        "the event that orders streams is recorded on the wrong one",
        STREAMS,
        "self._order.record(before)",
        "self._order.record(after)",
    ),
    # --- starts and ends ---
    Mutant(
        "starts beside the backend do not wait for the caller",
        DEVICE,
        "        self._streams.order(self._streams.current(), side)\n        with self._streams.use(side):\n"
        "            issued.start = self.clock.mark()\n        result",
        "        with self._streams.use(side):\n            issued.start = self.clock.mark()\n        result",
        "observe",
    ),
    Mutant(
        "who waits has the end mark's own event",
        DEVICE,
        "            done = self._done(side)\n        if asynchronous:",
        "            done = _Lent(issued.end[0], deque())\n        if asynchronous:",
    ),
    Mutant(
        "the private event is recorded before the collective",
        DEVICE,
        "        event.record(side)\n",
        "        event.record(self._streams.compute)\n",
    ),
    Mutant(
        "ends beside the backend are marked on the caller's stream",
        DEVICE,
        "        with self._streams.use(side):\n            self._end(work, [issued])\n        self._hold",
        "        with self._streams.use(self._streams.current() if issued.number is not None else side):\n"
        "            self._end(work, [issued])\n        self._hold",
        "observe",
    ),
    Mutant(
        "marks are taken on the default stream",
        CLOCK,
        "event.record(torch.accelerator.current_stream(self._device))",
        "event.record(torch.cuda.default_stream(self._device))",
    ),
    Mutant(
        "steps are not chained",
        CLOCK,
        "self._epoch = _Epoch(self._event(), self._epoch, None, self._pool)",
        "self._epoch = _Epoch(self._event(), None, self._origin.at_ns, self._pool)",
    ),
    Mutant(
        "sends and receives share one stream of ours",
        DEVICE,
        "(issued.group, issued.kind, args[2:-1])",
        "issued.group",
        "observe",
    ),
    # --- queues ---
    Mutant(
        "time in a communicator's queue counts as its duration",
        READING,
        "start_ns = self._in_turn(issued.communicator, issued.launch, start_ns, end_ns)",
        "pass",
        "observe",
    ),
    Mutant(
        "what is launched together is taken to run one after another",
        DEVICE,
        "issued.communicator, issued.launch, issued.start = name, number, self.clock.mark()",
        "issued.communicator, issued.launch, issued.start = name, None, self.clock.mark()",
    ),
    Mutant(
        "what outlives its step is forgotten",
        READING,
        "self._spilling = [(kind, span) for kind, span in spans if span[1] > window[1]]",
        "self._spilling = []",
    ),
    # --- batches ---
    Mutant(
        "what is collected is taken to be launched at once",
        DEVICE,
        "if (batch := self._batches.get(issued.group)) is not None:",
        "if (batch := self._batches.get(issued.group)) is not None and issued.kind == 'send':",
    ),
    Mutant(
        "a batch counts as many times as it has operations",
        DEVICE,
        "            issued.counted = issued.counted and not any(row.counted for row in batch.rows)\n",
        "",
    ),
    Mutant(
        "a batch's handle is the backend's",
        DEVICE,
        "return self._handle(batch.rows[-1], work, side)",
        "return work",
    ),
    Mutant(
        "a batch's tensors are not kept",
        DEVICE,
        "        self._hold(batch.rows[-1], batch.alive)\n",
        "",
    ),
    # --- stalls ---
    Mutant(
        "every wait of every stream is a stall",
        STREAMS,
        "return self.current() == self.compute",
        "return True",
    ),
    Mutant(
        "a handle's wait is no stall",
        DEVICE,
        "        outcome = wait()\n        self._went_on(issued, begin, computes=computes)\n",
        "        outcome = wait()\n",
    ),
    Mutant(
        "a collective on the computing stream is no stall",
        DEVICE,
        "        self._end(work_in(result), [issued])\n        self._went_on(issued, begin, computes=computes)",
        "        self._end(work_in(result), [issued])",
        "observe",
    ),
    Mutant(
        "a synchronous batch is no stall",
        DEVICE,
        "            self._went_on(batch.rows[-1], begin, computes=computes)\n",
        "",
    ),
    Mutant(
        "events that the computing stream waits for are not seen",
        STREAMS,
        "                    on_wait(begin, mark(), names)\n",
        "",
    ),
    Mutant(
        "waits of a strategy's own stream count",
        STREAMS,
        "if stream != streams.compute:",
        "if False:",
    ),
    Mutant(
        "every wait of the computing stream is for communication",
        READING,
        "algebra.intersect(algebra.lane(maybe, window), everywhere)",
        "algebra.lane(maybe, window)",
    ),
    Mutant(
        "the ending of a backward pass is no stall",
        READING,
        "        maybe = [tail for tail in tails if",
        "        maybe = [tail for tail in [] if",
    ),
    # --- lifetimes ---
    Mutant(
        "tensors are not kept",
        DEVICE,
        "        issued.alive = alive\n",
        "",
    ),
    Mutant(
        "tensors are let go whether or not the device has passed",
        DEVICE,
        "if oldest.alive is not None and oldest.end is not None and self.clock.read_ns(oldest.end) is None:",
        "if False:",
        "observe",
    ),
    Mutant(
        "tensors are let go with the step, not behind the wait",
        DEVICE,
        "            issued.alive = None  # the caller's stream",
        "            pass  # the caller's stream",
        seen="use",
    ),
    Mutant(
        "what a handle kept is not let go of",
        WORKS,
        "            self._work, self._wait, self._issued = _Done(), lambda inner, _limited: inner(), None\n",
        "            pass\n",
        seen="use",
    ),
    Mutant(
        "a handle that Python holds hides those behind it",
        WORKS,
        "                self._full.move_to_end(number)\n                continue\n",
        "                return\n",
        seen="use",
    ),
    # --- events and the host ---
    Mutant(
        "marks are not used again",
        CLOCK,
        "            self._pool.append(mark[0])\n",
        "            pass\n",
        seen="use",
    ),
    Mutant(
        "the first events of steps are not used again",
        CLOCK,
        "        self._pool.append(self.event)\n",
        "        pass\n",
        seen="use",
    ),
    Mutant(
        "private events are not used again",
        DEVICE,
        "        self._pool.append(self.event)\n",
        "        pass\n",
        seen="use",
    ),
    Mutant(
        "reading waits for the device",
        RECORDER,
        "        self._looked_s = time.monotonic()\n        while",
        "        self._clock.drain()\n        while",
    ),
)


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, taken: Mutant) -> None:
        self._name, self._source, self._path = taken.module, taken.source(), taken.path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, f"<mutant of {self._path.name}>", "exec"), module.__dict__)


@contextmanager
def mutated(taken: Mutant) -> Iterator[Any]:
    """The `Instrumentation` of a package in which one module is mutated; for the length of a `with` block."""
    own = {
        name: module
        for name, module in sys.modules.items()
        if name.startswith(f"{PACKAGE}.") and not name.startswith(f"{KEPT}.build")
    }
    finder = _Mutated(taken)
    for name in own:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(f"{PACKAGE}.instrumentation").Instrumentation
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        sys.modules.update(own)
