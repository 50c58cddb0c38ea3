"""Changes of how a strategy communicates: overlap, DDP's buckets, FSDP's prefetching.

The own time of a rank is also an axis: what it would have taken without waiting. `_restructured` moves operations on
it, while the work stays as it was recorded. When gradients become ready, and which buckets and prefetching that gives,
is in docs/dev/what-if-model.md. Must not change what a rank computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import ClassVar, Final, NamedTuple, TypeAlias

import numpy as np

from aorta.errors import InputError
from aorta.read.frames import Floats, Ints
from aorta.records.schema import Gradient
from aorta.whatif.program import (
    Change,
    Changed,
    Column,
    Issued,
    Operation,
    ProgramSpans,
    RankLayout,
    RunProgram,
    StepProgram,
    What,
    compact,
)

_SHARDED: Final = ("fsdp", "hsdp", "fsdp_tp")
"""Values of `parallel.strategy` in which every all-gather brings the parameters of a block, so that it can be moved."""
_TURN_GAP: Final = 1 << 20
"""Room between the turns of recorded operations for those that are put between them."""


@dataclass(frozen=True)
class OverlapSwitch(Change):
    """Issue DDP's buckets as they become ready, or after the backward pass; gather FSDP's blocks ahead, or not."""

    STATED_ERROR: ClassVar[float] = 0.20

    on: bool

    def make(self, program: RunProgram) -> Changed:
        if program.facts.gradient_order:
            return Changed(_ddp(program, self.text, None, self.on))
        flag = "overlap=on for FSDP: one block is gathered ahead"
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


class _Placed(NamedTuple):
    """An operation on the axis of own time. `collective` numbers those of a rank's step, in any order; `turn` orders
    operations at the same moment.
    """

    at_ns: int
    turn: int
    what: What
    collective: int = -1
    back: int = 0
    wake_ns: int = 0


class _Cost(NamedTuple):
    """A collective with its costs (`program.StepProgram`)."""

    issued: Issued
    cost_ns: int
    network_ns: int
    backend_ns: int


@dataclass(frozen=True)
class _RankView:
    """One step of one rank, on the axis of own time.

    Attributes:
        costs: of its collectives, by place.
        passes: phase -> block, begin and end of each computing span, the earliest first.
    """

    step: StepProgram
    column: int
    layout: RankLayout
    placed: tuple[_Placed, ...]
    costs: tuple[_Cost, ...]
    passes: dict[str, list[tuple[str, int, int]]]


_Rearranged: TypeAlias = tuple[list[_Placed], list[_Cost]]


def _restructured(program: RunProgram, rearrange: Callable[[_RankView], _Rearranged]) -> RunProgram:
    """Return a program in which every rank's operations are placed anew, step by step. A span that ends where an
    operation stands ends before it; one that begins there begins behind it.
    """
    layouts: dict[RankLayout, int] = {}
    steps = []
    for step in program.steps:
        spans, ranks = step.spans, len(program.ranks)
        host = step.host_ns.astype(np.int64)
        host[0] = 0
        at_ns = np.cumsum(host, axis=0)
        begin, end = (
            _on_axis(at_ns, spans.rank, after, offset)
            for after, offset in ((spans.begin_after, spans.begin_ns), (spans.end_after, spans.end_ns))
        )
        made = [rearrange(_view(program, step, at_ns, begin, end, column)) for column in range(ranks)]
        operations, places = (max(len(rows[part]) for rows in made) for part in (0, 1))
        host, wake = np.zeros((operations, ranks), np.int64), np.zeros((operations, ranks), np.int64)
        costs = np.zeros((3, places, ranks), np.int64)
        begin_after, end_after = np.zeros(len(spans.rank), np.int64), np.zeros(len(spans.rank), np.int64)
        of_step = []
        for column, (unordered, by_number) in enumerate(made):
            placed = sorted(unordered)
            issued = [each.collective for each in placed if each.what is What.ISSUE]
            place = {collective: number for number, collective in enumerate(issued)}
            if any(each.what is What.WAIT and each.back and each.collective not in place for each in placed):
                raise InputError("a wait is for a collective of an earlier step that this step does not issue")
            # A wait for a collective of an earlier step means its place there, which is the same in every step.
            layout = RankLayout(
                tuple(
                    Operation(each.what, place.get(each.collective, -1), each.back if each.what is What.WAIT else 0)
                    for each in placed
                ),
                tuple(by_number[collective].issued for collective in issued),
            )
            of_step.append(layouts.setdefault(layout, len(layouts)))
            at = np.array([each.at_ns for each in placed], np.int64)
            host[: len(at), column] = np.diff(at, prepend=0)
            wake[: len(at), column] = [each.wake_ns for each in placed]
            for number, collective in enumerate(issued):
                costs[:, number, column] = by_number[collective][1:]
            chosen = spans.of_rank(column)
            begin_after[chosen] = np.maximum(np.searchsorted(at, begin[chosen], side="right") - 1, 0)
            end_after[chosen] = np.maximum(np.searchsorted(at, end[chosen], side="left") - 1, 0)
            begin[chosen] -= at[begin_after[chosen]]
            end[chosen] -= at[end_after[chosen]]
        host[0] = step.host_ns[0]
        cost, network, backend = map(compact, costs)
        ends = map(compact, (begin_after, begin, end_after, end))
        steps.append(
            replace(
                step,
                layouts=tuple(of_step),
                host_ns=compact(host),
                wake_ns=compact(wake),
                cost_ns=cost,
                network_ns=None if step.network_ns is None else network,
                backend_ns=backend if backend.any() else None,
                spans=ProgramSpans(spans.rank, spans.name, *ends),
            )
        )
    return replace(program, layouts=tuple(layouts), steps=steps)


def _on_axis(at_ns: Ints, rank: Column, after: Column, offset: Column) -> Ints:
    """Return ends of spans on the axis: no further than the operation behind, where the span ended when recorded."""
    last = len(at_ns) - 1
    found: Ints = at_ns[after, rank] + offset
    behind: Ints = at_ns[np.minimum(after + 1, last), rank]
    return np.where(after < last, np.minimum(found, behind), found)


def _view(program: RunProgram, step: StepProgram, at_ns: Ints, begin: Ints, end: Ints, column: int) -> _RankView:
    layout, chosen, names = program.layouts[step.layouts[column]], step.spans.of_rank(column), program.names
    placed = tuple(
        _Placed(int(at_ns[index, column]), index, *operation, int(step.wake_ns[index, column]))
        for index, operation in enumerate(layout.operations)
    )
    tables = (step.cost_ns, step.network_ns, step.backend_ns)
    costs = tuple(
        _Cost(issued, *(0 if t is None else int(t[place, min(column, t.shape[1] - 1)]) for t in tables))
        for place, issued in enumerate(layout.issued)
    )
    passes: dict[str, list[tuple[str, int, int]]] = {"forward": [], "backward": []}
    spans = zip(step.spans.name[chosen].tolist(), begin[chosen].tolist(), end[chosen].tolist(), strict=True)
    for name, low, high in sorted(spans, key=lambda span: span[1]):
        lane, block, phase = names[name]
        if lane == "compute" and phase in passes:
            passes[phase].append((block, low, high))
    return _RankView(step, column, layout, placed, costs, passes)


@dataclass(frozen=True)
class GradientBuckets:
    """The recorded buckets of DDP: places of their all-reduces, and the number of parameters each closed with."""

    places: tuple[int, ...]
    closed_with: tuple[int, ...]

    @classmethod
    def of(cls, layout: RankLayout, sizes: Sequence[int], text: str) -> GradientBuckets:
        """Return which all-reduces of a step carry the gradients of these sizes, in their order.

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
                    return cls(tuple(reduces[first : first + count]), tuple(closed))
        raise InputError(f"--set {text}: the all-reduces of a step do not add up to the recorded gradients")

    def cap_bytes(self, sizes: Sequence[int]) -> int:
        """Return a cap that gives these buckets: the smallest of those that were full. If it does not, the first had a
        cap of its own, as in torch where none is given (1 MiB, `torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`).
        """
        bounds = [0, *self.closed_with]
        full = [sum(sizes[low:high]) for low, high in pairwise(bounds[:-1])]
        cap = min(full, default=sum(sizes))
        return cap if _closed(sizes, cap) == self.closed_with else min(full[1:], default=sum(sizes))


