"""Carries out the faults of `aorta.config.loop` in a training loop, at the step and rank that they name.

    with injected_faults(planned, rank, model) as faults:       # on every rank
        for step in range(...):
            faults.begin(step)
            batch = next(faults.batches(loader))
            ...

Some act on a collective of their own, which all ranks then issue in the forward pass of every step: the faulty rank
issues another one, or none. Must not do anything where no fault is planned.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from aorta.config.loop import PlannedFault

T = TypeVar("T")
_ELEMENTS: Final = 1000
_LATE_S: Final = 3.0
_IMPATIENT_S: Final = 2.5
"""After this a second SIGINT is no repetition of the first (`distributed.peers`)."""
_SO_ATTACH_FILTER: Final = 26  # asm-generic/socket.h
_BPF_RETURN: Final = 0x06  # linux/bpf_common.h: BPF_RET | BPF_K
ISSUES: Final = frozenset(
    ("skipped_collective", "swapped_order", "wrong_size", "wrong_dtype", "wrong_kind", "wrong_group")
)
"""Kinds for which every rank issues two small all-reduces in the forward pass of each step."""


class Faults:
    def __init__(
        self,
        planned: Sequence[PlannedFault],
        rank: int,
        phase: Callable[[str], AbstractContextManager[None]] = lambda _name: nullcontext(),
    ) -> None:
        self._own = {fault.kind: fault.step for fault in planned if fault.rank == rank}
        self._issues = any(fault.kind in ISSUES for fault in planned)
        self._phase = phase
        self._step = -1
        self._twin: dist.ProcessGroup | None = None
        if any(fault.kind == "wrong_group" for fault in planned):
            self._twin = dist.new_group()

    def begin(self, step: int) -> None:
        self._step = step
        if self._now("stuck_checkpoint"):
            with self._phase("checkpoint"):
                _sleep_for_ever()

    def batches(self, source: Iterator[T]) -> Iterator[T]:
        return self._late(source) if self._own else source

    def _late(self, source: Iterator[T]) -> Iterator[T]:
        for batch in source:
            if self._since("slow_data"):
                time.sleep(_LATE_S)
            if self._now("stuck_data"):
                _sleep_for_ever()
            yield batch

    def before_forward(self, *_arguments: Any) -> None:
        if self._since("slow_rank"):
            time.sleep(_LATE_S)
        for kind, act in _ACTS.items():
            if self._now(kind):
                act()
        if self._issues:
            self._issue()

    def before_optimizer(self, *_arguments: Any) -> None:
        if self._now("stuck_optimizer"):
            _sleep_for_ever()

    def _issue(self) -> None:
        first, second = torch.ones(_ELEMENTS), torch.ones(2 * _ELEMENTS)
        if self._now("swapped_order"):
            first, second = second, first
        if self._now("wrong_size"):
            first = torch.ones(3 * _ELEMENTS)
        if self._now("wrong_dtype"):
            first = first.double()
        if self._now("wrong_kind"):
            dist.broadcast(first, 0)
        elif not self._now("skipped_collective"):
            dist.all_reduce(first, group=self._twin if self._now("wrong_group") else None)
        dist.all_reduce(second)

    def _now(self, kind: str) -> bool:
        return self._own.get(kind) == self._step

    def _since(self, kind: str) -> bool:
        return kind in self._own and self._step >= self._own[kind]


@contextmanager
def injected_faults(
    planned: Sequence[PlannedFault],
    rank: int,
    model: nn.Module,
    phase: Callable[[str], AbstractContextManager[None]] = lambda _name: nullcontext(),
) -> Iterator[Faults]:
    faults = Faults(planned, rank, phase)
    with ExitStack() as stack:
        if planned:
            stack.callback(model.register_forward_pre_hook(faults.before_forward).remove)
            stack.callback(register_optimizer_step_pre_hook(faults.before_optimizer).remove)
        yield faults


def _sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(3600)


def _fail(kind: str) -> NoReturn:
    raise RuntimeError(f"injected fault: {kind}")


def _raise_from_a_thread() -> None:
    main = ctypes.c_ulong(threading.get_ident())
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    threading.Thread(target=lambda: set_exception(main, ctypes.py_object(RuntimeError))).start()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        pass


def _raise_in_a_handler() -> None:
    signal.signal(signal.SIGALRM, lambda *_: _fail("signal_exception"))
    signal.raise_signal(signal.SIGALRM)


def _interrupt_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    time.sleep(_IMPATIENT_S)
    signal.raise_signal(signal.SIGINT)


def _end_by(number: signal.Signals) -> Callable[[], None]:
    def act() -> None:
        if number is not signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        _sleep_for_ever()

    return act


def _crash(how: Callable[[], Any]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # leave no core
    how()


def _lock_the_interpreter() -> None:
    """Lock a mutex twice: unlike a sleep, no signal's handler ends that wait."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _stall_links() -> None:
    """Have the kernel drop what arrives on this process's connections to its peers, as a link that loses everything
    does: nobody sees an error. A socket filter of one instruction, `return 0` (socket(7), SO_ATTACH_FILTER); the store
    of the launch, which is no link of a collective, stays.
    """
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(descriptor.name))) as link:
            if os.environ.get("MASTER_PORT") not in (str(link.getpeername()[1]), str(link.getsockname()[1])):
                link.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


_ACTS: Final[dict[str, Callable[[], Any]]] = {
    "workload_exception": lambda: _fail("workload_exception"),
    "async_exception": _raise_from_a_thread,
    "signal_exception": _raise_in_a_handler,
    "sigint": _interrupt_twice,
    "sigterm": _end_by(signal.SIGTERM),
    "sigkill": _end_by(signal.SIGKILL),
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: _crash(lambda: ctypes.string_at(0)),
    "abort": lambda: _crash(os.abort),
    "lock_gil": _lock_the_interpreter,
    "stuck_forward": _sleep_for_ever,
    "link_stalled": _stall_links,
    "rank_dependent_branch": lambda: dist.barrier(),
}
"""What happens at the beginning of a forward pass."""
