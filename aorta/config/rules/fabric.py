"""Rules of `fabric=...`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from aorta.config.rules.bounds import at_least
from aorta.config.schema import Config, EmulatedFabric, Mode


def fabric_rules(config: Config, world_size: int) -> Iterator[str]:
    """One message per broken rule."""
    if isinstance(config.fabric, EmulatedFabric):
        yield from _emulated_rules(config.fabric, world_size)
        if config.instrument.mode is Mode.off:
            yield "instrument.mode=off: fabric=emulated delays what is seen; set instrument.mode=observe or dedicated"


def _emulated_rules(fabric: EmulatedFabric, world_size: int) -> Iterator[str]:
    for name in ("intra_bandwidth_gb_per_s", "inter_bandwidth_gb_per_s"):
        if not 0 < (value := getattr(fabric, name)) < math.inf:
            yield f"fabric.{name}={value}: must be greater than 0 and finite"
    for name in ("intra_latency_us", "inter_latency_us", "straggler_ms"):
        if not 0 <= (value := getattr(fabric, name)) < math.inf:
            yield f"fabric.{name}={value}: must be at least 0 and finite"
    yield from at_least(1, {"fabric.ranks_per_node": fabric.ranks_per_node})
    if not 0 <= fabric.jitter < 1:
        yield f"fabric.jitter={fabric.jitter}: must be in [0, 1)"
    if fabric.emulated_world_size is not None and fabric.emulated_world_size < world_size:
        yield (
            f"fabric.emulated_world_size={fabric.emulated_world_size}: must not be below the real world size "
            f"{world_size}; null takes the real one"
        )
    if fabric.straggler_rank is not None and not 0 <= fabric.straggler_rank < world_size:
        yield f"fabric.straggler_rank={fabric.straggler_rank}: must be a rank of this run, 0 to {world_size - 1}"
    if fabric.straggler_rank is None and fabric.straggler_ms != 0:
        yield f"fabric.straggler_ms={fabric.straggler_ms}: no rank is late by it; set fabric.straggler_rank"
