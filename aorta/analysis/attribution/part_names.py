"""Names of collectives, places and parts of exposed time as a sentence uses them.

Must not hold a number of a run.
"""

from __future__ import annotations

from typing import Final

from aorta.analysis.attribution.keys import BUBBLE_PART, TRANSFER, UNEXPLAINED, UNKNOWN_PART, WAIT, ExposedKey, Region
from aorta.analysis.formatting import TEXT

PARTS: Final = {
    WAIT: "waiting for peers",
    TRANSFER: "transfer",
    BUBBLE_PART: "bubbles of the pipeline",
    UNKNOWN_PART: "waiting or transfer, which of them is unknown",
}
UNTOLD_WHAT: Final = "communication that no row of the record covers"
BUCKETED: Final = ("ddp", "ep", "cp")
"""Values of `parallel.strategy` whose only all-reduces are DistributedDataParallel's, one for each bucket."""
_NO_PLACE: Final = "an unknown place"


def group_name(group: str, size: int | None) -> str:
    """The group's name as the record has it, with its size."""
    return f"group {group!r} ({'size unknown' if size is None else f'{size} ranks'})"


def collective_name(key: ExposedKey) -> str:
    """Kind, message size and group."""
    if key.kind == UNEXPLAINED:
        return UNTOLD_WHAT
    return f"{key.kind} of {TEXT.size(key.bytes)} on {group_name(key.group, key.size)}"


def order_name(key: ExposedKey, parallel: str) -> str:
    """Which collective of the step it is; a bucket where DistributedDataParallel issues one all-reduce per bucket."""
    if key.kind == UNEXPLAINED:
        return UNTOLD_WHAT
    if parallel in BUCKETED and key.kind == "allreduce":
        return f"bucket {key.order} ({collective_name(key)})"
    return f"{collective_name(key)}, number {key.order} of its kind in the step"


def place_name(place: Region) -> str:
    """A pass of a block, or work outside the blocks."""
    if place.phase is None:
        return _NO_PLACE
    return place.phase if place.block is None else f"{place.phase} of {place.block}"
