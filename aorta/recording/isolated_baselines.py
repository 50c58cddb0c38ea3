"""Isolated baselines: steps that only compute, and steps that only communicate, run after the training (R10).

In the record they are steps whose `phase` is `compute_only` or `comm_only`. `Rehearsal` is the dispatcher handler of
one real step; from its events, `Replay` issues the same operators with the same group, shapes, types and options in the
same order, on the same streams, and waits where the step's callers waited. Replayed collectives pass through the
dispatcher, and so through the interception, like any other.

Must not change what a next step of training would do, run a step that not all ranks run, keep a tensor of a rehearsed
step, or wait before the end of a replay for anything that the step did not wait for.
"""

from __future__ import annotations

import copy
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from aorta.distributed.topology import random_states, set_random_states
from aorta.instrument.dispatcher import Original, Work, first_tensor, with_work, work_in
from aorta.instrument.emulation.stand_in import StandIn
from aorta.instrument.operators import OPERATORS, tensors_in
from aorta.instrument.timed_work import KeptAlive, TimedWork
from aorta.parallel.plan import local_part
from aorta.recording.train_step import TrainStep
from aorta.records.schema import Phase
from aorta.records.step_line import StepFacts
from aorta.workload.tasks import Batch

_log = logging.getLogger(__name__)
_REHEARSALS = 2
"""Real steps, of which the last one is recorded: DDP exchanges its bucket order in the second of all."""
_ALIGNMENT = 512
"""Bytes: the alignment of torch's allocators, so that views of a buffer are aligned as they were in the step."""


