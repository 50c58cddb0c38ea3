"""Puts kernels onto streams of a device, reads when each ran, and makes numbers of it: how many ran at once, which
pairs never did, where the knee is.

Everything waits behind a gate, a kernel that computes until the host has issued all of it: every stream is then ready
at the same moment, and how fast the host issues is not what is measured. Times come from
`aorta.instrument.event_clock`. Must not know patterns by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from aorta.config.schema import Streams
from aorta.instrument.event_clock import DeviceClock
from aorta.streams.patterns import Kernel, waits
from aorta.timeline.intervals import Interval, measure, merge

RESOLUTION_NS = 1_000
"""Events tell times to about 0.5 us (CUDA: cudaEventElapsedTime), so two of them differ by up to twice that for
nothing: kernels that share no more than this ran one after the other.
"""


def concurrency(kernels: Sequence[Interval]) -> float:
    """Return the mean number of kernels at once while any runs: sum of lengths over length of the union; 0: none."""
    union_ns = measure(merge(kernels))
    return sum(end - begin for begin, end in kernels) / union_ns if union_ns else 0.0


def most_at_once(kernels: Iterable[Interval]) -> int:
    """Return the most kernels that ran at once for longer than the events resolve."""
    edges: list[tuple[int, int]] = []
    for begin, end in kernels:
        edges += [(begin, 1), (max(end - RESOLUTION_NS, begin + 1), -1)]
    running = most = 0
    for _, change in sorted(edges):  # at one moment ends come first
        running += change
        most = max(most, running)
    return most


def ran_together(one: Interval, other: Interval) -> bool:
    """Return whether two kernels ran at once for longer than the events resolve."""
    return min(one[1], other[1]) - max(one[0], other[0]) > RESOLUTION_NS


def elapsed_ns(kernels: Sequence[Interval]) -> int:
    """Return the time from the first begin to the last end."""
    return max(end for _, end in kernels) - min(begin for begin, _ in kernels)


def knee(gains: Mapping[int, float], tolerance: float) -> int:
    """Return the least number of streams that no larger one beats by more than `tolerance` of its throughput.

    With q queues and equal kernels the gain is q at every multiple of q and lower between (one queue has one stream
    more than the others), so "the first number whose successor is no better" would stop at any dip; and the place of
    the highest gain is decided by noise wherever the curve is flat.

    Args:
        gains: throughput against one stream, by number of streams; at least one.
    """
    ordered = sorted(gains)
    return next(n for n in ordered if all(gains[m] <= gains[n] * (1 + tolerance) for m in ordered if m > n))


_CALIBRATED_CYCLES = 2_000_000
"""About a millisecond on devices of 1 to 2 GHz: long beside what an event resolves."""
_FIRST_GATE_NS = 200_000
_GATE_MARGIN = 2.0
"""The gate's length over the time that issuing as many kernels took before."""
_ATTEMPTS = 4


@dataclass(frozen=True)
class Timed:
    """When kernels ran, in their order of issue, in nanoseconds of the host's clock, and whether the gate held until
    all were issued.
    """

    kernels: list[Interval]
    issued_in_time: bool


_LONGEST_GATE_NS = 1e9
"""A full launch queue holds the host up for as long as the gate: a longer gate would not help, and grow without end."""


