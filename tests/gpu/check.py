"""One table about this machine's devices: `scripts/gpu_check.sh`, which starts a process a device.

For the full-size workload (`experiment=full`) under ddp and fsdp, on every rank: the overlap ratio and the duration of
each collective from telemetry beside those of the profiler's kernels on the same steps (docs/measuring.md, K2); what
an end event recorded before the wait would have said (W1); what the instrumentation costs; that no step waits for the
device (R4); and races and lifetimes (K7). Rank 0 prints. On one device NCCL copies instead of running kernels, and the
table says where there was nothing to compare.

Exit 0 when every check passed, 1 when one failed or there is no device.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from aorta.instrument.clock import DeviceClock
from aorta.instrument.device_collectives import DeviceTap
from aorta.instrument.issued import Group, Issued
from aorta.instrument.operators import OPERATORS
from aorta.instrument.seam import Seam
from aorta.instrument.streams import DeviceStreams
from aorta.launch.process_group import process_group
from aorta.launch.topology import Topology, read_topology
from aorta.telemetry.schema import Step
from tests.gpu import races
from tests.gpu.device import default_group
from tests.gpu.kernels import matched, pooled_ratio, windows
from tests.gpu.table import Row, duration_row, failed, ratio_row, render
from tests.loop import Loop

NO_DEVICE = "gpu_check: torch sees no CUDA or HIP device on this machine, so nothing was checked"
WARM_UP, PROFILED, BLOCK, PAIRS = 10, 6, 20, 10
STRATEGIES = ("ddp", "fsdp")


class Case:
    """One strategy on one rank."""

    def __init__(self, strategy: str, topology: Topology, device: torch.device, words: list[str]) -> None:
        self.name, self.topology, self.device = strategy, topology, device
        self.lines: list[Step] = []
        chosen = ("experiment=full", "training.device=cuda", "instrument.mode=dedicated", *words)
        self.loop = Loop((*chosen, f"parallel={strategy}"), topology, device, self.lines.append)
        for _ in range(WARM_UP):
            self.loop.step()

    def rows(self) -> list[Row]:
        """Everything there is to say; the order matters, the profiler slows what comes with it."""
        rows = [self._no_synchronisation(), self._cost()]
        self.lines.clear()
        early = _EarlyEnds(self.loop)
        trace = self._profiled()
        self.loop.finish()
        own = self.lines[-PROFILED:]
        device = self.device.index or 0
        seen = windows(trace, [(line.t_start_ns, line.t_end_ns) for line in own], device)
        durations = [[_length_ns(row) for row in sorted(line.collectives, key=_start_ns)] for line in own]
        hidden, comm = (_total(own, name) for name in ("compute_comm_ms", "comm_ms"))
        complete = sum(line.coverage.complete for line in own)
        return [
            ratio_row(self.name, hidden / comm if hidden is not None and comm else None, pooled_ratio(seen)),
            duration_row(self.name, matched(durations, seen)),
            Row(self.name, "coverage", f"{complete} of {len(own)} steps", "all", complete == len(own)),
            early.row(self.name, own),
            Row(self.name, "host waits in the trace", str(sum(w.host_waits for w in seen)), "for information", None),
            *rows,
        ]

    def _no_synchronisation(self) -> Row:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(PROFILED):
                self.loop.step()
            found = "none"
        except RuntimeError as error:
            found = str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return Row(self.name, f"synchronisations in {PROFILED} steps", found, "none", found == "none")

    def _cost(self) -> Row:
        pairs, same = [], []
        for turn in range(PAIRS):
            arms = ("off", "on", "again") if turn % 2 == 0 else ("again", "on", "off")
            block = {arm: self._block_ms(on=arm == "on") for arm in arms}
            pairs.append(block["on"] / block["off"])
            same.append(block["again"] / block["off"])
        found = f"{median(pairs):.4f} (off again: {median(same):.4f}), {block['off']:.1f} ms a step"
        return Row(self.name, "step time, instrumented / off", found, "<= 1.01", median(pairs) <= 1.01)

    def _block_ms(self, *, on: bool) -> float:
        with nullcontext() if on else self.loop.instrument.paused():
            self.loop.step()
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(BLOCK):
                self.loop.step()
            torch.cuda.synchronize()
        taken = torch.tensor([(time.perf_counter_ns() - begin) / 1e6 / BLOCK])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    def _profiled(self) -> dict[str, Any]:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(PROFILED):
                self.loop.step()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            trace: dict[str, Any] = json.loads(path.read_text())
        return trace


class _EarlyEnds:
    """An end event recorded right after the issue, before any wait: what W1 measures. Beside the right one."""

    def __init__(self, loop: Loop) -> None:
        instrument = loop.instrument
        tap, self._clock = instrument._tap, instrument.clock
        assert isinstance(tap, DeviceTap)
        self._marks: dict[tuple[str, int], Any] = {}
        right = tap._ended_on

        def noted(side: Any, issued: Issued, work: Any, args: tuple[Any, ...]) -> Any:
            self._marks[issued.group, issued.seq] = self._clock.mark()
            return right(side, issued, work, args)

        tap._ended_on = noted  # type: ignore[method-assign]

    def row(self, case: str, lines: list[Step]) -> Row:
        """Median duration as W1 would have it, and as it was."""
        wrong, right = [], []
        for line in lines:
            for row in line.collectives:
                mark = self._marks.get((row.group, row.seq))
                end_ns = None if mark is None else self._clock.read_ns(mark)
                if end_ns is not None and row.start_ns is not None:
                    wrong.append(end_ns - line.start_mono_ns - row.start_ns)
                    right.append(_length_ns(row))
        found = f"{median(wrong) / 1e3:.1f} us instead of {median(right) / 1e3:.1f} us" if wrong else "no collective"
        return Row(case, "end before the wait (W1) would say", found, "for information", None)


def race_rows(device: torch.device) -> list[Row]:
    """K7 through a dedicated tap."""
    streams, groups = DeviceStreams(device), dict[str, Group]()
    tap = DeviceTap(DeviceClock(), groups, lambda _: None, lambda _begin, _end: None, streams, dedicated=True)
    seam = Seam(OPERATORS, device, tap)

    def delay() -> None:
        with torch.cuda.stream(streams.of_group(default_group())):
            torch.cuda._sleep(races.SLEEP_CYCLES)

    checks: dict[str, Callable[[races.Kind], bool]] = {
        "slow producer": lambda kind: races.slow_producer(kind, device),
        "late consumer": lambda kind: races.late_consumer(kind, device, delay),
        "memory pressure": lambda kind: races.memory_pressure(kind, device, delay),
    }
    try:
        found = {f"{check}, {kind}": checks[check](races.KINDS[kind]) for check in checks for kind in races.KINDS}
    finally:
        torch.cuda.synchronize()
        seam.close()
    return [Row("race", name, "right" if good else "WRONG VALUES", "right", good) for name, good in found.items()]


def main(words: list[str]) -> int:
    """Check; rank 0 prints the table of all ranks' findings."""
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)  # noqa: T201
        return 1
    topology = read_topology()
    device = torch.device("cuda", topology.local_rank)
    torch.cuda.set_device(device)
    with process_group(topology, device, 300):
        rows = race_rows(device)
        for strategy in STRATEGIES:
            rows += Case(strategy, topology, device, words).rows()
        everybody: list[list[Row]] = [[] for _ in range(topology.world_size)]
        dist.all_gather_object(everybody, rows)
    bad = any(map(failed, everybody))
    if topology.rank == 0:
        name = torch.cuda.get_device_name(device)
        print(f"{topology.world_size} x {name}, torch {torch.__version__}")  # noqa: T201
        for rank, found in enumerate(everybody):
            if rank == 0 or failed(found):
                print(f"rank {rank}\n{render(found)}")  # noqa: T201
    return int(bad)


def _start_ns(row: Any) -> int:
    return int(row.start_ns or 0)


def _length_ns(row: Any) -> int:
    return int((row.end_ns or 0) - (row.start_ns or 0))


def _total(lines: list[Step], name: str) -> float | None:
    values = [line.overlap[name] for line in lines]
    return None if None in values else sum(value for value in values if value is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