def _closed(sizes: Sequence[int], cap_bytes: float) -> tuple[int, ...]:
    """Return the number of parameters behind which each bucket closes: as torch does, with the one that fills it."""
    closed, filling = [], 0
    for number, size in enumerate(sizes, start=1):
        filling += size
        if filling >= cap_bytes or number == len(sizes):
            closed.append(number)
            filling = 0
    return tuple(closed)


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
    sizes = [gradient.bytes for gradient in order]

    def rearrange(view: _RankView) -> _Rearranged:
        buckets = GradientBuckets.of(view.layout, sizes, text)
        carries = set(buckets.places)
        of_sizes = {view.layout.issued[place].bytes for place in buckets.places}
        if cap is not None and program.facts.network is None and len(of_sizes) < 2:
            raise InputError(
                f"--set {text}: a real network, and all buckets of {of_sizes.pop()} bytes: what another size costs was "
                "not measured; record with a bucket_cap_mb that gives two sizes, or with fabric=emulated"
            )
        if any(each.back for each in view.placed):
            raise InputError(f"--set {text}: buckets are waited for in the next step")
        issues = [each for each in view.placed if each.what is What.ISSUE and each.collective in carries]
        waits = [each for each in view.placed if each.what is What.WAIT and each.collective in carries]
        if not waits:
            raise InputError(f"--set {text}: no wait for the buckets in step {view.step.global_step}")
        ready = _ready(view, buckets, issues, order)
        closed = buckets.closed_with if cap is None else _closed(sizes, cap(buckets.cap_bytes(sizes)))
        costs = list(view.costs)
        behind, turn = waits[0].at_ns, waits[0].turn
        # Recorded buckets were held back where the first was issued behind the last gradient.
        held_back = len(buckets.places) > 1 and issues[0].at_ns >= int(ready[-1])
        deferred = held_back if overlap is None else not overlap
        wake = round(sum(each.wake_ns for each in waits) / len(waits))
        # What stood behind the waits stays behind all of the new ones, also where no time was between.
        new = [
            each._replace(turn=each.turn + (_TURN_GAP if each.turn > turn else 0))
            for each in view.placed
            if each.collective not in carries
        ]
        for number, (low, high) in enumerate(zip([0, *closed[:-1]], closed, strict=True)):
            costs.append(_bucket_cost(program, view, buckets, sum(sizes[low:high])))
            at = behind if deferred else min(int(ready[high - 1]), behind)
            new.append(_Placed(at, turn, What.ISSUE, len(costs) - 1))
            new.append(_Placed(behind, turn + number + 1, What.WAIT, len(costs) - 1, 0, wake))
        return new, costs

    changed = _restructured(program, rearrange)
    if cap is None:
        return changed
    # The recorded times of held-back buckets are not those of the new ones.
    return replace(changed, steps=[replace(step, ready_ns=None) for step in changed.steps])


