"""All changes of a what-if: reads them, and makes them in a program. Those of how a strategy communicates are here.

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

How DDP's buckets are filled anew is `ddp_buckets`. FSDP issues the all-gather of a block when the block `depth` before
it in the same pass has arrived; without prefetching right before its own wait. A pass that was recorded with this
prefetching stays as it was. Must not change what a rank computes, replay, or predict anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Final, NamedTuple, Self

from aorta.analysis.whatif.ddp_buckets import ddp
from aorta.analysis.whatif.network_changes import CommSpeed, NetworkChange, WorldSize, check_length
from aorta.analysis.whatif.own_time import TURN_GAP, CollectiveCost, OwnOperation, RankView, restructured
from aorta.analysis.whatif.program import Change, Changed, RunProgram, What, factor_of, is_count, number_of, refused
from aorta.analysis.whatif.rank_changes import ComputeSpeed, NoStragglers, RankLateness
from aorta.errors import InputError, meant

PREFETCH_LIMIT: Final = 64
SHARDED: Final = ("fsdp", "hsdp", "fsdp_tp")
"""Values of `parallel.strategy` in which every all-gather brings the parameters of a block, so that it can be moved."""


@dataclass(frozen=True)
class OverlapSwitch(Change):
    """Communication overlaps with compute, or not at all."""

    HEAD: ClassVar = "overlap"
    FORMS: ClassVar[Mapping[str, str]] = {"overlap": "overlap=on, overlap=off"}
    TURN: ClassVar = 1
    STATED_ERROR: ClassVar[float] = 0.20

    on: bool

    @classmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        """Read on or off."""
        if rest or value not in {"on", "off"}:
            raise cls.refused(text, "overlap is on or off", "overlap")
        return cls(text, value == "on")

    def make(self, program: RunProgram) -> Changed:
        """Issue DDP's buckets as they become ready or behind the backward pass; gather FSDP's blocks ahead or not."""
        if program.facts.gradient_order:
            return Changed(ddp(program, self.text, None, self.on))
        _check_sharded_on_host(program, self.text)
        flag = "overlap of FSDP is taken to mean that one block is gathered ahead"
        return Changed(fsdp(program, self.text, int(self.on)), (flag,) if self.on else ())


@dataclass(frozen=True)
class BucketCap(Change):
    """DDP's buckets have another cap: bytes, or a factor of the recorded one."""

    HEAD: ClassVar = "buckets"
    FORMS: ClassVar[Mapping[str, str]] = {"buckets.mb": "buckets.mb=25 (MiB), buckets.mb=x2"}
    TURN: ClassVar = 2
    STATED_ERROR: ClassVar[float] = 0.20

    cap_bytes: float | None = None
    factor: float | None = None

    @classmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        """Read MiB or a factor."""
        if list(rest) != ["mb"]:
            raise cls.refused(text, "not a property of buckets", "buckets.mb")
        if value.startswith("x"):
            return cls(text, factor=factor_of(cls, text, value, "buckets.mb"))
        size = number_of(cls, text, value, "MiB such as 25, or a factor such as x2", "buckets.mb")
        if size <= 0:
            raise cls.refused(text, f"a bucket holds more than {size:g} MiB", "buckets.mb")
        return cls(text, cap_bytes=size * (1 << 20))

    def make(self, program: RunProgram) -> Changed:
        """Fill the buckets anew."""

        def cap(recorded_bytes: int) -> float:
            return self.cap_bytes or 0.0 if self.factor is None else recorded_bytes * self.factor

        flag = "other bucket sizes: linear fit to those measured"
        return Changed(ddp(program, self.text, cap, None), (flag,) if program.facts.network is None else ())


@dataclass(frozen=True)
class PrefetchDepth(Change):
    """FSDP gathers so many blocks ahead."""

    HEAD: ClassVar = "prefetch"
    FORMS: ClassVar[Mapping[str, str]] = {"prefetch": "prefetch=2"}
    TURN: ClassVar = 3
    STATED_ERROR: ClassVar[float] = 0.20

    depth: int

    @classmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        """Read a number of blocks."""
        if rest or not is_count(value) or int(value) > PREFETCH_LIMIT:
            raise cls.refused(text, f"0 to {PREFETCH_LIMIT} blocks can be gathered ahead", "prefetch")
        return cls(text, int(value))

    def make(self, program: RunProgram) -> Changed:
        """Issue all-gathers earlier or later."""
        _check_sharded_on_host(program, self.text)
        return Changed(fsdp(program, self.text, self.depth))


