"""Changes of how a strategy communicates: overlap, DDP's buckets, FSDP's prefetching.

A bucket of DDP closes with the parameter that fills it, and is issued when that gradient is ready; without overlap all
are issued behind the backward pass. All are waited for there. When a gradient was ready is known where a recorded
bucket closed with it and at both ends of its block; between, it is ready in the part of the block's pass in which it
was in the one step that noted all gradients, or, where none did, in proportion to the bytes.

FSDP issues the all-gather of a block when the block `depth` before it in the same pass has arrived; without prefetching
right before its own wait. A pass that was recorded with this prefetching stays as it was. Must not change what a rank
computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import ClassVar, Final, NamedTuple

import numpy as np

from aorta.analysis.frames import Floats, Ints
from aorta.analysis.whatif.program import (
    TURN_GAP,
    Change,
    Changed,
    CollectiveCost,
    OwnOperation,
    RankLayout,
    RankView,
    RunProgram,
    What,
    restructured,
)
from aorta.errors import InputError
from aorta.records.schema import Gradient

_SHARDED: Final = ("fsdp", "hsdp", "fsdp_tp")
"""Values of `parallel.strategy` in which every all-gather brings the parameters of a block, so that it can be moved."""


@dataclass(frozen=True)
class OverlapSwitch(Change):
    STATED_ERROR: ClassVar[float] = 0.20

    on: bool

    def make(self, program: RunProgram) -> Changed:
        """Issue DDP's buckets as they become ready or behind the backward pass; gather FSDP's blocks ahead or not."""
        if program.facts.gradient_order:
            return Changed(_ddp(program, self.text, None, self.on))
        flag = "overlap of FSDP is taken to mean that one block is gathered ahead"
        return Changed(_fsdp(program, self.text, int(self.on)), (flag,) if self.on else ())


@dataclass(frozen=True)
class BucketCap(Change):
    """DDP's buckets have another cap: bytes, or a factor of the recorded one."""

    STATED_ERROR: ClassVar[float] = 0.20

    cap_bytes: float | None = None
    factor: float | None = None

    def make(self, program: RunProgram) -> Changed:
        def cap(recorded_bytes: int) -> float:
            return self.cap_bytes or 0.0 if self.factor is None else recorded_bytes * self.factor

        flag = "other bucket sizes: linear fit to those measured"
        return Changed(_ddp(program, self.text, cap, None), (flag,) if program.facts.network is None else ())


@dataclass(frozen=True)
class PrefetchDepth(Change):
    STATED_ERROR: ClassVar[float] = 0.20

    depth: int

    def make(self, program: RunProgram) -> Changed:
        return Changed(_fsdp(program, self.text, self.depth))


@dataclass(frozen=True)
class GradientBuckets:
    """The recorded buckets of DDP: places of their all-reduces, and how many parameters each closed with."""

    places: tuple[int, ...]
    closed_with: tuple[int, ...]

    def cap_bytes(self, sizes: Sequence[int]) -> int:
        """Return a cap that gives these buckets: the smallest of those that were full. If it does not, the first had a
        cap of its own, as in torch where none is given (1 MiB, `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`).
        """
        bounds = [0, *self.closed_with]
        full = [sum(sizes[low:high]) for low, high in pairwise(bounds[:-1])]
        cap = min(full, default=sum(sizes))
        return cap if _closed(sizes, cap) == self.closed_with else min(full[1:], default=sum(sizes))


def _buckets_of(layout: RankLayout, sizes: Sequence[int], text: str) -> GradientBuckets:
    """Return which all-reduces of a step carry the gradients, in their order.

    Raises:
        InputError: none do.
    """
    reduces = [place for place, issued in enumerate(layout.issued) if issued.kind == "allreduce"]
    ends = {int(total): number for number, total in enumerate(np.cumsum(sizes), start=1)}
    for first in range(len(reduces)):
        total, closed = 0, []
        for count, place in enumerate(reduces[first:], start=1):
            total += layout.issued[place].bytes
            if total not in ends:
                break
            closed.append(ends[total])
            if closed[-1] == len(sizes):
                return GradientBuckets(tuple(reduces[first : first + count]), tuple(closed))
    raise InputError(f"--set {text}: the all-reduces of a step do not add up to the recorded gradients")


