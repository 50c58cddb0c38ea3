"""Replaces collectives by local copies, for steps that only compute (docs/dev/measuring.md, R10).

Used as the dispatcher handler, it fills an operator's outputs with local copies of the right shape and returns a
completed handle that works for every kind of caller: Python, DDP's futures in C++, functional collectives. On an
accelerator the copies run on the caller's stream, and waiting for the handle waits for them.

Must not call a backend, or count as a collective: these calls are in no row of the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from aorta.errors import InstrumentError
from aorta.instrument.dispatcher import Original, Work, group_in
from aorta.instrument.event_clock import EventClock, Mark
from aorta.instrument.operators import position_of_group, tensors_in


@dataclass(frozen=True)
class StandInRank:
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

    def __init__(self, device: torch.device, clock: EventClock, on_stall: Callable[[Mark, Mark], None]) -> None:
        self._make_work = work_maker("baseline=true")
        self._clock, self._on_stall = clock, on_stall
        self._device = device
        self._compute = None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def __call__(self, name: str, args: tuple[Any, ...], _original: Original) -> Any:
        """Handle one call of an operator.

        Raises:
            KeyError: an operator that `operators.OPERATORS` does not know.
        """
        copy, group = COPIES[name], group_in(args[position_of_group(name)])
        blocks = self._compute is None or torch.accelerator.current_stream(self._device) == self._compute
        begin = self._clock.mark() if blocks else None
        if copy is not None:
            with torch.no_grad():
                copy(args, StandInRank(group.rank(), group.size()))
        if blocks:
            self._on_stall(begin, self._clock.mark())
        written = tensors_in(args[0])
        return returned(name, args, self._done(written))

    def _done(self, written: list[torch.Tensor]) -> Work:
        """Return a completed handle that lives in C++ alone, so nothing must keep it alive; its future captures the
        copies' streams.
        """
        devices = list({tensor.device for tensor in written if tensor.device.type != "cpu"})
        future: torch.futures.Future[Any] = torch.futures.Future(devices=cast(Any, devices) or None)
        future.set_result(written)
        return self._make_work(future)


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


def _repeat(output: torch.Tensor, source: torch.Tensor, place: StandInRank) -> None:
    """Gather into one tensor: this rank's part, once for each rank. The part may be a view of the output."""
    if output.numel() != place.size * source.numel() or not (output.is_contiguous() and source.is_contiguous()):
        _fill(output, source.clone())
        return
    rows, part = output.data.view(place.size, -1), source.data.view(-1)
    if output.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
        rows.copy_(part.expand_as(rows))
    elif rows[place.rank].data_ptr() == part.data_ptr():
        for others in (rows[: place.rank], rows[place.rank + 1 :]):
            others.copy_(part.expand_as(others))
    else:
        rows.copy_(part.clone().expand_as(rows))


def _chunk(output: torch.Tensor, source: torch.Tensor, place: StandInRank) -> None:
    """Reduce-scatter from one tensor: this rank's own part of it."""
    _fill(output, source.reshape(place.size, -1)[place.rank])


def _each(copy: Callable[[Any, Any, StandInRank], None]) -> Copy:
    """Return the same copy for each of several outputs and inputs."""

    def several(args: tuple[Any, ...], place: StandInRank) -> None:
        for output, source in zip(args[0], args[1], strict=True):
            copy(output, source, place)

    return several


def _to_all(outputs: list[torch.Tensor], source: torch.Tensor, _place: StandInRank) -> None:
    for output in outputs:
        _fill(output, source)


def _gather(args: tuple[Any, ...], place: StandInRank) -> None:
    if args[0]:  # the root's
        _each(_to_all)(args, place)


def _gather_into_tensor(args: tuple[Any, ...], place: StandInRank) -> None:
    if place.rank == args[3]:  # the root
        _repeat(args[0], args[1], place)


def _gather_lists(args: tuple[Any, ...], _place: StandInRank) -> None:
    for outputs in args[0]:  # one list a rank
        for output, source in zip(outputs, args[1], strict=True):
            _fill(output, source)


def _scatter(args: tuple[Any, ...], place: StandInRank) -> None:
    if args[1]:  # the root's
        _each(lambda output, sources, at: _fill(output, sources[at.rank]))(args, place)
    else:
        _zero(args, place)


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
