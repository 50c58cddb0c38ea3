"""`workload=copy_overlap`: matrix multiplications beside copies, alone and together, on one accelerator.

    measured(settings, device) -> one `SizeResult` a size: bandwidth of each way to copy, slow-down of the computation

A kernel that copies takes compute units from the multiplications, a copy engine only memory bandwidth; which of them
serves a copy call is the driver's choice. Must not share a rule with the instrument: it times whole batches of work
with events of its own, and may wait for the device.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import msgspec
import torch

from aorta.config.groups.microbenchmarks import COPIES_NEED_DEVICE
from aorta.config.resolve import Resolved
from aorta.config.schema import CopyOverlap
from aorta.distributed import cuda
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology, read_topology
from aorta.errors import ConfigError
from aorta.records.files import write_whole
from aorta.records.run_files import COPY_OVERLAP_FILE
from aorta.runner.rank_process import run_rank
from aorta.runner.recorded_run import untrained_run
from aorta.terminal_style import table

_log = logging.getLogger(__name__)
VERSION: Final = 1
MOST_COPIES: Final = 1000
"""In one measurement, however short they are; more would measure how fast the host launches them."""
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CYCLES_PER_S: Final = 2e9
"""At most, of a device's clock."""
LONGEST_HELD_UP_S: Final = 1.0
"""A full launch queue holds the host up for as long: more would not help, and grow without end."""
HELD_UP: Final = 2.0
"""Times as long as the host took to launch a measurement's work, the device is kept busy before the next one."""
Work = Callable[[], object]


@dataclass(frozen=True)
class WayResult:
    """One way to copy, medians. `by`: what was asked for, a `kernel` that copies or a copy call (`memcpy`), which the
    driver may give to a copy engine or to a kernel of its own; bandwidths in GB = 1e9 bytes a second, each byte counted
    once; `together`: beside the multiplications, as long as these run or a copy longer. `compute_slowdown`: their time
    together / alone - 1; `overlap_efficiency`: (Tc + Tm - T) / min(Tc, Tm).
    """

    way: str
    by: str
    copies: int
    alone_gb_per_s: float
    together_gb_per_s: float
    compute_alone_ms: float
    compute_together_ms: float
    together_ms: float
    compute_slowdown: float
    overlap_efficiency: float


@dataclass(frozen=True)
class SizeResult:
    """All ways for copies of one size."""

    size_bytes: int
    ways: list[WayResult]


def run_copy_overlap(resolved: Resolved) -> int:
    """Measure, print the table, write `copy_overlap.json`; returns the exit code, and raises as `run_rank` does.

    Raises:
        ConfigError: several processes, which would measure each other, or no accelerator.
    """
    if (size := read_topology().world_size) > 1:
        raise ConfigError(
            f"workload=copy_overlap measures one device, and {size} processes would disturb each other; start it with: "
            "python train.py workload=copy_overlap"
        )
    return run_rank(resolved, _run, leave_together=False)


def _run(resolved: Resolved, topology: Topology, device: torch.device, peers: Peers) -> signal.Signals | None:
    config = resolved.config
    assert isinstance(config.workload, CopyOverlap)  # the caller checked it
    if device.type == "cpu":
        raise ConfigError(f"this machine has no accelerator that torch sees: {COPIES_NEED_DEVICE}")
    with untrained_run(resolved, topology, device, peers, None, {}) as (site, clocks, facts):
        results = measured(config.workload, device)
        clocks.at_end()
        document = {
            "version": VERSION,
            "run_id": site.folder.run_id,
            "device": facts[0],
            "settings": resolved.plain["workload"],
            "sizes": [asdict(one) for one in results],
        }
        path = site.folder.path / COPY_OVERLAP_FILE
        write_whole(path, msgspec.json.format(msgspec.json.encode(document)) + b"\n")
        sys.stdout.write("\n".join(result_lines(results)) + "\n")
        sys.stdout.flush()
        _log.info("written: %s", path)
    return None


def measured(settings: CopyOverlap, device: torch.device) -> list[SizeResult]:
    """Return all sizes, one after another. Waits for the device after every measurement."""
    dtype = _DTYPES[settings.dtype.name]
    left, right, product = (
        torch.ones(settings.matrix_size, settings.matrix_size, device=device, dtype=dtype) for _ in range(3)
    )

    def compute() -> None:
        for _ in range(settings.multiplications):
            torch.mm(left, right, out=product)

    bench = _TwoStreams(device, compute, settings.repeats)
    alone_ms = bench.alone(compute)
    return [
        SizeResult(size, [_measured(bench, alone_ms, name, by, copy, size) for name, by, copy in ways(size, device)])
        for size in settings.sizes_bytes
    ]


