"""Timelines of chosen steps: their spans on the clock that the ranks share, and what the page's script reads of them.

Must not place a rank on another's clock without a measured offset (each then starts at its own zero, and `clock` says
why), leave ranks out without saying how many, or choose a step that some rank does not have.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from aorta.analysis.aggregate import LabelledRun, job_step_times, job_steps
from aorta.command_line import name_ranks
from aorta.documents.formatting import PAGE, rough_ms
from aorta.errors import InputError
from aorta.read.ledger import COMM
from aorta.read.matching import NumberedNames, matched_pieces
from aorta.read.run import Run, StepIntervals
from aorta.report.palette import light
from aorta.timeline.classes import AUX, BUBBLE, COMPUTE, COPY, NOT_COMMUNICATION
from aorta.timeline.overlap import NS_PER_MS

BLOCKED: Final = "blocked on a collective"
OTHER_WORK: Final = "optimizer, data"
COPIES: Final = "copies"
NAMED: Final = "named in the loop"
EXPOSED: Final = "exposed communication"
BUBBLES: Final = "bubbles of the pipeline"
_TITLES: Final = {COMPUTE: "computation", COMM: "communication", COPY: COPIES}
_GROUP_LANES: Final = 12
"""With more process groups than this, a lane is a kind of collective instead of a group."""
RANK_STEP_SPANS: Final = 3_000
"""Spans of one rank in one step; more are closer than a pixel, and neighbours are drawn as one."""
_CLOSE: Final = 1 / 4_000
"""Of a step: what is closer than that is less than a pixel apart."""
_TYPES: Final = {
    **dict.fromkeys(("rank", "lane", "kind"), np.uint16),
    "step": np.uint8,
    "what": np.uint32,
    "seq": np.int32,
    "instance": np.int32,
}
"""Of columns; the others are float32."""
_KINDS: Final = {"allreduce", "reducescatter", "allgather", "alltoall"}
_MEANINGS: Final = {EXPOSED: "exposed", NAMED: "named", BLOCKED: "ink"}
_LANE_MEANINGS: Final = {OTHER_WORK: "other-work", COPIES: "other-work", BUBBLES: "idle"}


class Span(NamedTuple):
    """`seq` -1 and `wait_ms` NaN are unknown. Spans of one `instance` are one collective on several ranks; -1: none."""

    lane: str
    kind: str
    what: str
    start_ms: float
    length_ms: float
    seq: int = -1
    wait_ms: float = np.nan
    instance: int = -1

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.length_ms


def color_of(kind: str, lane: str) -> str:
    """Return the colour of a span on a light background."""
    meaning = _MEANINGS.get(kind) or _LANE_MEANINGS.get(lane)
    if lane == COMPUTE and meaning is None:
        meaning = kind if kind in ("forward", "backward") else "compute"
    return light(meaning or (kind if kind in _KINDS else "other-kind"))


def windows(run: Run, global_step: int, ranks: Iterable[int]) -> tuple[dict[int, tuple[float, float, float]], str]:
    """Return rank -> when it began the step, in ms after the first of `ranks`, how long it took, and by how much the
    start may be off (NaN: not known), for those that have the step; and a sentence on the clock that they share. Ranks
    of one host share its monotonic clock; those of several need measured offsets (R9).
    """
    steps = {rank: run.ranks[rank].steps for rank in ranks}
    indices = {rank: int(np.searchsorted(frame.global_step, global_step)) for rank, frame in steps.items()}
    indices = {
        rank: index for rank, index in indices.items() if global_step in steps[rank].global_step[index : index + 1]
    }
    lengths = {rank: int(steps[rank].length_ns[index]) / NS_PER_MS for rank, index in indices.items()}
    if len(indices) < 2:
        return {rank: (0.0, length, 0.0) for rank, length in lengths.items()}, "One rank."
    clocks = {rank: clock for rank in indices if (clock := run.clocks.get(rank)) is not None and clock.known}
    hosts = {run.ranks[rank].source.host for rank in indices}
    boots = {clock.boot_id for clock in clocks.values()}
    if run.traces is None and len(hosts) == 1 and None not in hosts and len(boots) < 2:
        starts = {rank: int(steps[rank].start_mono_ns[index]) for rank, index in indices.items()}
        bounds = dict.fromkeys(indices, 0.0)
        clock_sentence = "Ranks are on one clock, that of their host."
    elif len(clocks) == len(indices):
        wall = {rank: int(steps[rank].t_start_ns[index]) for rank, index in indices.items()}
        starts = {rank: wall_ns + clocks[rank].correction_ns(wall_ns) for rank, wall_ns in wall.items()}
        bounds_ns = {rank: clocks[rank].bound_ns(clocks[rank].shown_ns(wall_ns)) for rank, wall_ns in wall.items()}
        bounds = {rank: np.nan if bound is None else bound / NS_PER_MS for rank, bound in bounds_ns.items()}
        error = (
            "their error is not known" if None in bounds_ns.values() else f"known to {rough_ms(max(bounds.values()))}"
        )
        clock_sentence = f"Ranks are on one clock by their measured offsets, {error}."
    else:
        absent = next(rank for rank in indices if rank not in clocks)
        why = run.clocks_missing or f"the clock of rank {absent} was not measured"
        apart = {rank: (0.0, length, np.nan) for rank, length in lengths.items()}
        return apart, f"Each rank starts at its own zero: {why}."
    first = min(starts.values())
    return {
        rank: ((start - first) / NS_PER_MS, lengths[rank], bounds[rank]) for rank, start in starts.items()
    }, clock_sentence


class StepSpans:
    """One global step of a run, matched across ranks: why a rank is `unread`, what of a rank is not drawn as it is
    `unknown`, and of each rank, how many spans are not drawn (`unseen`), or as one with a neighbour (`joined`).
    """

    def __init__(self, run: Run, global_step: int) -> None:
        self._run, self._step = run, global_step
        self._matched = next(matched_pieces(run, NumberedNames(run), (global_step, global_step + 1)), None)
        codes = () if self._matched is None else np.unique(self._matched[0].frame.name).tolist()
        self._by_group = len({run.collectives.names[code].group for code in codes}) <= _GROUP_LANES
        self.unread: dict[int, str] = {}
        self.unknown: dict[int, set[str]] = {}
        self.unseen: dict[int, int] = {}
        self.joined: dict[int, int] = {}

    def spans(self, rank: int) -> list[Span]:
        """Return what one rank did, since it began the step; neighbours made one where there are more than
        `RANK_STEP_SPANS`.
        """
        try:
            step = self._run.ranks[rank].step_intervals(self._step)
        except InputError as error:  # the numbers do not need what only a timeline reads
            self.unread[rank] = str(error)
            return []
        if step is None:
            return []
        collectives, self.unseen[rank] = self._collectives(rank)
        unknown = self.unknown[rank] = set[str]()
        if self._run.traces is not None:  # what a trace does not show: a lane without records, what is null
            tables = self._run.ranks[rank]
            index = int(np.searchsorted(tables.steps.global_step, self._step))
            null = {name for name, column in tables.steps.metrics.items() if np.isnan(column[index])}
            unknown |= {gap.lane for gap in tables.gaps if not gap.seen and f"{gap.lane}_ms" in null}
            unknown |= {EXPOSED} if "exposed_comm_ms" in null else set()
        spans = list(self._all(step, [] if COMM in unknown else collectives, unknown))
        count, close_ms = len(spans), step.length_ns / NS_PER_MS * _CLOSE
        if count > RANK_STEP_SPANS:
            made: list[Span] = []
            for span in sorted(spans, key=lambda span: (span.lane, span.kind, span.start_ms)):
                last = made[-1] if made else None
                if last is None or last[:2] != span[:2] or span.start_ms - last.end_ms >= close_ms:
                    made.append(span)
                else:
                    reach = max(last.end_ms, span.end_ms) - last.start_ms
                    made[-1] = Span(last.lane, last.kind, f"{span.kind}, several", last.start_ms, reach)
            spans = made
        self.joined[rank] = count - len(spans)
        return spans

    def _collectives(self, rank: int) -> tuple[list[Span], int]:
        """Return the collectives of a rank whose start and end were seen, and how many others there are."""
        if self._matched is None:
            return [], 0
        rows, matched = self._matched
        every, frame, spans = self._run.collectives.names, rows.frame, []
        own = np.flatnonzero(rows.rank == rank)
        timed = own[frame.timed[own]]
        for index in timed.tolist():
            name, wait_ns = every[int(frame.name[index])], int(matched.wait_or_reason[index])
            lane = self._run.group_titles[name.group]
            what = f"{name.kind}, {PAGE.size(name.bytes)}, {lane}"
            start_ns, end_ns = int(frame.start_ns[index]), int(frame.end_ns[index])
            spans.append(
                _span(lane if self._by_group else name.kind, name.kind, what, start_ns, end_ns)._replace(
                    seq=max(-1, min(int(frame.seq[index]), 2**31 - 1)),
                    wait_ms=np.nan if wait_ns < 0 else wait_ns / NS_PER_MS,
                    instance=int(matched.by.of_row[index]),
                )
            )
        return spans, len(own) - len(timed)

    def _all(self, step: StepIntervals, collectives: list[Span], unknown: Container[str]) -> Iterator[Span]:
        """Yield computation, stalls, collectives, what was exposed of them, and the rest, but for what is unknown.
        Where a source has only segments, those; a lane of it is a stream.
        """
        lanes = step.active()
        if step.compute is not None:
            for part in step.compute:
                yield _span(COMPUTE, part.phase, f"{part.block}, {part.phase}", part.start_ns, part.end_ns)
        elif COMPUTE not in unknown:
            yield from _segments(COMPUTE, lanes.get(COMPUTE, ()))
        for stall in step.stalls or ():
            yield _span(COMPUTE, BLOCKED, BLOCKED, stall.start_ns, stall.end_ns)
        yield from collectives
        if not collectives and COMM not in unknown:
            for name in lanes.keys() - NOT_COMMUNICATION:
                yield from _segments(name, lanes[name])
        if EXPOSED not in unknown:
            yield from _segments(EXPOSED, step.exposed())
        yield from _segments(BUBBLES, lanes.get(BUBBLE, ()))
        if step.aux is not None:
            for work in step.aux:
                yield _span(OTHER_WORK, work.name, work.name, work.start_ns, work.end_ns)
        else:
            yield from _segments(OTHER_WORK, lanes.get(AUX, ()))
        if COPY not in unknown:
            yield from _segments(COPIES, lanes.get(COPY, ()))
        for named in step.ranges:
            if named.end_ns > 0:  # it may have ended before the step began
                lane = NAMED if not named.thread else f"{NAMED}, thread {named.thread}"
                lane += f", level {named.depth + 1}" if named.depth else ""  # in one lane the inner would be hidden
                what = named.name if named.error is None else f"{named.name}, ended by {named.error}"
                yield _span(lane, NAMED, what, max(named.start_ns, 0), min(named.end_ns, step.length_ns))


def _span(lane: str, kind: str, what: str, start_ns: int, end_ns: int) -> Span:
    return Span(lane, kind, what, start_ns / NS_PER_MS, (end_ns - start_ns) / NS_PER_MS)


def _segments(lane: str, parts: Iterable[tuple[int, int]]) -> Iterator[Span]:
    return (_span(lane, lane, lane, start, end) for start, end in parts)


def lane_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a lane's sort key: computation first, exposed and the rest last; `group 9` before `group 10`."""
    last = {COMPUTE: 0, EXPOSED: 2, BUBBLES: 3, OTHER_WORK: 4, COPIES: 5, NAMED: 6}
    parts = re.findall(r"\d+|\D+", name)
    return last.get(name, 7 if name.startswith(NAMED) else 1), [
        (int(part), "") if part.isdecimal() else (-1, part) for part in parts
    ]


