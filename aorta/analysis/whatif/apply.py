"""Makes the changes of a what-if in a program. Each gives a new program; the one it was given stays as it is.

Must not replay, or predict anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from typing import Any

import numpy as np

from aorta.analysis.tables import Floats, Ints
from aorta.analysis.whatif.changes import (
    BucketCap,
    Change,
    CommSpeed,
    ComputeSpeed,
    NetworkChange,
    NoStragglers,
    OverlapSwitch,
    PrefetchDepth,
    RankLateness,
    Selection,
    WorldSize,
    in_order,
)
from aorta.analysis.whatif.ddp_buckets import ddp
from aorta.analysis.whatif.fsdp_prefetch import fsdp
from aorta.analysis.whatif.network import charge_ns
from aorta.analysis.whatif.own_time import stretched
from aorta.analysis.whatif.program import Column, Issued, RunProgram, StepProgram, What, compact
from aorta.analysis.whatif.straggler_excess import lasting_excess_ns
from aorta.config.schema import EmulatedFabric
from aorta.errors import InputError

_NS_PER_MS = 1_000_000
_LONGEST_NS = 2.0**62
_NS_PER_YEAR = 365 * 24 * 3600 * 1e9


@dataclass(frozen=True)
class Changed:
    """A program with changes made, and sentences about what was assumed for them."""

    program: RunProgram
    flags: tuple[str, ...] = ()


def apply(program: RunProgram, changes: Sequence[Change]) -> Changed:
    """Make changes, one after the other, in the order of `ORDER`.

    Raises:
        InputError: one cannot be made in this program; the message says why.
    """
    applying = _Applying(program)
    for change in in_order(changes):
        applying.make(change)
        _check_range(applying.program, change)
    return Changed(applying.program, tuple(dict.fromkeys(applying.flags)))


def _check_range(program: RunProgram, change: Change) -> None:
    """Refuse what 64 bits of nanoseconds might not hold: no time is later than the sum of all there are."""

    def longest(values: Column) -> float:
        return float(values.max(axis=1).sum(dtype=np.float64)) if values.size else 0.0

    total = 0.0
    for step in program.steps:
        times = (step.host_ns, step.wake_ns, step.cost_ns, step.backend_ns)
        total += sum(longest(each) for each in times if each is not None)
    if total > _LONGEST_NS:
        raise _too_long(change.text)


def _too_long(text: str) -> InputError:
    return InputError(f"--set {text}: the run would take more than {_LONGEST_NS / _NS_PER_YEAR:.0f} years")


def selects(which: Selection, issued: Issued, place: int) -> bool:
    """Whether a collective is one of those selected."""
    return (
        which.kind in (None, issued.kind)
        and which.group in (None, issued.group)
        and which.position in (None, place)
        and (which.least_bytes is None or issued.bytes >= which.least_bytes)
        and (which.most_bytes is None or issued.bytes <= which.most_bytes)
    )


@dataclass
class _Applying:
    program: RunProgram
    flags: list[str] = field(default_factory=list)

    @singledispatchmethod
    def make(self, change: Change) -> None:
        """Make one change in `program`."""
        raise TypeError(type(change))

    @make.register
    def _speed(self, change: CommSpeed) -> None:
        def factors(issued: Issued, place: int) -> float:
            return change.factor if selects(change.which, issued, place) else 1.0

        found = self._of_places(factors)
        if not any((each != 1).any() for each in found.values()) and change.factor != 1:
            raise InputError(f"--set {change.text}: this run has no such collective. {_there_are(self.program)}")
        steps = []
        for step in self.program.steps:
            factor = found[step.layouts]
            cost = _divided(step.cost_ns, factor)
            backend = None if step.backend_ns is None else compact(_divided(step.backend_ns, factor))
            network = None if step.network_ns is None else compact(_divided(step.network_ns, factor))
            steps.append(replace(step, cost_ns=compact(cost), backend_ns=backend, network_ns=network))
        self.program = replace(self.program, steps=steps)

    @make.register
    def _network(self, change: NetworkChange) -> None:
        settings = self.program.facts.network
        if settings is None:
            self._real_network(change)
            return
        if change.algorithm is not None:
            self._charge(change.text, replace(settings, algorithm=change.algorithm))
            return
        unit = "bandwidth_gb_per_s" if change.field == "bandwidth" else "latency_us"
        names = [f"{where}_{unit}" for where in ("intra", "inter")]
        if change.absolute is not None:
            values: dict[str, Any] = dict.fromkeys(names, change.absolute)
        else:
            assert change.factor is not None  # one of the two is set
            values = {name: getattr(settings, name) * change.factor for name in names}
        self._charge(change.text, replace(settings, **values))

    @make.register
    def _ranks(self, change: WorldSize) -> None:
        settings = self.program.facts.network
        if settings is None:
            raise InputError(
                f"--set {change.text}: the network of this run was real, and what it would charge at another size is "
                "not known; record on an emulated one (fabric=emulated)"
            )
        if self.program.shared_links:
            raise InputError(
                f"--set {change.text}: the groups of this run share links (sharing=link), and which of them its groups "
                "would take at another size is not worked out; record with sharing=group"
            )
        if not any(
            len(issued.ranks) == self.program.world_size for layout in self.program.layouts for issued in layout.issued
        ):
            raise InputError(f"--set {change.text}: no group of this run has all {self.program.world_size} ranks")
        self._charge(change.text, replace(settings, emulated_world_size=change.size))
        self.flags.append(
            f"at {change.size} ranks groups of all ranks cost what the network's law says, compute is as recorded on "
            f"{self.program.world_size}: no more stragglers than there were, batches and shards as they were"
        )

    @make.register
    def _late(self, change: RankLateness) -> None:
        if change.rank not in self.program.ranks:
            known = self.program.ranks
            raise InputError(f"--set {change.text}: the ranks of this run are {known[0]} to {known[-1]}")
        column = self.program.ranks.index(change.rank)
        late_ns = round(change.late_ms * _NS_PER_MS)
        short = 0
        steps = []
        for step in self.program.steps:
            operations = self.program.layouts[step.layouts[column]].operations
            issues = [index for index, operation in enumerate(operations) if operation.what is What.ISSUE]
            host = step.host_ns.astype(np.int64)
            short += int((host[issues, column] + late_ns < 0).sum())
            host[issues, column] = np.maximum(host[issues, column] + late_ns, 0)
            steps.append(replace(step, host_ns=compact(host)))
        if short:
            self.flags.append(
                f"rank {change.rank} had less than {-change.late_ms:g} ms of own time before {short} of its "
                "collectives; there all of it is taken away"
            )
        self.program = replace(self.program, steps=steps)

    @make.register
    def _no_stragglers(self, change: NoStragglers) -> None:
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, step in enumerate(self.program.steps):
            if len({self.program.layouts[layout].operations for layout in step.layouts}) > 1:
                raise InputError(
                    f"--set {change.text}: the ranks do not all do the same, so none can be held to another"
                )
            alike[step.layouts].append(number)
        steps = list(self.program.steps)
        for numbers in alike.values():
            excess = lasting_excess_ns([steps[number].host_ns for number in numbers])
            for number in numbers:
                host = np.maximum(steps[number].host_ns - excess, 0)
                steps[number] = replace(steps[number], host_ns=compact(host))
        self.program = replace(self.program, steps=steps)

    @make.register
    def _buckets(self, change: BucketCap) -> None:
        if change.factor is None:
            cap_bytes = change.cap_bytes or 0.0
            self.program = ddp(self.program, change.text, lambda _recorded: cap_bytes, None)
        else:
            factor = change.factor
            self.program = ddp(self.program, change.text, lambda recorded: recorded * factor, None)
        self._without_law("what a bucket of another size costs follows a line through the recorded ones")

    @make.register
    def _prefetch(self, change: PrefetchDepth) -> None:
        self._sharded_on_host(change.text)
        self.program = fsdp(self.program, change.text, change.depth)

    @make.register
    def _overlap(self, change: OverlapSwitch) -> None:
        if self.program.facts.gradient_order:
            self.program = ddp(self.program, change.text, None, change.on)
        else:
            self._sharded_on_host(change.text)
            self.program = fsdp(self.program, change.text, int(change.on))
            if change.on:
                self.flags.append("overlap of FSDP is taken to mean that one block is gathered ahead")

    def _sharded_on_host(self, text: str) -> None:
        strategy = self.program.facts.parallel
        if strategy is not None and strategy not in _SHARDED:
            raise InputError(
                f"--set {text}: no block of this run waits for an all-gather of its parameters: its strategy is "
                f"{strategy}, and {', '.join(_SHARDED)} gather them"
            )
        if self.program.facts.device != "cpu":
            raise InputError(
                f"--set {text}: on a device FSDP gathers on streams of its own, and when it issues what is not in the "
                "record; only a CPU's can be moved"
            )

    def _without_law(self, what: str) -> None:
        if self.program.facts.network is None:
            self.flags.append(f"the network was real: {what}")

    @make.register
    def _compute(self, change: ComputeSpeed) -> None:
        computes = np.array([name.lane == "compute" for name in self.program.names], bool)
        if not computes.any():
            raise InputError(f"--set {change.text}: the record names no block that computes")
        steps = [stretched(step, computes[step.spans.name], 1 / change.factor) for step in self.program.steps]
        self.program = replace(self.program, steps=steps)

    def _real_network(self, change: NetworkChange) -> None:
        """A network whose law is not known."""
        if change.field != "bandwidth":
            raise InputError(
                f"--set {change.text}: the network of this run was real: how much of its times is {change.field} is "
                "not known. Allowed: network.bandwidth=x2, comm=x2; or record on an emulated one (fabric=emulated)"
            )
        if change.factor is not None:
            self.flags.append("the network was real: all of a collective's recorded time is taken for bandwidth")
            self._speed(replace(_ALL, text=change.text, factor=change.factor))
            return
        assert change.absolute is not None  # bandwidth is one of the two
        plain = EmulatedFabric(
            intra_latency_us=0,
            inter_latency_us=0,
            intra_bandwidth_gb_per_s=change.absolute,
            inter_bandwidth_gb_per_s=change.absolute,
        )
        self.flags.append(
            "the network was real, and its law is not known: every collective is given the time of a ring of "
            f"{change.absolute:g} GB/s without latency"
        )
        charged = self._of_places(lambda issued, _place: charge_ns(issued, self.program.world_size, plain))
        steps = [
            replace(step, cost_ns=compact(np.rint(charged[step.layouts]).astype(np.int64)))
            for step in self.program.steps
        ]
        self.program = replace(self.program, steps=steps)

    def _charge(self, text: str, settings: EmulatedFabric) -> None:
        """Every collective as another emulated network charges it."""
        facts = self.program.facts
        world = self.program.world_size
        charged = self._of_places(lambda issued, _place: charge_ns(issued, world, settings))
        if any(each.max(initial=0.0) > _LONGEST_NS for each in charged.values()):
            raise _too_long(text)
        steps = [
            _charged(step, np.rint(charged[step.layouts]).astype(np.int64), facts.law) for step in self.program.steps
        ]
        self.program = replace(self.program, steps=steps, facts=replace(facts, network=settings))

    def _of_places(self, value: Callable[[Issued, int], float]) -> dict[tuple[int, ...], Floats]:
        """A value of every collective: layouts of a step -> shape (places, ranks), or (places, 1) where ranks agree."""
        program = self.program
        of_layout = [
            np.array([value(issued, place) for place, issued in enumerate(layout.issued)], np.float64)
            for layout in program.layouts
        ]
        found: dict[tuple[int, ...], Floats] = {}
        for step in program.steps:
            if step.layouts not in found:
                table = np.ones((len(step.cost_ns), len(step.layouts)))
                for column, layout in enumerate(step.layouts):
                    table[: len(of_layout[layout]), column] = of_layout[layout]
                found[step.layouts] = table[:, :1] if (table == table[:, :1]).all() else table
        return found


_ALL = CommSpeed("", Selection(), 1.0)
_SHARDED = ("fsdp", "hsdp", "fsdp_tp")


def _divided(values: Ints | np.ndarray[tuple[int, ...], np.dtype[np.int32]], factor: Floats) -> Ints:
    return np.asarray(np.rint(values / factor), np.int64)


def _charged(step: StepProgram, charged: Ints, law: bool) -> StepProgram:
    """A step in which the network charges something else. What was recorded beyond the charge stays: on the law's
    network a factor (jitter), elsewhere an addend (the backend's own time).
    """
    before, cost = step.network_ns, step.cost_ns.astype(np.int64)
    assert before is not None  # an emulated network charges
    if law:
        ratio = np.divide(
            charged, before, out=np.zeros(np.broadcast_shapes(charged.shape, before.shape)), where=before > 0
        )
        new = np.where(before > 0, np.rint(cost * ratio).astype(np.int64), charged)
    else:
        new = np.maximum(cost + charged - before, 0)
    return replace(step, cost_ns=compact(new), network_ns=compact(charged))


def _there_are(program: RunProgram) -> str:
    issued = {each for layout in program.layouts for each in layout.issued}
    kinds = ", ".join(sorted({each.kind for each in issued}))
    groups = ", ".join(sorted({each.group for each in issued}))
    sizes = sorted({each.bytes for each in issued})
    most = max((len(layout.issued) for layout in program.layouts), default=0)
    return (
        f"It has kinds {kinds}; groups {groups}; {sizes[0]} to {sizes[-1]} bytes; positions 0 to {most - 1}"
        if issued
        else "It has none"
    )