def ways(size_bytes: int, device: torch.device) -> list[tuple[str, str, Work]]:
    """Return the name, what is asked to copy (`WayResult.by`), and one copy, for each way that this machine has."""
    elements = size_bytes // 4
    source, target = (torch.ones(elements, device=device) for _ in range(2))
    host = torch.ones(elements, pin_memory=True)
    found: list[tuple[str, str, Work]] = [
        ("d2d", "kernel", lambda: torch.mul(source, 1.0, out=target)),
        ("d2d", "memcpy", lambda: target.copy_(source, non_blocking=True)),
        ("h2d", "memcpy", lambda: target.copy_(host, non_blocking=True)),
        ("d2h", "memcpy", lambda: host.copy_(source, non_blocking=True)),
    ]
    if torch.accelerator.device_count() > 1:
        peer = torch.device(
            device.type, (torch.accelerator.current_device_index() + 1) % torch.accelerator.device_count()
        )
        away = torch.ones(elements, device=peer)
        found.append(("p2p", "memcpy", lambda: away.copy_(source, non_blocking=True)))
    return found


class _TwoStreams:
    """Times work on two streams of one device, in milliseconds; the median of some repeats, after one to warm up, which
    also tells how long the host takes to launch it.
    """

    def __init__(self, device: torch.device, compute: Work, repeats: int) -> None:
        self._device, self._compute, self._repeats = device, compute, repeats
        self._main, self._side = torch.accelerator.current_stream(device), torch.Stream(device)
        self._issued_s = 0.0

    def alone(self, work: Work) -> float:
        """Return the length of `work` by itself."""
        return self._median(lambda: (self._timed([(self._side, work)])[0],))[0]

    def together(self, copies: Work) -> tuple[float, float, float]:
        """Return the lengths of the computation, of the copies beside it, and of both."""
        found = self._median(lambda: self._timed([(self._side, copies), (self._main, self._compute)]))
        return found[1], found[0], found[2]

    def _median(self, measure: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        measure()
        return tuple(median(column) for column in zip(*(measure() for _ in range(self._repeats)), strict=True))

    def _timed(self, work: Sequence[tuple[torch.Stream, Work]]) -> tuple[float, ...]:
        """Return the length of each, from one event before all of them, and of all."""
        start, ends = self._event(), [self._event() for _ in work]
        torch.accelerator.synchronize(self._device)
        if self._device.type == cuda.TYPE:  # all is queued before the first of it runs, as fast as the host may launch
            cuda.spin(math.ceil(min(HELD_UP * self._issued_s, LONGEST_HELD_UP_S) * CYCLES_PER_S))
        begun_s = time.perf_counter()
        start.record(self._main)
        for (stream, run), end in zip(work, ends, strict=True):
            start.wait(stream)
            with stream:
                run()
            end.record(stream)
        self._issued_s = time.perf_counter() - begun_s
        torch.accelerator.synchronize(self._device)
        lengths = [float(start.elapsed_time(end)) for end in ends]
        return *lengths, max(lengths)

    def _event(self) -> Any:
        return torch.Event(self._device, enable_timing=True)


def _measured(bench: _TwoStreams, compute_ms: float, way: str, by: str, copy: Work, size_bytes: int) -> WayResult:
    """Measure copies for about as long as the multiplications take."""
    count = max(1, min(MOST_COPIES, math.ceil(compute_ms / max(bench.alone(copy), 1e-6))))

    def copies() -> None:
        for _ in range(count):
            copy()

    alone_ms = bench.alone(copies)
    beside_ms, copying_ms, both_ms = bench.together(copies)
    moved = count * size_bytes / 1e6  # over milliseconds: GB a second
    return WayResult(
        way=way,
        by=by,
        copies=count,
        alone_gb_per_s=moved / alone_ms,
        together_gb_per_s=moved / copying_ms,
        compute_alone_ms=compute_ms,
        compute_together_ms=beside_ms,
        together_ms=both_ms,
        compute_slowdown=beside_ms / compute_ms - 1,
        overlap_efficiency=(compute_ms + alone_ms - both_ms) / min(compute_ms, alone_ms),
    )


def result_lines(results: Sequence[SizeResult]) -> list[str]:
    """Return the table as lines for a terminal."""
    heads = ("bytes", "copy", "by", "copies", "alone GB/s", "beside GB/s", "compute ms", "beside ms", "slow-down")
    rows = [
        (
            f"{size.size_bytes:,}",
            one.way,
            one.by,
            str(one.copies),
            f"{one.alone_gb_per_s:.2f}",
            f"{one.together_gb_per_s:.2f}",
            f"{one.compute_alone_ms:.3f}",
            f"{one.compute_together_ms:.3f}",
            f"{one.compute_slowdown:+.1%}",
        )
        for size in results
        for one in size.ways
    ]
    return table([heads, *rows], right=range(len(heads)))
