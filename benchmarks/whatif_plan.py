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


def bandwidth(base: float, factor: float) -> Intervention:
    family = "faster" if factor > 1 else "slower"
    return Intervention(family, (_bandwidth(base * factor),), (f"network.bandwidth=x{factor:g}",))


def latency(microseconds: float, base: float = 50) -> Intervention:
    family = "slower" if microseconds > base else "faster"
    return Intervention(family, (_latency(microseconds),), (f"network.latency={microseconds:g}",))


def slow(factor: float, change: str, *words: str) -> Intervention:
    """Some collectives take `factor` times as long."""
    return Intervention("one kind", (f"fabric.slow_factor={factor:g}", *words), (f"{change}=x{1 / factor:.6g}",))


def straggler(rank: int, ms: float, was_ms: float = 0.0) -> Intervention:
    return Intervention("straggler", _straggler(rank, ms), (f"rank.{rank}.late_ms={ms - was_ms:g}",))


def together(*several: Intervention) -> Intervention:
    words = tuple(word for one in several for word in one.words)
    return Intervention("straggler and network", words, tuple(each for one in several for each in one.changes))


def free(base: float) -> Intervention:
    """As fast as the emulation goes: what is left is the backend's own time."""
    return Intervention("free", (_bandwidth(base * 1e6), _latency(0)), ("comm=free",))


def buckets(mib: float) -> Intervention:
    return Intervention("buckets", (f"parallel.bucket_cap_mb={mib:g}",), (f"buckets.mb={mib:g}",))


def overlap(on: bool) -> Intervention:
    return Intervention("overlap", (f"parallel.overlap={str(on).lower()}",), (f"overlap={'on' if on else 'off'}",))


def prefetch(depth: int) -> Intervention:
    words = (f"parallel.forward_prefetch={depth}", f"parallel.backward_prefetch={depth}")
    return Intervention("prefetch", words, (f"prefetch={depth}",))


def world(ranks: int, seed: int) -> Intervention:
    """A larger world with another law than the predictor's: jitter, and everything a tenth slower, as one slow node
    makes a ring.
    """
    law = ("fabric.jitter=0.2", f"fabric.seed={seed}", "fabric.slow_factor=1.1")
    return Intervention(WORLD, (f"fabric.emulated_world_size={ranks}", *law), (f"ranks={ranks}",))


def _bandwidth(gb_per_s: float) -> str:
    return f"fabric.inter_bandwidth_gb_per_s={gb_per_s:.6g}"


def _latency(microseconds: float) -> str:
    return f"fabric.inter_latency_us={microseconds:g}"


def _straggler(rank: int, ms: float) -> tuple[str, ...]:
    return (f"fabric.straggler_rank={rank if ms else 'null'}", f"fabric.straggler_ms={ms:g}")


REGIMES = (
    Regime(
        "ddp, mostly hidden",
        ("parallel=ddp", _bandwidth(0.07)),
        (
            bandwidth(0.07, 2),
            bandwidth(0.07, 0.5),
            bandwidth(0.07, 0.7),
            straggler(1, 5),
            latency(3000),
            together(straggler(0, 8), bandwidth(0.07, 0.5)),
            straggler(0, 15),
            slow(2.5, "comm", "fabric.slow_kind=allreduce"),
            bandwidth(0.07, 0.35),
            free(0.07),
        ),
    ),
    Regime(
        "ddp, exposed",
        ("parallel=ddp", _bandwidth(0.03)),
        (
            bandwidth(0.03, 3),
            bandwidth(0.03, 1.5),
            slow(1.6, "comm.bytes.750000-", "fabric.slow_min_bytes=750000"),
            bandwidth(0.03, 0.7),
            buckets(1.0),
            straggler(1, 10),
            bandwidth(0.03, 2),
            overlap(False),
            latency(2500),
            buckets(2.0),
        ),
    ),
    Regime(
        "ddp, straggler",
        ("parallel=ddp", _bandwidth(0.06), *_straggler(1, 8)),
        (
            straggler(1, 0, 8),
            together(straggler(1, 0, 8), bandwidth(0.06, 0.5)),
            bandwidth(0.06, 0.5),
            straggler(1, 3, 8),
            together(straggler(1, 2, 8), bandwidth(0.06, 2)),
            straggler(1, 16, 8),
            bandwidth(0.06, 3),
            latency(4000),
        ),
    ),
    Regime(
        "fsdp",
        ("parallel=fsdp", _bandwidth(0.035), _latency(SMALL_US)),
        (
            bandwidth(0.035, 3),
            bandwidth(0.035, 1.6),
            bandwidth(0.035, 0.7),
            slow(1.8, "comm.kind.allgather", "fabric.slow_kind=allgather"),
            straggler(1, 3),
            latency(4500, SMALL_US),
            slow(2, "comm.kind.reducescatter", "fabric.slow_kind=reducescatter"),
            prefetch(2),
            together(straggler(0, 2), bandwidth(0.035, 2)),
            prefetch(0),
            bandwidth(0.035, 2),
            free(0.035),
        ),
    ),
    Regime(
        "fsdp, straggler",
        ("parallel=fsdp", _bandwidth(0.05), _latency(SMALL_US), *_straggler(0, 4)),
        (
            straggler(0, 0, 4),
            together(straggler(0, 0, 4), bandwidth(0.05, 0.6)),
            bandwidth(0.05, 0.6),
            straggler(0, 8, 4),
            bandwidth(0.05, 2),
            straggler(0, 2, 4),
        ),
    ),
    Regime(
        "tp",
        ("parallel=tp", _bandwidth(0.04), _latency(SMALL_US)),
        (
            bandwidth(0.04, 2),
            bandwidth(0.04, 0.5),
            latency(4500, SMALL_US),
            straggler(1, 2),
            bandwidth(0.04, 0.7),
            latency(1700, SMALL_US),
            straggler(0, 4),
            bandwidth(0.04, 0.4),
            together(straggler(1, 1), bandwidth(0.04, 0.6)),
            latency(3500, SMALL_US),
        ),
    ),
    Regime(
        "ddp, larger worlds",
        ("parallel=ddp", _bandwidth(0.07), _latency(20)),
        (world(8, 1), world(64, 2), world(512, 3)),
    ),
    Regime(
        "fsdp, larger worlds",
        ("parallel=fsdp", _bandwidth(0.07), _latency(20)),
        (world(8, 4), world(64, 5), world(512, 6)),
    ),
)
