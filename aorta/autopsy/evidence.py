"""What sources say of the ranks of a job that makes no progress, and what follows: the types of both.

A source is the progress file of a recorded run, a dump of torch's Flight Recorder, or NCCL's RAS. Times are nanoseconds
of a clock of the rank's host: comparable within a rank, and between sources and hosts not. A field is None where no
source says it. `aorta autopsy --json` prints a `Verdict`. Must not decide anything.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from aorta.records.schema import WORLD_LIMIT, Integer, Rank

DEFAULT_GROUP: Final = "default_pg"
"""torch's description of the group of all ranks."""
UNKNOWN_KIND: Final = "unknown"
"""`CollectiveEvidence.kind` of a collective of which only its number and that it completed are known."""
UNRESPONSIVE: Final = "no answer to RAS"
"""`RankEvidence.torn` of a rank that NCCL's RAS got no answer from."""
CollectiveState: TypeAlias = Literal["issued", "started", "completed", "retired", "unseen"]
"""`issued`: by the host. `started`: on the device; sources that cannot see that remain at `issued`. `retired`:
completed or failed, the source does not say which; `aorta.autopsy.joining.join` decides. `unseen`: issued, on a device
that nobody has asked since, so it may be completed.
"""
Source: TypeAlias = Literal["progress", "flight_recorder", "ras"]
ProcessState: TypeAlias = Literal["running", "stopped", "dead", "unknown"]
"""`stopped`: by SIGSTOP or a debugger. `dead`: ended; `RankEvidence.exit` has how."""


class GroupEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """A process group as one rank sees it. `ranks`: global, ascending; empty where the source does not list them."""

    name: str
    description: str | None = None
    ranks: tuple[Rank, ...] = ()

    def __str__(self) -> str:
        return group_label(self.name, self.description)


class CollectiveEvidence(msgspec.Struct, kw_only=True):
    """One collective, or one send or receive, that a rank issued.

    Attributes:
        group: `GroupEvidence.name`.
        number: counts the collectives of the group from 0; of send and receive, those between this pair of ranks in
            this direction.
        kind: as in the record: all_reduce, all_gather, ..., send, recv; `UNKNOWN_KIND`.
        bytes: the full array, as in the record: of an all_gather what every rank has in the end.
        peer: global rank of the other side of a send or receive.
        issued_by: the innermost frame of the user's program, "file:line function".
    """

    group: str
    number: Integer
    kind: str
    state: CollectiveState
    bytes: Integer | None = None
    dtype: str | None = None
    input_sizes: tuple[tuple[Integer, ...], ...] | None = None
    output_sizes: tuple[tuple[Integer, ...], ...] | None = None
    peer: Integer | None = None
    issued_ns: Integer | None = None
    started_ns: Integer | None = None
    completed_ns: Integer | None = None
    issued_by: str | None = None


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """The frames of one thread, innermost first, each "file:line function"."""

    name: str
    frames: tuple[str, ...]


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended: by a signal ("SIGKILL"), with an exit code, or with an exception ("RuntimeError: ...")."""

    signal: str | None = None
    exit_code: Integer | None = None
    exception: str | None = None

    def __str__(self) -> str:
        """Return ` by SIGKILL`, ` with exit code 1`, ...; empty where it is not known."""
        if self.signal is not None:
            return f" by {self.signal}"
        if self.exception is not None:
            return f" with {self.exception}"
        return f" with exit code {self.exit_code}" if self.exit_code is not None else ""


class RankState(msgspec.Struct, kw_only=True):
    """Where a rank is.

    Attributes:
        exit: how the process ended or, if it still runs, how it left its recorded program.
        host, pid: of the process.
        stacks: the thread that runs the training first.
        taken_ns: when the evidence was taken.
        progress_ns: when the rank last began or ended a step or phase, or issued or completed a collective.
        step: the current step, or between steps the last one, numbered as in the record.
        phase: data, forward, backward, optimizer, checkpoint, ...; None outside of a step.
    """

    rank: Rank
    state: ProcessState = "unknown"
    exit: RankExit | None = None
    host: str | None = None
    pid: Integer | None = None
    stacks: list[ThreadStack] = []
    taken_ns: Integer | None = None
    progress_ns: Integer | None = None
    step: Integer | None = None
    phase: str | None = None
    phase_since_ns: Integer | None = None


class RankEvidence(RankState, kw_only=True):
    """All that one source says of one rank.

    Attributes:
        groups: all that the rank is known to belong to.
        collectives: in the order of issue, the newest last; old ones may be missing.
        not_after_ns: the source was written at this moment of its clock at the latest, so it may lack what was issued
            later; None where `taken_ns` says when.
        device_seen_ns: the source says of each collective whether the device had begun it, at this moment of its clock
            at the latest; None where it does not.
        overwritten: names of groups, where the source keeps so few collectives that all of a group, or of a pair in it,
            may be missing.
        from_start: the source has all that the rank issued since it began, if it is not torn.
        torn: why the evidence is incomplete.
    """

    source: Source
    path: str
    world_size: Annotated[int, msgspec.Meta(ge=0, le=WORLD_LIMIT)] | None = None
    groups: list[GroupEvidence] = []
    collectives: list[CollectiveEvidence] = []
    not_after_ns: Integer | None = None
    device_seen_ns: Integer | None = None
    overwritten: tuple[str, ...] = ()
    from_start: bool = False
    torn: str | None = None

    @property
    def is_unreadable(self) -> bool:
        """Whether nothing in it tells what the rank does."""
        known = self.collectives or self.progress_ns is not None or self.state != "unknown" or self.exit is not None
        return self.torn is not None and not known


AUTOPSY_VERSION: Final = 1
ENDED_IN_ORDER: Final = "finished normally"
"""`RankDoing.doing` of a rank whose program ended with exit code 0."""
Kind: TypeAlias = Literal[
    "not_stuck",
    "slow",
    "dead",
    "stopped",
    "signature_mismatch",
    "order_swapped",
    "stuck_outside",
    "rank_did_not_join",
    "stuck_inside",
    "cannot_decide",
]
"""What happened, as the table of docs/autopsy.md says. `rank_did_not_join`: where it is is not known, of
`stuck_outside` it is. `slow`: others wait for a rank that makes progress.
"""
Aspect: TypeAlias = Literal["kind", "size", "dtype", "group"]
"""In what a collective differs between ranks."""


class NumberedCollective(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of a job: the `number`-th of its group, from 0."""

    group: str
    description: str | None
    number: int
    kind: str
    bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of {group_label(self.group, self.description)}"