def _ready(view: _RankView, buckets: GradientBuckets, issues: Sequence[_Placed], order: Sequence[Gradient]) -> Ints:
    """Return when each parameter's gradient was ready, in own time; never earlier than the one before it."""
    # Progress of the backward pass: the number of blocks, and a part of the next one.
    progress: list[float] = []
    known: list[tuple[float, int]] = []
    ranges = {block: (begin, end) for block, begin, end in view.passes["backward"]}
    for number, (block, group) in enumerate(groupby(order, key=lambda gradient: gradient.block)):
        gradients = list(group)
        noted = [gradient.part for gradient in gradients if gradient.part is not None]
        done = np.cumsum([gradient.bytes for gradient in gradients])
        parts = done / max(done[-1], 1) if len(noted) < len(gradients) else np.maximum.accumulate(noted)
        progress += (number + parts).tolist()
        if block in ranges:
            known += [(float(number), ranges[block][0]), (float(number + 1), ranges[block][1])]
    held = view.step.ready_ns
    if held is not None:
        known += [(progress[count - 1], int(held[at, view.column])) for at, count in enumerate(buckets.closed_with)]
    elif not ranges or issues[0].at_ns < max(end for _, end in ranges.values()):
        known += [(progress[count - 1], issue.at_ns) for count, issue in zip(buckets.closed_with, issues, strict=True)]
    # Several moments may be known for one place (a bucket, the end of a block, the begin of the next): it was reached
    # at the first, and left at the last.
    known.sort()
    first, last = dict(reversed(known)), dict(known)
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
    return np.maximum.accumulate(np.array(moments, np.int64))


