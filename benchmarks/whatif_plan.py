"""The launches of `whatif_interventions`: regimes, and what is changed in each for real and as a what-if.

A regime is a base that is launched again and again between its interventions. Must not launch or predict anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

RANKS = 2
STEPS, WARMUP = 30, 4
COMMON = (
    "training.device=cpu",
    f"training.max_steps={STEPS}",
    f"telemetry.warmup_steps={WARMUP}",
    "training.log_interval=1000",
    "fabric=emulated",
    "fabric.inter_latency_us=50",
)
SMALL_US = 2500.0
"""Latency of the base where many collectives are small: gloo itself takes up to that long for them, and a network that
is faster than the backend is none that a replay could know.
"""
MEASURED = ("faster", "slower", "one kind", "straggler", "straggler and network")
"""Families that the targets of median and 95th percentile are about."""
APART = ("free", "buckets", "overlap", "prefetch")
"""Families with a target of their own: what they change is more than the network."""
WORLD = "world"


@dataclass(frozen=True)
class Intervention:
    """One change: `words` of train.py make it, `changes` ask for it."""

    family: str
    words: tuple[str, ...]
    changes: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(self.changes)


@dataclass(frozen=True)
class Regime:
    """A base and what is changed in it. Later words win, so an intervention's stand behind the base's."""

    name: str
    words: tuple[str, ...]
    interventions: tuple[Intervention, ...]

    @property
    def folder(self) -> str:
        """Its name as that of a folder, without what Hydra would take for a list."""
        return self.name.replace(",", "").replace(" ", "-")

    def launches(self, rounds: int) -> Iterator[tuple[str, Intervention | None]]:
        """Folder and intervention (None: the base) of each launch, in order: base a b base c d base, and again."""
        for number, intervention in enumerate(self.interventions * rounds):
            if number % 2 == 0:
                yield _base(number // 2), None
            yield f"{number:02}", intervention
        yield _base(number // 2 + 1), None

    def launches_of(self, intervention: int, rounds: int) -> Iterator[tuple[str, tuple[str, str]]]:
        """Each launch of an intervention, with those of the base before and behind it."""
        for number in range(intervention, rounds * len(self.interventions), len(self.interventions)):
            yield f"{number:02}", (_base(number // 2), _base(number // 2 + 1))


def _base(number: int) -> str:
    return f"base{number:02}"


def bandwidths(base: float, *factors: float) -> tuple[Intervention, ...]:
    return tuple(
        Intervention("faster" if factor > 1 else "slower", (_gb(base * factor),), (f"network.bandwidth=x{factor:g}",))
        for factor in factors
    )


def latencies(base: float, *microseconds: float) -> tuple[Intervention, ...]:
    return tuple(
        Intervention("slower" if us > base else "faster", (_us(us),), (f"network.latency={us:g}",))
        for us in microseconds
    )


def slow(factor: float, change: str, *words: str) -> Intervention:
    """Some collectives take `factor` times as long."""
    return Intervention("one kind", (f"fabric.slow_factor={factor:g}", *words), (f"{change}=x{1 / factor:.6g}",))


def stragglers(rank: int, *ms: float, was_ms: float = 0.0) -> tuple[Intervention, ...]:
    return tuple(
        Intervention("straggler", _straggler(rank, each), (f"rank.{rank}.late_ms={each - was_ms:g}",)) for each in ms
    )


def together(*several: tuple[Intervention, ...]) -> Intervention:
    words = tuple(word for (one,) in several for word in one.words)
    return Intervention("straggler and network", words, tuple(each for (one,) in several for each in one.changes))


def free(base: float) -> Intervention:
    """As fast as the emulation goes: what is left is the backend's own time."""
    return Intervention("free", (_gb(base * 1e6), _us(0)), ("comm=free",))


def buckets(mib: float) -> Intervention:
    return Intervention("buckets", (f"parallel.bucket_cap_mb={mib:g}",), (f"buckets.mb={mib:g}",))


def prefetch(depth: int) -> Intervention:
    words = (f"parallel.forward_prefetch={depth}", f"parallel.backward_prefetch={depth}")
    return Intervention("prefetch", words, (f"prefetch={depth}",))


