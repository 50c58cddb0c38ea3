"""Run on two ranks: every form of collective as it is recorded, in Python and by the compiled part, if that was built,
and as the stand-in answers it; sequences that are rehearsed and replayed. Ends with an error where something is wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from aorta.instrument.dispatcher import Original, all_groups, issued_by
from aorta.instrument.emulation.stand_in import StandIn
from aorta.instrument.event_clock import HostClock
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.operators import tensors_in
from aorta.recording.isolated_baselines import Rehearsal, Replay
from aorta.records.clocks import read_clocks
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts

CPU, ONES = torch.device("cpu"), torch.ones
NEEDS_THE_NETWORK = ("object_broadcast", "object_scatter", "monitored_barrier")
"""Their receivers learn sizes and values from the network: without it there is nothing to go on with."""
Calls = dict[str, tuple[Callable[[], Any], list[str] | None]]


def coalesced(call: Callable[..., Any], first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    with dist._coalescing_manager(group=dist.group.WORLD):
        call(*first)
        call(*second)


def exchange(rank: int) -> None:
    peer = 1 - rank
    calls = [dist.P2POp(dist.isend, ONES(2), peer), dist.P2POp(dist.irecv, ONES(2), peer)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()


def waited(result: Any) -> None:
    for tensor in result if isinstance(result, list) else [result]:
        assert funcol.wait_tensor(tensor).isfinite().all()


def calls(rank: int) -> Calls:
    """Name -> a call that both ranks make, and the kinds and bytes that are seen; None where gloo counts two.

    The full array's bytes, by hand: float32 but for the first; all-to-all: one rank's send buffer. What objects take
    depends on how they are pickled.
    """
    world, two, reduce_scatters = dist.group.WORLD, [ONES(4), ONES(2)], funcol.reduce_scatter_tensor_coalesced
    parts = [ONES(3)] * 2 if rank == 0 else None
    return {
        "all_reduce": (lambda: dist.all_reduce(ONES(3, dtype=torch.float64)), ["allreduce 24"]),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(ONES(3), ONES(6)), ["reducescatter 24"]),
        "reduce_scatter_list": (lambda: dist.reduce_scatter(ONES(3), [ONES(3)] * 2), None),
        "all_gather": (lambda: dist.all_gather_into_tensor(ONES(6), ONES(3)), ["allgather 24"]),
        "all_gather_list": (lambda: dist.all_gather([ONES(3)] * 2, ONES(3)), ["allgather 24"]),
        "broadcast": (lambda: dist.broadcast(ONES(3), 0), ["broadcast 12"]),
        "all_to_all": (lambda: dist.all_to_all_single(ONES(4), ONES(4)), ["alltoall 16"]),
        "all_to_all_list": (lambda: dist.all_to_all([ONES(2)] * 2, [ONES(2)] * 2), ["alltoall 16"]),
        "reduce": (lambda: dist.reduce(ONES(3), 0), ["reduce 12"]),
        "gather": (lambda: dist.gather(ONES(3), parts, 0), ["gather 24"]),
        "scatter": (lambda: dist.scatter(ONES(3), parts, 0), ["scatter 24"]),
        "barrier": (dist.barrier, ["barrier 0"]),
        "send": (
            lambda: dist.send(ONES(2), 1) if rank == 0 else dist.recv(ONES(2), 0),
            ["send 8" if rank == 0 else "recv 8"],
        ),
        "exchange": (lambda: exchange(rank), ["send 8", "recv 8"]),
        "coalesced_all_reduce": (lambda: coalesced(dist.all_reduce, (ONES(2),), (ONES(3),)), ["allreduce 20"]),
        "coalesced_all_gather": (
            lambda: coalesced(dist.all_gather_into_tensor, (ONES(4), ONES(2)), (ONES(6), ONES(3))),
            ["allgather 40"],
        ),
        "coalesced_reduce_scatter": (
            lambda: coalesced(dist.reduce_scatter_tensor, (ONES(2), ONES(4)), (ONES(3), ONES(6))),
            None,
        ),
        "functional_all_reduce": (lambda: waited(funcol.all_reduce(ONES(3), "sum", world)), ["allreduce 12"]),
        "functional_all_gather": (lambda: waited(funcol.all_gather_tensor(ONES(3), 0, world)), ["allgather 24"]),
        "functional_reduce_scatter": (
            lambda: waited(funcol.reduce_scatter_tensor(ONES(6), "sum", 0, world)),
            ["reducescatter 24"],
        ),
        "functional_all_to_all": (
            lambda: waited(funcol.all_to_all_single(ONES(4), None, None, world)),
            ["alltoall 16"],
        ),
        "functional_coalesced_all_reduce": (
            lambda: waited(funcol.all_reduce_coalesced(two, "sum", world)),
            ["allreduce 24"],
        ),
        "functional_coalesced_all_gather": (
            lambda: waited(funcol.all_gather_into_tensor_coalesced(two, world)),
            ["allgather 48"],
        ),
        "functional_coalesced_reduce_scatter": (lambda: waited(reduce_scatters(two, "sum", [0, 0], world)), None),
        "object_all_gather": (lambda: dist.all_gather_object([None] * 2, {"rank": rank}), ["allgather", "allgather"]),
        "object_broadcast": (lambda: dist.broadcast_object_list([1], 0), ["broadcast", "broadcast"]),
        "object_gather": (lambda: dist.gather_object(1, [None] * 2 if rank == 0 else None, 0), ["allgather", "gather"]),
        "object_scatter": (lambda: dist.scatter_object_list([None], [1, 2], 0), ["broadcast", "scatter", "scatter"]),
        "monitored_barrier": (dist.monitored_barrier, None),
        # Last: both ranks must still count alike after sends and receives.
        "all_reduce_again": (lambda: dist.all_reduce(ONES(3)), ["allreduce 12"]),
    }


def recorded(rank: int, *, native: bool) -> None:
    """Each call is a step, whose coverage is complete or says that it is not; both ranks tell the same of it."""
    named, steps = calls(rank), list[Step]()
    with Instrumentation(CPU, "observe", rank, 2, read_clocks(), steps.append, native=native) as instrument:
        for number, (call, _) in enumerate(named.values()):
            with instrument.recorder.step(StepFacts(0, number, number, 0.0, warmup=False)):
                call()
        instrument.recorder.finish()
    # What ranks are matched by, and sizes.
    told = {
        name: [(row.group, row.kind, row.seq, row.bytes, row.dtype) for row in step.collectives]
        for name, step in zip(named, steps, strict=True)
    }
    of_both: list[Any] = [None, None]
    dist.all_gather_object(of_both, told)
    for (name, (_, expected)), step in zip(named.items(), steps, strict=True):
        coverage = step.coverage
        if expected is None:
            assert (coverage.complete, coverage.issued, step.overlap["overlap_ratio"]) == (False, 2, None), name
            assert "the backends counted 2 collectives" in str(coverage.reason), name
            continue
        assert coverage.complete, (name, coverage.reason)
        assert all(row.end_ns is not None for row in step.collectives), name
        of_objects = name.startswith("object")
        assert [row.kind if of_objects else f"{row.kind} {row.bytes}" for row in step.collectives] == expected, name
        assert of_both[0][name] == of_both[1][name] or of_objects or name in ("send", "exchange"), name
    dtypes = {"all_reduce": "float64", "broadcast": "float32", "barrier": None}
    assert {name: told[name][0][-1] for name in dtypes} == dtypes
    # Sends and receives have numbers of their own.
    numbers = [(kind, seq) for name in ("send", "exchange") for _, kind, seq, _, _ in told[name]]
    assert numbers == [[("send", 0), ("send", 1), ("recv", 0)], [("recv", 0), ("send", 0), ("recv", 1)]][rank]
    step_of = dict(zip(named, steps, strict=True))
    assert [(wait.kind, wait.seq) for name in ("send", "exchange") for wait in step_of[name].waits] == numbers


def described(value: Any) -> Any:
    """An operator's result: tensors by shape and type, handles by what they are."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    return type(value).__name__


