"""What `summary.json` holds of why: where the mean step goes, who holds others up, where communication is exposed,
what a rule found, and what would gain most.

Must not compute anything.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from aorta.documents import ABSENT


class AccountPart(msgspec.Struct):
    """A part of the mean step; `parts` below it add up to it."""

    name: str
    ms: float
    share: float
    parts: list[AccountPart]


class Account(msgspec.Struct, kw_only=True):
    """Where the mean step goes: `parts` add up to `step_ms`, the mean window over rank-steps and launches; with a
    `reason` there is nothing else in it.
    """

    reason: str | None
    launches: int = ABSENT
    rank_steps: int = ABSENT
    step_ms: float = ABSENT
    parts: list[AccountPart] = ABSENT


class RankTimes(msgspec.Struct):
    """The account of one rank: means over its steps, which add up to `step_ms`."""

    rank: int
    step_ms: float
    computation_ms: float
    exposed_ms: float
    outside_ms: float
    idle_ms: float


class Straggler(msgspec.Struct, kw_only=True):
    """A rank that holds the others up, in the median step: how late it is, how much exposed waiting that costs the
    others, and what it does longer than they (null where no part of its step explains it).
    """

    rank: int
    late_ms: float
    cost_ms: float
    because: str | None = None


class Stragglers(msgspec.Struct, kw_only=True):
    """The ranks that hold the others up, or why none is named; `uneven`: a rank that computes longer, at the same
    work.
    """

    reason: str | None
    ranks: list[Straggler]
    uneven: str | None = None


class Finding(msgspec.Struct):
    """A diagnosis by a rule of `aorta.analysis.findings`: rank, step, process group and stream where they apply."""

    rule: str
    sentence: str
    rank: int | None = None
    step: int | None = None
    group: str | None = None
    stream: int | None = None


class ExposedRow(msgspec.Struct):
    """Exposed communication of one group, collective, region, part or rank: the mean over all rank-steps after warm-up.
    `share`: of the whole, None where that is 0. In a comparison `ms` is the candidate's, and `share` is that of the
    difference.
    """

    what: str
    ms: float
    share: float | None
    reference_ms: float = ABSENT
    difference_ms: float = ABSENT


class ExposedBreakdown(msgspec.Struct, kw_only=True):
    """Where communication is exposed, or, in a comparison, where that differs: dimension -> its rows, the largest
    first, which add up to `exposed_ms` and `difference_ms` (not `computing`, which hides it). With a `reason` it is not
    known.

    Attributes:
        rank_steps, rank_steps_left_out: of all sides; left out where exposed communication is null.
        exposed_ms: in a comparison the candidate's.
    """

    reason: str | None
    rank_steps: int = ABSENT
    rank_steps_left_out: int = ABSENT
    exposed_ms: float = ABSENT
    reference_ms: float = ABSENT
    difference_ms: float = ABSENT
    dimensions: dict[str, list[ExposedRow]] = ABSENT


class GainEntry(msgspec.Struct):
    """By how much a step would be shorter with one change alone, and the 95 % interval of that.

    `what`: the network, the ranks, a kind or group of collectives if it were free, or a bound. `change`: what `aorta
    whatif --set` takes; null: nothing. `share`: of the step. `upper_bound`: the network was real, and the replay
    ignores contention.
    """

    what: Literal["network", "ranks", "kind", "group", "bound"]
    name: str
    change: str | None
    gain_ms: float
    low_ms: float
    high_ms: float
    share: float
    upper_bound: bool
    notes: list[str]
    sentence: str


class WhatIf(msgspec.Struct, kw_only=True):
    """What would gain most, from a replay of the last steps; with a `reason` no replay was possible."""

    reason: str | None
    steps: int = ABSENT
    ranks: int = ABSENT
    level: float = ABSENT
    step_ms: float = ABSENT
    check: str | None = ABSENT
    gains: list[GainEntry] = ABSENT
    marginals: list[GainEntry] = ABSENT
    bounds: list[GainEntry] = ABSENT
    notes: list[str] = ABSENT
    command: str = ABSENT
