"""One process that stands for all ranks of a run on an emulated fabric (`fabric.ranks=W`).

torch's fake process group says that there are W ranks, so that meshes, shards and parts of batches are those of rank 0
of W; kernels for the `c10d` operators, below those that the interception overrides, are the backend. A collective fills
its outputs with copies of this rank's values (`stand_in.COPIES`) and takes as long as the fabric says for W ranks. What
times collectives sees an ordinary backend, so that every interceptor can be used and `instrument.mode=off` be compared.

On a CPU a thread of each group carries one collective after another (`emulated_link.Link`). On an accelerator they run
as NCCL's do: a synchronous one on the caller's stream and without a work handle, an asynchronous one on a stream of its
group, which waits for the caller's, and those of one group one after another.

    with emulated_ranks(EmulatedNetwork(settings, 0, W, None), device):   # behind init_process_group("fake", ...)
        train()

All ranks are taken to be as fast as this one, and values are not those of a training: a loss says nothing. Must not be
open beside a process group with other backends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from aorta.instrument.device_streams import wait_unseen
from aorta.instrument.dispatcher import group_in, implemented
from aorta.instrument.emulation.emulated_link import DeviceLink, HostLinks, StreamSleep
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.emulation.stand_in import COPIES, StandInRank, returned, work_maker
from aorta.instrument.in_flight import InFlight
from aorta.instrument.operators import is_async, offered, position_of_async_op, position_of_group, tensors_in

NO_VALUES = "one process stands for all ranks: what they would have exchanged is not known, so values mean nothing"
"""Why loss and norm of gradients are null."""
SWITCH_INTERVAL_S = 1e-4
"""How long a backend's completion callback, or a link whose collective ends, may wait for the interpreter lock before
the training thread must release it; Python's default, 5 ms, would be added to the ends of collectives. It costs only
when a thread waits."""
_open: list[_Backend] = []


@contextmanager
def emulated_ranks(fabric: EmulatedNetwork, device: torch.device) -> Iterator[None]:
    """Be the backend of every group for the length of a `with` block.

    Raises:
        InstrumentError: this torch lacks what it takes.
    """
    with ExitStack() as stack:
        backend = _Backend(fabric, device)
        stack.callback(backend.close)
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        stack.enter_context(implemented("cpu", {name: partial(backend.on_host, name) for name in offered()}))
        if device.type != "cpu":
            kernels = {name: partial(backend.on_device, name) for name in offered()}
            stack.enter_context(implemented(device.type, kernels))
        _open.append(backend)
        stack.callback(_open.remove, backend)
        yield


def counts_of_ranks() -> Callable[[dist.ProcessGroup], int] | None:
    """Return what counts the collectives of a group (R8) where one process stands for all ranks; None elsewhere."""
    return _open[-1].issued_by if _open else None


class _Backend:
    """What all groups of the process do with a collective."""

    def __init__(self, fabric: EmulatedNetwork, device: torch.device) -> None:
        self._device, self._links, self._make_work = device, HostLinks(fabric), work_maker("fabric.ranks")
        on_host = device.type == "cpu"
        self._device_link = None if on_host else DeviceLink(fabric, [device], StreamSleep(device))
        self._groups: dict[str, _Group] = {}

    def issued_by(self, group: dist.ProcessGroup) -> int:
        """Return how many collectives of a group were issued."""
        return self._group(group).issued

    def close(self) -> None:
        """End what carries collectives on the host."""
        self._links.close()

    def on_host(self, name: str, *args: Any) -> Any:
        """Issue a collective of CPU tensors."""
        group, issued = self._issue(name, args)
        transfer = self._links.arrive(issued, group.ranks)
        gate = self._links.carry_copy(transfer, partial(_copy, name, args, group.place))
        written = tensors_in(args[0])

        def outputs(done: torch.futures.Future[None]) -> list[torch.Tensor]:
            done.value()  # raises what went wrong
            return written

        return returned(name, args, self._make_work(gate.then(outputs)))

    def on_device(self, name: str, *args: Any) -> Any:
        """Issue a collective of the device's tensors."""
        group, issued = self._issue(name, args)
        caller = stream = torch.accelerator.current_stream(self._device)
        asynchronous = is_async(args, position_of_async_op(name))
        if asynchronous:
            stream = group.stream(self._device)
            group.ready.record(caller)
            wait_unseen(stream, group.ready)
            for tensor in tensors_in(args):
                tensor.record_stream(cast(Any, stream))
        with stream:
            _copy(name, args, group.place)
            assert self._device_link is not None  # there is a device
            self._device_link.delay(issued, group.ranks)
            if not asynchronous:
                return returned(name, args, None)
            future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device])
            future.set_result(tensors_in(args[0]))  # behind what is on the current stream
            return returned(name, args, self._make_work(future))

    def _issue(self, name: str, args: tuple[Any, ...]) -> tuple[_Group, InFlight]:
        group, operator = self._group(group_in(args[position_of_group(name)])), offered()[name]
        number, group.issued = group.issued, group.issued + 1
        size_bytes = operator.full_array_bytes(args, group.place.size)
        return group, InFlight(
            operator.kind,
            group.name,
            number,
            size_bytes,
            None,
            time.perf_counter_ns(),
            number=number,
            communicator=group.name,
        )

    def _group(self, group: dist.ProcessGroup) -> _Group:
        name = group.group_name
        if name not in self._groups:
            self._groups[name] = _Group(group, self._device)
        return self._groups[name]


class _Group:
    """What is known of one process group; on an accelerator also the stream of its asynchronous collectives."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.name, self.ranks = group.group_name, tuple(dist.get_process_group_ranks(group))
        self.place = StandInRank(group.rank(), group.size())
        self.issued = 0
        self._stream: torch.Stream | None = None
        if device.type != "cpu":
            self.ready = torch.Event(device=device)

    def stream(self, device: torch.device) -> torch.Stream:
        """Return the stream of its asynchronous collectives."""
        if self._stream is None:
            self._stream = torch.Stream(device)
        return self._stream


def _copy(name: str, args: tuple[Any, ...], place: StandInRank) -> None:
    if (copy := COPIES[name]) is not None:
        with torch.no_grad():
            copy(args, place)