class Issuer:
    """Issues kernels to one device, the current one.

    Args:
        settings: lengths and sizes of kernels.
        with_peers: whether there are other ranks to reduce with.
    """

    def __init__(self, device: torch.device, settings: Streams, *, with_peers: bool) -> None:
        self._device, self._unit_ns = device, settings.kernel_us * 1e3
        self._module = torch.get_device_module(device.type)
        self._clock = DeviceClock(device)
        side, items = settings.matrix_size, max(settings.transfer_bytes // 4, 1)
        self._left, self._right = (torch.ones(side, side, device=device) for _ in range(2))
        self._host = torch.ones(items, pin_memory=True)
        self._reduced = torch.ones(items, device=device) if with_peers else None
        self._products: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._issue_ns_a_kernel = 0.0
        self._cycles_a_ns = self._calibrated()

    def run(self, kernels: Sequence[Kernel], stream_of: Callable[[Kernel], torch.Stream]) -> Timed:
        """Issue all kernels, wait for them, and read their times. Where the host was too slow for the gate it is done
        again with a longer one; not with collectives, which all ranks must issue equally often.
        """
        once = any(kernel.work == "allreduce" for kernel in kernels)
        streams = [stream_of(kernel) for kernel in kernels]
        margin = _GATE_MARGIN * (4 if once else 1)
        self._prepare(kernels, streams)
        for _ in range(1 if once else _ATTEMPTS):
            timed = self._attempt(kernels, streams, margin)
            if timed.issued_in_time:
                break
            margin *= 4
        return timed

    def _attempt(self, kernels: Sequence[Kernel], streams: Sequence[torch.Stream], margin: float) -> Timed:
        clock = self._clock
        clock.new_epoch()
        self._spin(min(_FIRST_GATE_NS + margin * self._issue_ns_a_kernel * len(kernels), _LONGEST_GATE_NS))
        gate = clock.mark()
        opened = self._event()
        for stream in dict.fromkeys(streams):
            stream.wait_event(opened)
        awaited = dict.fromkeys(waits(list(kernels)))
        ended: dict[int, torch.Event] = {}
        marks = []
        begun_ns = time.perf_counter_ns()
        for place, (kernel, stream) in enumerate(zip(kernels, streams, strict=True)):
            with stream:
                for before in kernel.after:
                    if streams[before] != stream:
                        stream.wait_event(ended[before])
                begin = clock.mark()
                self._work(kernel)
                marks.append((begin, clock.mark()))
                if place in awaited:
                    ended[place] = self._event()
        issued_ns = time.perf_counter_ns()
        clock.drain()
        self._issue_ns_a_kernel = max(self._issue_ns_a_kernel, (issued_ns - begun_ns) / len(kernels))
        gate_ns = self._read(gate)
        intervals = [(self._read(begin), self._read(end)) for begin, end in marks]
        for mark in (gate, *(mark for pair in marks for mark in pair)):
            clock.release(mark)
        return Timed(intervals, issued_in_time=gate_ns >= issued_ns)

    def _prepare(self, kernels: Sequence[Kernel], streams: Sequence[torch.Stream]) -> None:
        """Allocate outputs, one a stream: no kernel waits for the allocator, or writes where another does."""
        for kernel, stream in zip(kernels, streams, strict=True):
            if kernel.work == "gemm" and stream.stream_id not in self._products:
                self._products[stream.stream_id] = torch.empty_like(self._left)
            if kernel.work == "copy" and stream.stream_id not in self._copies:
                self._copies[stream.stream_id] = torch.empty_like(self._host, device=self._device)
        torch.accelerator.synchronize(self._device)

    def _work(self, kernel: Kernel) -> None:
        stream_id = torch.accelerator.current_stream(self._device).stream_id
        match kernel.work:
            case "spin":
                self._spin(kernel.length * self._unit_ns)
            case "gemm":
                torch.mm(self._left, self._right, out=self._products[stream_id])
            case "copy":
                self._copies[stream_id].copy_(self._host, non_blocking=True)
            case "allreduce":
                assert self._reduced is not None  # patterns that need ranks are left out without
                dist.all_reduce(self._reduced, dist.ReduceOp.AVG)

    def _spin(self, length_ns: float) -> None:
        # One thread of one block, so that kernels of many streams fit on the device at once and queues are the limit.
        self._module._sleep(max(round(length_ns * self._cycles_a_ns), 1))

    def _calibrated(self) -> float:
        """Return the cycles that the kernel counts in a nanosecond."""
        self._cycles_a_ns = 1.0
        for _ in range(2):  # the first loads the kernel, and wakes the device's clock
            self._clock.new_epoch()
            begin = self._clock.mark()
            self._spin(_CALIBRATED_CYCLES)
            end = self._clock.mark()
            self._clock.drain()
        return _CALIBRATED_CYCLES / max(self._read(end) - self._read(begin), 1)

    def _event(self) -> torch.Event:
        event = torch.Event(device=self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _read(self, mark: object) -> int:
        at_ns = self._clock.read_ns(mark)
        assert at_ns is not None  # the device was drained
        return at_ns
