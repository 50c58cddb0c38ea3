"""The pool of faults that a run can be given on purpose: what each does, and what an autopsy should make of it.

`aorta.workload.faults` carries them out. Must not import torch: the names are checked before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from aorta.errors import meant


class FaultFacts(NamedTuple):
    """One kind of fault.

    Attributes:
        does: what the rank does, from the beginning of `fault.step` on.
        verdict: what an autopsy should find; one of `aorta.autopsy.verdict.Kind`.
        phase: where the rank is then, as `records.progress_file.PHASES`; None: anywhere.
        aspect: of a signature mismatch.
        held_out: not looked at while the first rules of the autopsy were written; seen since.
    """

    does: str
    verdict: str
    phase: str | None = None
    aspect: str | None = None
    held_out: bool = False


FAULTS: Final[dict[str, FaultFacts]] = {
    "workload_exception": FaultFacts("raises RuntimeError in its forward pass", "dead", "forward"),
    "async_exception": FaultFacts(
        "another thread raises RuntimeError in the one that trains", "dead", "forward", held_out=True
    ),
    "signal_exception": FaultFacts("a handler of SIGALRM raises RuntimeError", "dead", "forward", held_out=True),
    "sigint": FaultFacts("gets SIGINT twice, the second of which ends it at once", "dead", None, held_out=True),
    "sigterm": FaultFacts("gets SIGTERM without a handler", "dead", "forward", held_out=True),
    "sigkill": FaultFacts("gets SIGKILL", "dead", "forward"),
    "sigstop": FaultFacts("gets SIGSTOP", "stopped", "forward"),
    "segfault": FaultFacts("reads address 0", "dead", "forward", held_out=True),
    "abort": FaultFacts("calls abort()", "dead", "forward", held_out=True),
    "lock_gil": FaultFacts("deadlocks in compiled code that holds the interpreter lock", "stuck_outside", "forward"),
    "stuck_forward": FaultFacts("sleeps in its forward pass without end", "stuck_outside", "forward"),
    "link_stalled": FaultFacts("loses all that its peers send, without an error", "stuck_inside"),
    "skipped_collective": FaultFacts(
        "leaves out an all-reduce of the others, and goes on", "signature_mismatch", "forward", "size"
    ),
    "swapped_order": FaultFacts("issues two all-reduces the other way round", "signature_mismatch", "forward", "size"),
    "wrong_size": FaultFacts("reduces three times as many elements", "signature_mismatch", "forward", "size"),
    "wrong_dtype": FaultFacts("reduces float64 for float32", "signature_mismatch", "forward", "dtype", held_out=True),
    "wrong_kind": FaultFacts("broadcasts instead of reducing", "signature_mismatch", "forward", "kind"),
    "wrong_group": FaultFacts(
        "reduces in another group of the same ranks", "signature_mismatch", "forward", "group", held_out=True
    ),
    "rank_dependent_branch": FaultFacts(
        "waits in a barrier that only it calls", "signature_mismatch", "forward", "kind", held_out=True
    ),
    "slow_data": FaultFacts("waits three seconds for each batch", "slow", "data"),
    "stuck_data": FaultFacts("waits for a batch without end", "stuck_outside", "data"),
    "stuck_optimizer": FaultFacts("sleeps in its optimizer without end", "stuck_outside", "optimizer"),
    "stuck_checkpoint": FaultFacts(
        "sleeps while it writes a checkpoint, without end", "stuck_outside", "checkpoint", held_out=True
    ),
    "slow_rank": FaultFacts("takes three seconds longer for each forward pass", "slow", "forward"),
}
"""Kind -> what it is, for one rank of a data-parallel run."""
_WITHOUT_FORWARD: Final = ("slow_data", "stuck_data", "stuck_optimizer", "stuck_checkpoint")
"""Kinds that do not act in the model's forward pass: a pipeline runs its stages, never the model as a whole."""


class PlannedFault(NamedTuple):
    """One fault of a run."""

    kind: str
    rank: int
    step: int


@dataclass
class Fault:
    """Faults that the run is given on purpose, to see what is noticed of them."""

    # what goes wrong: a kind of aorta/config/groups/faults.py; several are joined by +; null = nothing
    kind: str | None = None
    # the rank that it happens to; several kinds: a rank each, joined by +
    rank: str = "1"
    # global step at which it happens
    step: int = 10


def planned_faults(fault: Fault) -> list[PlannedFault]:
    """Return the faults of a configuration that `fault_rules` accepts."""
    kinds = [] if fault.kind is None else fault.kind.split("+")
    ranks = fault.rank.split("+")
    if len(ranks) == 1:
        ranks *= len(kinds)
    return [PlannedFault(kind, int(rank), fault.step) for kind, rank in zip(kinds, ranks, strict=True)]


def fault_rules(fault: Fault, world_size: int, *, in_pipeline: bool = False) -> Iterator[str]:
    """Yield what is wrong with these values, if anything. `in_pipeline`: the ranks run stages of the model."""
    if fault.kind is None:
        return
    kinds, ranks = fault.kind.split("+"), fault.rank.split("+")
    for kind in kinds:
        if kind not in FAULTS:
            yield f"fault.kind={fault.kind}: {kind!r} must be one of {', '.join(FAULTS)}{meant(kind, FAULTS, '; ')}"
        elif in_pipeline and kind not in _WITHOUT_FORWARD:
            yield (
                f"fault.kind={fault.kind}: {kind!r} acts in the model's forward pass, which a pipeline runs in stages; "
                f"choose of {', '.join(_WITHOUT_FORWARD)}, or another parallel="
            )
    if len(ranks) not in (1, len(kinds)):
        yield f"fault.rank={fault.rank}: must be one rank, or one for each of {fault.kind}"
    for rank in ranks:
        if not rank.isdecimal() or int(rank) >= world_size:
            yield f"fault.rank={fault.rank}: {rank!r} must be a rank, at least 0 and below {world_size}"
    if fault.step < 0:
        yield f"fault.step={fault.step}: must be at least 0"
