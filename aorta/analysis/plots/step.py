"""One step of one rank, from its active segments: which lane was active when, and what communication was exposed.

Enters: a step and the names of its lanes. Leaves: merged intervals in nanoseconds. Must not: measure a window again
(its metrics are those of the record; these are only drawn).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aorta.telemetry.schema import Step
from aorta.timeline.classes import AUX, COMPUTE, COPY
from aorta.timeline.intervals import Interval, merge

NOT_COMMUNICATION: Final = frozenset({COMPUTE, COPY, AUX})


def lanes_of(step: Step, streams: Sequence[str]) -> dict[str, list[Interval]]:
    """Lane -> merged spans in which it was active; lanes never active are left out."""
    spans = {
        name: merge((part.start_ns, part.end_ns) for part in step.active_segments if part.streams >> bit & 1)
        for bit, name in enumerate(streams)
    }
    return {name: merged for name, merged in spans.items() if merged}


def exposed_of(step: Step, streams: Sequence[str]) -> list[Interval]:
    """When some collective ran and the rank did not compute."""
    compute = sum(1 << bit for bit, name in enumerate(streams) if name == COMPUTE)
    comm = sum(1 << bit for bit, name in enumerate(streams) if name not in NOT_COMMUNICATION)
    return merge(
        (part.start_ns, part.end_ns)
        for part in step.active_segments
        if part.streams & comm and not part.streams & compute
    )
