"""The books of a run: what must exist is reconciled with what was seen, so that absence of evidence is never zero.

A reader books every event once: a *witness* is a timed row of a lane; a *claim* says that there must be a
row; what is known to be neither is irrelevant; everything else is unknown, and counts with its time. What the claims of
a lane lack is a `Gap`. `balanced` turns the gaps of a window into the least and the greatest value of each metric, by
one table (docs/metrics.md); `audit` makes null what breaks an invariant that holds of every run, whatever read it.
`facts` says in sentences what is wrong, or merely unusual, with a run.

    gaps = [Gap(COMM, "4 launches of graphs have no kernel in the trace")]
    values, reasons, bounds = balanced(overlap, gaps)  # what the gap leaves open is null; the reason has its bounds
    steps, broken = audit(steps, whole)                # what does not add up is null, with the reason

Must not: know a format, repair or guess anything, or decide what a row is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final, NamedTuple

import numpy as np

from aorta.command_line import name_ranks
from aorta.documents import known
from aorta.documents.dataset import GapEntry, Health
from aorta.documents.formatting import TEXT
from aorta.documents.metrics import RATIO_PARTS
from aorta.read.frames import Bools, Floats, Ints, Steps
from aorta.timeline.classes import COMPUTE, COPY, KINDS
from aorta.timeline.overlap import DECIDED, NS_PER_MS, Bounds, Overlap, share

COMM: Final = "comm"
LANES: Final = (COMPUTE, COMM, COPY)
WHOLE: Final = -2
"""`Gap.step` of the whole recording as one window."""


@dataclass(frozen=True)
class Gap:
    """What one lane of a window may lack.

    Attributes:
        lane: one of `LANES`; empty for what no metric rests on.
        step: of which window; None: of every one.
        most_ns: at most so much; infinite where nothing is known of it. What was seen is a lower bound.
        seen: False where what was seen says nothing of the lane, as of a host whose device was not recorded.
        count: of how many windows, `step` the first of them.
    """

    lane: str
    why: str
    step: int | None = None
    most_ns: float = inf
    seen: bool = True
    count: int = 1


def lacking(why: str, *lanes: str, seen: bool = True) -> tuple[Gap, ...]:
    """Return the same gap of some lanes in every window."""
    return tuple(Gap(lane, why, seen=seen) for lane in lanes)


def of_steps(steps: Steps, chosen: Bools, lane: str, why: str, *, seen: bool = False) -> Gap:
    """Return the gap of a lane in some steps, one at least."""
    return Gap(lane, why, int(steps.global_step[chosen][0]), seen=seen, count=int(chosen.sum()))


def lost(
    why: str, lanes: Sequence[str], step: Ints, weight: Floats, ran: Mapping[int, float], *, seen: bool = True
) -> Iterator[Gap]:
    """Yield the gaps of launches without a row, in each step and in the whole, where they matter (`DECIDED`).

    Args:
        why: with `{count}` for the number of launches.
        step, weight: of each launch: its step, and how many rows, or how much time, it stands for.
        ran: step -> what ran; `WHOLE` -> all.
        seen: as of a `Gap`.
    """
    numbers, of_step = np.unique(step, return_inverse=True)
    sums, counts = np.bincount(of_step, weight), np.bincount(of_step)
    windows = [*zip(numbers.tolist(), sums.tolist(), counts.tolist(), strict=True), (WHOLE, weight.sum(), len(step))]
    for number, missing, count in windows:
        if missing > DECIDED * (missing + ran.get(number, 0)):
            yield from (Gap(lane, why.format(count=count), number, seen=seen) for lane in lanes)


def entries(gaps: Iterable[Gap], rank: int | None) -> list[GapEntry]:
    """Return gaps as a report lists them: one entry for what differs between windows in nothing but its counts."""
    same: dict[tuple[str, bool], list[Gap]] = {}
    for gap in gaps:
        same.setdefault((re.sub(r"\d+", "#", gap.why), gap.seen), []).append(gap)
    listed = []
    for (_, seen), alike in same.items():
        of_whole = [gap for gap in alike if gap.step in (None, WHOLE)]
        steps = max(
            sum({gap.step: gap.count for gap in alike if gap.lane == lane and gap.step not in (None, WHOLE)}.values())
            for lane in {gap.lane for gap in alike}
        )
        most_ns = max(gap.most_ns for gap in alike)
        listed.append(
            GapEntry(
                rank,
                [lane for lane in LANES if any(gap.lane == lane for gap in alike)],
                (of_whole or alike)[0].why,
                observed=seen,
                steps=steps if steps and not any(gap.step is None for gap in alike) else None,
                most_ms=most_ns / NS_PER_MS if most_ns < inf else None,
            )
        )
    return listed


_TABLE: Final[Mapping[str, str]] = {
    "compute_ms": "+..",
    "comm_ms": ".+.",
    "copy_ms": "..+",
    "idle_ms": "---",
    "compute_comm_ms": "++.",
    "exposed_comm_ms": "-+.",
    "overlap_ratio": "+?.",
    "overlap_over_compute": "?+.",
    "exposed_share": "-+.",
    **{f"{kind}_ms": ".+." for kind in KINDS},
    **{f"compute_{kind}_ms": "++." for kind in KINDS},
    **{f"exposed_{kind}_ms": "-+." for kind in KINDS},
}
"""Metric -> which way it moves when more is in the lanes (`LANES`): the table of docs/metrics.md. `+`: what was seen is
at least, `-`: at most, `?`: either, `.`: it does not rest on the lane."""


class Balance(NamedTuple):
    """Metrics of a window, why some are null, and the bounds of those that gaps or second readings leave open."""

    values: dict[str, float | None]
    reasons: dict[str, str]
    bounds: dict[str, Bounds]


def balanced(overlap: Overlap, gaps: Sequence[Gap], *, open_ended: bool = False) -> Balance:
    """Return the metrics of a window. Those that its gaps leave open further than `DECIDED` are null.

    Args:
        open_ended: the window ends with what was seen (a recording without steps), so more may lie outside of it.
    """
    if not gaps:
        return Balance(*overlap.metrics(), dict(overlap.undecided))
    more = [sum(gap.most_ns for gap in gaps if gap.lane == lane) for lane in LANES]
    seen, why_null = replace(overlap, bounds={}).metrics()
    touched = {
        name: own
        for name, effects in _TABLE.items()
        if name in seen and (own := [gap for gap in gaps if effects[LANES.index(gap.lane)] != "."])
    }
    length = overlap.window_ns + (sum(more) if open_ended else 0)
    scales = {"comm_ms", *(f"{kind}_ms" for kind in KINDS)}  # what their parts are measured by (`DECIDED`)
    possible = _ends(overlap, seen, more, length)
    ends = {name: ends_of for name, ends_of in possible.items() if name in touched or name in scales}
    for name, (low, high) in overlap.bounds.items():  # of rows that may be in two accounts
        least, most = ends.get(name, (low, high))
        ends[name] = min(least, low), max(most, high)
    bounded = replace(overlap, bounds=ends)
    values, reasons = bounded.metrics()
    open_ = {name: ends_of for name, ends_of in bounded.undecided.items() if name in reasons and name not in why_null}
    for name, own in touched.items():
        why = "; ".join(dict.fromkeys(gap.why for gap in own))
        if any(not gap.seen for gap in own):
            if name not in why_null or name == "overlap_ratio":
                values[name], reasons[name] = None, why
            open_.pop(name, None)
        elif values[name] is None and (name in open_ or (name == "overlap_ratio" and inf in more)):
            reasons[name] = _told(why, name, open_.get(name), length / NS_PER_MS)
    return Balance(values, reasons, open_)


def _ends(
    overlap: Overlap, values: Mapping[str, float | None], more: Sequence[float], length: float
) -> dict[str, Bounds]:
    """Return the least and the greatest value of each metric with up to `more` ns in each lane, in a window of at most
    `length` ns.
    """
    compute, comm = overlap.compute_ns, overlap.comm_ns
    computes, sends, copies = (min(lane_ns, length) for lane_ns in more)
    may_compute, may_send = min(compute + computes, length), min(comm + sends, length)
    unused = {kind: (0, 0) for kind in KINDS if f"{kind}_ms" in values}
    parts = {"comm": (comm, overlap.hidden_ns)} | unused
    parts |= {kind: (part.total_ns, part.hidden_ns) for kind, part in overlap.kinds.items()}
    copied = overlap.copy_ns or 0
    ns: dict[str, Bounds] = {"compute_ms": (compute, may_compute), "copy_ms": (copied, min(copied + copies, length))}
    outside = length - overlap.window_ns
    ns["idle_ms"] = max(overlap.idle_ns - computes - sends - copies, 0), overlap.idle_ns + outside
    for name, (total, hides) in parts.items():
        exposed_ns, most_ns = total - hides, min(total + sends, length)
        ns[f"{name}_ms"] = total, most_ns
        ns[f"compute_{name}_ms"] = hides, min(hides + min(computes, exposed_ns) + sends, may_compute, most_ns)
        ns[f"exposed_{name}_ms"] = max(exposed_ns - computes, 0), min(exposed_ns + sends, length)
    (hidden, most_hidden), (exposed, most_exposed) = ns["compute_comm_ms"], ns["exposed_comm_ms"]
    ends = {name: (low / NS_PER_MS, high / NS_PER_MS) for name, (low, high) in ns.items()}
    if may_send:
        ends["overlap_ratio"] = share(hidden, most_exposed), share(most_hidden, exposed)
    if may_compute:
        ends["overlap_over_compute"] = hidden / may_compute, min(most_hidden / max(compute, 1), 1.0)
    if overlap.window_ns:
        most = min(most_exposed / overlap.window_ns, 1.0)
        ends["exposed_share"] = exposed / length, most
    return {name: pair for name, pair in ends.items() if values.get(name) is not None or name == "overlap_ratio"}


def _told(why: str, name: str, bounds: Bounds | None, window_ms: float) -> str:
    """Return a reason with what is known of the metric: that a ratio is at most 1, or a time at most the window, tells
    nothing.
    """
    if bounds is None or (not name.endswith("_ms") and bounds[0] <= 0 and bounds[1] >= 1):
        return why
    unit = " ms" if name.endswith("_ms") else ""
    low, high = bounds
    if high >= (window_ms if unit else 1):
        high = inf
    if low <= 0:
        return why if high == inf else f"{why}: it is at most {high:.4g}{unit}"
    if high == inf:
        return f"{why}: it is at least {low:.4g}{unit}"
    return f"{why}: it is between {low:.4g} and {high:.4g}{unit}"


# What holds of every run ----------------------------------------------------------------------------------------------

_SUMMED: Final = ("compute_ms", "comm_ms", "copy_ms", "compute_comm_ms")
_ROUNDING_MS: Final = 1e-6


def audit(steps: Steps, whole: Mapping[str, float | None] | None = None) -> tuple[Steps, list[Gap]]:
    """Return the steps of one device, with null and a reason for what breaks an invariant, and that as gaps.

    Args:
        whole: the metrics of the whole recording as one window, where there is one.
    """
    gaps: list[Gap] = []
    for chosen, why, metrics in list(_broken(steps, whole)) if len(steps) else ():
        if chosen.any():
            steps = nulled(steps, chosen, why, metrics)
            gaps += [of_steps(steps, chosen, lane, why) for lane in LANES]
    return steps, gaps


def _broken(
    steps: Steps, whole: Mapping[str, float | None] | None
) -> Iterator[tuple[Bools, str, frozenset[str] | None]]:
    """Yield invariants that do not hold: in which steps, why, and what is null there (None: every metric)."""
    order = np.argsort(steps.start_mono_ns, kind="stable")
    start, reach = steps.start_mono_ns[order], np.maximum.accumulate(steps.end_mono_ns[order])
    shared = np.maximum(np.minimum(reach[:-1], steps.end_mono_ns[order][1:]) - start[1:], 0)
    if shared.sum() > DECIDED * max(int(steps.length_ns.sum()), 1):
        overlapping = np.zeros(len(steps), bool)
        overlapping[order[1:][shared > 0]] = overlapping[order[:-1][shared > 0]] = True
        share = int(steps.length_ns.sum()) / max(int(reach[-1] - start[0]), 1)
        why = f"steps overlap: together they last {share:.0%} of the time from first to last"
        yield overlapping, why, None
    values = {name: steps.column(name) for name in {*steps.metrics, *_SUMMED, "exposed_comm_ms", "window_ms"}}
    kinds = [values[f"{kind}_ms"] for kind in KINDS if f"{kind}_ms" in values]
    window, comm, hidden = values["window_ms"], values["comm_ms"], values["compute_comm_ms"]
    parted = hidden + values["exposed_comm_ms"]
    timed = np.where(steps.length_ns > 0, steps.length_ns / NS_PER_MS, np.nan)
    for why, low, value, high in (  # a comparison with what is null does not fail
        ("the clock gives a step another length than its window has", timed, window, timed),
        ("hidden and exposed communication do not add up to communication", comm, parted, comm),
        ("a lane lasts longer than its step", 0, np.fmax(values["compute_ms"], comm), window),
        ("more communication is hidden than there is computation", 0, hidden, values["compute_ms"]),
        ("kinds of collectives do not add up to communication", 0, comm, sum(kinds) if kinds else np.inf),
    ):
        slack = _ROUNDING_MS if low is not timed else DECIDED * window
        yield (value < low - slack) | (value > high + slack), why, None
    for name, (part, of) in RATIO_PARTS.items():
        if {name, part, of} <= values.keys():
            apart = np.abs(values[name] * values[of] - values[part]) > _ROUNDING_MS + DECIDED * np.abs(values[part])
            yield apart, f"{name} is not the share that its parts have", None
    for name in _SUMMED:
        total, of_steps_ms = (whole or {}).get(name), np.nansum(values[name])
        if total is not None and of_steps_ms > total * (1 + DECIDED) + _ROUNDING_MS:
            why = f"steps have more than the whole: {of_steps_ms:.4g} ms of {total:.4g} ms"
            yield np.ones(len(steps), bool), why, frozenset({name})


def resting_on(lane: str) -> frozenset[str]:
    """Return the metrics that change with what is in a lane."""
    return frozenset(name for name, effects in _TABLE.items() if effects[LANES.index(lane)] != ".")


def nulled(steps: Steps, chosen: Bools, why: str, metrics: frozenset[str] | None = None) -> Steps:
    """Return the steps with metrics (None: all) of the chosen null, with one more reason."""
    names = [name for name in steps.metrics if metrics is None or name in metrics]
    values = {name: np.where(chosen, np.nan, own) if name in names else own for name, own in steps.metrics.items()}
    reasons, codes = [*steps.reasons], steps.reason.copy()
    for old in np.unique(steps.reason[chosen]).tolist():
        own = reasons[old] if reasons else {}
        reasons.append({**own, **dict.fromkeys(names, why)})
        codes[chosen & (steps.reason == old)] = len(reasons) - 1
    return replace(steps, metrics=values, reason=codes, reasons=tuple(reasons))


# In sentences ---------------------------------------------------------------------------------------------------------

_LISTED: Final = 12
"""Ranks that a sentence names."""
DAMAGED, MISSING, UNLIKE, EMULATED, ALONE, MODES, NOTED = range(7)
"""How urgent a fact is, the most urgent first; `NOTED` does not head a report."""


class Fact(NamedTuple):
    """What is wrong with a run, as the top of a report says it, and what its notes say besides."""

    urgency: int
    short: str
    more: str = ""


def facts(health: Health) -> Iterator[Fact]:
    """Yield what is wrong with a run that was read, each once."""
    if health.emulated_ranks is not None:
        yield Fact(
            EMULATED,
            f"ONE RANK OF {health.emulated_ranks}, EMULATED: the others are assumed to be as fast, and never late",
            "; stragglers, waiting for other ranks and their losses are not known",
        )
    if health.emulated_fabric is not None:
        shared = health.emulated_fabric.get("sharing") == "link"
        more = f"; {'groups of a rank share its links' if shared else 'each process group has a link of its own'}"
        rows, slower = health.emulated_fabric_rows, health.emulated_fabric_backend_slower_rows
        if rows == 0:
            more += "; no collective was seen"
        elif rows is not None and slower is None:
            more += "; on a device they come on top of the backend's own times"
        elif rows and slower == 0:
            more += f"; the emulation decided all {rows} collectives"
        elif rows and slower is not None:
            more += f"; in {slower} of {rows} collectives ({TEXT.percent(slower / rows)}) the backend was slower than "
            more += "the emulated link, and its time counts"
        yield Fact(EMULATED, "EMULATED FABRIC: communication times are those of the emulation", more)
    elif health.manifest_problem:
        yield Fact(EMULATED, f"whether the network was emulated is not known: {health.manifest_problem}")
    if health.is_alone:
        yield Fact(ALONE, "one rank: start one process per device (torchrun --standalone --nproc_per_node N ...)")
    for why in dict.fromkeys(gap.why for gap in health.gaps):
        alike = [gap for gap in health.gaps if gap.why == why]
        ranks = sorted({gap.rank for gap in alike if gap.rank is not None})
        steps = max(gap.steps or 0 for gap in alike)
        lanes = ", ".join(dict.fromkeys(lane for gap in alike for lane in gap.lanes))
        much = "at least" if all(gap.observed for gap in alike) else "unknown"
        who = name_ranks(ranks, _LISTED) if ranks else f"{len(alike)} trace(s) of unknown rank"
        more = (f" (in {steps} steps)" if steps else "") + (f": {much}: {lanes}" if lanes else "")
        yield Fact(MISSING if lanes else NOTED, f"{who}: {why}", more)
    if missing := health.ranks_missing:
        text = f"{len(missing)} of {health.world_size} ranks missing: {listed(missing)}"
        yield Fact(MISSING, text, "; what needs every rank is not available")
    if left_out := health.files_left_out:
        first, *others = left_out
        of_first, _, why = first.partition(";")
        text = f"{TEXT.count(len(left_out), 'file')} left out, the first: {of_first}"
        yield Fact(DAMAGED, text, "; ".join([f";{why}" if why else "", *others]))
    if problems := [problem for problem in health.problems if "no footer" not in problem]:  # the ending says it
        yield Fact(DAMAGED, f"{TEXT.count(len(problems), 'problem')} in the records, the first: {problems[0]}")
    for ending in sorted({ending for ending in health.endings.values() if ending != "completed"}):
        ranks = [int(rank) for rank, other in health.endings.items() if other == ending]
        yield Fact(DAMAGED, f"{name_ranks(ranks, _LISTED)}: {ending}")
    if partial := health.steps_not_on_all_ranks:
        where = "global step(s) not on all ranks" if known(health.traces) is None else "step(s) not in all traces"
        yield Fact(NOTED, f"{len(partial)} {where}, the first: {partial[0]}", "; left out of job_step_ms")
    if health.timed_from_python is not None:
        text = f"collectives were timed from Python: {health.timed_from_python}"
        yield Fact(MODES, text, "; less may have overlapped than without AORTA")
    if len(health.instrument_modes) > 1:
        yield Fact(MODES, f"ranks used different instrument modes: {', '.join(health.instrument_modes)}")


def notes_of(health: Health, of_traces: Sequence[str] = ()) -> list[str]:
    """Return what readers of results must know. `of_traces`: what the loader of traces has to say."""
    return [*(f"{fact.short}{fact.more}" for fact in facts(health)), *of_traces]


def listed(numbers: Sequence[int]) -> str:
    """List numbers of ranks or devices: the first `_LISTED`, and how many more there are."""
    rest = f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else ""
    return ", ".join(map(str, numbers[:_LISTED])) + rest
