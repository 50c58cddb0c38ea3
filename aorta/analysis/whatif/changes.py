"""All changes of a what-if: reads them, and makes them in a program. Those of what ranks do in their own time are here.

    parse_changes(["network.bandwidth=x2", "rank.3.late_ms=-5"])

`FORMS` has an example of each; docs/what-if.md says what they mean. Must not replay or predict anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

import numpy as np

from aorta.analysis.tables import Floats, Ints
from aorta.analysis.whatif.network_changes import LONGEST_NS, CommSpeed, NetworkChange, WorldSize
from aorta.analysis.whatif.program import (
    Change,
    Changed,
    Column,
    Operation,
    RunProgram,
    What,
    compact,
    is_count,
)
from aorta.analysis.whatif.strategy_changes import BucketCap, OverlapSwitch, PrefetchDepth
from aorta.errors import InputError, meant
from aorta.timeline.overlap import NS_PER_MS

LATE_LIMIT_MS: Final = 1e9
_NS_PER_YEAR: Final = 365 * 24 * 3600 * 1e9
_DEVIATION_PER_MAD: Final = 1.4826
"""Standard deviation of normal values over their median absolute deviation."""
_ERROR_OF_MEDIAN: Final = 1.2533
"""Standard error of the median of normal values over that of their mean."""
_SURE: Final = 3.0
"""An excess counts where it is more than so many standard errors."""


@dataclass(frozen=True)
class RankLateness(Change):
    """A rank is later to every collective, or earlier where `late_ms` is negative."""

    HEAD: ClassVar = "rank"
    FORMS: ClassVar[Mapping[str, str]] = {"rank.N.late_ms": "rank.3.late_ms=5, rank.3.late_ms=-5"}

    rank: int
    late_ms: float

    @classmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        match rest:
            case [rank, "late_ms"] if is_count(rank):
                late_ms = cls.number_of(text, value, "milliseconds", "rank.N.late_ms")
                if abs(late_ms) > LATE_LIMIT_MS:
                    raise cls.refused(text, f"at most {LATE_LIMIT_MS:g} ms, not {late_ms:g}", "rank.N.late_ms")
                return cls(text, int(rank), late_ms)
        raise cls.refused(text, "not a change of a rank", "rank.N.late_ms")

    def make(self, program: RunProgram) -> Changed:
        if self.rank not in program.ranks:
            raise InputError(f"--set {self.text}: the ranks of this run are {program.ranks[0]} to {program.ranks[-1]}")
        column = program.ranks.index(self.rank)
        late_ns = round(self.late_ms * NS_PER_MS)
        short = 0
        steps = []
        for step in program.steps:
            operations = program.layouts[step.layouts[column]].operations
            issues = [index for index, operation in enumerate(operations) if operation.what is What.ISSUE]
            host = step.host_ns.astype(np.int64)
            short += int((host[issues, column] + late_ns < 0).sum())
            host[issues, column] = np.maximum(host[issues, column] + late_ns, 0)
            steps.append(replace(step, host_ns=compact(host)))
        flag = (
            f"rank {self.rank} had less than {-self.late_ms:g} ms of own time before {short} of its "
            "collectives; there all of it is taken away"
        )
        return Changed(replace(program, steps=steps), (flag,) if short else ())


@dataclass(frozen=True)
class NoStragglers(Change):
    """Before no operation does a rank take more own time than the typical one, step after step."""

    HEAD: ClassVar = "stragglers"
    FORMS: ClassVar[Mapping[str, str]] = {"stragglers": "stragglers=none"}

    @classmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        if rest or value != "none":
            raise cls.refused(text, "stragglers can be taken away, all of them", "stragglers")
        return cls(text)

    def make(self, program: RunProgram) -> Changed:
        alike: dict[tuple[Operation, ...], list[int]] = defaultdict(list)
        for number, step in enumerate(program.steps):
            operations = {program.layouts[layout].operations for layout in step.layouts}
            if len(operations) > 1:
                raise InputError(f"--set {self.text}: the ranks do not all do the same, so none can be held to another")
            alike[operations.pop()].append(number)
        steps = list(program.steps)
        for numbers in alike.values():
            if len(numbers) == 1 < len(steps):
                continue  # what lasts does not show in one step
            excess = lasting_excess_ns([steps[number].host_ns for number in numbers])
            for number in numbers:
                host = np.maximum(steps[number].host_ns - excess, 0)
                steps[number] = replace(steps[number], host_ns=compact(host))
        return Changed(replace(program, steps=steps))


def lasting_excess_ns(host_ns: Sequence[Column]) -> Ints:
    """Return the excess of each rank's own time before each operation (median over steps) over the typical rank's.

    In every single step one rank is the slowest, also where all are alike: what does not last is noise, no straggler.

    Args:
        host_ns: of each step, shape (operations, ranks).

    Returns:
        Nanoseconds, shape (operations, ranks), 0 where the difference is within its error. The typical rank is the
        lower median of the ranks.
    """
    found = np.zeros(host_ns[0].shape, np.int64)
    for operation in range(len(found)):
        own_ns = np.stack([step[operation] for step in host_ns])
        medians: Floats = np.median(own_ns, axis=0)
        deviation = np.median(np.abs(own_ns - medians), axis=0) * _DEVIATION_PER_MAD
        error = _ERROR_OF_MEDIAN * deviation / np.sqrt(len(own_ns))
        typical = np.argsort(medians, kind="stable")[(len(medians) - 1) // 2]
        excess = medians - medians[typical]
        found[operation] = np.where(excess > _SURE * np.hypot(error, error[typical]), np.rint(excess), 0)
    return found


CHANGES: Final[tuple[type[Change], ...]] = (
    OverlapSwitch,
    BucketCap,
    PrefetchDepth,
    NoStragglers,
    RankLateness,
    WorldSize,
    NetworkChange,
    CommSpeed,
)
"""Every change, in the order in which they are made, and in which help lists them."""
_BY_HEAD: Final = {change.HEAD: change for change in CHANGES}
FORMS: Final = {target: form for change in CHANGES for target, form in change.FORMS.items()}
"""What can be set -> how it is written, an example each."""


def parse_changes(texts: Sequence[str]) -> tuple[Change, ...]:
    """Read changes, each `TARGET=VALUE`, and put them into the order in which they are made.

    Raises:
        InputError: one is not understood; the message says what is allowed.
    """
    found = []
    for text in texts:
        target, equals, value = (part.strip() for part in text.partition("="))
        head, *rest = target.split(".")
        if not equals or not value or head not in _BY_HEAD:
            hint = meant(target, FORMS, " (", ")")
            raise InputError(f"--set {text}: expected TARGET=VALUE{hint}. Allowed: {'; '.join(FORMS.values())}")
        found.append(_BY_HEAD[head].read(text, rest, value))
    return in_order(found)


def in_order(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Return changes in the order in which they are made; several of one class stay as given."""
    return tuple(sorted(changes, key=lambda change: CHANGES.index(type(change))))


def apply(program: RunProgram, changes: Sequence[Change]) -> Changed:
    """Make changes, one after the other, in their order.

    Raises:
        InputError: one cannot be made in this program, or 64 bits of nanoseconds do not hold it.
    """
    flags: dict[str, None] = {}
    for change in in_order(changes):
        changed = change.make(program)
        program = changed.program
        if _longest_ns(program) >= LONGEST_NS:
            years = LONGEST_NS / _NS_PER_YEAR
            raise InputError(f"--set {change.text}: the run would take more than {years:.0f} years")
        flags |= dict.fromkeys(changed.flags)
    return Changed(program, tuple(flags))


def _longest_ns(program: RunProgram) -> float:
    """Return the sum of all times there are, which no time of a replay is later than."""
    total = 0.0
    for step in program.steps:
        for times in (step.host_ns, step.wake_ns, step.cost_ns, step.backend_ns):
            if times is not None and times.size:
                total += float(times.max(axis=1).sum(dtype=np.float64))
    return total
