"""The answer of an autopsy, as types that are computed and written (`aorta autopsy --json` prints one), and as text of
80 columns: the answer, who is accused and why, who waits for whom, what every rank does, and what to do next. Ranks
that do the same share a line.

Its JSON Schema is `docs/schemas/autopsy-1.schema.json`. Must not decide anything.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from aorta.autopsy.evidence import ThreadStack
from aorta.command_line import name_ranks, rounded_time
from aorta.terminal_style import LEAST_WIDTH, PLAIN, Style

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
        host, pid: where its process is; null where no evidence says.
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
    host: str | None = None
    pid: int | None = None
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


_MOST_LINES: Final = 6
"""Of waits, and of ranks: more are counted, and in the JSON."""
_GOOD: Final = ("not_stuck", "slow")


def verdict_text(verdict: Verdict, style: Style = PLAIN, *, stacks: bool = False) -> str:
    """Return the text for the terminal.

    Args:
        stacks: show the stacks of each rank that left some, those of its main thread first.
    """
    word = verdict.kind.replace("_", " ")
    title = style.bold(word) if verdict.kind in _GOOD else style.error(word)
    lines = [title, *_wrapped(verdict.summary, "  ")]
    accused = list[str]()
    for one in verdict.culprits:
        aspect = f" of {one.aspect}" if one.aspect else ""
        accused += _wrapped(f"rank {one.rank}: {one.kind.replace('_', ' ')}{aspect} (rule {one.rule})", "  ")
        accused += [line for sentence in one.evidence for line in _wrapped(sentence, "    ")]
    doing = _limited(list(_doing(verdict.ranks)))
    if verdict.missing:
        doing.append(f"  no evidence of {name_ranks(verdict.missing)}")
    blocks = {
        "accused": accused,
        "waiting": _limited([_wrapped(waiting_sentence(one), "  ") for one in verdict.waits]),
        "ranks": doing,
        "sources disagree": [line for sentence in verdict.contradictions for line in _wrapped(sentence, "  ")],
        "limits": [line for sentence in verdict.notes for line in _wrapped(sentence, "  ")],
        "next": [line for sentence in verdict.next for line in _wrapped(sentence, "  ")],
    }
    if stacks:
        blocks["stacks"] = list[str]()
        for rank in verdict.ranks:
            threads = [(f"rank {rank.rank}", rank.stack)] if rank.stack else []
            threads += [(f"rank {rank.rank}, thread {each.name}", list(each.frames)) for each in rank.other_stacks]
            for thread, frames in threads:
                blocks["stacks"] += [f"  {thread}", *(f"    {frame}" for frame in frames)]
    for heading, block in blocks.items():
        lines += [heading, *block] if block else []
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, LEAST_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _limited(blocks: Sequence[list[str]]) -> list[str]:
    shown = [line for block in blocks[:_MOST_LINES] for line in block]
    return [*shown, f"  and {len(blocks) - _MOST_LINES} more; see --json"] if len(blocks) > _MOST_LINES else shown


def waiting_sentence(one: WaitingRanks) -> str:
    """Return who waits for whom, in which collective, and for how long."""
    for_whom = f" for {name_ranks(one.for_ranks)}" if one.for_ranks else ""
    verb = "waits" if len(one.ranks) == 1 else "wait"
    size = "" if one.collective.bytes is None else f" ({one.collective.bytes:,} bytes)"
    return f"{name_ranks(one.ranks)} {verb}{for_whom} in {one.collective}{size}{_age(one.since_s)}"


def _doing(ranks: Sequence[RankDoing]) -> Iterator[list[str]]:
    alike: dict[tuple[str, str, int | None], list[RankDoing]] = {}
    for one in ranks:
        alike.setdefault((one.doing, one.state, one.step), []).append(one)
    for (doing, state, step), several in alike.items():
        ages = [one.since_s for one in several if one.since_s is not None]
        # How a rank ended says more than that its process is gone.
        parts = [doing] if state in ("unknown", doing) or doing == ENDED_IN_ORDER else [state, doing]
        parts += [f"step {step}"] if step is not None else []
        who = name_ranks([one.rank for one in several])
        yield _wrapped(f"{who}: {', '.join(parts)}{_age(max(ages, default=None))}", "  ")


def _age(seconds: float | None) -> str:
    return f", for {rounded_time(seconds)}" if seconds is not None else ""
