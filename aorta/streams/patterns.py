"""The patterns of `workload=streams`: which kernels run on which stream, of which length, after which others.

A pattern is one function from a number of streams to the kernels in their order of issue. Each stream runs what it is
given in that order; `after` adds waits for kernels of other streams:

    [Kernel(0), Kernel(1, after=(0,))]  # the second, on stream 1, waits for the first, on stream 0

A new pattern is a function and a line in `PATTERNS`. Must not import torch, or know how long a kernel takes in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

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


def _depth_first(streams: int) -> list[Kernel]:
    return [Kernel(stream) for stream in range(streams) for _ in range(ROUNDS)]


def _chained(streams: int) -> list[Kernel]:
    return [Kernel(n % streams, after=(n - 1,) if n else ()) for n in range(ROUNDS * streams)]


def _fan_in(streams: int) -> list[Kernel]:
    producers = _independent(streams)
    return [*producers, Kernel(0, after=tuple(range(len(producers) - streams, len(producers))))]


def _fan_out(streams: int) -> list[Kernel]:
    first = Kernel(0)
    return [first, *(Kernel(kernel.stream, after=(0,)) for kernel in _independent(streams))]


def _fork_join(streams: int) -> list[Kernel]:
    """Return kernels on all streams at once, then a short one that waits for all of them and begins the next round."""
    found: list[Kernel] = []
    for _ in range(ROUNDS):
        before = (len(found) - 1,) if found else ()
        first = len(found)
        found += [Kernel(stream, after=before) for stream in range(streams)]
        found.append(Kernel(0, after=tuple(range(first, len(found))), length=0.1))
    return found


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
    found: list[Kernel] = []
    for _ in range(ROUNDS // 2):
        router = len(found)
        found.append(Kernel(0, after=(router - 1,) if found else (), length=0.25))
        found += [Kernel(s, after=(router,), length=1.0 + 0.5 * (s % 3)) for s in range(streams)]
        found.append(Kernel(0, after=tuple(range(router + 1, len(found))), length=0.25))
    return found


def _small_kernel_storm(streams: int) -> list[Kernel]:
    return [Kernel(stream, length=0.1) for _ in range(2 * ROUNDS) for stream in range(streams)]


def _unbalanced(streams: int) -> list[Kernel]:
    """Return kernels of which the last stream has four times the work of the first."""
    return [
        Kernel(stream, length=1.0 + 3.0 * stream / max(streams - 1, 1))
        for _ in range(ROUNDS)
        for stream in range(streams)
    ]


def _copies_beside_gemm(streams: int) -> list[Kernel]:
    return [Kernel(s, work="copy" if s % 2 else "gemm") for _ in range(ROUNDS) for s in range(streams)]


def _allreduce_beside_gemm(streams: int) -> list[Kernel]:
    """Return kernels; the last stream reduces once per round of the others, as a bucket follows its layer."""
    found: list[Kernel] = []
    for _ in range(ROUNDS):
        layers = range(len(found), len(found) + max(streams - 1, 1))
        found += [Kernel(stream, work="gemm") for stream in range(len(layers))]
        found.append(Kernel(streams - 1, after=tuple(layers), work="allreduce"))
    return found


PATTERNS: Mapping[str, Pattern] = {
    "independent": Pattern(_independent, "nothing waits for anything, issued in turn"),
    "depth_first": Pattern(_depth_first, "the same, issued one stream after the other"),
    "chained": Pattern(_chained, "every kernel waits for the one before, on the next stream"),
    "fan_in": Pattern(_fan_in, "one kernel at the end waits for all streams"),
    "fan_out": Pattern(_fan_out, "all streams wait for one kernel at the beginning"),
    "fork_join": Pattern(_fork_join, "rounds on all streams, joined after each"),
    "ping_pong": Pattern(_ping_pong, "two streams by turns, one pair beside the other"),
    "pipeline": Pattern(_pipeline, "stages on streams, micro-batches through them"),
    "moe_bursts": Pattern(_moe_bursts, "router, uneven experts on all streams, combination"),
    "small_kernel_storm": Pattern(_small_kernel_storm, "many kernels of a tenth of the length"),
    "unbalanced": Pattern(_unbalanced, "the last stream has four times the first one's work"),
    "priorities": Pattern(_independent, "independent; every second stream is urgent", lambda stream: stream % 2 == 1),
    "copies_beside_gemm": Pattern(_copies_beside_gemm, "GEMMs, and copies from the host on every second stream"),
    "allreduce_beside_gemm": Pattern(
        _allreduce_beside_gemm, "GEMMs, and an all-reduce a round on the last stream", ranks=2
    ),
}


def waits(kernels: list[Kernel]) -> Iterator[int]:
    """Yield the places of the kernels that another stream waits for."""
    yield from sorted({n for kernel in kernels for n in kernel.after if kernels[n].stream != kernel.stream})
