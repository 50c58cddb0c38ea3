"""The device's own timeline as the rows that torch's profiler writes of a card: kernels, copies, collectives.

A process that has the device has torch.profiler with it (`install`): `export_chrome_trace` writes torch's own file with
these rows in it, as a build with CUPTI does. Times are those of the host's clock, as AORTA's record has them.

torch's own rows of the host are on another clock than the virtual host: they are left out, and steps
(`ProfilerStep#N`) stand where that was. What a collective moved is not told.

Must not: use anything of `aorta`, nor ask the device more than its timeline.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.simulated import device as simulated

KERNELS = {
    "allreduce": "AllReduce_Sum_f32_RING_LL",
    "reducescatter": "ReduceScatter_Sum_f32_RING_LL",
    "allgather": "AllGather_RING_LL",
    "broadcast": "Broadcast_RING_LL",
    "reduce": "Reduce_Sum_f32_RING_LL",
    "barrier": "AllReduce_Sum_f32_RING_LL",
}
"""NCCL's names; what is not here it makes of messages, in one kernel."""
MESSAGES = "SendRecv"
COPIES = {
    "memcpy_h2d": "Memcpy HtoD (Pinned -> Device)",
    "memcpy_d2h": "Memcpy DtoH (Device -> Pinned)",
    "aten::copy_": "Memcpy DtoD (Device -> Device)",
}


class Step(NamedTuple):
    """A step of the profiler, by the host's clock."""

    number: int
    start_ns: int
    end_ns: int


def kernels(rows: Sequence[simulated.Row], offset_ns: int) -> list[dict[str, Any]]:
    """The rows as Kineto's events.

    Args:
        offset_ns: from the host's clock to that of the trace.
    """
    return [_event(row, number, offset_ns) for number, row in enumerate(rows, start=1)]


def _event(row: simulated.Row, number: int, offset_ns: int) -> dict[str, Any]:
    category, length_ns = "kernel", row.end_ns - row.start_ns
    moved = {"bytes": row.bytes, "memory bandwidth (GB/s)": row.bytes / max(length_ns, 1)}
    launched = {"queued": 0, "grid": [1, 1, 1], "block": [1, 1, 1], "est. achieved occupancy %": 0}
    if row.kind == "copy":
        category, name = "gpu_memcpy", COPIES.get(row.name, COPIES["aten::copy_"])
    elif row.kind == "memset":
        category, name = "gpu_memset", "Memset (Device)"
    elif row.kind == "sleep":
        name = "spin_kernel(long)"
    elif row.kind == "collective":
        name = KERNELS.get(row.name.removesuffix("_coalesced"), MESSAGES)
        name = f"ncclDevKernel_{name}(ncclDevKernelArgsStorage<4096ul>)"
    else:
        name = f"void at::native::{row.name.removeprefix('aten::')}_kernel()"
    # CUPTI's number of a stream: the default one is 7 there, and the others follow in no order that torch knows.
    stream = 7 if row.stream == 0 else 12 + row.stream
    arguments = {"device": row.device, "context": 1, "stream": stream, "correlation": number}
    arguments |= launched if category == "kernel" else moved
    return _x(category, name, (row.device, stream), row.start_ns + offset_ns, length_ns, arguments)


def _x(
    category: str, name: str, place: tuple[int, int], start_ns: int, length_ns: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    """A complete event; below 2^43 us a float has the nanosecond."""
    facts = {"ph": "X", "cat": category, "name": name, "pid": place[0], "tid": place[1]}
    return facts | {"ts": start_ns / 1000, "dur": length_ns / 1000, "args": arguments}


def written(
    trace: dict[str, Any], rows: Sequence[simulated.Row], steps: Sequence[Step], base_ns: int
) -> dict[str, Any]:
    """torch's own trace with the device's rows in it. What torch writes lies at most three months before its rows, and
    the virtual host may live in another year: the trace begins with the host's clock, at `base_ns` of the Unix epoch's.
    """
    events = trace["traceEvents"]
    pid = next((event["pid"] for event in events if event.get("cat") == "cpu_op"), 0)
    kept = [event for event in events if event.get("ph") == "M"]
    for step in steps:
        name, length_ns = f"ProfilerStep#{step.number}", step.end_ns - step.start_ns
        kept.append(_x("user_annotation", name, (pid, pid), step.start_ns, length_ns, {"External id": 0}))
    devices = [{"id": index, "name": "Simulated"} for index in sorted({row.device for row in rows})]
    own = {"deviceProperties": devices, "baseTimeNanoseconds": base_ns, "traceEvents": [*kept, *kernels(rows, 0)]}
    return trace | own


class DeviceEvent:
    """One row as `kineto_results.events()` has those of a card, with the names of torch's `_KinetoEvent`."""

    def __init__(self, event: dict[str, Any], start_ns: int, end_ns: int) -> None:
        self._event, self._start_ns, self._end_ns = event, start_ns, end_ns

    def name(self) -> str:
        return str(self._event["name"])

    def device_type(self) -> Any:
        from torch.autograd import DeviceType

        return DeviceType.CUDA

    def device_index(self) -> int:
        return int(self._event["pid"])

    def device_resource_id(self) -> int:
        """CUPTI's number of the stream: not torch's `stream_id`."""
        return int(self._event["tid"])

    def activity_type(self) -> str:
        return str(self._event["cat"])

    def start_ns(self) -> int:
        """Since the Unix epoch."""
        return self._start_ns

    def duration_ns(self) -> int:
        return self._end_ns - self._start_ns


class Results:
    """torch's results of one window with the device's rows behind its own; with those alone where only they were asked
    for.
    """

    def __init__(self, results: Any, rows: Sequence[DeviceEvent], *, host: bool) -> None:
        self._results, self._rows, self._host = results, rows, host

    def events(self) -> list[Any]:
        return [*(self._results.events() if self._host else []), *self._rows]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._results, name)


