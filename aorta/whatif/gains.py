"""Lists the changes that would gain most, the marginal cost of parts of the communication, and the critical path of a
step.

    gains(base_of(program)).gains[0].sentence
    marginals(program).marginals[0].gain_ms
    critical_path(program, 7).totals_ns()

docs/dev/what-if-model.md defines them. Must not add gains up: a collective may hide another one's time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from aorta.analysis.collective_metrics import NO_SLOWER_RANKS
from aorta.documents.dataset import GainEntry, MarginalEntry
from aorta.documents.formatting import TEXT, rough_interval, rough_ms
from aorta.errors import InputError
from aorta.read.frames import Bools, Ints
from aorta.read.run import HAND_OVER
from aorta.timeline.overlap import NS_PER_MS
from aorta.whatif.changes import CommSpeed, NoStragglers, apply, parse_changes
from aorta.whatif.prediction import FREE, Base, flags_of, gain_of, predict_from, step_gain_ms, verdict
from aorta.whatif.program import RunProgram, What
from aorta.whatif.replay import StepTimes, replay, span_edges

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
    "stragglers=none": NO_SLOWER_RANKS,
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
    """Try every change that somebody could make in this run, alone."""
    found: dict[bytes, GainEntry] = {}
    upper_bound = base.program.facts.network is None
    for text, words in (_SETTINGS | _HYPOTHETICAL).items():
        (change,) = parse_changes([text])
        try:
            changed = apply(base.program, [change])
        except InputError:  # this run does not have it
            continue
        gained = step_gain_ms(base.times, replay(changed.program))
        gain = gain_of(gained, base.identity.missed_ms + change.STATED_ERROR * abs(float(np.median(gained))))
        share, setting = gain.value / base.identity.replayed_ms, text in _SETTINGS
        significant = not upper_bound and gain.low > 0
        sentence = (
            f"{words}{'' if setting else ' (hypothetical)'}: {'at most ' if upper_bound else ''}"
            f"{rough_interval(gain.value, gain.low, gain.high)} of the {rough_ms(base.identity.replayed_ms)} step, "
            f"{TEXT.percent(share)}{'' if upper_bound else f', {verdict(significant)}'}"
        )
        entry = GainEntry(
            change=text,
            words=words,
            setting=setting,
            gain_ms=gain.value,
            low_ms=gain.low,
            high_ms=gain.high,
            share=share,
            notes=list(changed.flags),
            significant=significant,
            upper_bound=upper_bound,
            sentence=sentence,
        )
        # Two that gain the same in every step are one change: FSDP's overlap and prefetch=1.
        found.setdefault(gained.tobytes(), entry)
    worth = [gain for gain in found.values() if gain.share > WORTH]
    chosen = sorted(worth, key=lambda gain: (not (gain.setting and gain.significant), -gain.gain_ms))[:shown]
    free = predict_from(base, [FREE])
    return Gains(base.identity.replayed_ms, chosen, flags_of(base.program), free.notes)


class Marginals(msgspec.Struct, frozen=True):
    """Marginal costs (medians over steps and their intervals, `gain_of`), the largest first, and bounds."""

    step_ms: float
    steps: int
    marginals: list[MarginalEntry]
    bounds: list[MarginalEntry]
    notes: list[str]


def marginals(program: RunProgram) -> Marginals:
    """Work out what a step would gain if each kind or group of collectives alone were free."""
    every = {  # (layout, place) of all collectives
        (number, place): issued
        for number, layout in enumerate(program.layouts)
        for place, issued in enumerate(layout.issued)
    }
    # Groups that other ranks use in each other's place (the disjoint groups of a mesh) are one family.
    at_place: dict[tuple[int, str, int], set[str]] = defaultdict(set)
    for (_, place), issued in every.items():
        at_place[place, issued.kind, len(issued.ranks)].add(issued.group)
    family = {issued.group: {issued.group} for issued in every.values()}
    for names in at_place.values():
        merged = set().union(*(family[name] for name in names))
        family |= dict.fromkeys(merged, merged)
    kinds: dict[str, set[tuple[int, int]]] = defaultdict(set)
    groups: dict[tuple[str, ...], set[tuple[int, int]]] = defaultdict(set)
    for at, issued in every.items():
        kinds[issued.kind].add(at)
        groups[tuple(sorted(family[issued.group]))].add(at)
    # Kind of part, name, the change that frees it, and (layout, place) of its collectives.
    parts: list[tuple[str, str, str | None, Collection[tuple[int, int]]]] = [
        ("bound", "all communication free", "comm=free", every),
        *(("kind", kind, f"comm.kind.{kind}=free", chosen) for kind, chosen in sorted(kinds.items())),
    ]
    if len(groups) > 1:
        for members, chosen in sorted(groups.items()):
            change = f"comm.group.{members[0]}=free" if len(members) == 1 else None
            parts.append(("group", ", ".join(members), change, chosen))
    freed: dict[tuple[int, int], Bools] = defaultdict(lambda: np.zeros(len(parts) + 1, bool))
    for number, (*_, freed_here) in enumerate(parts, start=1):
        for at in freed_here:
            freed[at][number] = True
    times = replay(program, freed=freed, scenarios=len(parts) + 1)
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
    # Perfect overlap: a step takes the longer of its time without communication and the time of its busiest link.
    busiest = np.zeros(len(base), np.int64)
    for number, step in enumerate(program.steps):
        for column in range(step.cost_ns.shape[1]):
            busy: dict[object, int] = defaultdict(int)
            for place, issued in enumerate(program.layouts[step.layouts[column]].issued):
                # Without a link it waits for no other: it can run beside all of them.
                busy[("alone", place) if issued.link is None else issued.link] += int(step.cost_ns[place, column])
            busiest[number] = max(busiest[number], *busy.values(), 0)
    overlapped = np.maximum(base - np.maximum(free, busiest), 0)
    bounds.append(entry("bound", "perfect overlap", None, overlapped, CommSpeed.STATED_ERROR))
    ordered = sorted(found[1:], key=lambda part: -part.gain_ms)
    return Marginals(float(np.median(base)) / NS_PER_MS, len(program.steps), ordered, bounds, notes)


Part: TypeAlias = Literal["compute", "aux", "hand_over", "own", "wake", "transfer", "backend", "before"]
WORDS: Final[dict[Part, str]] = {
    "compute": "computes",
    "aux": "",
    "hand_over": "collective",
    "own": "code outside timed blocks",
    "wake": "resumes after",
    "transfer": "transfers",
    "backend": "waits for the backend, slower than the emulated link, in",
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
        """Return the time per cause, the largest first: (part, rank, name) -> nanoseconds."""
        found: dict[tuple[Part, int, str], int] = {}
        for segment in self.segments:
            found[segment[:3]] = found.get(segment[:3], 0) + segment.end_ns - segment.begin_ns
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
    column = int(np.argmax(times.end_ns[index, :, 0] - times.begin_ns[index, :, 0]))
    begin, end = int(times.begin_ns[index, column, 0]), int(times.end_ns[index, column, 0])
    segments = _Walk(program, index, times.kept[index], begin).back_from(column, end)
    return CriticalPath(program.steps[index].global_step, program.ranks[column], begin, end, tuple(segments))


class _Walk:
    def __init__(self, program: RunProgram, index: int, times: StepTimes, begin_ns: int) -> None:
        self._program, self._times, self._begin_ns = program, times, begin_ns
        self._step = program.steps[index]
        self._layouts = [program.layouts[layout] for layout in self._step.layouts]
        self._spans: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        self._segments: list[PathSegment] = []

    def back_from(self, column: int, now_ns: int) -> list[PathSegment]:
        """Return the segments up to the end of the step of a rank, in order of time."""
        operation = len(self._layouts[column].operations) - 2  # the last is END, at `now_ns`
        while True:
            left = int(self._times.leave_ns[operation, column, 0])
            self._own(column, left, now_ns)
            now_ns = min(left, now_ns)
            what, place, back = self._layouts[column].operations[operation]
            if now_ns <= self._begin_ns or what is What.BEGIN:
                self._add("before", column, None, self._begin_ns, now_ns)
                break
            if what is What.WAIT:
                entered = int(self._times.enter_ns[operation, column, 0])
                until = entered if back else int(self._times.end_ns[place, column, 0])
                if back:  # its times are those of another step
                    self._add("before", column, "a collective of the step before", entered, now_ns)
                else:
                    self._add("wake", column, place, max(until, entered), now_ns)
                if until > entered:
                    arrived = self._collective(column, place, min(until, now_ns))
                    if arrived is None:
                        break
                    column, operation, now_ns = arrived
                else:
                    now_ns = min(entered, now_ns)
            operation -= 1
        return self._segments[::-1]

    def _collective(self, column: int, place: int, now_ns: int) -> tuple[int, int, int] | None:
        """Return from the end of a collective on a rank to the arrival it waited for: rank, index of the issue, and
        when. None: that is before the beginning.
        """
        step, times, issued = self._step, self._times, self._layouts[column].issued
        while now_ns > self._begin_ns:
            last, free = int(times.last_ns[place, column, 0]), int(times.free_ns[place, column, 0])
            cost = int(step.cost_ns[place, min(column, step.cost_ns.shape[1] - 1)])
            by_backend = now_ns > max(last, free) + cost
            if not by_backend and free > last:  # it queued behind another collective on the link
                self._add("transfer", column, place, free, now_ns)
                now_ns = min(free, now_ns)
                queue = [at for at, each in enumerate(issued[:place]) if each.link == issued[place].link]
                before = [at for at in queue if int(times.end_ns[at, column, 0]) == free]
                if not before:
                    self._add("before", column, "the link is busy with the step before", self._begin_ns, now_ns)
                    return None
                place = before[-1]
                continue
            self._add("backend" if by_backend else "transfer", column, place, last, now_ns)
            group = issued[place][1::2]
            number = sum(each[1::2] == group for each in issued[:place])
            arrivals = []
            for other in map(self._program.ranks.index, issued[place].ranks):
                layout = self._layouts[other]
                own = [at for at, each in enumerate(layout.issued) if each[1::2] == group][number]
                issue = next(at for at, each in enumerate(layout.operations) if each[:2] == (What.ISSUE, own))
                # This rank comes before others that came at the same moment.
                arrivals.append((-int(times.enter_ns[issue, other, 0]), other != column, other, issue))
            *_, column, issue = min(arrivals)
            return (column, issue, min(last, now_ns)) if last > self._begin_ns else None
        return None

    def _own(self, column: int, begin_ns: int, end_ns: int) -> None:
        """Divide own time of a rank by what its spans say; of nested ones the inner."""
        begin_ns = max(begin_ns, self._begin_ns)
        if begin_ns >= end_ns:
            return
        if column not in self._spans:
            self._spans[column] = span_edges(self._step, self._times, column)
        inside = [
            (self._program.names[name], max(low, begin_ns), min(high, end_ns))
            for name, (low, high) in self._spans[column]
            if low < end_ns and high > begin_ns
        ]
        edges = sorted({begin_ns, end_ns, *(edge for _, *span in inside for edge in span)}, reverse=True)
        for high, low in pairwise(edges):
            over = [
                (name.lane == HAND_OVER, begin, name) for name, begin, end in inside if begin <= low and end >= high
            ]
            if not over:
                self._add("own", column, None, low, high)
                continue
            *_, name = max(over, key=lambda span: span[:2])
            part: Part = "compute" if name.lane == "compute" else "aux" if name.lane == "aux" else "hand_over"
            self._add(part, column, str(name), low, high)

    def _add(self, part: Part, column: int, name: str | int | None, begin_ns: int, end_ns: int) -> None:
        """Add a segment before those there are, named in words or by the place of a collective."""
        begin_ns = max(begin_ns, self._begin_ns)
        if begin_ns >= end_ns:
            return
        if isinstance(name, int):
            name = f"{self._layouts[column].issued[name].kind} #{name}"
        key = (part, self._program.ranks[column], name or "")
        if self._segments and self._segments[-1][:3] == key:
            end_ns = self._segments.pop().end_ns
        self._segments.append(PathSegment(*key, begin_ns, end_ns))