class Answering:
    """The seam's handler: the backend answers, or a stand-in, whose handle is held to what it has written."""

    def __init__(self, stand_in: StandIn | None) -> None:
        self.stand_in = stand_in
        self.answers: list[Any] = []

    def __call__(self, name: str, args: tuple[Any, ...], original: Original) -> Any:
        result = original() if self.stand_in is None else self.stand_in(name, args, original)
        self.answers.append((name, described(result)))
        if self.stand_in is not None:
            work, written = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result), tensors_in(args[0])
            assert work.is_completed(), name
            assert work.get_future().done(), name
            assert described(work.get_future().value()) == described(list(written)), name
            assert all(bool(tensor.isfinite().all()) for tensor in tensors_in(args[0])), name
        return result


def answered(instrument: Instrumentation, stand_in: StandIn, rank: int) -> None:
    """It gives back what the real collective does, and issues nothing."""
    for name, (call, _) in calls(rank).items():
        if name in NEEDS_THE_NETWORK:
            continue
        handlers, issued = (Answering(None), Answering(stand_in)), []
        for handler in handlers:
            before = sum(issued_by(group) or 0 for group in all_groups())
            with instrument.replaced(handler):
                call()
            issued.append(sum(issued_by(group) or 0 for group in all_groups()) - before)
        assert issued[0] > 0 == issued[1], name
        assert handlers[0].answers == handlers[1].answers, name


