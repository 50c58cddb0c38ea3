"""What the trace of a CPU says by plain loops over its JSON, for K2; uses nothing of the record or of AORTA's hooks.

`Rows` and `windows` say of each step what the record has to say, as `aorta.gpu_check.check_table.KernelWindow`.
`c10d::*` rows on the training thread say when each collective was issued, `gloo:*` rows on gloo's worker threads when
it ran; both come in order of issue, one for one. A collective's start is the later of its issue and the end of the one
before it on its link (docs/dev/measuring.md, section 1), and a link here is a worker thread. The `gloo:*` row itself
begins later, by the time the worker took to wake up: 1 to 10 ms where others use the cores. A reduce-scatter ends for
its caller when gloo has copied the result out, inside of the caller's `wait()` (R6): with the `aten::copy_` row that
comes next on the training thread. Computation is operators and autograd nodes on the training thread, and marked
ranges, less the time inside of collectives, of FSDP's own work (its hooks run inside of autograd nodes) and of an
optimizer. In the call that issues an asynchronous collective the profiler cannot tell the host's own work, which is
computation to the record, from standing blocked inside of gloo, which is not; so there is a lower and an upper answer,
which differ by milliseconds where the machine is busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aorta.gpu_check.check_table import Interval, KernelWindow, span
from tests.pair_algebra import clip, subtract


def union(spans: Sequence[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same time; a plain loop, so that `aorta.timeline` is not judged by itself."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


NOT_COMPUTING = ("c10d::", "_c10d_functional::", "fsdp::", "FSDP::", "Optimizer.")
ASYNCHRONOUS = "c10d::allreduce_"
"""As DDP issues it; FSDP issues its all-gathers inside of `FSDP::*` rows, and waits for its reduce-scatters."""


class Rows:
    """The rows of one rank's trace.

    Args:
        trace: as `json.load` reads it. mark: name of the `record_function` ranges that count as computation.
    """

    def __init__(self, trace: dict[str, Any], mark: str) -> None:
        base_ns = int(trace.get("baseTimeNanoseconds", 0))
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        rows = [(*span(event, base_ns), event) for event in events]
        training = next(e["tid"] for e in events if e["name"].startswith("c10d::"))
        mine = sorted((a, b, e["name"], e.get("cat")) for a, b, e in rows if e["tid"] == training)
        calls = [(a, b, name) for a, b, name, _ in mine if name.startswith("c10d::")]
        copies = [(a, b) for a, b, name, _ in mine if name == "aten::copy_"]
        worked = sorted((a, b, e["tid"]) for a, b, e in rows if e["name"].startswith("gloo:"))
        self.issues = [(a, b) for a, b, _ in calls]
        self.spans: list[Interval] = []
        free_at: dict[int, int] = {}
        for (issue, _, name), (start, end, thread) in zip(calls, worked, strict=True):
            out = next(b for a, b in copies if a >= end) if "reduce_scatter" in name else end
            self.spans.append((min(max(issue, free_at.get(thread, 0)), start), out))
            free_at[thread] = end
        busy = [(a, b) for a, b, name, category in mine if name == mark or category == "cpu_op"]
        other = [(a, b, name) for a, b, name, _ in mine if name.startswith(NOT_COMPUTING)]
        blocked = [(a, b) for a, b, name in other if not name.startswith(ASYNCHRONOUS)]
        self.compute = subtract(union(busy), union([(a, b) for a, b, _ in other]))
        self.compute_and_issuing = subtract(union(busy), union(blocked))

    def issued_in(self, step: Interval) -> list[Interval]:
        """The calls that issued the collectives of a step, in order."""
        return [issue for issue in self.issues if step[0] <= issue[0] < step[1]]


def windows(rows: Rows, steps: Sequence[Interval], compute: Sequence[Interval]) -> list[KernelWindow]:
    """What the profiler saw in each of these steps, `[start, end)` in nanoseconds of the Unix epoch; `compute` is one
    of the two answers of `rows`.
    """
    return [
        KernelWindow(
            [span for issue, span in zip(rows.issues, rows.spans, strict=True) if low <= issue[0] < high],
            clip(compute, (low, high)),
            0,
        )
        for low, high in steps
    ]
