"""What there is to gain: the changes that would gain most, what each part of the communication costs a step, and the
critical path of a step.

    gains(base_of(program)).gains[0].sentence
    marginals(program).marginals[0].gain_ms
    critical_path(program, 7).totals_ns()

A candidate is one thing that somebody could change, tried alone. A marginal cost is how much shorter a step would be,
were one kind or group of collectives free; all are worked out in one replay. Bounds are not reachable by any single
change. The critical path goes back from the end of the rank on which a step took longest, along what each moment waited
for; its segments sum up to the step exactly. Must not add gains up: what one collective hides another may expose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from aorta.analysis.documents.dataset import GainEntry, MarginalEntry
from aorta.analysis.formatting import TEXT, rough_interval
from aorta.analysis.frames import Bools, Floats, Ints
from aorta.analysis.step_intervals import HAND_OVER
from aorta.analysis.straggler import NO_SLOWER_RANKS
from aorta.analysis.whatif.changes import NoStragglers, apply, parse_changes
from aorta.analysis.whatif.network_changes import CommSpeed
from aorta.analysis.whatif.prediction import FREE, Base, flags_of, gain_of, predict_from, step_gain_ms, verdict
from aorta.analysis.whatif.program import Issued, RunProgram, What
from aorta.analysis.whatif.replay import Freed, StepTimes, replay, span_edges
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
    "stragglers=none": "without the straggler",
}
DO_NOT_ADD_UP: Final = "do not add these up"


class Gains(msgspec.Struct, frozen=True):
    """The largest gains: significant ones of settings first, then the others, the largest first. `flags`: what is not
    known, whatever is changed; `notes`: why less exposed communication is not as much less of a step.
    """

    step_ms: float
    gains: list[GainEntry]
    flags: tuple[str, ...]
    notes: tuple[str, ...] = ()


def gains(base: Base, shown: int = SHOWN) -> Gains:
    found: dict[bytes, GainEntry] = {}
    for text, words in (_SETTINGS | _HYPOTHETICAL).items():
        tried = _tried(base, text, words)
        if tried is not None:  # two that gain the same in every step are one change: FSDP's overlap and prefetch=1
            found.setdefault(tried[0].tobytes(), tried[1])
    worth = [gain for gain in found.values() if gain.share > WORTH]
    chosen = sorted(worth, key=lambda gain: (not (gain.setting and gain.significant), -gain.gain_ms))[:shown]
    free = predict_from(base, [FREE])
    return Gains(base.identity.replayed_ms, chosen, flags_of(base.program), free.notes)


def _tried(base: Base, text: str, words: str) -> tuple[Floats, GainEntry] | None:
    """Return what each step gains by a change, and the entry that says so; None where it does not apply."""
    (change,) = parse_changes([text])
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
        f"per step, {TEXT.percent(share)}, {verdict(significant, upper_bound)}"
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


def marginals(program: RunProgram) -> Marginals:
    every = {
        (number, place): issued
        for number, layout in enumerate(program.layouts)
        for place, issued in enumerate(layout.issued)
    }
    kinds: dict[str, set[tuple[int, int]]] = defaultdict(set)
    groups: dict[tuple[str, ...], set[tuple[int, int]]] = defaultdict(set)
    family = _families(every)
    for at, issued in every.items():
        kinds[issued.kind].add(at)
        groups[family[issued.group]].add(at)
    # What is asked about together, how it is asked for alone, and (layout, place) of its collectives.
    parts: list[tuple[str, str, str | None, Collection[tuple[int, int]]]] = [
        ("bound", "all communication free", "comm=free", every),
        *(("kind", kind, f"comm.kind.{kind}=free", those) for kind, those in sorted(kinds.items())),
    ]
    if len(groups) > 1:
        for names, at_group in sorted(groups.items()):
            change = f"comm.group.{names[0]}=free" if len(names) == 1 else None
            parts.append(("group", ", ".join(names), change, at_group))
    freed: dict[tuple[int, int], Bools] = defaultdict(lambda: np.zeros(len(parts) + 1, bool))
    for number, (*_, those) in enumerate(parts, start=1):
        for at in those:
            freed[at][number] = True
    times = replay(program, freed=Freed(len(parts) + 1, dict(freed)))
    base, free = times.job_step_ns(0), times.job_step_ns(1)
    missed_ms = abs(float(np.median(base)) / NS_PER_MS - float(np.median(program.recorded_step_ms())))

    def entry(what: str, name: str, change: str | None, gains_ns: Ints, stated_error: float) -> MarginalEntry:
        gains = gains_ns / NS_PER_MS
        value = gain_of(gains, stated_error * abs(float(np.median(gains))) + missed_ms)
        return MarginalEntry(what, name, value.value, value.low, value.high, change)

    found = [
        entry(what, name, change, base - times.job_step_ns(number), CommSpeed.STATED_ERROR)
        for number, (what, name, change, _) in enumerate(parts, start=1)
    ]
    bounds, notes = found[:1], [DO_NOT_ADD_UP]
    try:
        level = replay(apply(program, [NoStragglers("stragglers=none")]).program).job_step_ns()
        bounds.append(entry("bound", NO_SLOWER_RANKS, "stragglers=none", base - level, NoStragglers.STATED_ERROR))
    except InputError as error:
        notes.append(str(error))
    bounds.append(entry("bound", "perfect overlap", None, _perfect_ns(program, base, free), CommSpeed.STATED_ERROR))
    ordered = sorted(found[1:], key=lambda each: -each.gain_ms)
    return Marginals(float(np.median(base)) / NS_PER_MS, len(program.steps), ordered, bounds, notes)


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


def _perfect_ns(program: RunProgram, base: Ints, free: Ints) -> Ints:
    """Return what each step would gain were nothing exposed but what no overlap can hide: it takes what it takes
    without communication, or what its busiest link is busy for, whichever is longer.
    """
    busiest = np.zeros(len(base), np.int64)
    for number, step in enumerate(program.steps):
        for column in range(step.cost_ns.shape[1]):
            busy: dict[object, int] = defaultdict(int)
            for place, issued in enumerate(program.layouts[step.layouts[column]].issued):
                # Without a link it waits for no other: it can run beside all of them.
                busy[("alone", place) if issued.link is None else issued.link] += int(step.cost_ns[place, column])
            busiest[number] = max(busiest[number], *busy.values(), 0)
    return np.maximum(base - np.maximum(free, busiest), 0)


Part: TypeAlias = Literal["compute", "aux", "hand_over", "own", "wake", "transfer", "backend", "before"]
WORDS: Final[dict[Part, str]] = {
    "compute": "computes",
    "aux": "other work",
    "hand_over": "hands a collective over",
    "own": "code outside timed blocks",
    "wake": "resumes after",
    "transfer": "transfers",
    "backend": "waits for the backend, not the network, in",
    "before": "finishes the step before",
}


class PathSegment(NamedTuple):
    part: Part
    rank: int
    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class CriticalPath:
    """The path of one step, in order of time; `rank` is the one on which the step took longest."""

    global_step: int
    rank: int
    begin_ns: int
    end_ns: int
    segments: tuple[PathSegment, ...]

    def totals_ns(self) -> dict[tuple[Part, int, str], int]:
        """Return what each cause adds, the largest first: (part, rank, name) -> nanoseconds."""
        found: dict[tuple[Part, int, str], int] = {}
        for segment in self.segments:
            key = segment[:3]
            found[key] = found.get(key, 0) + segment.end_ns - segment.begin_ns
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; times count from the beginning of the step."""
        return {
            "global_step": self.global_step,
            "rank": self.rank,
            "step_ns": self.end_ns - self.begin_ns,
            "segments": [
                each._replace(begin_ns=each.begin_ns - self.begin_ns, end_ns=each.end_ns - self.begin_ns)._asdict()
                for each in self.segments
            ],
        }