def _ddp(program: RunProgram, text: str, cap: Callable[[int], float] | None, overlap: bool | None) -> RunProgram:
    """Return the program with other buckets of DDP, or with its overlap switched.

    Args:
        text: the change, for errors.
        cap: bytes at which a bucket was full -> at which it is to be; None: the recorded buckets.
        overlap: whether buckets are issued as they become ready; None: as recorded.

    Raises:
        InputError: the record does not say when which gradients were ready, or what another size costs.
    """
    order = program.facts.gradient_order
    if not order:
        raise InputError(f"--set {text}: the record has no order of gradients, which DDP alone has")
    sizes = [one.bytes for one in order]

    def rearrange(view: RankView) -> tuple[list[OwnOperation], list[CollectiveCost]]:
        found = _buckets_of(view.layout, sizes, text)
        carries = set(found.places)
        of_sizes = {view.layout.issued[place].bytes for place in found.places}
        if cap is not None and program.facts.network is None and len(of_sizes) < 2:
            raise InputError(
                f"--set {text}: a real network, and all buckets of {of_sizes.pop()} bytes: what another size costs was "
                "not measured; record with a bucket_cap_mb that gives two sizes, or with fabric=emulated"
            )
        if any(each.back for each in view.placed):
            raise InputError(f"--set {text}: buckets are waited for in the step behind theirs")
        issues = [each for each in view.placed if each.what is What.ISSUE and each.collective in carries]
        waits = [each for each in view.placed if each.what is What.WAIT and each.collective in carries]
        if not waits:
            raise InputError(f"--set {text}: nobody waits for the buckets in the step {view.step.global_step}")
        ready = _ready(program, view, found, issues, order)
        closed = found.closed_with if cap is None else _closed(sizes, cap(found.cap_bytes(sizes)))
        costs = list(view.costs)
        behind = waits[0].at_ns
        # Recorded buckets were held back where the first was issued behind the last gradient.
        held_back = len(found.places) > 1 and issues[0].at_ns >= int(ready[-1])
        deferred = held_back if overlap is None else not overlap
        wake = round(sum(each.wake_ns for each in waits) / len(waits))
        # What stood behind the waits stays behind all of the new ones, also where no time was between.
        new = [
            each._replace(turn=each.turn + (TURN_GAP if each.turn > waits[0].turn else 0))
            for each in view.placed
            if each.collective not in carries
        ]
        for number, (low, high) in enumerate(zip([0, *closed[:-1]], closed, strict=True)):
            costs.append(_bucket_cost(program, view, found, sum(sizes[low:high])))
            at = behind if deferred else min(int(ready[high - 1]), behind)
            turn = waits[0].turn
            new.append(OwnOperation(at, turn, What.ISSUE, len(costs) - 1))
            new.append(OwnOperation(behind, turn + number + 1, What.WAIT, len(costs) - 1, 0, wake))
        return new, costs

    changed = restructured(program, rearrange)
    if cap is None:
        return changed
    # What was recorded of held-back buckets is not of these.
    return replace(changed, steps=[replace(step, ready_ns=None) for step in changed.steps])


def _closed(sizes: Sequence[int], cap_bytes: float) -> tuple[int, ...]:
    """Return the number of parameters behind which each bucket closes: as torch does, with the one that fills it."""
    closed, filling = [], 0
    for number, size in enumerate(sizes, start=1):
        filling += size
        if filling >= cap_bytes or number == len(sizes):
            closed.append(number)
            filling = 0
    return tuple(closed)


