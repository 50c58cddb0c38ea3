"""Makes the changes of a what-if in a program. Each gives a new program; the one it was given stays as it is.

Must not replay, or predict anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from typing import Any, Final

import numpy as np

from aorta.analysis.tables import Floats, Ints
from aorta.analysis.whatif.changed_costs import charged_by, check_length, faster, of_plain_ring
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
from aorta.analysis.whatif.fsdp_prefetch import SHARDED, fsdp
from aorta.analysis.whatif.own_time import stretched
from aorta.analysis.whatif.program import Column, Operation, RunProgram, What, compact
from aorta.errors import InputError

_DEVIATION_PER_MAD: Final = 1.4826
"""Standard deviation of normal values over their median absolute deviation."""
_ERROR_OF_MEDIAN: Final = 1.2533
"""Standard error of the median of normal values over that of their mean."""
_SURE: Final = 3.0
"""An excess counts where it is more than so many standard errors."""


def lasting_excess_ns(host_ns: Sequence[Column]) -> Ints:
    """By how much each rank's own time before each operation, median over steps, exceeds that of the typical rank.

    In every single step one rank is the slowest, also where all are alike: what does not last is noise, no straggler.

    Args:
        host_ns: of each step, shape (operations, ranks).

    Returns:
        Nanoseconds, shape (operations, ranks), 0 where the difference is within its error. The typical rank is the
        lower median of the ranks.
    """
    return np.stack([_of_operation(np.stack([step[at] for step in host_ns])) for at in range(len(host_ns[0]))])


def _of_operation(own_ns: Column) -> Ints:
    """Of one operation; `own_ns` has shape (steps, ranks)."""
    medians: Floats = np.median(own_ns, axis=0)
    deviation = np.median(np.abs(own_ns - medians), axis=0) * _DEVIATION_PER_MAD
    error = _ERROR_OF_MEDIAN * deviation / np.sqrt(len(own_ns))
    typical = np.argsort(medians, kind="stable")[(len(medians) - 1) // 2]
    excess = medians - medians[typical]
    lasting = excess > _SURE * np.hypot(error, error[typical])
    return np.where(lasting, np.rint(excess), 0).astype(np.int64)


_NS_PER_MS = 1_000_000


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
        check_length(applying.program, change.text)
    return Changed(applying.program, tuple(dict.fromkeys(applying.flags)))


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
        self.program = faster(self.program, change.text, change.which, change.factor)

    @make.register
    def _network(self, change: NetworkChange) -> None:
        settings = self.program.facts.network
        if settings is None:
            self._real_network(change)
            return
        if change.algorithm is not None:
            self.program = charged_by(self.program, change.text, replace(settings, algorithm=change.algorithm))
            return
        unit = "bandwidth_gb_per_s" if change.field == "bandwidth" else "latency_us"
        names = [f"{where}_{unit}" for where in ("intra", "inter")]
        if change.absolute is not None:
            values: dict[str, Any] = dict.fromkeys(names, change.absolute)
        else:
            assert change.factor is not None  # one of the two is set
            values = {name: getattr(settings, name) * change.factor for name in names}
        self.program = charged_by(self.program, change.text, replace(settings, **values))

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
        self.program = charged_by(self.program, change.text, replace(settings, emulated_world_size=change.size))
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
        alike: dict[tuple[Operation, ...], list[int]] = defaultdict(list)
        for number, step in enumerate(self.program.steps):
            operations = {self.program.layouts[layout].operations for layout in step.layouts}
            if len(operations) > 1:
                raise InputError(
                    f"--set {change.text}: the ranks do not all do the same, so none can be held to another"
                )
            alike[operations.pop()].append(number)
        steps = list(self.program.steps)
        for numbers in alike.values():
            if len(numbers) == 1 < len(steps):
                continue  # what lasts does not show in one step
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
        if strategy is not None and strategy not in SHARDED:
            raise InputError(
                f"--set {text}: which all-gathers bring the parameters of a block is known for parallel="
                f"{', '.join(SHARDED)} only; this run has parallel={strategy}"
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
            self.program = faster(self.program, change.text, Selection(), change.factor)
            return
        assert change.absolute is not None  # bandwidth is one of the two
        self.flags.append(
            "the network was real, and its law is not known: every collective is given the time of a ring of "
            f"{change.absolute:g} GB/s without latency"
        )
        self.program = of_plain_ring(self.program, change.text, change.absolute)