def group_label(name: str, description: str | None) -> str:
    """Return a group in words: `the default group` for torch's group 0; or its description, or `group 1`."""
    if description == DEFAULT_GROUP or (not description and name == "0"):
        return "the default group"
    return description or f"group {name}"


class Accusation(msgspec.Struct, kw_only=True):
    """One rank that is a cause.

    Attributes:
        rule: name of the rule that accuses it (`aorta.autopsy.rules`).
        phase: where in its step it is, where the evidence says so.
        since_s: for how long, seconds.
        collective: the one that it holds up, or in which it differs.
        reason: what the rank does, without its name: "is in data and has not issued all_reduce 2 of dp".
        evidence: what was seen, a sentence each.
    """

    rank: int
    kind: Kind
    rule: str
    reason: str
    evidence: list[str] = []
    aspect: Aspect | None = None
    phase: str | None = None
    since_s: float | None = None
    collective: NumberedCollective | None = None


class WaitingRanks(msgspec.Struct, kw_only=True):
    """Ranks that wait in one collective, and for whom. `since_s`: how long the first of them has waited."""

    ranks: list[int]
    for_ranks: list[int]
    collective: NumberedCollective
    since_s: float | None = None


class RankDoing(msgspec.Struct, kw_only=True):
    """What one rank does, as far as its evidence says.

    Attributes:
        state: running, stopped, dead or unknown.
        doing: in a few words.
        since_s: for how long, seconds.
        host, pid: of its process; null where no evidence says.
        sources: the files or services that speak of it.
        stack: frames of the thread that runs the training, innermost first.
        other_stacks: of its other threads.
    """

    rank: int
    state: str
    doing: str
    step: int | None = None
    phase: str | None = None
    since_s: float | None = None
    collective: NumberedCollective | None = None
    host: str | None = None
    pid: int | None = None
    sources: list[str] = []
    stack: list[str] = []
    other_stacks: list[ThreadStack] = []


class Verdict(msgspec.Struct, kw_only=True):
    """What an autopsy found.

    Attributes:
        kind: of the first accusation; `stuck_inside` and `signature_mismatch` may name no rank.
        summary: the answer in one sentence; begins with the accused rank, its PID and host.
        culprits: accused ranks.
        suspects: without a culprit, the ranks among which the cause is, where evidence says so.
        waits: who waits for whom, those next to a culprit first.
        missing: ranks of the job of which there is no evidence.
        contradictions: where two sources disagree.
        notes: what else limits the answer.
        next: what to do now.
    """

    autopsy_version: Literal[1] = AUTOPSY_VERSION
    aorta_version: str
    kind: Kind
    summary: str
    culprits: list[Accusation] = []
    suspects: list[int] = []
    waits: list[WaitingRanks] = []
    ranks: list[RankDoing] = []
    missing: list[int] = []
    contradictions: list[str] = []
    notes: list[str] = []
    next: list[str] = []