def replayed(instrument: Instrumentation, steps: list[Step], rank: int) -> None:
    """A replay issues and waits as the step did, whose collectives are waited for in another order than issued."""

    def sequence() -> None:
        big, part = ONES(4, 6), ONES(2, 3)
        first = dist.all_reduce(big[:, ::1], async_op=True)
        second = dist.all_gather_into_tensor(torch.empty(4, 3), part, async_op=True)
        second.wait()
        dist.all_reduce(ONES(5, dtype=torch.bfloat16))
        whole = ONES(8, dtype=torch.float64)
        dist.all_gather_into_tensor(whole, whole[4 * rank : 4 * rank + 4])
        first.wait()

    def noted(body: Callable[[], None]) -> Rehearsal:
        rehearsal = Rehearsal(CPU)
        with instrument.replaced(rehearsal):
            body()
        return rehearsal

    with instrument.recorder.step(StepFacts(0, 0, 0, 0.0, warmup=False)):
        sequence()
    rehearsal = noted(sequence)
    replay = Replay(rehearsal.events)
    expected = ["allreduce_", "_allgather_base_", 1, "allreduce_", 2, "_allgather_base_", 3, 0]  # numbers: of waits
    for noticed in (rehearsal, noted(replay.run)):
        assert [getattr(event, "number", getattr(event, "name", None)) for event in noticed.events] == expected
    with instrument.recorder.step(StepFacts(0, 0, 0, None, warmup=False, phase="comm_only")):
        replay.run()
    instrument.recorder.finish()
    for step in steps:
        rows = [(row.bytes, row.dtype) for row in step.collectives]
        assert rows == [(96, "float32"), (48, "float32"), (10, "bfloat16"), (64, "float64")]
    # The rehearsal is not counted, or the emulated fabric's ranks would disagree about numbers.
    assert [[row.seq for row in step.collectives] for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def main() -> None:
    """All of it, in one process group."""
    warnings.simplefilter("ignore")  # names that torch 2.13 calls deprecated, and 2.11 knows no others
    dist.init_process_group("gloo")
    rank, steps = dist.get_rank(), list[Step]()
    for native in (False, True):
        recorded(rank, native=native)
    with Instrumentation(CPU, "observe", rank, 2, read_clocks(), steps.append) as instrument:
        stand_in = StandIn(CPU, HostClock(), instrument.recorder.on_stall)
        answered(instrument, stand_in, rank)
        replayed(instrument, steps, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