class ChosenStep(NamedTuple):
    """`why` says which step it is; `job_step_ms` is None where the slowest rank may be missing."""

    why: str
    global_step: int
    job_step_ms: float | None


def chosen_steps(dataset: LabelledRun) -> list[ChosenStep]:
    """Return the median (the lower of two middle ones), the slowest and the fastest; the earliest of equals. Empty
    without a step that is on all ranks.
    """
    ranks = dataset.run.health.ranks_read or tuple(dataset.run.ranks)
    times, steps = job_steps(dataset, ranks, observed=True)
    if not len(times):
        return []
    known = job_step_times(dataset)[2] is None  # not where ranks are missing; those read are still drawn
    what = "job step" if known else "step of the ranks read"
    order = np.argsort(times, kind="stable")
    chosen = {"median": order[(len(times) - 1) // 2], "slowest": np.argmax(times), "fastest": order[0]}
    return [
        ChosenStep(f"{why} {what}", int(steps[index]), float(times[index]) if known else None)
        for why, index in chosen.items()
    ]


@dataclass(frozen=True)
class TimelineSpans:
    """The spans of a few steps (`columns`, an element a span) and when each rank was in them (`windows`). `rank`,
    `step`, `lane`, `kind` and `what` are places in the lists of that name; `start`, `length`, `wait`, `bound` are ms.
    `shown_first`: ranks that a page shows before anybody chooses; `kinds`: the colour of each on a light background.
    """

    label: str
    steps: list[ChosenStep]
    ranks: list[int]
    ranks_read: int
    ranks_in_run: int
    shown_first: list[int]
    clock: str
    lanes: list[str]
    kinds: dict[str, str]
    whats: list[str]
    columns: dict[str, np.ndarray]
    windows: dict[str, np.ndarray]
    notes: list[str]


def spans_of(dataset: LabelledRun, budget: int, first: int, named: Sequence[int] = ()) -> TimelineSpans:
    """Return the spans of the median, the slowest and the fastest step.

    Args:
        budget: about how many spans there may be; with more, fewer ranks are drawn, spread evenly over all.
        first: how many ranks are shown at first.
        named: ranks that are drawn and shown before others, the first of them where there are more than fit.
    """
    steps, everyone = chosen_steps(dataset), sorted(dataset.run.ranks)
    numbers: dict[int, int] = {}
    for index, step in enumerate(steps):
        numbers.setdefault(step.global_step, index)
    looks = {index: StepSpans(dataset.run, number) for number, index in numbers.items()}
    most = max((len(look.spans(everyone[0])) for look in looks.values()), default=0)
    drawn = _spread(everyone, max(1, budget // max(1, most * len(looks))), named)
    rows: list[tuple[Any, ...]] = []
    window_rows: list[tuple[Any, ...]] = []
    clocks = []
    for index, look in looks.items():
        began, clock = windows(dataset.run, steps[index].global_step, drawn)
        clocks.append(clock)
        for row, rank in enumerate(drawn):
            rows += [(row, index, *span._replace(start_ms=began[rank][0] + span.start_ms)) for span in look.spans(rank)]
            window_rows += [(row, index, *began[rank])] if rank in began else []
    spans = _columns(("rank", "step", *Span._fields), rows)
    colors: dict[str, str] = {}
    for kind, lane in zip(spans["kind"], spans["lane"], strict=True):
        colors.setdefault(kind, color_of(kind, lane))
    lanes, whats = sorted(set(spans["lane"]), key=lane_order), list(dict.fromkeys(spans["what"]))
    for name, words in (("lane", lanes), ("kind", [*colors]), ("what", whats)):
        codes = {word: code for code, word in enumerate(words)}
        spans[name] = [codes[word] for word in spans[name]]
    notes = [note for look in looks.values() for note in look.unread.values()]
    if absent := sorted(set(named) & set(everyone) - set(drawn)):
        late = PAGE.count(len(absent), "straggler")
        notes.append(f"for lack of room {late} not drawn, the first: rank {absent[0]}")
    for lane in sorted({lane for look in looks.values() for lanes_of in look.unknown.values() for lane in lanes_of}):
        ranks = sorted({rank for look in looks.values() for rank, lanes_of in look.unknown.items() if lane in lanes_of})
        notes.append(f"not drawn, as it is not known: {_TITLES.get(lane, lane)} of {name_ranks(ranks)}")
    if unseen := sum(sum(look.unseen.values()) for look in looks.values()):
        notes.append(f"not drawn: {PAGE.count(unseen, 'collective')} whose start or end was not seen")
    if joined := sum(sum(look.joined.values()) for look in looks.values()):
        notes.append(f"drawn as one with a neighbour closer than a pixel: {PAGE.count(joined, 'span')}")
    return TimelineSpans(
        label=dataset.label,
        steps=steps if rows else [],
        ranks=drawn,
        ranks_read=len(everyone),
        ranks_in_run=max(len(everyone), dataset.run.health.world_size),
        shown_first=sorted(
            dict.fromkeys([*(known_rank for known_rank in named if known_rank in drawn), *_spread(drawn, first)])
        )[:first],
        clock=" ".join(dict.fromkeys(clocks)),
        lanes=lanes,
        kinds=colors,
        whats=whats,
        columns=_arrays(spans),
        windows=_arrays(_columns(("rank", "step", "start", "length", "bound"), window_rows)),
        notes=[*dict.fromkeys(notes)],
    )


def _columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, Sequence[Any]]:
    return dict(zip(names, zip(*rows, strict=True) if rows else [()] * len(names), strict=True))


def _arrays(columns: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    return {
        name.removesuffix("_ms"): np.array(values, _TYPES.get(name, np.float32)) for name, values in columns.items()
    }


def _spread(ranks: Sequence[int], count: int, named: Sequence[int] = ()) -> list[int]:
    """Select `count` ranks, evenly from first to last, and as many of `named` at most; all where they fit."""
    if len(ranks) <= count:
        return list(ranks)
    indices = np.unique(np.linspace(0, len(ranks) - 1, count).round().astype(int))
    wanted = {ranks[index] for index in indices} | set([rank for rank in named if rank in set(ranks)][:count])
    return [rank for rank in ranks if rank in wanted]


_PAYLOAD: Final = ("label", "ranks", "ranks_in_run", "shown_first", "clock", "lanes", "whats")


def payload(spans: Sequence[TimelineSpans]) -> list[dict[str, Any]]:
    """Return what the page's script reads, as plain JSON values; columns as base64 of little-endian numbers."""

    def packed(columns: dict[str, np.ndarray]) -> dict[str, dict[str, str]]:
        little = {name: column.astype(column.dtype.newbyteorder("<")) for name, column in columns.items()}
        return {
            name: {"type": column.dtype.name, "data": base64.b64encode(column.tobytes()).decode("ascii")}
            for name, column in little.items()
        }

    return [
        {
            **{name: getattr(of_label, name) for name in _PAYLOAD},
            "steps": [step._asdict() for step in of_label.steps],
            "kinds": [*of_label.kinds],
            "columns": packed(of_label.columns),
            "windows": packed(of_label.windows),
        }
        for of_label in spans
    ]
