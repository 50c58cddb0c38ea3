"""How sentences and rows name collectives, regions of a step, and parts of exposed time.

Must not: hold a number of a run.
"""

from __future__ import annotations

from typing import Final

from aorta.analysis.amounts import size_name
from aorta.analysis.attribution.keys import TRANSFER, UNEXPLAINED, UNKNOWN_PART, WAIT, ExposedKey, Region

PARTS: Final = {
    WAIT: "waiting for peers",
    TRANSFER: "transfer",
    UNKNOWN_PART: "waiting or transfer, which cannot be told apart",
}
UNTOLD_WHAT: Final = "communication that no row of the record covers"
_NO_PLACE: Final = "a place that the record does not tell"


def group_name(group: str, size: int | None) -> str:
    """The group's name as the record has it, with its size."""
    return f"group {group!r} ({'size unknown' if size is None else f'{size} ranks'})"


def collective_name(key: ExposedKey) -> str:
    """Kind, message size and group."""
    if key.kind == UNEXPLAINED:
        return UNTOLD_WHAT
    return f"{key.kind} of {size_name(key.bytes)} on {group_name(key.group, key.size)}"


def order_name(key: ExposedKey, parallel: str) -> str:
    """Which collective of the step it is; a bucket where DDP issues one all-reduce per bucket."""
    if key.kind == UNEXPLAINED:
        return UNTOLD_WHAT
    if parallel == "ddp" and key.kind == "allreduce":
        return f"bucket {key.order} ({collective_name(key)})"
    return f"{collective_name(key)}, number {key.order} of its kind in the step"


def place_name(place: Region) -> str:
    """A pass of a block, or work outside the blocks."""
    if place.phase is None:
        return _NO_PLACE
    return place.phase if place.block is None else f"{place.phase} of {place.block}"


def amount(value_ms: float) -> str:
    """Milliseconds for a sentence: about three significant digits, no sign."""
    value = abs(value_ms)
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.3f} ms"


def percent(share: float) -> str:
    """A share in whole per cent; one that is not exactly 0 or 100 % is never shown as such."""
    if 0 < share < 0.005:
        return "less than 1 %"
    if 0.995 <= share < 0.9995:
        return "over 99 %"
    return f"{share:.0%}".replace("%", " %")
