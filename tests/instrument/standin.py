"""Run on two ranks: every form of collective for real, and answered by the stand-in.

Argument: a folder, which gets `rank_<r>.json`: name -> the operators it made, and what went wrong with the stand-in.
Also: autograd through the stand-in, and a rehearsed sequence replayed.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aorta.instrument.dispatcher import Original, all_groups, issued_by
from aorta.instrument.emulation.rehearsal import Rehearsal, Replay
from aorta.instrument.emulation.stand_in import StandIn
from aorta.instrument.event_clock import HostClock
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.operators import tensors_in
from aorta.records.clocks import read_clocks
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts
from tests.instrument.kinds import calls

# Their receivers learn sizes and values from the network: without one there is nothing to go on with.
NEEDS_THE_NETWORK = ("object_broadcast", "object_scatter", "monitored_barrier")


def described(value: Any) -> Any:
    """An operator's result: tensors by shape and type, handles by what they are."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype)]
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    return type(value).__name__


class Both:
    """The seam's handler: the original, or the stand-in; notes what it gave back."""

    def __init__(self, standin: StandIn, *, real: bool) -> None:
        self.standin, self.real = standin, real
        self.seen: list[dict[str, Any]] = []

    def __call__(self, name: str, args: tuple[Any, ...], original: Original) -> Any:
        result = original() if self.real else self.standin(name, args, original)
        handle = result[-1] if isinstance(result, tuple) else result
        work = dist.Work.unbox(handle)
        row = {"name": name, "result": described(result), "written": described(args[0])}
        if not self.real:
            row["completed"] = work.is_completed() and work.get_future().done()
            row["future"] = described(work.get_future().value())
            row["finite"] = all(bool(t.isfinite().all()) for t in tensors_in(args[0]))
        self.seen.append(row)
        return result


def counted() -> int:
    return sum(issued_by(group) or 0 for group in all_groups())


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank, steps = dist.get_rank(), list[Step]()
    cpu, told = torch.device("cpu"), dict[str, Any]()
    with Instrumentation(cpu, "observe", rank, 2, read_clocks(), steps.append) as instrument:
        standin = StandIn(cpu, HostClock(), instrument.recorder.on_stall)
        for name, call in calls(rank).items():
            if name in NEEDS_THE_NETWORK:
                continue
            rows = {}
            for real in (True, False):
                before, handler = counted(), Both(standin, real=real)
                with instrument.replaced(handler):
                    call()
                rows["real" if real else "standin"] = handler.seen
                rows["issued_really" if real else "issued"] = counted() - before
            told[name] = rows
        told = {"kinds": told, "values": values(instrument, standin, rank), "replay": replayed(instrument, steps, rank)}
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def values(instrument: Instrumentation, standin: StandIn, rank: int) -> dict[str, Any]:
    """What stands in the outputs."""
    mine = torch.arange(3.0) + 10 * rank
    gathered, reduced, exchanged = torch.empty(6), torch.empty(3), torch.empty(4)
    listed = [torch.empty(3), torch.empty(3)]
    inside = torch.arange(6.0) + 10 * rank
    uneven = torch.full((5,), -1.0)
    version = gathered._version
    with instrument.replaced(standin):
        dist.all_gather_into_tensor(gathered, mine)
        dist.all_gather(listed, mine)
        dist.reduce_scatter_tensor(reduced, torch.arange(6.0))
        dist.all_to_all_single(exchanged, torch.arange(4.0))
        dist.all_to_all_single(uneven, torch.arange(2.0), [3, 2], [1, 1])
        dist.all_gather_into_tensor(inside, inside[3 * rank : 3 * rank + 3])  # in place, as FSDP does
        summed = mine.clone()
        dist.all_reduce(summed)
        with torch.inference_mode():
            quiet = torch.empty(6)
            dist.all_gather_into_tensor(quiet, torch.ones(3))
        parameter = torch.zeros(4, requires_grad=True)
        saved = parameter * 2
        loss = (saved * saved).sum()
        dist.all_gather_into_tensor(saved.detach(), torch.ones(2))  # backends do not count as in-place operations
        loss.backward()
    return {
        "all_gather": gathered.tolist(),
        "all_gather_list": [part.tolist() for part in listed],
        "reduce_scatter": reduced.tolist(),
        "all_to_all": exchanged.tolist(),
        "all_to_all_uneven": uneven.tolist(),
        "in_place": inside.tolist(),
        "all_reduce": summed.tolist(),
        "inference": quiet.tolist(),
        "version_moved": gathered._version != version,
        "gradient": None if parameter.grad is None else parameter.grad.tolist(),
    }


def replayed(instrument: Instrumentation, steps: list[Step], rank: int) -> dict[str, Any]:
    """A sequence noted down, and what its replay issued: asynchronous ones, waited for in another order than issued."""

    def sequence() -> None:
        big, part = torch.ones(4, 6), torch.ones(2, 3)
        first = dist.all_reduce(big[:, ::1], async_op=True)
        second = dist.all_gather_into_tensor(torch.empty(4, 3), part, async_op=True)
        second.wait()
        dist.all_reduce(torch.ones(5, dtype=torch.bfloat16))
        whole = torch.ones(8, dtype=torch.float64)
        dist.all_gather_into_tensor(whole, whole[4 * rank : 4 * rank + 4])
        first.wait()

    def facts(number: int) -> StepFacts:
        return StepFacts(0, number, number, None, warmup=False, phase="comm_only")

    with instrument.recorder.step(StepFacts(0, 0, 0, 0.0, warmup=False)):
        sequence()
    rehearsal = Rehearsal(torch.device("cpu"))
    with instrument.replaced(rehearsal):
        sequence()
    replay = Replay(rehearsal.events)

    again = Rehearsal(torch.device("cpu"))
    with instrument.replaced(again):
        replay.run()
    for number in range(2):
        with instrument.recorder.step(facts(number)):
            replay.run()
    instrument.recorder.finish()
    seen, once_more = (
        [[type(event).__name__, getattr(event, "number", getattr(event, "name", None))] for event in one.events]
        for one in (rehearsal, again)
    )
    return {
        "events": seen,
        "again": once_more,
        "rows": [[[c.kind, c.group, c.bytes, c.dtype] for c in step.collectives] for step in steps],
        "seqs": [[c.seq for c in step.collectives] for step in steps],
        "phases": [step.phase for step in steps],
        "complete": [step.coverage.complete for step in steps],
        "reasons": steps[-1].reasons,
    }


if __name__ == "__main__":
    main(sys.argv[1])
