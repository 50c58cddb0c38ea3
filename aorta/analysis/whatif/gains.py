"""What there is to gain: the changes that would gain most, and what each part of the communication costs a step.

    gains(base_of(program)).gains[0].sentence
    marginals(program).marginals[0].gain_ms

A candidate is one thing that somebody could change, tried alone: the network, the slowest ranks, and how the strategy
communicates. A marginal cost is how much shorter a step would be, were one part of the communication alone free: each
kind, group and position of collectives is set to no cost, one at a time, in one replay of all scenarios. `bounds` are
not reachable by any single change: all communication free, no rank slower than the typical one, and perfect overlap.
Must not add gains up: what one collective hides another may expose.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from aorta.analysis.documents.dataset import GainEntry, MarginalEntry
from aorta.analysis.formatting import rough_interval
from aorta.analysis.tables import Bools, Floats, Ints
from aorta.analysis.whatif.changes import apply, parse_change
from aorta.analysis.whatif.network_changes import CommSpeed
from aorta.analysis.whatif.prediction import Base, flags_of, free_communication, gain_of, step_gain_ms, verdict
from aorta.analysis.whatif.program import Issued, RunProgram
from aorta.analysis.whatif.rank_changes import NoStragglers
from aorta.analysis.whatif.replay import Freed, replay
from aorta.errors import InputError
from aorta.timeline.overlap import NS_PER_MS

SHOWN: Final = 3
WORTH: Final = 0.005
"""A gain below this part of the step is not named."""
_SETTINGS: Final = {
    "overlap=on": "overlap on",
    "prefetch=1": "prefetching one block",
    "prefetch=2": "prefetching two blocks",
    "buckets.mb=x2": "buckets twice as large",
    "buckets.mb=x0.5": "buckets half as large",
    "network.algorithm=tree": "tree algorithms",
}
"""What the next launch can be given, where the run has it -> in words."""
_HYPOTHETICAL: Final = {
    "network.bandwidth=x2": "twice the bandwidth",
    "network.latency=x0.5": "half the latency",
    "stragglers=none": "no rank slower than the typical one",
}
"""What no setting changes."""
DO_NOT_ADD_UP: Final = "marginal costs do not add up: what one of them no longer delays, another may"
POSITIONS: Final = 64
"""Positions asked about one by one; of more, those whose collectives cost most."""


class Gains(msgspec.Struct, frozen=True):
    """The largest gains: significant ones of settings first, then the others, the largest first. `flags`: what is not
    known, whatever is changed; `notes`: why less exposed communication is not as much less of a step.
    """

    step_ms: float
    gains: list[GainEntry]
    flags: tuple[str, ...]
    notes: tuple[str, ...] = ()


def gains(base: Base, shown: int = SHOWN) -> Gains:
    """Try the candidates that this run allows."""
    found: dict[bytes, GainEntry] = {}
    for text, words in (_SETTINGS | _HYPOTHETICAL).items():
        tried = _tried(base, text, words)
        if tried is not None:  # two that gain the same in every step are one change: FSDP's overlap and prefetch=1
            found.setdefault(tried[0].tobytes(), tried[1])
    worth = [gain for gain in found.values() if gain.share > WORTH]
    chosen = sorted(worth, key=lambda gain: (not (gain.setting and gain.significant), -gain.gain_ms))[:shown]
    notes = free_communication(base).notes
    return Gains(base.identity.replayed_ms, chosen, flags_of(base.program), notes)


def _tried(base: Base, text: str, words: str) -> tuple[Floats, GainEntry] | None:
    """Return what each step gains by a change, and the entry that says so; None where it does not apply."""
    change = parse_change(text)
    try:
        changed = apply(base.program, [change])
    except InputError:
        return None
    gained = step_gain_ms(base.times, replay(changed.program))
    wrong_by = change.STATED_ERROR * abs(float(np.median(gained)))
    found = gain_of(gained, base.identity.missed_ms + wrong_by)
    share, setting = found.value / base.identity.replayed_ms, text in _SETTINGS
    upper_bound = base.program.facts.network is None
    significant = not upper_bound and found.low > 0
    sentence = (
        f"{words}{'' if setting else ' (hypothetical)'}: {rough_interval(found.value, found.low, found.high)} "
        f"per step, {share:.1%}, {verdict(significant, upper_bound)}"
    )
    notes = list(changed.flags)
    return gained, GainEntry(
        text, words, setting, found.value, found.low, found.high, share, notes, significant, upper_bound, sentence
    )


class Marginals(msgspec.Struct, frozen=True):
    """Marginal costs (medians over steps and their intervals, `gain_of`), the largest first, and bounds.

    `steps`: how many steps they rest on.
    """

    step_ms: float
    steps: int
    marginals: list[MarginalEntry]
    bounds: list[MarginalEntry]
    notes: list[str]


@dataclass(frozen=True)
class _Part:
    """Collectives that are asked about together: (layout, place) of each."""

    what: str
    name: str
    places: frozenset[tuple[int, int]] = frozenset()
    change: str | None = None


def marginals(program: RunProgram) -> Marginals:
    """Return the marginal costs of a program."""
    parts = _parts(program)
    freed: dict[tuple[int, int], Bools] = defaultdict(lambda: np.zeros(len(parts) + 1, bool))
    for number, part in enumerate(parts, start=1):
        for each in part.places:
            freed[each][number] = True
    times = replay(program, freed=Freed(len(parts) + 1, dict(freed)))
    base, free = times.job_step_ns(0), times.job_step_ns(1)
    missed_ms = abs(float(np.median(base)) / NS_PER_MS - float(np.median(program.recorded_step_ms())))

    def gained(part: _Part, gains_ns: Ints, stated_error: float = CommSpeed.STATED_ERROR) -> MarginalEntry:
        gains = gains_ns / NS_PER_MS
        value = gain_of(gains, stated_error * abs(float(np.median(gains))) + missed_ms)
        return MarginalEntry(part.what, part.name, value.value, value.low, value.high, part.change)

    found = [gained(part, base - times.job_step_ns(number)) for number, part in enumerate(parts, start=1)]
    bounds = [found[0], gained(_Part("bound", "perfect overlap"), _perfect_ns(program, base, free))]
    notes = [DO_NOT_ADD_UP]
    try:
        level = replay(apply(program, [NoStragglers("stragglers=none")]).program).job_step_ns()
        part = _Part("bound", "no straggler", change="stragglers=none")
        bounds.insert(1, gained(part, base - level, NoStragglers.STATED_ERROR))
    except InputError as error:
        notes.append(str(error))
    ordered = sorted(found[1:], key=lambda each: -each.gain_ms)
    return Marginals(float(np.median(base)) / NS_PER_MS, len(program.steps), ordered, bounds, notes)


def _parts(program: RunProgram) -> list[_Part]:
    every = {
        (number, place): issued
        for number, layout in enumerate(program.layouts)
        for place, issued in enumerate(layout.issued)
    }
    kinds: dict[str, set[tuple[int, int]]] = defaultdict(set)
    groups: dict[tuple[str, ...], set[tuple[int, int]]] = defaultdict(set)
    positions: dict[int, set[tuple[int, int]]] = defaultdict(set)
    family = _families(every)
    for at, issued in every.items():
        kinds[issued.kind].add(at)
        groups[family[issued.group]].add(at)
        positions[at[1]].add(at)
    costly = sorted(positions, key=lambda place: -_cost_of(program, place))[:POSITIONS]
    parts = [_Part("bound", "all communication free", frozenset(every), "comm=free")]
    parts += [_Part("kind", kind, frozenset(those), f"comm.kind.{kind}=free") for kind, those in sorted(kinds.items())]
    for names, those in sorted(groups.items()) if len(groups) > 1 else ():
        change = f"comm.group.{names[0]}=free" if len(names) == 1 else None
        parts.append(_Part("group", ", ".join(names), frozenset(those), change))
    for place in sorted(costly):
        there = sorted({every[at].kind for at in positions[place]})
        name = f"#{place} {' or '.join(there)}"
        parts.append(_Part("position", name, frozenset(positions[place]), f"comm.position.{place}=free"))
    return parts


def _families(every: dict[tuple[int, int], Issued]) -> dict[str, tuple[str, ...]]:
    """Return, by group name, the names that other ranks use in its place (the disjoint groups of a mesh)."""
    at_place: dict[tuple[int, str, int], set[str]] = defaultdict(set)
    for (_, place), issued in every.items():
        at_place[place, issued.kind, len(issued.ranks)].add(issued.group)
    joined = {issued.group: {issued.group} for issued in every.values()}
    for names in at_place.values():
        merged = set().union(*(joined[name] for name in names))
        for name in merged:
            joined[name] = merged
    return {name: tuple(sorted(names)) for name, names in joined.items()}


def _cost_of(program: RunProgram, place: int) -> float:
    costs = [float(step.cost_ns[place].mean()) for step in program.steps if place < len(step.cost_ns)]
    return sum(costs)


def _perfect_ns(program: RunProgram, base: Ints, free: Ints) -> Ints:
    """Return what each step would gain were nothing exposed but what no overlap can hide: it takes what it takes
    without communication, or what its busiest link is busy for, whichever is longer.
    """
    busiest = []
    for step in program.steps:
        longest = 0
        for column, layout in enumerate(step.layouts):
            links: dict[int | None, int] = defaultdict(int)
            for place, issued in enumerate(program.layouts[layout].issued):
                cost = int(step.cost_ns[place, min(column, step.cost_ns.shape[1] - 1)])
                if issued.link is None:  # waits for no other: it can run beside all of them
                    longest = max(longest, cost)
                else:
                    links[issued.link] += cost
            longest = max(longest, *links.values(), 0)
            if step.cost_ns.shape[1] == 1:
                break
        busiest.append(longest)
    return np.maximum(base - np.maximum(free, busiest), 0)