def _ready(
    program: RunProgram,
    view: RankView,
    buckets: GradientBuckets,
    issues: Sequence[OwnOperation],
    order: Sequence[Gradient],
) -> Ints:
    """Return when each parameter's gradient was ready, in own time; never earlier than the one before it."""
    progress, blocks = _progress(order)
    ranges = {block: (begin, end) for block, begin, end in view.passes(program, "backward")}
    known = [
        (float(number + after), ranges[block][after])
        for number, block in enumerate(blocks)
        if block in ranges
        for after in (0, 1)
    ]
    held = view.step.ready_ns
    if held is not None:
        known += [(progress[count - 1], int(held[at, view.column])) for at, count in enumerate(buckets.closed_with)]
    elif not ranges or issues[0].at_ns < max(end for _, end in ranges.values()):
        known += [(progress[count - 1], issue.at_ns) for count, issue in zip(buckets.closed_with, issues, strict=True)]
    return np.maximum.accumulate(_between(known, progress))


def _progress(order: Sequence[Gradient]) -> tuple[list[float], list[str]]:
    """Return how far the backward pass was when each gradient was ready: so many blocks, and a part of the next one;
    and these blocks.
    """
    progress: list[float] = []
    blocks: list[str] = []
    for number, (block, those) in enumerate(groupby(order, key=lambda one: one.block)):
        gradients = list(those)
        done = np.cumsum([one.bytes for one in gradients]) / max(sum(one.bytes for one in gradients), 1)
        noted = [one.part for one in gradients if one.part is not None]
        parts = done if len(noted) < len(gradients) else np.maximum.accumulate(noted)
        progress += (number + parts).tolist()
        blocks.append(block)
    return progress, blocks


def _between(known: Sequence[tuple[float, int]], progress: Sequence[float]) -> Ints:
    """Return when the backward pass was so far. Where several moments are known for the same place (a bucket, the end
    of a block, the begin of the next), the first is when it was reached, the last from when on it went further.
    """
    first, last = dict[float, int](), dict[float, int]()
    for place, at in known:
        first[place], last[place] = min(first.get(place, at), at), max(last.get(place, at), at)
    places = sorted(first)
    moments = []
    for place in progress:
        above = bisect_left(places, place)
        if above == len(places):
            moments.append(last[places[-1]])
        elif places[above] == place or above == 0:
            moments.append(first[places[above]])
        else:
            low, high = places[above - 1], places[above]
            part = (place - low) / (high - low)
            moments.append(round(last[low] + part * max(first[high] - last[low], 0)))
    return np.array(moments, np.int64)


def _bucket_cost(program: RunProgram, view: RankView, buckets: GradientBuckets, size: int) -> CollectiveCost:
    """Return what a bucket of another size costs: by the law, and what the backend added between the recorded ones."""
    recorded = [view.costs[place] for place in buckets.places]
    issued = recorded[0].issued._replace(bytes=size)
    sizes = np.array([each.issued.bytes for each in recorded], np.float64)
    by_size = np.argsort(sizes, kind="stable")

    def between(values: Sequence[int]) -> int:
        """Return the value at this size: interpolated between the recorded sizes, outside them along a line."""
        known = np.array(values, np.float64)
        if sizes.min() <= size <= sizes.max():
            return round(float(np.interp(size, sizes[by_size], known[by_size])))
        slope, fixed = _line(sizes, known)
        return max(round(fixed + slope * size), 0)

    backend = between([each.backend_ns for each in recorded])
    network = program.facts.network
    if network is None:
        slope, fixed = _line(sizes, np.array([each.cost_ns for each in recorded], np.float64))
        return CollectiveCost(issued, max(round(fixed + slope * size), 0), 0, backend)
    charged = round(issued.charge_ns(program.world_size, network))
    if program.facts.law:
        return CollectiveCost(issued, charged, charged, backend)
    return CollectiveCost(
        issued, charged + between([each.cost_ns - each.network_ns for each in recorded]), charged, backend
    )