@contextmanager
def restored_state(step: TrainStep) -> Iterator[None]:
    """Restore parameters, buffers, optimizer, schedule, scaler and random states after a `with` block between two
    steps, and clear gradients; not after an error, which ends the run.

    Tensors are restored in place, as strategies hold views of them; copies are on the CPU, to spare the accelerator.
    """
    module, optimizer, schedule, scaler = step.model.module, step.optimizer, step.schedule, step.scaler
    tensors = [_local(tensor) for tensor in (*module.parameters(), *module.buffers())]
    saved = [tensor.to("cpu", copy=True) for tensor in tensors]
    groups = [
        {key: copy.deepcopy(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups
    ]
    states: dict[Any, dict[str, Any]] = {
        parameter: {
            key: _local(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in state.items()
        }
        for parameter, state in optimizer.state.items()
    }
    others = copy.deepcopy(schedule.state_dict()), copy.deepcopy(scaler.state_dict())
    device = next(module.parameters()).device
    generators = random.getstate(), random_states(device)
    yield
    with torch.no_grad():
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
        for parameter in list(optimizer.state):
            if parameter not in states:
                del optimizer.state[parameter]  # its first update was inside the block
                continue
            for key, value in states[parameter].items():
                now = optimizer.state[parameter][key]
                if isinstance(now, torch.Tensor):
                    _local(now).copy_(value)
                else:
                    optimizer.state[parameter][key] = value
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)
    optimizer.zero_grad(set_to_none=True)
    schedule.load_state_dict(others[0])
    scaler.load_state_dict(others[1])
    random.setstate(generators[0])
    set_random_states(generators[1], device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that may be distributed over ranks; shares its memory."""
    with torch.no_grad():
        return local_part(tensor).detach()


def run_baselines(
    step: TrainStep, batches_of: Callable[[], Iterator[Batch]], may_start: Callable[[], bool], steps: int, warmup: int
) -> None:
    """Run both baselines of one rank, or as many steps as the run's end leaves time for; every rank runs them together.

    Args:
        batches_of: makes an endless source of them; training's own keeps its position.
        may_start: whether one more step may begin, the same on all ranks; once False, it stays False.
        steps: of each baseline, of which `warmup` are flagged as warm-up.
    """

    def facts_of(phase: Phase) -> Iterator[StepFacts]:
        for number in range(steps):
            if not may_start():
                return
            lr = float(step.schedule.get_last_lr()[0]) if phase == "compute_only" else None
            yield StepFacts(0, number, number, lr, number < warmup, phase)

    instrument, device = step.instrument, step.device
    with restored_state(step):
        batches = batches_of()
        for _ in range(_REHEARSALS):
            if not may_start():
                return
            rehearsal = Rehearsal(device)
            with instrument.replaced(rehearsal):
                step.unrecorded(batches)
        replay = Replay(rehearsal.events)
        _log.info("baseline: %d compute-only steps", steps)
        batches, done = batches_of(), 0
        with instrument.replaced(StandIn(device, instrument.clock, instrument.recorder.on_stall)):
            for facts in facts_of("compute_only"):
                step.run(batches, facts)
                done += 1
        if done < steps:
            return
        if not replay.collectives:
            _log.info("baseline: no communication-only steps, as a step has no collectives")
            return
        _log.info("baseline: %d communication-only steps of %d collectives", steps, replay.collectives)
        for facts in facts_of("comm_only"):
            with instrument.recorder.step(facts):
                replay.run()


@dataclass(frozen=True)
class Shape:
    """A tensor without its memory: its layout within its storage, in elements, and an identifier of that storage."""

    storage: int
    device: torch.device
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        return cls(
            tensor.untyped_storage().data_ptr(),
            tensor.device,
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def span_bytes(self) -> tuple[int, int]:
        """Return the byte range [first, end) within its storage."""
        extent = 0 if 0 in self.size else 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + extent) * self.dtype.itemsize


@dataclass(frozen=True)
class ReplayedCall:
    """One collective. `args` are the operator's, with a `Shape` in place of each tensor; `stream` is None on a CPU.
    `after` lists earlier calls on other streams whose result this one reads.
    """

    name: str
    args: tuple[Any, ...]
    stream: Any
    after: tuple[int, ...]


@dataclass(frozen=True)
class ReplayedWait:
    """A caller waited for call `number`."""

    number: int
    stream: Any


@dataclass
class Rehearsal:
    """Dispatcher handler that records the collectives of a real step.

    Args:
        device: what the run computes on.
        current_stream: returns the caller's stream; None asks `device`, and a CPU has none.
    """

    device: torch.device
    current_stream: Callable[[], Any] | None = None
    events: list[ReplayedCall | ReplayedWait] = field(default_factory=list)
    _kept: KeptAlive = field(default_factory=KeptAlive)
    _calls: int = 0
    _last_use: dict[tuple[int, int], tuple[int, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.current_stream is None and self.device.type != "cpu":
            self.current_stream = lambda: torch.accelerator.current_stream(self.device)

    def __call__(self, name: str, args: tuple[Any, ...], original: Original) -> Any:
        number, self._calls = self._calls, self._calls + 1
        stream = self._stream()
        self.events.append(
            ReplayedCall(name, tree_map_only(torch.Tensor, Shape.of, args), stream, self._needed(number, args, stream))
        )
        result = original()
        work = work_in(result)
        if work is None:  # synchronous on NCCL: the caller's stream continues after it, and no call waits
            return result

        def wait(inner: Callable[[], bool]) -> bool:
            self.events.append(ReplayedWait(number, self._stream()))
            return inner()

        tensor = first_tensor(args)
        on_device = tensor is not None and tensor.device.type != "cpu"
        waiters = len(args[0]) if OPERATORS[name].coalesced else 1
        return with_work(result, TimedWork(work, wait, self._kept, waiters, repeatable=on_device))

    def _stream(self) -> Any:
        return None if self.current_stream is None else self.current_stream()

    def _needed(self, number: int, args: tuple[Any, ...], stream: Any) -> tuple[int, ...]:
        """Return the earlier calls on other streams that touched the same memory, e.g. a reduce-scatter whose output is
        all-reduced.
        """
        needed = set()
        for tensor in tensors_in(args):
            memory = (tensor.data_ptr(), tensor.nbytes)
            before = self._last_use.get(memory)
            if before is not None and before[1] != stream:
                needed.add(before[0])
            self._last_use[memory] = (number, stream)
        return tuple(sorted(needed))


class Replay:
    """The collectives of a recorded step, to be issued repeatedly.

    Memory is allocated here, once: a buffer is reused for the next collective of its size if the step had waited for
    the previous one. Buffers hold zeros, which no reduction changes.

    Args:
        events: of a `Rehearsal`.
    """

    def __init__(self, events: list[ReplayedCall | ReplayedWait]) -> None:
        self._events: list[tuple[ReplayedCall, tuple[Any, ...]] | ReplayedWait] = []
        self._needed = {number for event in events if isinstance(event, ReplayedCall) for number in event.after}
        self._streams = list(dict.fromkeys(e.stream for e in events if e.stream is not None))
        free: defaultdict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)
        taken: list[list[torch.Tensor]] = []
        for event in events:
            if isinstance(event, ReplayedWait):
                for buffer in taken[event.number]:
                    free[buffer.device, buffer.numel()].append(buffer)
                taken[event.number] = []
                self._events.append(event)
            else:
                buffers, args = _with_memory(event.args, free)
                taken.append(buffers)
                self._events.append((event, args))
        self.collectives = len(taken)

    def run(self) -> None:
        """Issue every collective once; on return all of them are complete (on an accelerator: in stream order)."""
        main = torch.accelerator.current_stream(self._streams[0].device) if self._streams else None
        for stream in self._streams:
            stream.wait_stream(main)
        works: list[Work | None] = []
        done: dict[int, Any] = {}
        waited = set()
        for event in self._events:
            if isinstance(event, ReplayedWait):
                work = works[event.number]
                assert work is not None  # only of a handle was a wait heard
                with _on(event.stream):
                    work.wait()
                waited.add(event.number)
                continue
            call, args = event
            with _on(call.stream):
                for number in call.after:
                    call.stream.wait_event(done[number])
                works.append(work_in(getattr(torch.ops.c10d, call.name).default(*args)))
                if len(works) - 1 in self._needed:
                    done[len(works) - 1] = call.stream.record_event()
        for number, work in enumerate(works):
            if work is not None and number not in waited:
                work.wait()  # by its future, as DDP does behind the backward pass
        for stream in self._streams:
            assert main is not None  # there are streams
            main.wait_stream(stream)


def _on(stream: Any) -> Any:
    return nullcontext() if stream is None else stream


def _with_memory(
    arguments: tuple[Any, ...], free: defaultdict[tuple[torch.device, int], list[torch.Tensor]]
) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Return the buffers for one call, one per storage, and its arguments with tensors in them that are laid out as the
    step's were.
    """
    storages: defaultdict[int, list[Shape]] = defaultdict(list)
    for shape in tree_leaves(arguments):
        if isinstance(shape, Shape):
            storages[shape.storage].append(shape)
    buffers: dict[int, tuple[torch.Tensor, int]] = {}
    for storage, shapes in storages.items():
        spans = [shape.span_bytes() for shape in shapes]
        low = min(begin for begin, _ in spans) // _ALIGNMENT * _ALIGNMENT
        size = -(-(max(end for _, end in spans) - low) // _ALIGNMENT) * _ALIGNMENT
        ready = free[shapes[0].device, size]
        buffer = ready.pop() if ready else torch.zeros(size, dtype=torch.uint8, device=shapes[0].device)
        buffers[storage] = buffer, low

    def fill(shape: Shape) -> torch.Tensor:
        buffer, low = buffers[shape.storage]
        offset = shape.offset - low // shape.dtype.itemsize
        return buffer.view(shape.dtype).as_strided(shape.size, shape.stride, offset)

    return [buffer for buffer, _ in buffers.values()], tree_map_only(Shape, fill, arguments)
