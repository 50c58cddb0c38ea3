"""All changes of a what-if: reads them, and makes them in a program.

    parse_changes(["network.bandwidth=x2", "rank.3.late_ms=-5"])

    comm=free                       all communication costs nothing
    comm=x2                         ... is twice as fast
    comm.kind.allreduce=x2          one kind of collective
    comm.group.0=free               one process group
    comm.bytes.1e6-4e6=free         by size of the full array
    comm.position.3=free            the collective that a rank issues as its fourth in a step
    network.bandwidth=x2            twice as much; or in GB/s: network.bandwidth=10
    network.latency=x0.5            half of it; or in microseconds: network.latency=20
    network.algorithm=tree          ring or tree
    rank.3.late_ms=5                rank 3 is 5 ms later to every collective; -5: 5 ms earlier
    stragglers=none                 no rank is slower than the typical one
    compute=x1.5                    blocks compute 1.5 times as fast
    overlap=off                     DDP reduces behind the backward pass, FSDP gathers each block when it is needed
    buckets.mb=25                   DDP's bucket_cap_mb (MiB); x2: twice as large
    prefetch=2                      FSDP gathers so many blocks ahead, in both passes; 0: none
    ranks=512                       as many ranks, compute as recorded

Must not replay, or predict anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aorta.analysis.whatif.change import Change, Changed, refused
from aorta.analysis.whatif.network_changes import CommSpeed, NetworkChange, WorldSize, check_length
from aorta.analysis.whatif.program import RunProgram
from aorta.analysis.whatif.rank_changes import ComputeSpeed, NoStragglers, RankLateness
from aorta.analysis.whatif.strategy_changes import BucketCap, OverlapSwitch, PrefetchDepth
from aorta.errors import meant

CHANGES: Final[tuple[type[Change], ...]] = (
    CommSpeed,
    NetworkChange,
    RankLateness,
    NoStragglers,
    ComputeSpeed,
    OverlapSwitch,
    BucketCap,
    PrefetchDepth,
    WorldSize,
)
"""Every change, in the order in which help lists them."""
_BY_HEAD: Final = {change.HEAD: change for change in CHANGES}
_FORMS: Final = {target: form for change in CHANGES for target, form in change.FORMS.items()}


def forms() -> list[str]:
    """How every change is written, an example each."""
    return list(_FORMS.values())


def parse_changes(texts: Sequence[str]) -> tuple[Change, ...]:
    """Read changes, and put them into the order in which they are made.

    Raises:
        InputError: one is not understood; the message says what is allowed.
    """
    return in_order([parse_change(text) for text in texts])


def parse_change(text: str) -> Change:
    """Read one change, `TARGET=VALUE`.

    Raises:
        InputError: it is not understood.
    """
    target, equals, value = (part.strip() for part in text.partition("="))
    head, *rest = target.split(".")
    if not equals or not value or head not in _BY_HEAD:
        hint = meant(target, _FORMS, " (", ")")
        raise refused(text, f"expected TARGET=VALUE{hint}", *_FORMS.values())
    return _BY_HEAD[head].read(text, rest, value)


def in_order(changes: Sequence[Change]) -> tuple[Change, ...]:
    """The order in which changes are made (`Change.TURN`)."""
    return tuple(sorted(changes, key=lambda change: change.TURN))


def apply(program: RunProgram, changes: Sequence[Change]) -> Changed:
    """Make changes, one after the other, in their order.

    Raises:
        InputError: one cannot be made in this program; the message says why.
    """
    flags: dict[str, None] = {}
    for change in in_order(changes):
        changed = change.make(program)
        program = changed.program
        check_length(program, change.text)
        flags |= dict.fromkeys(changed.flags)
    return Changed(program, tuple(flags))