def _check_sharded_on_host(program: RunProgram, text: str) -> None:
    """Refuse a run whose all-gathers cannot be moved.

    Raises:
        InputError: what they bring, or when they are issued, is not known.
    """
    strategy = program.facts.parallel
    if strategy is not None and strategy not in SHARDED:
        raise InputError(
            f"--set {text}: which all-gathers bring the parameters of a block is known for parallel="
            f"{', '.join(SHARDED)} only; this run has parallel={strategy}"
        )
    if program.facts.device != "cpu":
        raise InputError(
            f"--set {text}: on a device FSDP gathers on streams of its own, and when it issues what is not in the "
            "record; only a CPU's can be moved"
        )


def fsdp(program: RunProgram, text: str, depth: int) -> RunProgram:
    """Return the program with FSDP that gathers the next `depth` blocks while one computes; 0: each when it is needed.

    Raises:
        InputError: there are no all-gathers that blocks wait for.
    """

    def rearrange(view: RankView) -> tuple[list[OwnOperation], list[CollectiveCost]]:
        needed = _consumers(program, view)
        if not needed:
            raise InputError(f"--set {text}: no block of this run waits for an all-gather")
        gathers = {one.collective for one in needed}
        new = [
            each._replace(turn=each.turn * TURN_GAP)
            for each in view.placed
            if each.what is not What.ISSUE or each.collective not in gathers
        ]
        issues = {each.collective: each for each in view.placed if each.what is What.ISSUE}
        for _, those in groupby(needed, key=lambda one: one.phase):
            of_pass = list(those)
            recorded = [issues[one.collective] for one in of_pass]
            if all(_ahead(of_pass[:at], own) == min(depth, at) for at, own in enumerate(recorded)):
                new += [own._replace(turn=own.turn * TURN_GAP) for own in recorded]
                continue
            for at, one in enumerate(of_pass):
                if at == 0:  # nothing before it in its pass could gather it
                    new.append(recorded[at]._replace(turn=recorded[at].turn * TURN_GAP))
                elif depth == 0:
                    new.append(OwnOperation(one.wait.at_ns, one.wait.turn * TURN_GAP - 1, What.ISSUE, one.collective))
                else:
                    behind = of_pass[max(at - depth, 0)]
                    turn = behind.wait.turn * TURN_GAP + at + 1
                    new.append(OwnOperation(behind.arrived_ns, turn, What.ISSUE, one.collective))
        return new, list(view.costs)

    return restructured(program, rearrange)


def _ahead(before: Sequence[_Needed], own: OwnOperation) -> int:
    """Return how many blocks ahead an all-gather was issued: so many of those before it began to compute later."""
    return sum(one.begin_ns >= own.at_ns for one in before)


class _Needed(NamedTuple):
    """An all-gather that a block waits for: in which pass, its wait, from when on others can be prefetched, and when
    the block begins to compute.
    """

    collective: int
    phase: str
    wait: OwnOperation
    arrived_ns: int
    begin_ns: int


def _consumers(program: RunProgram, view: RankView) -> list[_Needed]:
    """Return a step's all-gathers, each with the block that computes after its wait, in the order of the waits."""
    begins = sorted((begin, phase) for phase in ("forward", "backward") for _, begin, _ in view.spans(program, phase))
    issues = [each.at_ns for each in view.placed if each.what is What.ISSUE]
    found = []
    for each in view.placed:
        if each.what is not What.WAIT or each.back or view.layout.issued[each.collective].kind != "allgather":
            continue
        behind = next(((begin, phase) for begin, phase in begins if begin >= each.at_ns), None)
        if behind is None:
            continue
        begin, phase = behind
        prefetched = [at for at in issues if each.at_ns < at <= begin]
        found.append(_Needed(each.collective, phase, each, min(prefetched, default=begin), begin))
    return found


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
    """Return how every change is written, an example each."""
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
    """Return the order in which changes are made (`Change.TURN`)."""
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
