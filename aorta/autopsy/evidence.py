"""What is known of each rank of a job that makes no progress, whatever the source: the progress file of a recorded run,
a dump of torch's Flight Recorder, or NCCL's RAS.

Times are nanoseconds of the clock named by `RankEvidence.clock`: comparable within a rank, and between ranks of one
host and clock only. A field is None where the source does not say it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from aorta.records.schema import WORLD_LIMIT, Integer, Rank

UNKNOWN_KIND: Final = "unknown"
"""`CollectiveEvidence.kind` of one that is known to be completed, and nothing else of it."""
CollectiveState: TypeAlias = Literal["issued", "started", "completed", "retired"]
"""`issued`: by the host. `started`: on the device; sources that cannot see that remain at `issued`. `retired`:
completed or failed, the source does not say which; `aorta.autopsy.joining.join` decides.
"""
Source: TypeAlias = Literal["progress", "flight_recorder", "ras"]
ProcessState: TypeAlias = Literal["running", "stopped", "dead", "unknown"]
"""`stopped`: by SIGSTOP or a debugger. `dead`: ended; `RankEvidence.exit` has how."""


class GroupEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """A process group as one rank sees it. `ranks`: global, ascending; empty where the source does not list them."""

    name: str
    description: str | None = None
    ranks: tuple[Rank, ...] = ()


class CollectiveEvidence(msgspec.Struct, kw_only=True):
    """One collective, or one send or receive, that a rank issued.

    Attributes:
        group: `GroupEvidence.name`.
        number: counts the collectives of the group from 0, the same on each rank that issued the same sequence; of send
            and receive, those between this pair of ranks in this direction.
        kind: as in the record: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, barrier, send, recv, ...;
            `UNKNOWN_KIND` where only its number is known.
        bytes: the full array, as in the record: of an all_gather what every rank has in the end.
        peer: global rank of the other side of a send or receive.
        input_sizes, dtype: where the source has them; `bytes` otherwise.
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
    """The frames of one thread, innermost first, each "file:line function". `native`: frames of compiled code are among
    them.
    """

    name: str
    frames: tuple[str, ...]
    native: bool = False


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
        exit: how the process ended or, of one that still runs, how it left its recorded program.
        taken_ns: when the evidence was taken.
        progress_ns: when the rank last made progress: a step or phase began or ended, a collective was issued or
            completed.
        step: the step it is in, as in the record; the last one that ended where it is between two.
        phase: data, forward, backward, optimizer, checkpoint, ...; None outside of a step.
    """

    rank: Rank
    state: ProcessState = "unknown"
    exit: RankExit | None = None
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
        lost: how many older ones the source has dropped.
        not_after_ns: the source was written at this moment of its clock at the latest, so it may lack what was issued
            later; None where `taken_ns` says when.
        completed_late: what is issued may be completed: on a device, that is known once a step has been read.
        device_seen_ns: the source says of each whether the device had begun it, at this moment of its clock at the
            latest; None where it does not.
        stacks: the thread that runs the training first.
        torn: why the evidence is incomplete.
    """

    source: Source
    path: str
    world_size: Annotated[int, msgspec.Meta(ge=0, le=WORLD_LIMIT)] | None = None
    clock: str | None = None
    host: str | None = None
    pid: Integer | None = None
    groups: list[GroupEvidence] = []
    collectives: list[CollectiveEvidence] = []
    lost: Integer = 0
    not_after_ns: Integer | None = None
    completed_late: bool = False
    device_seen_ns: Integer | None = None
    stacks: list[ThreadStack] = []
    torn: str | None = None
