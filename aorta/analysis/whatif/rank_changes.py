"""Changes of what ranks do in their own time: later or earlier ones, no stragglers, faster compute.

Must not change what a collective costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

import numpy as np

from aorta.analysis.tables import Floats, Ints
from aorta.analysis.whatif.own_time import stretched
from aorta.analysis.whatif.program import (
    Change,
    Changed,
    Column,
    Operation,
    RunProgram,
    What,
    compact,
    factor_of,
    is_count,
    number_of,
)
from aorta.errors import InputError
from aorta.timeline.overlap import NS_PER_MS

LATE_LIMIT_MS: Final = 1e9
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
    TURN: ClassVar = 6

    rank: int
    late_ms: float

    @classmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        """Read a rank and milliseconds."""
        match rest:
            case [rank, "late_ms"] if is_count(rank):
                late_ms = number_of(cls, text, value, "milliseconds", "rank.N.late_ms")
                if abs(late_ms) > LATE_LIMIT_MS:
                    raise cls.refused(text, f"at most {LATE_LIMIT_MS:g} ms, not {late_ms:g}", "rank.N.late_ms")
                return cls(text, int(rank), late_ms)
        raise cls.refused(text, "not a change of a rank", "rank.N.late_ms")

    def make(self, program: RunProgram) -> Changed:
        """Lengthen or shorten the rank's own time before each of its collectives."""
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
    TURN: ClassVar = 5

    @classmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        """Read that there are none."""
        if rest or value != "none":
            raise cls.refused(text, "stragglers can be taken away, all of them", "stragglers")
        return cls(text)

    def make(self, program: RunProgram) -> Changed:
        """Take away by how much ranks are slower, step after step (`lasting_excess_ns`)."""
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


@dataclass(frozen=True)
class ComputeSpeed(Change):
    """Blocks compute `factor` times as fast."""

    HEAD: ClassVar = "compute"
    FORMS: ClassVar[Mapping[str, str]] = {"compute": "compute=x1.5"}
    TURN: ClassVar = 4

    factor: float

    @classmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        """Read a factor."""
        if rest:
            raise cls.refused(text, "all blocks are changed alike", "compute")
        return cls(text, factor_of(cls, text, value, "compute", "a factor such as x1.5"))

    def make(self, program: RunProgram) -> Changed:
        """Shorten or stretch every computing span."""
        computes = np.array([name.lane == "compute" for name in program.names], bool)
        if not computes.any():
            raise InputError(f"--set {self.text}: the record names no block that computes")
        steps = [stretched(step, computes[step.spans.name], 1 / self.factor) for step in program.steps]
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
    return np.stack([_of_operation(np.stack([step[at] for step in host_ns])) for at in range(len(host_ns[0]))])


def _of_operation(own_ns: Column) -> Ints:
    """Return the lasting excess at one operation; `own_ns` has shape (steps, ranks)."""
    medians: Floats = np.median(own_ns, axis=0)
    deviation = np.median(np.abs(own_ns - medians), axis=0) * _DEVIATION_PER_MAD
    error = _ERROR_OF_MEDIAN * deviation / np.sqrt(len(own_ns))
    typical = np.argsort(medians, kind="stable")[(len(medians) - 1) // 2]
    excess = medians - medians[typical]
    lasting = excess > _SURE * np.hypot(error, error[typical])
    return np.where(lasting, np.rint(excess), 0).astype(np.int64)
