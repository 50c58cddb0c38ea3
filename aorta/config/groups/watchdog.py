"""The section `watchdog` of the root file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Watchdog:
    """Notices ranks that are stuck or die, and writes an autopsy of the run; never ends a rank."""

    # seconds without progress on a rank, from its first step on; null = learned from the run's own steps (at least
    # 10 s, and 10 times the longest time without progress behind the warm-up); 0 = no watchdog
    timeout_s: float | None = None
    # seconds without progress before a timeout holds, and in a checkpoint, a baseline or another announced phase
    grace_s: float = 600.0


def watchdog_rules(watchdog: Watchdog) -> Iterator[str]:
    """What is wrong with these values, if anything."""
    if watchdog.timeout_s is not None and not 0 <= watchdog.timeout_s < math.inf:
        yield f"watchdog.timeout_s={watchdog.timeout_s}: must be at least 0 and finite; null learns it, 0 is off"
    if not 0 < watchdog.grace_s < math.inf:
        yield f"watchdog.grace_s={watchdog.grace_s}: must be greater than 0 and finite"
