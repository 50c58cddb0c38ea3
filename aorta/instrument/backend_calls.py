"""What the interceptors on a CPU share, compiled or not (`python_interceptor`): how a call is labelled in traces, and
how long a backend's call may take and still only have handed a collective over, the stall cut-off of this host.

A call of the backend that takes longer than the cut-off counts as a stall of the training thread, a shorter one as host
work. How long handing over takes is a property of the host and its load, so it is measured when a run begins, on a gloo
group of this process alone, which wakes a worker thread as every collective does and exchanges nothing. Must not fail a
run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.autograd import profiler

from aorta.instrument.dispatcher import counts_point_to_point, worker_threads
from aorta.records.ring_file import RingGroup
from aorta.records.schema import STALL_CUTOFF_NS, InstrumentMode, StallCutoff


def labelled(kind: str, seq: int, group: str, issue: Callable[[], Any]) -> Callable[[], Any]:
    """Return `issue` unchanged, or wrapped in its label `comm:<kind>#<seq> group=<name>` while a profiler is on (C17).

    gloo's own rows of a trace carry no sequence number, by which they could be matched across ranks. Where no profiler
    is on, this costs the check of one flag of torch.
    """
    if not profiler._is_profiler_enabled:
        return issue

    def call() -> Any:
        with profiler.record_function(f"comm:{kind}#{seq} group={group}"):
            return issue()

    return call


_CPU = torch.device("cpu")
CALLBACKS_S = 1.0
"""How long `close` waits for callbacks; those of collectives that never end do not come."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without its module: `torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")


DTYPES: Final = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=dtype_name)
)
"""Every dtype of this torch; a progress file has their positions."""


def group_seen(process_group: dist.ProcessGroup, counted_on: torch.device = _CPU) -> RingGroup:
    """Return a process group as a ring lists it; the backend of `counted_on` counts its collectives."""
    counts, ranks = counts_point_to_point(process_group, counted_on), dist.get_process_group_ranks(process_group)
    return RingGroup(process_group.group_name, worker_threads(process_group, _CPU), counts, tuple(ranks))


LEAST_NS: Final = 100_000
MOST_NS: Final = 1_000_000
"""Bounds of a calibrated cut-off. Below: handing over to gloo was seen to take 20 to 195 us. Above: a
call that blocks waits for peers or for a transfer, and these are to be seen."""
TIMES: Final = 5
"""Cut-off over the 99th percentile of the calls that are measured. They are cheaper than a run's, which pass the
dispatcher and concern several ranks: where 0.2 ms was found to lie above a run's calls, theirs is about 40 us."""
CALLS: Final = 1_000
FEWEST_CALLS: Final = 200
LIMIT_S: Final = 0.03
LONGEST_S: Final = 0.2
"""For the fewest calls, on a host so slow or loaded that the default would be too short for it."""


def stall_cutoff(asked_us: float | None, device: torch.device, mode: InstrumentMode) -> StallCutoff | None:
    """Return the cut-off of this process; None where no call on the host can stall what computes (an accelerator), or
    where nothing is looked at.

    Args:
        asked_us: as configured; None: measured.
    """
    if device.type != "cpu" or mode == "off":
        return None
    if asked_us is not None:
        return StallCutoff(round(asked_us * 1000), "configured")
    try:
        return cutoff_from(hand_over_ns())
    except (RuntimeError, OSError, AttributeError) as error:  # no gloo here, or no network interface for it
        return StallCutoff(STALL_CUTOFF_NS, "default", problem=f"not measured: {error}".splitlines()[0])


def hand_over_ns() -> list[int]:
    """Return the durations of calls that only hand a collective over to gloo.

    Raises:
        RuntimeError, OSError, AttributeError: there is no gloo in this torch, or it finds no network interface.
    """
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    tensor = torch.zeros(256)
    taken: list[int] = []
    until_ns, last_ns = (time.perf_counter_ns() + round(limit_s * 1e9) for limit_s in (LIMIT_S, LONGEST_S))
    while len(taken) < CALLS and (now_ns := time.perf_counter_ns()) < last_ns:
        if now_ns > until_ns and len(taken) >= FEWEST_CALLS:
            break
        begin_ns = time.perf_counter_ns()
        work = group.allreduce([tensor])
        taken.append(time.perf_counter_ns() - begin_ns)
        work.wait()
    return taken


def cutoff_from(taken_ns: Sequence[int]) -> StallCutoff:
    """Return the cut-off from durations of calls; the default where they are too few for a 99th percentile."""
    if len(taken_ns) < FEWEST_CALLS:
        problem = f"only {len(taken_ns)} calls in {LONGEST_S * 1000:g} ms, {FEWEST_CALLS} are needed"
        return StallCutoff(STALL_CUTOFF_NS, "default", problem=problem)
    high_ns = sorted(taken_ns)[len(taken_ns) * 99 // 100]
    return StallCutoff(min(max(TIMES * high_ns, LEAST_NS), MOST_NS), "calibrated", high_ns)


def slowest_of_host(own: StallCutoff | None, host: str, facts: Sequence[Mapping[str, Any]]) -> StallCutoff | None:
    """Return the largest cut-off among the ranks of a host, which all of them use: it is a property of the host.

    Args:
        facts: of every rank, each with `host` and `stall_cutoff` (JSON types).
    """
    if own is None:
        return None
    of_host = [
        StallCutoff(**rank_facts["stall_cutoff"])
        for rank_facts in facts
        if rank_facts["host"] == host and rank_facts["stall_cutoff"]
    ]
    return max([own, *of_host], key=lambda cutoff: (cutoff.cutoff_ns, cutoff.hand_over_ns or 0))