def worlds(seed: int, *ranks: int) -> tuple[Intervention, ...]:
    """Larger worlds with another law than the predictor's: jitter, and everything a tenth slower, as one slow node
    makes a ring.
    """
    law = ("fabric.jitter=0.2", "fabric.slow_factor=1.1")
    return tuple(
        Intervention(WORLD, (f"fabric.emulated_world_size={each}", f"fabric.seed={number}", *law), (f"ranks={each}",))
        for number, each in enumerate(ranks, start=seed)
    )


def _gb(gb_per_s: float) -> str:
    return f"fabric.inter_bandwidth_gb_per_s={gb_per_s:.6g}"


def _us(microseconds: float) -> str:
    return f"fabric.inter_latency_us={microseconds:g}"


def _straggler(rank: int, ms: float) -> tuple[str, ...]:
    return (f"fabric.straggler_rank={rank if ms else 'null'}", f"fabric.straggler_ms={ms:g}")


NO_OVERLAP = Intervention("overlap", ("parallel.overlap=false",), ("overlap=off",))
REGIMES = (
    Regime(
        "ddp, mostly hidden",
        ("parallel=ddp", _gb(0.07)),
        (
            *bandwidths(0.07, 2, 0.5, 0.7, 0.35),
            *latencies(50, 3000),
            *stragglers(1, 5),
            *stragglers(0, 15),
            together(stragglers(0, 8), bandwidths(0.07, 0.5)),
            slow(2.5, "comm", "fabric.slow_kind=allreduce"),
            free(0.07),
        ),
    ),
    Regime(
        "ddp, exposed",
        ("parallel=ddp", _gb(0.03)),
        (
            *bandwidths(0.03, 3, 1.5, 0.7, 2),
            *latencies(50, 2500),
            *stragglers(1, 10),
            slow(1.6, "comm.bytes.750000-", "fabric.slow_min_bytes=750000"),
            buckets(1.0),
            buckets(2.0),
            NO_OVERLAP,
        ),
    ),
    Regime(
        "ddp, straggler",
        ("parallel=ddp", _gb(0.06), *_straggler(1, 8)),
        (
            *bandwidths(0.06, 0.5, 3),
            *latencies(50, 4000),
            *stragglers(1, 0, 3, 16, was_ms=8),
            together(stragglers(1, 0, was_ms=8), bandwidths(0.06, 0.5)),
            together(stragglers(1, 2, was_ms=8), bandwidths(0.06, 2)),
        ),
    ),
    Regime(
        "fsdp",
        ("parallel=fsdp", _gb(0.035), _us(SMALL_US)),
        (
            *bandwidths(0.035, 3, 1.6, 0.7, 2),
            *latencies(SMALL_US, 4500),
            *stragglers(1, 3),
            together(stragglers(0, 2), bandwidths(0.035, 2)),
            slow(1.8, "comm.kind.allgather", "fabric.slow_kind=allgather"),
            slow(2, "comm.kind.reducescatter", "fabric.slow_kind=reducescatter"),
            prefetch(2),
            prefetch(0),
            free(0.035),
        ),
    ),
    Regime(
        "fsdp, straggler",
        ("parallel=fsdp", _gb(0.05), _us(SMALL_US), *_straggler(0, 4)),
        (
            *bandwidths(0.05, 0.6, 2),
            *stragglers(0, 0, 8, 2, was_ms=4),
            together(stragglers(0, 0, was_ms=4), bandwidths(0.05, 0.6)),
        ),
    ),
    Regime(
        "tp",
        ("parallel=tp", _gb(0.04), _us(SMALL_US)),
        (
            *bandwidths(0.04, 2, 0.5, 0.7, 0.4),
            *latencies(SMALL_US, 4500, 1700, 3500),
            *stragglers(1, 2),
            *stragglers(0, 4),
            together(stragglers(1, 1), bandwidths(0.04, 0.6)),
        ),
    ),
    Regime("ddp, larger worlds", ("parallel=ddp", _gb(0.07), _us(20)), worlds(1, 8, 64, 512)),
    Regime("fsdp, larger worlds", ("parallel=fsdp", _gb(0.07), _us(20)), worlds(4, 8, 64, 512)),
)
