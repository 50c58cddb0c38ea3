"""The vocabulary of a timeline: lanes, kinds of collectives, and the bit of each lane in a record.

Must not measure anything.
"""

from __future__ import annotations

from typing import Final

COMPUTE: Final = "compute"
COPY: Final = "copy"
AUX: Final = "aux"
BUBBLE: Final = "bubble"

KINDS: Final = (
    "allreduce",
    "reducescatter",
    "allgather",
    "broadcast",
    "alltoall",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)
"""Kinds of collectives, by their usual names rather than by operator name."""

UNKNOWN_KIND: Final = "collective"
"""Communication whose kind a source does not report (RCCL's one kernel for all, unlinked). Not a kind: only `comm_ms`
counts it. AORTA's own records always know the kind.
"""

LOCKSTEP: Final = frozenset({"allreduce", "reducescatter", "allgather", "alltoall", "barrier"})
"""Kinds that end on no rank before every rank has started."""

LANES: Final = (COMPUTE, *KINDS, COPY, AUX, BUBBLE)
"""Lanes of a timeline. The position is the bit in the `lanes` mask of an active segment."""

NOT_COMMUNICATION: Final = frozenset({COMPUTE, COPY, AUX, BUBBLE})
"""Lanes of a timeline that are not a kind of collective."""

ALWAYS_SHOWN: Final = (COMPUTE, "allreduce", "reducescatter", AUX)
"""Lanes whose milliseconds are in every record even when they are 0."""

TRACE_LANES: Final = (*LANES, UNKNOWN_KIND)
"""Lanes of a trace from another tool. The first bits are those of `LANES`."""
