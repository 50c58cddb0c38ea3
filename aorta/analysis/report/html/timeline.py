"""The spans of the page's timelines: of a few steps of a dataset, what ran when on each rank, where it waited, and what
stayed exposed.

Must not line ranks up in time (each step starts at its rank's own zero), or leave ranks out without saying how many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.formatting import PAGE
from aorta.analysis.frames import collectives_frame
from aorta.analysis.report.figure_data import ChosenStep, chosen_steps
from aorta.analysis.step_intervals import StepIntervals
from aorta.errors import InputError
from aorta.timeline.classes import AUX, BUBBLE, COMPUTE, COPY, NOT_COMMUNICATION
from aorta.timeline.overlap import NS_PER_MS

BLOCKED: Final = "blocked on a collective"
OTHER_WORK: Final = "optimizer, data"
COPIES: Final = "copies"
NAMED: Final = "named in the loop"
EXPOSED: Final = "exposed communication"
BUBBLES: Final = "bubbles of the pipeline"
_GROUP_LANES: Final = 12
"""With more process groups than this, a lane is a kind of collective instead of a group."""
RANK_STEP_SPANS: Final = 3_000
"""Spans of one rank in one step; more are closer than a pixel, and neighbours are drawn as one."""
_CLOSE: Final = 1 / 4_000
"""Of a step: what is closer than that is less than a pixel apart."""


class _Span(NamedTuple):
    lane: str
    kind: str
    what: str
    start_ms: float
    length_ms: float
    seq: int = -1
    wait_ms: float = np.nan
    instance: int = -1


@dataclass(frozen=True)
class TimelineSpans:
    """`columns`: an element a span. `rank`, `step`, `lane`, `kind` and `what` are places in the lists of that name;
    `start` and `length` are ms from the start of the step on that rank; `seq` -1 and `wait` NaN are unknown.
    Spans of one `instance` are the same collective on different ranks; -1 is no collective.
    """

    label: str
    steps: list[ChosenStep]
    ranks: list[int]
    ranks_read: int
    ranks_in_run: int
    shown_first: list[int]
    """Ranks that a page shows before anybody chooses."""
    lanes: list[str]
    kinds: list[str]
    whats: list[str]
    columns: dict[str, np.ndarray]
    notes: list[str]


@dataclass
class _Table:
    """Spans as they are found."""

    lanes: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    whats: dict[str, int] = field(default_factory=dict)
    rows: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, rank: int, step: int, span: _Span) -> None:
        lane, kind, what = (
            places.setdefault(name, len(places))
            for places, name in ((self.lanes, span.lane), (self.kinds, span.kind), (self.whats, span.what))
        )
        self.rows.append((rank, step, lane, kind, what, span.start_ms, span.length_ms, *span[5:]))

    def order(self) -> None:
        """Put the lanes in the order in which they are read: what is computed, what is exchanged, what is left."""
        names = sorted(self.lanes, key=lane_order)
        moved = {self.lanes[name]: at for at, name in enumerate(names)}
        self.lanes = {name: at for at, name in enumerate(names)}
        self.rows = [(*row[:2], moved[int(row[2])], *row[3:]) for row in self.rows]

    def columns(self) -> dict[str, np.ndarray]:
        table = np.array(self.rows, np.float64).reshape(-1, 10)
        names = ("rank", "step", "lane", "kind", "what", "start", "length", "seq", "wait", "instance")
        short, real = (np.uint16, np.uint8, np.uint16, np.uint16, np.uint32), (np.float32, np.float32)
        types = (*short, *real, np.int32, np.float32, np.int32)
        return {name: table[:, place].astype(kind) for place, (name, kind) in enumerate(zip(names, types, strict=True))}


def lane_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a lane's sort key: computation first, exposed and the rest last; `group 9` before `group 10`."""
    last = {COMPUTE: 0, EXPOSED: 2, BUBBLES: 3, OTHER_WORK: 4, COPIES: 5, NAMED: 6}
    parts = re.findall(r"\d+|\D+", name)
    return last.get(name, 7 if name.startswith(NAMED) else 1), [
        (int(part), "") if part.isdecimal() else (-1, part) for part in parts
    ]