def critical_path(program: RunProgram, index: int) -> CriticalPath:
    """Replay a program, and find the critical path of the step with this index."""
    times = replay(program, {index})
    lengths = times.end_ns[index, :, 0] - times.begin_ns[index, :, 0]
    column = int(np.argmax(lengths))
    begin, end = int(times.begin_ns[index, column, 0]), int(times.end_ns[index, column, 0])
    walk = _Walk(program, index, times.kept[index], begin)
    walk.back_from(column, end)
    return CriticalPath(
        program.steps[index].global_step, program.ranks[column], begin, end, tuple(reversed(walk.segments))
    )


class _Walk:
    def __init__(self, program: RunProgram, index: int, times: StepTimes, begin_ns: int) -> None:
        self._program, self._times, self._begin_ns = program, times, begin_ns
        self._step = program.steps[index]
        self._layouts = [program.layouts[layout] for layout in self._step.layouts]
        self._spans: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        self._carried: set[tuple[int, int]] = set()
        self.segments: list[PathSegment] = []

    def back_from(self, column: int, now_ns: int) -> None:
        operation = len(self._layouts[column].operations) - 2  # the last is END, at `now_ns`
        while True:
            left = int(self._times.leave_ns[operation, column, 0])
            self._own(column, left, now_ns)
            now_ns = min(left, now_ns)
            if now_ns <= self._begin_ns:
                return
            what = self._layouts[column].operations[operation]
            if what.what is What.BEGIN:
                self._add("before", column, "", self._begin_ns, now_ns)
                return
            if what.what is What.WAIT:
                entered = int(self._times.enter_ns[operation, column, 0])
                if what.back:  # its times are those of another step
                    self._add("before", column, "a collective of the step before", entered, now_ns)
                elif (until := int(self._times.end_ns[what.place, column, 0])) > entered:
                    self._add("wake", column, self._name(column, what.place), until, now_ns)
                    arrived = self._collective(column, what.place, min(until, now_ns))
                    if arrived is None:
                        return
                    column, operation, now_ns = arrived
                    operation -= 1
                    continue
                else:
                    self._add("wake", column, self._name(column, what.place), entered, now_ns)
                now_ns = min(entered, now_ns)
            operation -= 1

    def _collective(self, column: int, place: int, now_ns: int) -> tuple[int, int, int] | None:
        """Return from the end of a collective on a rank to the arrival it waited for: rank, index of the issue, and
        when. None: that is before the beginning.
        """
        while now_ns > self._begin_ns:
            times, step = self._times, self._step
            last, free = int(times.last_ns[place, column, 0]), int(times.free_ns[place, column, 0])
            cost = int(step.cost_ns[place, min(column, step.cost_ns.shape[1] - 1)])
            issued = self._layouts[column].issued[place]
            came = self._arrivals(issued, column, place)
            _, last_column, issue = came[0]
            by_backend = now_ns > max(last, free) + cost
            if by_backend or free <= last:
                part: Part = "backend" if by_backend else "transfer"
                self._add(part, column, self._name(column, place), last, now_ns)
                return (last_column, issue, min(last, now_ns)) if last > self._begin_ns else None
            self._add("transfer", column, self._name(column, place), free, now_ns)
            # A collective that costs nothing ends when its link was free for it: each is followed once, or the walk
            # would find it, and not the one before it, for ever.
            self._carried |= {
                (arrived_column, self._layouts[arrived_column].operations[operation].place)
                for _, arrived_column, operation in came
            }
            before = self._carried_before(issued, column, place, free)
            if before is None:
                self._add("before", column, "the link is busy with the step before", self._begin_ns, min(free, now_ns))
                return None
            (column, place), now_ns = before, min(free, now_ns)
        return None

    def _arrivals(self, issued: Issued, column: int, place: int) -> list[tuple[int, int, int]]:
        """Return arrival, column and index of the issue of each rank of a collective, the last first; this rank before
        others that came at the same moment.
        """
        group = (issued.group, issued.ranks)
        before = sum((each.group, each.ranks) == group for each in self._layouts[column].issued[:place])
        found = []
        for rank in issued.ranks:
            other = self._program.ranks.index(rank)
            layout = self._layouts[other]
            own = [at for at, each in enumerate(layout.issued) if (each.group, each.ranks) == group]
            at = own[before]
            operation = next(
                index for index, each in enumerate(layout.operations) if each.what is What.ISSUE and each.place == at
            )
            found.append((int(self._times.enter_ns[operation, other, 0]), other, operation))
        return sorted(found, key=lambda each: (-each[0], each[1] != column, each[1]))

    def _carried_before(self, issued: Issued, column: int, place: int, free_ns: int) -> tuple[int, int] | None:
        """Return column and place of the collective that kept the link busy until `free_ns`; None: not of this step."""
        if not self._program.shared_links:
            others = [
                at
                for at, each in enumerate(self._layouts[column].issued[:place])
                if each.link == issued.link and int(self._times.end_ns[at, column, 0]) == free_ns
            ]
            return (column, others[-1]) if others else None
        for rank in issued.ranks:
            other = self._program.ranks.index(rank)
            for at, each in enumerate(self._layouts[other].issued):
                if (other, at) in self._carried or each.link != issued.link:
                    continue
                if int(self._times.end_ns[at, other, 0]) == free_ns:
                    return other, at
        return None

    def _own(self, column: int, begin_ns: int, end_ns: int) -> None:
        """Divide own time of a rank by what its spans say; of nested ones the inner."""
        begin_ns = max(begin_ns, self._begin_ns)
        if begin_ns >= end_ns:
            return
        if column not in self._spans:
            self._spans[column] = span_edges(self._step, self._times, column)
        inside = [
            (name, max(low, begin_ns), min(high, end_ns))
            for name, (low, high) in self._spans[column]
            if low < end_ns and high > begin_ns
        ]
        edges = sorted({begin_ns, end_ns, *(edge for _, *span in inside for edge in span)}, reverse=True)
        for high, low in pairwise(edges):
            over = [(name, span) for name, *span in inside if span[0] <= low and span[1] >= high]
            if not over:
                self._add("own", column, "", low, high)
                continue
            names = self._program.names
            name = names[max(over, key=lambda each: (names[each[0]].lane == HAND_OVER, each[1][0]))[0]]
            part: Part = "compute" if name.lane == "compute" else "aux" if name.lane == "aux" else "hand_over"
            self._add(part, column, str(name), low, high)

    def _add(self, part: Part, column: int, name: str, begin_ns: int, end_ns: int) -> None:
        begin_ns = max(begin_ns, self._begin_ns)
        if begin_ns >= end_ns:
            return
        rank = self._program.ranks[column]
        if self.segments and self.segments[-1][:3] == (part, rank, name):
            end_ns = self.segments.pop().end_ns
        self.segments.append(PathSegment(part, rank, name, begin_ns, end_ns))

    def _name(self, column: int, place: int) -> str:
        return f"{self._layouts[column].issued[place].kind} #{place}"