def _bucket_cost(program: RunProgram, view: _RankView, buckets: GradientBuckets, size: int) -> _Cost:
    """Return the cost of a bucket of another size: from the network's formula, plus what the backend added."""
    recorded = [view.costs[place] for place in buckets.places]
    issued = recorded[0].issued._replace(bytes=size)
    sizes = np.array([each.issued.bytes for each in recorded], np.float64)
    by_size = np.argsort(sizes, kind="stable")

    def on_line(values: Floats) -> int:
        slope, fixed = np.polyfit(sizes, values, 1) if len(set(sizes.tolist())) > 1 else (-1.0, 0.0)
        if slope < 0 or fixed < 0:  # neither the time per byte nor the fixed time is negative
            slope, fixed = values.sum() / sizes.sum(), 0.0
        return max(round(float(fixed) + float(slope) * size), 0)

    def interpolated(values: Sequence[int]) -> int:
        """Return the value at this size: interpolated between the recorded sizes, outside them along a line."""
        known = np.array(values, np.float64)
        if sizes.min() <= size <= sizes.max():
            return round(float(np.interp(size, sizes[by_size], known[by_size])))
        return on_line(known)

    backend = interpolated([each.backend_ns for each in recorded])
    network = program.facts.network
    if network is None:
        return _Cost(issued, on_line(np.array([each.cost_ns for each in recorded], np.float64)), 0, backend)
    charged = round(issued.charge_ns(program.world_size, network))
    beyond = 0 if program.facts.law else interpolated([each.cost_ns - each.network_ns for each in recorded])
    return _Cost(issued, charged + beyond, charged, backend)


class _Gather(NamedTuple):
    """An all-gather that a block waits for: its pass, its wait, from when on others can be prefetched, and when the
    block begins to compute.
    """

    collective: int
    phase: str
    wait: _Placed
    arrived_ns: int
    begin_ns: int


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

    def rearrange(view: _RankView) -> _Rearranged:
        begins = sorted((begin, phase) for phase, spans in view.passes.items() for _, begin, _ in spans)
        issues = {each.collective: each for each in view.placed if each.what is What.ISSUE}
        needed = []  # all-gathers, with the block that computes after the wait, in the order of the waits
        for wait in view.placed:
            if wait.what is not What.WAIT or wait.back or view.layout.issued[wait.collective].kind != "allgather":
                continue
            at = bisect_left(begins, wait.at_ns, key=lambda span: span[0])
            if at < len(begins):
                begin, phase = begins[at]
                prefetched = [each.at_ns for each in issues.values() if wait.at_ns < each.at_ns <= begin]
                needed.append(_Gather(wait.collective, phase, wait, min(prefetched, default=begin), begin))
        if not needed:
            raise InputError(f"--set {text}: no block of this run waits for an all-gather")
        gathers = {gather.collective for gather in needed}
        moved: list[_Placed] = []
        for _, group in groupby(needed, key=lambda gather: gather.phase):
            of_pass = list(group)
            recorded = [issues[gather.collective] for gather in of_pass]
            # How many blocks ahead it was issued: the number of those before it that began to compute later.
            ahead = [sum(one.begin_ns >= own.at_ns for one in of_pass[:at]) for at, own in enumerate(recorded)]
            if ahead == [min(depth, at) for at in range(len(recorded))]:
                gathers -= {gather.collective for gather in of_pass}
                continue
            gathers.discard(of_pass[0].collective)  # nothing before it in its pass could gather it
            for at, gather in enumerate(of_pass[1:], start=1):
                if depth == 0:
                    moment, turn = gather.wait.at_ns, gather.wait.turn * _TURN_GAP - 1
                else:
                    behind = of_pass[max(at - depth, 0)]
                    moment, turn = behind.arrived_ns, behind.wait.turn * _TURN_GAP + at + 1
                moved.append(_Placed(moment, turn, What.ISSUE, gather.collective))
        kept = [
            each._replace(turn=each.turn * _TURN_GAP)
            for each in view.placed
            if each.what is not What.ISSUE or each.collective not in gathers
        ]
        return kept + moved, list(view.costs)

    return _restructured(program, rearrange)