def spans_of(dataset: LabelledRun, budget: int, first: int, named: Sequence[int] = ()) -> TimelineSpans:
    """Return the spans of the median, the slowest and the fastest step.

    Args:
        budget: about how many spans there may be; with more, fewer ranks are drawn, spread evenly over all.
        first: how many ranks are shown at first, those of `named` before others.
        named: ranks that are drawn before others, the first of them where there are more than fit.
    """
    steps = chosen_steps(dataset)
    numbers = list(dict.fromkeys(step.global_step for step in steps))
    everyone = sorted(dataset.run.ranks)
    looks = [_Look(dataset, number) for number in numbers]
    for look in looks:
        look.read(everyone[:1])
    each = max((len(look.spans(everyone[0])) for look in looks), default=0)
    drawn = _spread(everyone, max(1, budget // max(1, each * len(looks))), named)
    table = _Table()
    for look, number in zip(looks, numbers, strict=True):
        place = next(at for at, step in enumerate(steps) if step.global_step == number)
        look.read(drawn)
        for at, rank in enumerate(drawn):
            for span in look.spans(rank):
                table.add(at, place, span)
    table.order()
    return TimelineSpans(
        dataset.label,
        steps if table.rows else [],
        drawn,
        len(everyone),
        max(len(everyone), dataset.run.health.world_size),
        sorted(list(dict.fromkeys([*(rank for rank in named if rank in drawn), *_spread(drawn, first, ())]))[:first]),
        list(table.lanes),
        list(table.kinds),
        list(table.whats),
        table.columns(),
        [
            *dict.fromkeys(note for look in looks for note in look.unread.values()),
            *_said(looks, sorted(set(named) & set(everyone) - set(drawn))),
        ],
    )


class _Look:
    """One global step of a dataset, matched across ranks; what could not be drawn of it is kept by rank."""

    def __init__(self, dataset: LabelledRun, global_step: int) -> None:
        self._run, self._step = dataset.run, global_step
        self._frame = collectives_frame(dataset.run, steps=(global_step, global_step + 1))
        self._rows: dict[int, list[Any]] = {}
        self._by_group = self._frame["group"].nunique() <= _GROUP_LANES
        self.unread: dict[int, str] = {}
        self.unseen: dict[int, int] = {}
        self.joined: dict[int, int] = {}

    def read(self, ranks: Sequence[int]) -> None:
        """Make tuples of the collectives of these ranks: of thousands few are drawn, and all of a call cost as much as
        those of one rank.
        """
        self._rows = {rank: [] for rank in ranks}
        for row in self._frame[self._frame["rank"].isin(ranks)].itertuples():
            self._rows[int(str(row.rank))].append(row)

    def spans(self, rank: int) -> list[_Span]:
        """Return what one rank did; neighbours made one where there are more than `RANK_STEP_SPANS`."""
        try:
            step = self._run.ranks[rank].step_intervals(self._step)
        except InputError as error:  # the numbers do not need what only this picture reads
            self.unread[rank] = str(error)
            return []
        if step is None:
            return []
        rows = self._rows[rank]
        self.unseen[rank] = sum(1 for row in rows if _missing(row))
        found = list(_all(step, rows, by_group=self._by_group))
        kept = found if len(found) <= RANK_STEP_SPANS else _joined(found, step)
        self.joined[rank] = len(found) - len(kept)
        return kept


def _said(looks: Sequence[_Look], not_drawn: Sequence[int]) -> Iterator[str]:
    if not_drawn:
        yield f"{len(not_drawn)} rank(s) named as stragglers do not fit and are not drawn, the first: {not_drawn[0]}"
    unseen = sum(sum(look.unseen.values()) for look in looks)
    joined = sum(sum(look.joined.values()) for look in looks)
    if unseen:
        yield f"{unseen} collective(s) whose start or end was not seen are not drawn"
    if joined:
        yield f"{joined} span(s) closer to their neighbour than a pixel are drawn as one with it"


def _spread(ranks: Sequence[int], count: int, named: Sequence[int]) -> list[int]:
    """Select `count` ranks, evenly from first to last, and as many of `named` at most; all where they fit."""
    if len(ranks) <= count:
        return list(ranks)
    places = np.unique(np.linspace(0, len(ranks) - 1, count).round().astype(int))
    there = set(ranks)
    wanted = {ranks[place] for place in places} | set([each for each in named if each in there][:count])
    return [rank for rank in ranks if rank in wanted]


def _missing(row: Any) -> bool:
    return bool(np.isnan(row.duration_ms))


def _all(step: StepIntervals, rows: list[Any], *, by_group: bool) -> Iterator[_Span]:
    """Yield computation, stalls, collectives, what was exposed of them, and the rest. Where a source has only segments,
    those; a lane of it is a stream.
    """
    lanes = step.active()
    if step.compute:
        for part in step.compute:
            yield _span(COMPUTE, part.phase, f"{part.block}, {part.phase}", part.start_ns, part.end_ns)
    else:
        yield from _segments(COMPUTE, step.computing())
    for stall in step.stalls or ():
        yield _span(COMPUTE, BLOCKED, BLOCKED, stall.start_ns, stall.end_ns)
    if rows:
        yield from (_collective(row, by_group=by_group) for row in rows if not _missing(row))
    else:
        for name in lanes.keys() - NOT_COMMUNICATION:
            yield from _segments(name, lanes[name])
    for start, end in step.exposed():
        yield _span(EXPOSED, EXPOSED, EXPOSED, start, end)
    yield from _segments(BUBBLES, lanes.get(BUBBLE, ()))
    if step.aux:
        for work in step.aux:
            yield _span(OTHER_WORK, work.name, work.name, work.start_ns, work.end_ns)
    else:
        yield from _segments(OTHER_WORK, lanes.get(AUX, ()))
    yield from _segments(COPIES, lanes.get(COPY, ()))
    for named in step.ranges:
        if named.end_ns > 0:  # it may have ended before the step began
            lane = NAMED if not named.thread else f"{NAMED}, thread {named.thread}"
            lane += f", level {named.depth + 1}" if named.depth else ""  # in one lane the inner would hide in the outer
            what = named.name if named.error is None else f"{named.name}, ended by {named.error}"
            yield _span(lane, NAMED, what, max(named.start_ns, 0), min(named.end_ns, step.length_ns))


def _span(lane: str, kind: str, what: str, start_ns: int, end_ns: int) -> _Span:
    return _Span(lane, kind, what, start_ns / NS_PER_MS, (end_ns - start_ns) / NS_PER_MS)


def _segments(lane: str, parts: Iterable[tuple[int, int]]) -> Iterator[_Span]:
    return (_span(lane, lane, lane, start, end) for start, end in parts)


def _collective(row: Any, *, by_group: bool) -> _Span:
    what = f"{row.kind}, {PAGE.size(row.bytes)}, group {row.group}"
    start = int(row.start_ns) / NS_PER_MS
    lane = f"group {row.group}" if by_group else row.kind
    seq = max(-1, min(int(row.seq), 2**31 - 1))
    return _Span(lane, row.kind, what, start, row.duration_ms, seq, row.wait_ms, int(row.instance))


def _joined(spans: list[_Span], step: StepIntervals) -> list[_Span]:
    """Return the spans of one lane and kind that are less than a pixel apart, made one."""
    close = step.length_ns / NS_PER_MS * _CLOSE
    made: list[_Span] = []
    for span in sorted(spans, key=lambda span: (span.lane, span.kind, span.start_ms)):
        last = made[-1] if made else None
        if last is None or (last.lane, last.kind) != (span.lane, span.kind):
            made.append(span)
            continue
        end = last.start_ms + last.length_ms
        if span.start_ms - end < close:
            reach = max(end, span.start_ms + span.length_ms) - last.start_ms
            made[-1] = last._replace(what=f"{span.kind}, several", length_ms=reach, seq=-1, wait_ms=np.nan, instance=-1)
        else:
            made.append(span)
    return made
