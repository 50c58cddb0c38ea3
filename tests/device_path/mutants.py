"""Mutants of the device path's Python: each takes one rule away. Data, and how one is put in the place of the code.

Those of C++ are in `native_mutants`. `instrument(name)` imports an `Instrumentation` of mutated modules beside the real
ones. Must not: touch a file, or change what this process has imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from tests.mutation import mutant

PACKAGE = "aorta.instrument"
KEPT = f"{PACKAGE}.native"
"""Compiled code is loaded once a process."""
DEVICE, STREAMS = f"{PACKAGE}.device_interceptor", f"{PACKAGE}.device_streams"
CLOCK, WORKS = f"{PACKAGE}.event_clock", f"{PACKAGE}.timed_work"
ORDER, WAITS, NATIVE = f"{PACKAGE}.device_streams", f"{PACKAGE}.in_flight", f"{PACKAGE}.native.native_interceptor"
READING, RECORDER = f"{PACKAGE}.step_builder", f"{PACKAGE}.step_recorder"
MARKS = f"{PACKAGE}.step_marks"


@dataclass(frozen=True)
class Mutant(mutant.Mutant):
    """`tap`: the one whose Python it changes."""

    tap: Literal["python", "compiled"] = "python"


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
        "self._stalling(issued, lambda: wait_unseen(self._streams.current(), done.event))",
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
    ),
    Mutant(
        "who waits has the end mark's own event",
        DEVICE,
        "            done = self._done(side)\n            if work is None",
        "            done = _Lent(issued.end[0], deque())\n            if work is None",
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
        "        with self._streams.use(side):\n            released =",
        "        with self._streams.use(self._streams.current() if issued.number is not None else side):\n"
        "            released =",
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
        'f"{key} {peer}"',
        "issued.group",
    ),
    # --- queues ---
    Mutant(
        "time in a communicator's queue counts as its duration",
        MARKS,
        "start_ns = self._serialised_start_ns(issued.communicator, issued.launch, start_ns, end_ns)",
        "pass",
    ),
    Mutant(
        "what is launched together is taken to run one after another",
        DEVICE,
        "issued.communicator, issued.launch, issued.start = name, number, self.clock.mark()",
        "issued.communicator, issued.launch, issued.start = name, None, self.clock.mark()",
    ),
    Mutant(
        "what outlives its step is forgotten",
        MARKS,
        "self._spilling = [one for one in communicated if one.possible[1] > window[1]]",
        "self._spilling = []",
    ),
    Mutant(
        "point-to-point of a bound group has communicators of its own",
        DEVICE,
        "if member.shared is False:",
        "if member.shared is not None:",
    ),
    Mutant(
        "both directions of a pair have a communicator of their own",
        DEVICE,
        "            elif member.shared is None:",
        "            if not member.shared:",
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
        "                self._on_wait(begin, self._mark(), names)\n",
        "",
    ),
    Mutant(
        "waits of torch's own streams are not seen",
        STREAMS,
        "dict.fromkeys((torch.Stream, module.Stream))",
        "(module.Stream,)",
    ),
    Mutant(
        "waits of torch's own events are not seen",
        STREAMS,
        "dict.fromkeys((torch.Event, module.Event))",
        "(module.Event,)",
    ),
    Mutant(
        "waits of a strategy's own stream count",
        STREAMS,
        "        if stream.stream_id != streams.compute.stream_id or stream.device != streams.compute.device:\n",
        "        if False:\n",
    ),
    Mutant(
        "every wait of the computing stream is for communication",
        READING,
        "algebra.intersect(algebra.lane(possibly_blocked, window), everywhere)",
        "algebra.lane(possibly_blocked, window)",
    ),
    Mutant(
        "the ending of a backward pass is no stall",
        MARKS,
        "        possibly_blocked = [tail for tail in tails if",
        "        possibly_blocked = [tail for tail in [] if",
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
    ),
    Mutant(
        "tensors are let go with the step, not behind the wait",
        DEVICE,
        "            issued.alive = None  # the caller's stream",
        "            pass  # the caller's stream",
    ),
    Mutant(
        "what a handle kept is not let go of",
        WORKS,
        "            self._work, self._wait, self._issued = _Done(), lambda inner, _limited: inner(), None\n",
        "            pass\n",
    ),
    Mutant(
        "a handle that Python holds hides those behind it",
        WORKS,
        "                self._full.move_to_end(number)\n                continue\n",
        "                return\n",
    ),
    Mutant(
        "what the backend stacks is released under its kernel",
        DEVICE,
        "kept = work is None or (stacks and wait_for_future(work))",
        "kept = work is None",
    ),
    # --- events and the host ---
    Mutant(
        "marks are not used again",
        CLOCK,
        "            self._pool.append(mark[0])\n",
        "            pass\n",
    ),
    Mutant(
        "the first events of steps are not used again",
        CLOCK,
        "        self._pool.append(self.event)\n",
        "        pass\n",
    ),
    Mutant(
        "private events are not used again",
        DEVICE,
        "        self._pool.append(self.event)\n",
        "        pass\n",
    ),
    Mutant(
        "reading waits for the device",
        RECORDER,
        "        self._looked_s = time.monotonic()\n        while",
        "        self._clock.drain()\n        while",
    ),
    # --- which stream, and who waited for what ---
    Mutant(
        "our streams have the default priority",
        STREAMS,
        "self.priority() if self._priority is None else self._priority",
        "0",
    ),
    Mutant(
        "the compute stream is never looked up again",
        DEVICE,
        "        self._streams.compute = self._streams.current()\n        self._let_go()\n",
        "        self._let_go()\n",
    ),
    Mutant(
        "asynchronous collectives are not moved",
        DEVICE,
        "if self._dedicated and (side",
        "if self._dedicated and not asynchronous and (side",
    ),
    Mutant(
        "starts beside the backend are marked on the caller's stream",
        DEVICE,
        "        with self._streams.use(side):\n            issued.start = self.clock.mark()\n        result"
        " = original()\n        work = work_in(result)\n        if work is None:",
        "        issued.start = self.clock.mark()\n        result = original()\n"
        "        work = work_in(result)\n        if work is None:",
    ),
    Mutant(
        "a stream that does not compute joins nothing",
        DEVICE,
        "            self._order.joined(self._streams.current().stream_id, name_of(issued))\n",
        "            pass\n",
    ),
    Mutant(
        "sends and receives are named as other collectives",
        WAITS,
        "None if issued.number is not None else issued.kind)",
        "None)",
    ),
    Mutant(
        "a future in a backward pass is not noted",
        WORKS,
        "            self._issued.by_future = True\n",
        "            pass\n",
    ),
    Mutant(
        "a future outside of a backward pass is noted",
        WORKS,
        "if self._issued is not None and backward_pass() != -1:",
        "if self._issued is not None:",
    ),
    Mutant(
        "a batch is named after its first operation",
        DEVICE,
        "            self._went_on(batch.rows[-1], begin, computes=computes)\n",
        "            self._went_on(batch.rows[0], begin, computes=computes)\n",
    ),
    Mutant(
        "asynchronous collectives stay on the backend's stream",
        DEVICE,
        "self._dedicated_async = dedicated and dedicated_async",
        "self._dedicated_async = False",
    ),
    Mutant("what was awaited is named again", ORDER, "            joined.awaited = True\n", "            pass\n"),
    Mutant(
        "a stream joins one collective at most", ORDER, "        behind += joined\n", "        behind[:] = joined\n"
    ),
    Mutant(
        "an event stands for what its stream joins later",
        ORDER,
        "        setattr(event, _BEHIND, tuple(self._of(stream)))\n",
        "        setattr(event, _BEHIND, self._of(stream))\n",
    ),
    Mutant(
        "a wait of the strategy's streams for each other passes nothing on",
        ORDER,
        "            self._add(stream, [joined for joined in behind if id(joined) not in known])\n",
        "            pass\n",
    ),
    # --- lifetimes of handles and marks ---
    Mutant(
        "marks that were not read are used again",
        CLOCK,
        '''        """No-op: the event may still''',
        '''        self.release(mark)
        """No-op: the event may still''',
    ),
    # --- the Python of the compiled tap ---
    Mutant(
        "the compute stream is never looked up again, for waits of streams",
        NATIVE,
        "        self._streams.compute = self._streams.current()\n        super().begin()\n",
        "        super().begin()\n",
        "compiled",
    ),
    Mutant(
        "what compiled code saw joined is not asked for",
        NATIVE,
        "self._order = StreamOrder(lambda stream: [self._name(*name) for name in compiled.take_joined(stream)])",
        "self._order = StreamOrder()",
        "compiled",
    ),
    Mutant(
        "a batch counts as many times as it has operations, for the backend",
        NATIVE,
        "issued.counted = issued.launch != self._counted_launch",
        "issued.counted = True",
        "compiled",
    ),
    Mutant(
        "the marks of a failed step are lost",
        NATIVE,
        "            self._tap.let_go(self._tap.end())\n",
        "            self._tap.end()\n",
        "compiled",
    ),
    Mutant(
        "the passes of a failed step are lost",
        NATIVE,
        "            self.ranges.forget()\n",
        "            self.ranges.end()\n",
        "compiled",
    ),
    Mutant(
        "captured collectives are not reported",
        NATIVE,
        "                self._on_captured()\n",
        "                pass\n",
        "compiled",
    ),
    Mutant(
        "transfers share the group's communicator, in the record",
        NATIVE,
        'issued.group if communicator == _OF_THE_GROUP else f"{issued.group} {communicator}"',
        "issued.group",
        "compiled",
    ),
    Mutant(
        "marks of waits outside of steps are lost",
        NATIVE,
        "            self.release(mark)\n",
        "            pass\n",
        "compiled",
    ),
    Mutant(
        "coalesced operations are not seen to be",
        NATIVE,
        "coalescing = Coalescing(self._tap.batch_begins, self._tap.batch_ends)",
        "coalescing = Coalescing(lambda group: None, lambda group, launch: launch())",
        "compiled",
    ),
    # --- keys, launches and patched classes ---
    Mutant(
        "both directions share a side stream where nothing is known",
        DEVICE,
        'f"{key} {issued.kind} {peer}"',
        'f"{key} {peer} {peer}"',
    ),
    Mutant(
        "the operations of a batch are asked to be synchronous",
        DEVICE,
        " and member.name not in self._batches\n",
        "\n",
    ),
    Mutant(
        "a batch stacks as its last operation does",
        DEVICE,
        "batch.stacks = batch.stacks or operator.stacks",
        "batch.stacks = operator.stacks",
    ),
    Mutant(
        "the mark before an asynchronous batch is lost",
        DEVICE,
        "            self.clock.release(begin)\n",
        "            pass\n",
    ),
    Mutant(
        "a wait with a limit of time is not the host's",
        DEVICE,
        "                    outcome = inner()  # with a timeout",
        "                    pass  # with a timeout",
    ),
    Mutant(
        "a side stream may be the caller's",
        STREAMS,
        "taken = {self.compute, self.current(), *self._sides.values()}",
        "taken = {self.compute, *self._sides.values()}",
    ),
    Mutant(
        "waits are marked on the current stream",
        STREAMS,
        "with nullcontext() if streams.computes() else streams.use(stream):",
        "with nullcontext():",
    ),
    Mutant("a wait inside of another one is told", STREAMS, "        if self._inside:", "        if False:"),
    Mutant(
        "the other device's stream of the same number computes",
        STREAMS,
        " or stream.device != streams.compute.device:",
        ":",
    ),
    Mutant(
        "classes stay patched",
        STREAMS,
        "for owner, name, own in reversed(self._own):",
        "for owner, name, own in ():",
    ),
    Mutant("the names of the first are kept", ORDER, "del behind[:-_MOST]", "del behind[_MOST:]"),
    Mutant("what a stream has joined it joins again", ORDER, "if id(joined) not in known]", "]"),
    Mutant(
        "why there is no time is not said",
        NATIVE,
        "        issued.untimed = _UNTIMED[untimed]\n",
        "",
        "compiled",
    ),
    Mutant(
        "captured collectives are one",
        NATIVE,
        "for _ in range(self._tap.take_captured()):",
        "for _ in range(min(1, self._tap.take_captured())):",
        "compiled",
    ),
)
EQUIVALENT: dict[str, str] = {
    "a synchronous collective's handle is not waited for": "since torch 2.11 a synchronous one has none",
}
"""Name of a mutant, of either language, and why nothing can notice it."""


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, taken: Mutant) -> None:
        self._name, self._source, self._path = taken.module, taken.source(), taken.path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, f"<mutant of {self._path.name}>", "exec"), module.__dict__)


def instrument(name: str) -> AbstractContextManager[Any]:
    """The `Instrumentation` of the mutant with this name, for a `with` block; of the code as it is without a name."""
    if not name:
        return nullcontext(importlib.import_module(f"{PACKAGE}.instrumentation").Instrumentation)
    (taken,) = (one for one in MUTANTS if one.name == name)
    return mutated(taken)


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
