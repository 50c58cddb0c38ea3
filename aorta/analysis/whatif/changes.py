"""All changes of a what-if: reads them, and makes them in a program. Those of what ranks do in their own time are here.

    parse_changes(["network.bandwidth=x2", "rank.3.late_ms=-5"])

docs/what-if.md says what they mean. Must not replay or predict anything.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from aorta.analysis.frames import Floats, Ints
from aorta.analysis.whatif.network_changes import LONGEST_NS, CommSpeed, NetworkChange, WorldSize
from aorta.analysis.whatif.program import Change, Changed, Column, Operation, RunProgram, What, compact
from aorta.analysis.whatif.strategy_changes import BucketCap, OverlapSwitch, PrefetchDepth
from aorta.config.schema import Algorithm
from aorta.errors import InputError, meant
from aorta.timeline.classes import KINDS
from aorta.timeline.overlap import NS_PER_MS

LATE_LIMIT_MS: Final = 1e9
FACTOR_LIMIT: Final = 1e6
"""A factor is at most this, and at least its inverse: beyond it 64 bits of nanoseconds could overflow."""
PREFETCH_LIMIT: Final = 64
RANKS_LIMIT: Final = 1 << 20
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

    rank: int
    late_ms: float

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


_ORDER: Final[tuple[type[Change], ...]] = (
    OverlapSwitch,
    BucketCap,
    PrefetchDepth,
    NoStragglers,
    RankLateness,
    WorldSize,
    NetworkChange,
    CommSpeed,
)
"""Every change, in the order in which they are made."""
FORMS: Final = {
    "overlap": "overlap=on, overlap=off",
    "buckets.mb": "buckets.mb=25 (MiB), buckets.mb=x2",
    "prefetch": "prefetch=2",
    "stragglers": "stragglers=none",
    "rank.N.late_ms": "rank.3.late_ms=5, rank.3.late_ms=-5",
    "ranks": "ranks=512",
    "network.bandwidth": "network.bandwidth=x2, network.bandwidth=10 (GB/s)",
    "network.latency": "network.latency=x0.5, network.latency=20 (microseconds)",
    "network.algorithm": "network.algorithm=tree",
    "comm": "comm=free, comm=x2",
    "comm.kind.KIND": "comm.kind.allreduce=free, comm.kind.allreduce=x2",
    "comm.group.NAME": "comm.group.0=free",
    "comm.bytes.LEAST-MOST": "comm.bytes.1e6-4e6=free (either end may be left out)",
}
"""What can be set -> how it is written, an example each."""


def parse_changes(texts: Sequence[str]) -> tuple[Change, ...]:
    """Read changes, each `TARGET=VALUE`, and put them into the order in which they are made.

    Raises:
        InputError: one is not understood; the message says what is allowed.
    """
    return in_order([_Text(text).change() for text in texts])


@dataclass(frozen=True)
class _Text:
    text: str

    def change(self) -> Change:
        target, _, value = (part.strip() for part in self.text.partition("="))
        head, *rest = target.split(".")
        if not value or head not in {form.split(".")[0] for form in FORMS}:
            hint = meant(target, FORMS, " (", ")")
            raise InputError(f"--set {self.text}: expected TARGET=VALUE{hint}. Allowed: {'; '.join(FORMS.values())}")
        match head, rest:
            case "overlap", [] if value in {"on", "off"}:
                return OverlapSwitch(self.text, value == "on")
            case "overlap", _:
                raise self.refused("overlap is on or off", "overlap")
            case "buckets", ["mb"]:
                return self.bucket_cap(value)
            case "buckets", _:
                raise self.refused("not a property of buckets", "buckets.mb")
            case "prefetch", [] if is_count(value) and int(value) <= PREFETCH_LIMIT:
                return PrefetchDepth(self.text, int(value))
            case "prefetch", _:
                raise self.refused(f"0 to {PREFETCH_LIMIT} blocks can be gathered ahead", "prefetch")
            case "stragglers", [] if value == "none":
                return NoStragglers(self.text)
            case "stragglers", _:
                raise self.refused("stragglers can be taken away, all of them", "stragglers")
            case "rank", [rank, "late_ms"] if is_count(rank):
                late_ms = self.number(value, "milliseconds", "rank.N.late_ms")
                if abs(late_ms) > LATE_LIMIT_MS:
                    raise self.refused(f"at most {LATE_LIMIT_MS:g} ms, not {late_ms:g}", "rank.N.late_ms")
                return RankLateness(self.text, int(rank), late_ms)
            case "rank", _:
                raise self.refused("not a change of a rank", "rank.N.late_ms")
            case "ranks", [] if is_count(value) and 2 <= int(value) <= RANKS_LIMIT:
                return WorldSize(self.text, int(value))
            case "ranks", _:
                raise self.refused(f"a world has 2 to {RANKS_LIMIT} ranks", "ranks")
            case "network", ["algorithm"]:
                if value not in {algorithm.value for algorithm in Algorithm}:
                    raise self.refused(f"{value!r} is no algorithm; ring and tree are")
                return NetworkChange(self.text, "algorithm", algorithm=Algorithm(value))
            case "network", ["bandwidth"]:
                return self.network("bandwidth", "GB/s", 1 / FACTOR_LIMIT, value)
            case "network", ["latency"]:
                return self.network("latency", "microseconds", 0, value)
            case "network", _:
                raise self.refused("not a property of a network", *(form for form in FORMS if "network" in form))
        return self.comm(rest, value)

    def bucket_cap(self, value: str) -> BucketCap:
        if value.startswith("x"):
            return BucketCap(self.text, factor=self.factor(value, "buckets.mb"))
        size = self.number(value, "MiB such as 25, or a factor such as x2", "buckets.mb")
        if size <= 0:
            raise self.refused(f"a bucket holds more than {size:g} MiB", "buckets.mb")
        return BucketCap(self.text, cap_bytes=size * (1 << 20))

    def network(self, field: Literal["bandwidth", "latency"], unit: str, least: float, value: str) -> NetworkChange:
        form = f"network.{field}"
        if value.startswith("x"):
            return NetworkChange(self.text, field, factor=self.factor(value, form))
        number = self.number(value, f"a factor such as x2, or {unit} such as 10", form)
        if number < least:
            raise self.refused(f"{number:g} {unit}", form)
        return NetworkChange(self.text, field, absolute=number)

    def comm(self, rest: Sequence[str], value: str) -> CommSpeed:
        factor = math.inf if value == "free" else self.factor(value, "comm", "free or a factor such as x2")
        match rest:
            case []:
                return CommSpeed(self.text, factor)
            case ["kind", kind]:
                if kind not in KINDS:
                    hint = meant(kind, KINDS, after=" ")
                    raise self.refused(f"{kind!r} is no kind of collective; {hint}the kinds are {', '.join(KINDS)}")
                return CommSpeed(self.text, factor, kind=kind)
            case ["group", *name] if name:
                return CommSpeed(self.text, factor, group=".".join(name))
            case ["bytes", *sizes] if sizes:
                form, number = "comm.bytes.LEAST-MOST", r"([0-9.]+(?:[eE]\+?[0-9]+)?)?"
                match = re.fullmatch(f"{number}-{number}", ".".join(sizes))
                if match is None or not any(match.groups()):
                    raise self.refused(f"{'.'.join(sizes)!r} is not a range of bytes", form)
                least, most = (None if size is None else int(self.number(size, "bytes")) for size in match.groups())
                if least is not None and most is not None and least > most:
                    raise self.refused(f"{least} bytes are more than {most}", form)
                return CommSpeed(self.text, factor, least_bytes=least, most_bytes=most)
        raise self.refused("not a selection of collectives", *(form for form in FORMS if "comm" in form))

    def refused(self, why: str, *forms: str) -> InputError:
        """Return the error for what cannot be read: why, and how `forms` are written; without any, nothing more."""
        allowed = f". Allowed: {'; '.join(FORMS[form] for form in forms)}" if forms else ""
        return InputError(f"--set {self.text}: {why}{allowed}")

    def factor(self, value: str, form: str, allowed: str = "a factor such as x2") -> float:
        match = re.fullmatch(r"x([0-9.eE+-]+)", value)
        if match is None:
            raise self.refused(f"{value!r} is not {allowed}", form)
        factor = self.number(match[1], "a factor such as x2", form)
        if factor <= 0:
            raise self.refused(f"a factor is greater than 0, not {factor:g}", form)
        if not 1 / FACTOR_LIMIT <= factor <= FACTOR_LIMIT:
            raise self.refused(f"a factor is between {1 / FACTOR_LIMIT:g} and {FACTOR_LIMIT:g}, not {factor:g}", form)
        return factor

    def number(self, value: str, allowed: str, *forms: str) -> float:
        try:
            number = float(value)
        except ValueError:
            raise self.refused(f"{value!r} is not {allowed}", *forms) from None
        if not math.isfinite(number) or abs(number) > 1e12:  # larger than anything that a machine has
            raise self.refused(f"{value} is beyond any machine", *forms)
        return number


def is_count(text: str) -> bool:
    """Return whether a text is a plain number from 0; of `str.isdigit`, also what `int` refuses is."""
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def in_order(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Return changes in the order in which they are made; several of one class stay as given."""
    return tuple(sorted(changes, key=lambda change: _ORDER.index(type(change))))


def apply(program: RunProgram, changes: Sequence[Change]) -> Changed:
    """Make changes, one after the other, in their order.

    Raises:
        InputError: one cannot be made in this program, or 64 bits of nanoseconds do not hold it.
    """
    flags: dict[str, None] = {}
    for change in in_order(changes):
        changed = change.make(program)
        program = changed.program
        total_ns = 0.0  # of all times there are, which no time of a replay is later than
        for step in program.steps:
            for times in (step.host_ns, step.wake_ns, step.cost_ns, step.backend_ns):
                if times is not None and times.size:
                    total_ns += float(times.max(axis=1).sum(dtype=np.float64))
        if total_ns >= LONGEST_NS:
            years = LONGEST_NS / _NS_PER_YEAR
            raise InputError(f"--set {change.text}: the run would take more than {years:.0f} years")
        flags |= dict.fromkeys(changed.flags)
    return Changed(program, tuple(flags))