def install() -> None:
    """Give torch.profiler of this process the device. Once.

    `supported_activities()` then has CUDA. torch's own profiler, which has no CUPTI, records the host's side, and the
    device's rows are added to `kineto_results.events()` of whoever asks for CUDA. Traces have them in any case.
    `events()` and `key_averages()` stay without them.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, profiler

    kineto: Any = profiler._KinetoProfile
    make, begin, end, export = (getattr(kineto, name) for name in _REPLACED)
    step = profile.step
    host_only = profiler.supported_activities

    def supported_activities() -> set[ProfilerActivity]:
        return {*host_only(), ProfilerActivity.CUDA}

    def initialise(self: Any, *, activities: Any = None, **words: Any) -> None:
        asked = supported_activities() if activities is None else set(activities)
        self._simulated_asked = asked
        make(self, activities={ProfilerActivity.CPU}, **words)

    def start_trace(self: Any) -> None:
        torch.cuda.synchronize()
        self._simulated_steps, self._simulated_ns = [], (simulated.host_ns(), None)
        self._simulated_step_ns = simulated.host_ns()
        begin(self)

    def rows(self: Any) -> list[simulated.Row]:
        low, high = self._simulated_ns
        here = simulated.timeline(torch.cuda.current_device())
        return [row for row in here if low <= row.start_ns <= high]

    def stop_trace(self: Any) -> None:
        torch.cuda.synchronize()
        self._simulated_ns = (self._simulated_ns[0], simulated.host_ns())
        end(self)
        if ProfilerActivity.CUDA not in self._simulated_asked:
            return
        inner, offset_ns, own = self.profiler, unix_offset_ns(), rows(self)
        events = kernels(own, offset_ns)
        found = [
            DeviceEvent(event, row.start_ns + offset_ns, row.end_ns + offset_ns)
            for event, row in zip(events, own, strict=True)
        ]
        host, parse = inner.kineto_results, inner._parse_kineto_results
        inner._parse_kineto_results = lambda _results, **words: parse(host, **words)
        inner.kineto_results = Results(host, found, host=ProfilerActivity.CPU in self._simulated_asked)

    def next_step(self: Any) -> None:
        if hasattr(self, "_simulated_step_ns"):
            self._simulated_steps.append(Step(self.step_num, self._simulated_step_ns, simulated.host_ns()))
            self._simulated_step_ns = simulated.host_ns()
        step(self)

    def export_chrome_trace(self: Any, path: str, *words: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder, "trace.json")
            export(self, str(plain), *words)
            trace = json.loads(plain.read_text())
        text = json.dumps(written(trace, rows(self), self._simulated_steps, unix_offset_ns())).encode()
        Path(path).write_bytes(gzip.compress(text) if str(path).endswith(".gz") else text)

    replacing: Sequence[Callable[..., Any]] = (initialise, start_trace, stop_trace, export_chrome_trace)
    for name, function in zip(_REPLACED, replacing, strict=True):
        setattr(kineto, name, function)
    profile.step = next_step
    torch.profiler.supported_activities = profiler.supported_activities = supported_activities


def unix_offset_ns() -> int:
    """From the host's clock to the Unix epoch's."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)


_REPLACED = ("__init__", "start_trace", "stop_trace", "export_chrome_trace")
