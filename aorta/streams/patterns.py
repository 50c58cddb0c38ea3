"""The patterns of `workload=streams`: which kernels run on which stream, of which length, after which others; and how
they are put onto streams of a device, and read when each ran.

A pattern is one function from a number of streams to the kernels in their order of issue. Each stream runs what it is
given in that order; `after` adds waits for kernels of other streams:

    [Kernel(0), Kernel(1, after=(0,))]  # the second, on stream 1, waits for the first, on stream 0

A new pattern is a function and a line in `PATTERNS`. Everything waits behind a gate, a kernel that computes until the
host has issued all of it: every stream is then ready at the same moment, and how fast the host issues is not what is
measured. Times come from `aorta.instrument.event_clock`. `Issuer` must not know patterns by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from aorta.config.schema import Streams
from aorta.instrument.event_clock import DeviceClock
from aorta.timeline.arrays import Interval, interval_array, measure, merge

Work: TypeAlias = Literal["spin", "gemm", "copy", "allreduce"]
"""What a kernel does: one block that counts cycles, a matrix product, a copy from the host, an all-reduce."""


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        stream: on which it runs, from 0.
        after: places in the pattern of the kernels that must have ended before it begins.
        length: of a spin, in units of `workload.kernel_us`.
        work: what it does.
    """

    stream: int
    after: tuple[int, ...] = ()
    length: float = 1.0
    work: Work = "spin"


@dataclass(frozen=True)
class Pattern:
    """A pattern. `urgent` says which streams have high priority; `ranks` is the least number of ranks."""

    kernels: Callable[[int], list[Kernel]]
    says: str
    urgent: Callable[[int], bool] = lambda _stream: False
    ranks: int = 1


ROUNDS = 8
"""Kernels a stream in most patterns: filling and draining are then a small part of the whole."""


def _independent(streams: int) -> list[Kernel]:
    return [Kernel(stream) for _ in range(ROUNDS) for stream in range(streams)]


def _fan_in(streams: int) -> list[Kernel]:
    producers = _independent(streams)
    return [*producers, Kernel(0, after=tuple(range(len(producers) - streams, len(producers))))]


def _fan_out(streams: int) -> list[Kernel]:
    first = Kernel(0)
    return [first, *(Kernel(kernel.stream, after=(0,)) for kernel in _independent(streams))]


def _fork_join(streams: int) -> list[Kernel]:
    """Return kernels on all streams at once, then a short one that waits for all of them and begins the next round."""
    kernels: list[Kernel] = []
    for _ in range(ROUNDS):
        before = (len(kernels) - 1,) if kernels else ()
        first = len(kernels)
        kernels += [Kernel(stream, after=before) for stream in range(streams)]
        kernels.append(Kernel(0, after=tuple(range(first, len(kernels))), length=0.1))
    return kernels


def _ping_pong(streams: int) -> list[Kernel]:
    """Return kernels that alternate, each after the one before, between two streams; an odd last stream is alone."""
    pairs = (streams + 1) // 2

    def side(pair: int, turn: int) -> int:
        return min(2 * pair + turn % 2, streams - 1)

    return [
        Kernel(side(pair, turn), after=((turn - 1) * pairs + pair,) if turn else ())
        for turn in range(2 * ROUNDS)
        for pair in range(pairs)
    ]


def _pipeline(streams: int) -> list[Kernel]:
    """Return a pipeline in which stage s is stream s; a micro-batch goes to the next stage when the one before has
    finished it. With m micro-batches the ideal gain of s stages is m s / (m + s - 1): its bubble is (s - 1) / (m + s -
    1) of the time (GPipe, arXiv:1811.06965).
    """
    return [
        Kernel(stage, after=(batch * streams + stage - 1,) if stage else ())
        for batch in range(ROUNDS)
        for stage in range(streams)
    ]


