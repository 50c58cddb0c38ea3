"""Run on two ranks: one call of every form of collective, each as a step of its own.

Argument: a folder, which gets `rank_<r>.json`: name -> the step's collectives and coverage, and what went wrong.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from aorta.instrument.instrumentation import Instrumentation
from aorta.records.clocks import read_clocks
from aorta.records.schema import Step
from aorta.records.step_line import StepFacts

ONES = torch.ones


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
        assert functional.wait_tensor(tensor).isfinite().all()


def calls(rank: int) -> dict[str, Callable[[], Any]]:
    """Name -> a call that both ranks make."""
    world, two = dist.group.WORLD, (ONES(4), ONES(2))
    return {
        "all_reduce": lambda: dist.all_reduce(ONES(3, dtype=torch.float64)),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(ONES(3), ONES(6)),
        "reduce_scatter_list": lambda: dist.reduce_scatter(ONES(3), [ONES(3)] * 2),
        "all_gather": lambda: dist.all_gather_into_tensor(ONES(6), ONES(3)),
        "all_gather_list": lambda: dist.all_gather([ONES(3)] * 2, ONES(3)),
        "broadcast": lambda: dist.broadcast(ONES(3), 0),
        "all_to_all": lambda: dist.all_to_all_single(ONES(4), ONES(4)),
        "all_to_all_list": lambda: dist.all_to_all([ONES(2)] * 2, [ONES(2)] * 2),
        "reduce": lambda: dist.reduce(ONES(3), 0),
        "gather": lambda: dist.gather(ONES(3), [ONES(3)] * 2 if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(ONES(3), [ONES(3)] * 2 if rank == 0 else None, 0),
        "barrier": dist.barrier,
        "send": lambda: dist.send(ONES(2), 1) if rank == 0 else dist.recv(ONES(2), 0),
        "exchange": lambda: exchange(rank),
        "coalesced_all_reduce": lambda: coalesced(dist.all_reduce, (ONES(2),), (ONES(3),)),
        "coalesced_all_gather": lambda: coalesced(dist.all_gather_into_tensor, (ONES(4), ONES(2)), (ONES(6), ONES(3))),
        "coalesced_reduce_scatter": lambda: coalesced(
            dist.reduce_scatter_tensor, (ONES(2), ONES(4)), (ONES(3), ONES(6))
        ),
        "functional_all_reduce": lambda: waited(functional.all_reduce(ONES(3), "sum", world)),
        "functional_all_gather": lambda: waited(functional.all_gather_tensor(ONES(3), 0, world)),
        "functional_reduce_scatter": lambda: waited(functional.reduce_scatter_tensor(ONES(6), "sum", 0, world)),
        "functional_all_to_all": lambda: waited(functional.all_to_all_single(ONES(4), None, None, world)),
        "functional_coalesced_all_reduce": lambda: waited(functional.all_reduce_coalesced([*two], "sum", world)),
        "functional_coalesced_all_gather": lambda: waited(functional.all_gather_into_tensor_coalesced([*two], world)),
        "functional_coalesced_reduce_scatter": lambda: waited(
            functional.reduce_scatter_tensor_coalesced([*two], "sum", [0, 0], world)
        ),
        "object_all_gather": lambda: dist.all_gather_object([None] * 2, {"rank": rank}),
        "object_broadcast": lambda: dist.broadcast_object_list([1], 0),
        "object_gather": lambda: dist.gather_object(1, [None] * 2 if rank == 0 else None, 0),
        "object_scatter": lambda: dist.scatter_object_list([None], [1, 2], 0),
        "monitored_barrier": dist.monitored_barrier,
        # Last: both ranks must still count alike after sends and receives.
        "all_reduce_again": lambda: dist.all_reduce(ONES(3)),
    }


def main(folder: str, ends: str) -> None:
    """Make the calls; `ends` is `python` or `native`."""
    warnings.simplefilter("ignore")  # names that torch 2.13 calls deprecated, and 2.11 knows no others
    dist.init_process_group("gloo")
    rank, steps = dist.get_rank(), list[Step]()
    native = ends == "native"
    with Instrumentation(
        torch.device("cpu"), "observe", rank, 2, read_clocks(), steps.append, native=native
    ) as instrument:
        named = calls(rank)
        for number, call in enumerate(named.values()):
            with instrument.recorder.step(StepFacts(0, number, number, 0.0, warmup=False)):
                call()
        instrument.recorder.finish()
    told = {
        name: {
            "rows": [[c.kind, c.group, c.seq, c.bytes, c.dtype, c.end_ns is not None] for c in step.collectives],
            "seen": step.coverage.seen,
            "issued": step.coverage.issued,
            "complete": step.coverage.complete,
            "reason": step.coverage.reason,
            "ratio": step.overlap["overlap_ratio"],
        }
        for name, step in zip(named, steps, strict=True)
    }
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
