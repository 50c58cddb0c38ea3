"""Replaces collectives by local copies: in steps that only compute (docs/dev/measuring.md, R10), and where one process
stands for all ranks of a run on an emulated fabric (`fabric.ranks=W`).

`StandIn`, as the dispatcher handler, fills an operator's outputs with local copies of the right shape and returns a
completed handle that works for every kind of caller: Python, DDP's futures in C++, functional collectives. On an
accelerator the copies run on the caller's stream, and waiting for the handle waits for them. These calls are in no row
of the record.

    with emulated_ranks(EmulatedNetwork(settings, 0, W, None), device):   # behind init_process_group("fake", ...)
        train()

torch's fake process group says that there are W ranks, so that meshes, shards and parts of batches are those of rank 0
of W; kernels for the `c10d` operators, below those that the interception overrides, are the backend. A collective fills
its outputs with copies of this rank's values and takes as long as the fabric says for W ranks. What times collectives
sees an ordinary backend, so that every interceptor can be used and `instrument.mode=off` be compared. On a CPU a thread
of each group carries one collective after another (`emulated_link.Link`). On an accelerator they run as NCCL's do: a
synchronous one on the caller's stream and without a work handle, an asynchronous one on a stream of its group, which
waits for the caller's, and those of one group one after another. All ranks are taken to be as fast as this one, and a
loss says nothing. Must not call a backend, or be open beside a process group with other backends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from aorta.errors import InstrumentError
from aorta.instrument.device_streams import wait_unseen
from aorta.instrument.dispatcher import Original, Work, group_in, implemented
from aorta.instrument.emulation.emulated_link import HostLinks, StreamSleep
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.instrument.event_clock import HostClock, Mark
from aorta.instrument.operators import is_async, offered, position_of, position_of_group, tensors_in
from aorta.instrument.timed_work import InFlight


class StandInRank(NamedTuple):
    """This rank's number in the group of a collective, and the group's size."""

    rank: int
    size: int


Copy = Callable[[tuple[Any, ...], StandInRank], None]


class StandIn:
    """Handler that completes every collective at once, locally.

    The time of the copies counts as a stall, as the collective's would: it is not the block's own computation. On an
    accelerator that holds where they run on the stream that computes.

    Args:
        device: what the run computes on; the stream that is current now is the one that computes.
        clock: of the device.
        on_stall: called with two marks around each copy.

    Raises:
        InstrumentError: this torch cannot make a work handle from a future.
    """

    def __init__(self, device: torch.device, clock: HostClock, on_stall: Callable[[Mark, Mark], None]) -> None:
        self._make_work = work_maker("baseline=true")
        self._clock, self._on_stall = clock, on_stall
        self._device = device
        self._compute = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def __call__(self, name: str, args: tuple[Any, ...], _original: Original) -> Any:
        """Handle one call of an operator.

        Raises:
            KeyError: an operator that `operators.OPERATORS` does not know.
        """
        group = group_in(args[position_of_group(name)])
        blocks = self._compute is None or torch.accelerator.current_stream(self._device) == self._compute
        begin = self._clock.mark() if blocks else None
        _copy(name, args, StandInRank(group.rank(), group.size()))
        if blocks:
            self._on_stall(begin, self._clock.mark())
        written = tensors_in(args[0])
        devices = list({tensor.device for tensor in written if tensor.device.type != "cpu"})
        future: torch.futures.Future[Any] = torch.futures.Future(devices=cast(Any, devices) or None)
        future.set_result(written)  # captures the copies' streams
        return returned(name, args, self._make_work(future))


def work_maker(purpose: str) -> Callable[[Any], Work]:
    """Return what makes a work handle of a future, and lives in C++ alone.

    Raises:
        InstrumentError: this torch cannot; says that `purpose` needs it.
    """
    make: Callable[[Any], Work] | None = getattr(torch._C._distributed_c10d, "_create_work_from_future", None)
    if make is None:
        raise InstrumentError(
            f"torch {torch.__version__} does not offer _create_work_from_future, which {purpose} needs; use a "
            "torch that AORTA supports (>= 2.11), or run without it"
        )
    return make


def returned(name: str, args: tuple[Any, ...], work: Work | None) -> Any:
    """Return what an operator returns: a handle, behind the tensors that it writes where its schema has them; None: as
    NCCL does for a synchronous call.
    """
    boxed = Work.boxed(cast(Any, work))
    return (args[0], boxed) if len(getattr(torch.ops.c10d, name).default._schema.returns) == 2 else boxed


def _fill(output: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, repeating or truncating `source` where the sizes differ; through `.data`, as backends do not bump
    versions.
    """
    to, data = output.data, source.data
    if to.data_ptr() == data.data_ptr() and to.numel() == data.numel():
        return  # in place
    if not data.numel():
        to.zero_()
    elif to.numel() == data.numel():
        to.copy_(data.reshape(to.shape))
    else:
        flat = data.reshape(-1)
        to.copy_(flat.repeat(-(-to.numel() // flat.numel()))[: to.numel()].reshape(to.shape))


def _repeat(output: torch.Tensor, source: torch.Tensor, own: StandInRank) -> None:
    """Gather into one tensor: this rank's part, once for each rank. The part may be a view of the output."""
    if output.numel() != own.size * source.numel() or not (output.is_contiguous() and source.is_contiguous()):
        _fill(output, source.clone())
        return
    rows, part = output.data.view(own.size, -1), source.data.view(-1)
    if output.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
        rows.copy_(part.expand_as(rows))
    elif rows[own.rank].data_ptr() == part.data_ptr():
        for others in (rows[: own.rank], rows[own.rank + 1 :]):
            others.copy_(part.expand_as(others))
    else:
        rows.copy_(part.clone().expand_as(rows))


def _chunk(output: torch.Tensor, source: torch.Tensor, own: StandInRank) -> None:
    _fill(output, source.reshape(own.size, -1)[own.rank])


def _each(copy: Callable[[Any, Any, StandInRank], None]) -> Copy:
    """Return the same copy for each of several outputs and inputs."""

    def several(args: tuple[Any, ...], own: StandInRank) -> None:
        for output, source in zip(args[0], args[1], strict=True):
            copy(output, source, own)

    return several


def _to_all(outputs: list[torch.Tensor], source: torch.Tensor, _place: StandInRank) -> None:
    for output in outputs:
        _fill(output, source)


def _gather(args: tuple[Any, ...], own: StandInRank) -> None:
    if args[0]:  # the root's
        _each(_to_all)(args, own)


def _gather_into_tensor(args: tuple[Any, ...], own: StandInRank) -> None:
    if own.rank == args[3]:  # the root
        _repeat(args[0], args[1], own)


def _gather_lists(args: tuple[Any, ...], _place: StandInRank) -> None:
    for outputs in args[0]:  # one list a rank
        for output, source in zip(outputs, args[1], strict=True):
            _fill(output, source)


def _scatter(args: tuple[Any, ...], own: StandInRank) -> None:
    if args[1]:  # the root's
        _each(lambda output, sources, member: _fill(output, sources[member.rank]))(args, own)
    else:
        _zero(args, own)


def _zero(args: tuple[Any, ...], _place: StandInRank) -> None:
    for output in tensors_in(args[0]):
        output.data.zero_()  # there is no local value, and uninitialised memory may hold NaN


COPIES: dict[str, Copy | None] = {
    # In-place reductions and broadcasts already hold this rank's values.
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "send", "barrier")),
    "_reduce_scatter_base_": lambda args, place: _chunk(args[0], args[1], place),
    "reduce_scatter_": _each(lambda output, sources, place: _fill(output, sources[place.rank])),
    "reduce_scatter_tensor_coalesced_": _each(_chunk),
    "_allgather_base_": lambda args, place: _repeat(args[0], args[1], place),
    "allgather_": _each(_to_all),
    "allgather_coalesced_": _gather_lists,
    "allgather_into_tensor_coalesced_": _each(_repeat),
    "alltoall_base_": lambda args, _place: _fill(args[0], args[1]),
    "alltoall_": _each(lambda output, source, _place: _fill(output, source)),
    "gather_": _gather,
    "gather_into_tensor_": _gather_into_tensor,
    "scatter_": _scatter,
    "recv_": _zero,
    "recv_any_source_": _zero,
}
"""Operator name -> how its outputs are filled from this rank's inputs; None where nothing has to be copied."""


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
        stack.callback(backend.links.close)
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
    def __init__(self, fabric: EmulatedNetwork, device: torch.device) -> None:
        self._device, self.links, self._make_work = device, HostLinks(fabric), work_maker("fabric.ranks")
        self._fabric, self._sleep = fabric, None if device.type == "cpu" else StreamSleep(device)
        self._groups: dict[str, _Group] = {}

    def issued_by(self, group: dist.ProcessGroup) -> int:
        return self._group(group).issued

    def on_host(self, name: str, *args: Any) -> Any:
        group, issued = self._issue(name, args)
        transfer = self.links.arrive(issued, group.ranks)
        gate = self.links.carry_copy(transfer, partial(_copy, name, args, group.place))
        written = tensors_in(args[0])

        def outputs(done: torch.futures.Future[None]) -> list[torch.Tensor]:
            done.value()  # raises what went wrong
            return written

        return returned(name, args, self._make_work(gate.then(outputs)))

    def on_device(self, name: str, *args: Any) -> Any:
        group, issued = self._issue(name, args)
        caller = stream = torch.accelerator.current_stream(self._device)
        asynchronous = is_async(args, position_of(name, "async_op"))
        if asynchronous:
            if group.stream is None:
                group.stream = torch.Stream(self._device)
            stream = group.stream
            group.ready.record(caller)
            wait_unseen(stream, group.ready)
            for tensor in tensors_in(args):
                tensor.record_stream(cast(Any, stream))
        with stream:
            _copy(name, args, group.place)
            if cost_ns := self._fabric.cost_ns(issued.kind, issued.bytes, group.ranks, issued.number):
                # Behind the group's collective before, which may be on another stream.
                wait_unseen(stream, group.ended)
                assert self._sleep is not None  # there is a device
                self._sleep(cost_ns)
                group.ended.record(stream)
            if not asynchronous:
                return returned(name, args, None)
            future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device])
            future.set_result(tensors_in(args[0]))  # behind what is on the current stream
            return returned(name, args, self._make_work(future))

    def _issue(self, name: str, args: tuple[Any, ...]) -> tuple[_Group, InFlight]:
        group, operator = self._group(group_in(args[position_of_group(name)])), offered()[name]
        number, group.issued = group.issued, group.issued + 1
        size_bytes = operator.full_array_bytes(args, group.place.size)
        return group, InFlight(operator.kind, group.name, number, size_bytes, time.perf_counter_ns(), number)

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
        self.stream: torch.Stream | None = None
        if device.type != "cpu":
            self.ready, self.ended = torch.Event(device=device), torch.Event(device=device)


def _copy(name: str, args: tuple[Any, ...], own: StandInRank) -> None:
    if (copy := COPIES[name]) is not None:
        with torch.no_grad():
            copy(args, own)