def _moe_bursts(streams: int) -> list[Kernel]:
    """Return router, experts of uneven load on all streams and combination, layer by layer as in MoE models."""
    kernels: list[Kernel] = []
    for _ in range(ROUNDS // 2):
        router = len(kernels)
        kernels.append(Kernel(0, after=(router - 1,) if kernels else (), length=0.25))
        kernels += [Kernel(s, after=(router,), length=1.0 + 0.5 * (s % 3)) for s in range(streams)]
        kernels.append(Kernel(0, after=tuple(range(router + 1, len(kernels))), length=0.25))
    return kernels


def _allreduce_beside_gemm(streams: int) -> list[Kernel]:
    """Return kernels; the last stream reduces once per round of the others, as a bucket follows its layer."""
    kernels: list[Kernel] = []
    for _ in range(ROUNDS):
        layers = range(len(kernels), len(kernels) + max(streams - 1, 1))
        kernels += [Kernel(stream, work="gemm") for stream in range(len(layers))]
        kernels.append(Kernel(streams - 1, after=tuple(layers), work="allreduce"))
    return kernels


PATTERNS: Mapping[str, Pattern] = {
    "independent": Pattern(_independent, "nothing waits for anything, issued in turn"),
    "depth_first": Pattern(
        lambda streams: [Kernel(stream) for stream in range(streams) for _ in range(ROUNDS)],
        "the same, issued one stream after the other",
    ),
    "chained": Pattern(
        lambda streams: [Kernel(n % streams, after=(n - 1,) if n else ()) for n in range(ROUNDS * streams)],
        "every kernel waits for the one before, on the next stream",
    ),
    "fan_in": Pattern(_fan_in, "one kernel at the end waits for all streams"),
    "fan_out": Pattern(_fan_out, "all streams wait for one kernel at the beginning"),
    "fork_join": Pattern(_fork_join, "rounds on all streams, joined after each"),
    "ping_pong": Pattern(_ping_pong, "two streams by turns, one pair beside the other"),
    "pipeline": Pattern(_pipeline, "stages on streams, micro-batches through them"),
    "moe_bursts": Pattern(_moe_bursts, "router, uneven experts on all streams, combination"),
    "small_kernel_storm": Pattern(
        lambda streams: [Kernel(stream, length=0.1) for _ in range(2 * ROUNDS) for stream in range(streams)],
        "many kernels of a tenth of the length",
    ),
    "unbalanced": Pattern(
        lambda streams: [Kernel(s, length=1 + 3 * s / max(streams - 1, 1)) for s in range(streams)] * ROUNDS,
        "the last stream has four times the first one's work",
    ),
    "priorities": Pattern(_independent, "independent; every second stream is urgent", lambda stream: stream % 2 == 1),
    "copies_beside_gemm": Pattern(
        lambda streams: [Kernel(s, work="copy" if s % 2 else "gemm") for _ in range(ROUNDS) for s in range(streams)],
        "GEMMs, and copies from the host on every second stream",
    ),
    "allreduce_beside_gemm": Pattern(
        _allreduce_beside_gemm, "GEMMs, and an all-reduce a round on the last stream", ranks=2
    ),
}


RESOLUTION_NS = 1_000
"""Events tell times to about 0.5 us (CUDA: cudaEventElapsedTime), so two of them differ by up to twice that for
nothing: kernels that share no more than this ran one after the other.
"""


def concurrency(kernels: Sequence[Interval]) -> float:
    """Return the mean number of kernels at once while any runs: sum of lengths over length of the union; 0: none."""
    union_ns = measure(merge(interval_array(kernels)))
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


def ran_together(first: Interval, second: Interval) -> bool:
    """Return whether two kernels ran at once for longer than the events resolve."""
    return min(first[1], second[1]) - max(first[0], second[0]) > RESOLUTION_NS


def elapsed_ns(kernels: Sequence[Interval]) -> int:
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
_LONGEST_GATE_NS = 1e9
"""A full launch queue holds the host up for as long as the gate: a longer gate would not help, and grow without end."""
_ATTEMPTS = 4


class Timed(NamedTuple):
    """When kernels ran, in their order of issue, in nanoseconds of the host's clock, and whether the gate held until
    all were issued.
    """

    kernels: list[Interval]
    issued_in_time: bool


class Issuer:
    """Issues kernels to one device, the current one."""

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
        awaited = {n for kernel in kernels for n in kernel.after if kernels[n].stream != kernel.stream}
        ended: dict[int, torch.Event] = {}
        marks = []
        begun_ns = time.perf_counter_ns()
        for index, (kernel, stream) in enumerate(zip(kernels, streams, strict=True)):
            with stream:
                for before in kernel.after:
                    if streams[before] != stream:
                        stream.wait_event(ended[before])
                begin = clock.mark()
                self._work(kernel)
                marks.append((begin, clock.mark()))
                if index in awaited:
                    ended[index] = self._event()
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