def _line(sizes: Floats, costs: Floats) -> tuple[float, float]:
    """Return the time per byte and for none, through the recorded collectives; neither is negative."""
    if len(set(sizes.tolist())) < 2:
        return float(costs.mean() / sizes.mean()), 0.0
    slope, fixed = np.polyfit(sizes, costs, 1)
    if slope < 0 or fixed < 0:
        return float(costs.sum() / sizes.sum()), 0.0
    return float(slope), float(fixed)


def _fsdp(program: RunProgram, text: str, depth: int) -> RunProgram:
    """Return the program with FSDP that gathers the next `depth` blocks while one computes; 0: each when it is needed.

    Raises:
        InputError: what the all-gathers bring, or when they are issued, is not known, or no block waits for one.
    """
    strategy = program.facts.parallel
    if strategy is not None and strategy not in _SHARDED:
        raise InputError(f"--set {text}: it takes parallel={', '.join(_SHARDED)}; this run has parallel={strategy}")
    if program.facts.device != "cpu":
        raise InputError(f"--set {text}: on a device the record does not say when FSDP issues; a CPU's does")

    def rearrange(view: RankView) -> tuple[list[OwnOperation], list[CollectiveCost]]:
        needed = _consumers(program, view)
        if not needed:
            raise InputError(f"--set {text}: no block of this run waits for an all-gather")
        gathers = {one.collective for one in needed}
        new = [
            each._replace(turn=each.turn * TURN_GAP)
            for each in view.placed
            if each.what is not What.ISSUE or each.collective not in gathers
        ]
        issues = {each.collective: each for each in view.placed if each.what is What.ISSUE}
        for _, those in groupby(needed, key=lambda one: one.phase):
            of_pass = list(those)
            recorded = [issues[one.collective] for one in of_pass]
            # How many blocks ahead each was issued: so many of those before it began to compute later.
            ahead = [sum(one.begin_ns >= own.at_ns for one in of_pass[:at]) for at, own in enumerate(recorded)]
            if ahead == [min(depth, at) for at in range(len(recorded))]:
                new += [own._replace(turn=own.turn * TURN_GAP) for own in recorded]
                continue
            for at, one in enumerate(of_pass):
                if at == 0:  # nothing before it in its pass could gather it
                    new.append(recorded[at]._replace(turn=recorded[at].turn * TURN_GAP))
                elif depth == 0:
                    new.append(OwnOperation(one.wait.at_ns, one.wait.turn * TURN_GAP - 1, What.ISSUE, one.collective))
                else:
                    behind = of_pass[max(at - depth, 0)]
                    turn = behind.wait.turn * TURN_GAP + at + 1
                    new.append(OwnOperation(behind.arrived_ns, turn, What.ISSUE, one.collective))
        return new, list(view.costs)

    return restructured(program, rearrange)


class _Needed(NamedTuple):
    """An all-gather that a block waits for: in which pass, its wait, from when on others can be prefetched, and when
    the block begins to compute.
    """

    collective: int
    phase: str
    wait: OwnOperation
    arrived_ns: int
    begin_ns: int


def _consumers(program: RunProgram, view: RankView) -> list[_Needed]:
    """Return a step's all-gathers, each with the block that computes after its wait, in the order of the waits."""
    begins = sorted((begin, phase) for phase in ("forward", "backward") for _, begin, _ in view.passes(program, phase))
    issues = [each.at_ns for each in view.placed if each.what is What.ISSUE]
    found = []
    for each in view.placed:
        if each.what is not What.WAIT or each.back or view.layout.issued[each.collective].kind != "allgather":
            continue
        behind = next(((begin, phase) for begin, phase in begins if begin >= each.at_ns), None)
        if behind is None:
            continue
        begin, phase = behind
        prefetched = [at for at in issues if each.at_ns < at <= begin]
        found.append(_Needed(each.collective, phase, each, min(prefetched, default=begin), begin))
    return found
