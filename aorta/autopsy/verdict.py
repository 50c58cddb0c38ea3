"""The answer of an autopsy, as types that are computed, rendered and written (`aorta autopsy --json` prints one).

Its JSON Schema is `docs/schemas/autopsy-1.schema.json`. Must not compute anything but what a struct says of itself.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from aorta.autopsy.evidence import ThreadStack

AUTOPSY_VERSION: Final = 1
ENDED_IN_ORDER: Final = "ended in order"
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
"""What happened:

`not_stuck`: no rank waits for another for longer than usual. `slow`: ranks wait, and the one they wait for goes on.
`dead`: a process ended. `stopped`: a process is held by SIGSTOP or a debugger. `signature_mismatch`: ranks met in one
collective with different kinds, sizes or types of data, or one of them used another group. `order_swapped`: ranks wait
for each other in a circle, as they issued collectives in different orders. `stuck_outside`: a rank is busy with
something else, and where is known. `rank_did_not_join`: a rank did not issue the collective in which others wait, and
what it does is not known. `stuck_inside`: all issued the collective, and it does not complete. `cannot_decide`: the
evidence does not say.
"""
Aspect: TypeAlias = Literal["kind", "size", "dtype", "group"]
"""In what a collective differs between ranks."""


def group_label(name: str, description: str | None) -> str:
    """Return a group in words: its description, or `group 0`."""
    return description or f"group {name}"


class CollectiveName(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of a job: the `number`-th of its group, from 0."""

    group: str
    description: str | None
    number: int
    kind: str
    bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of {group_label(self.group, self.description)}"


class Accusation(msgspec.Struct, kw_only=True):
    """One rank, and why it is a cause.

    Attributes:
        rule: name of the rule that accuses it (`aorta.autopsy.rules`).
        phase: where in its step it is, where the evidence says so.
        since_s: for how long, seconds.
        collective: the one that it holds up, or in which it differs.
        reason: in one sentence.
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
    collective: CollectiveName | None = None


class WaitingRanks(msgspec.Struct, kw_only=True):
    """Ranks that wait in one collective, and for whom. `since_s`: how long the first of them has waited."""

    ranks: list[int]
    for_ranks: list[int]
    collective: CollectiveName
    since_s: float | None = None


class RankDoing(msgspec.Struct, kw_only=True):
    """What one rank does, as far as its evidence says.

    Attributes:
        state: running, stopped, dead or unknown.
        doing: in a few words.
        since_s: for how long, seconds.
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
    collective: CollectiveName | None = None
    sources: list[str] = []
    stack: list[str] = []
    other_stacks: list[ThreadStack] = []


class Verdict(msgspec.Struct, kw_only=True):
    """What an autopsy found.

    Attributes:
        kind: of the first accusation; `stuck_inside` may name no rank.
        summary: the answer in one sentence.
        culprits: ranks that evidence accuses.
        suspects: where evidence narrows a cause down to some ranks and cannot tell which; with `cannot_decide` only.
        waits: the chain, from the culprits to those who wait last.
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
