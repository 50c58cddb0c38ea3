"""Parses the changes of a what-if, and applies them to a program.

    parse_changes(["network.bandwidth=x2", "rank.3.late_ms=-5"])

docs/what-if.md has the table of them. What a launch can be given is no change here: `aorta ab` measures it. Must not
replay or predict anything.
"""

from __future__ import annotations

import math
import re
import shlex
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np

from aorta.config.fabric import Algorithm, EmulatedFabric
from aorta.documents.formatting import rough_ms
from aorta.errors import InputError, meant, nearest
from aorta.read.frames import Floats, Ints
from aorta.timeline.classes import KINDS
from aorta.timeline.overlap import NS_PER_MS
from aorta.whatif.program import Column, Issued, Operation, RunProgram, What, compact

LATE_LIMIT_MS: Final = 1e9
FACTOR_LIMIT: Final = 1e6
"""A factor is at most this, and at least its inverse: beyond it 64 bits of nanoseconds could overflow."""
RANKS_LIMIT: Final = 1 << 20
_LONGEST_NS: Final = 2.0**62
"""What 64 bits of nanoseconds hold, with room for a sum of two."""
_NS_PER_YEAR: Final = 365 * 24 * 3600 * 1e9
_DEVIATION_PER_MAD: Final = 1.4826
"""Standard deviation of normal values over their median absolute deviation."""
_ERROR_OF_MEDIAN: Final = 1.2533
"""Standard error of the median of normal values over that of their mean."""
_NAMED: Final = 3
"""The slowest ranks, whose excess over the typical rank is named."""
_SURE: Final = 3.0
"""An excess counts from this number of standard errors on."""


class Changed(NamedTuple):
    """A program with changes made, and sentences about what was assumed for them."""

    program: RunProgram
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change(ABC):
    """One change; `text` is how it was written."""

    text: str

    @abstractmethod
    def make(self, program: RunProgram) -> Changed:
        """Return the program with the change made; `program` itself stays as it is.

        Raises:
            InputError: it cannot be made in this program; the message says why.
        """


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
        note = (
            f"rank {self.rank} had less than {-self.late_ms:g} ms of own time before {short} of its collectives: all "
            "of it is taken away there"
        )
        return Changed(replace(program, steps=steps), (note,) if short else ())


@dataclass(frozen=True)
class NoStragglers(Change):
    """No rank takes more own time before an operation than the typical one, step after step."""

    def make(self, program: RunProgram) -> Changed:
        alike: dict[tuple[Operation, ...], list[int]] = defaultdict(list)
        for number, step in enumerate(program.steps):
            operations = {program.layouts[layout].operations for layout in step.layouts}
            if len(operations) > 1:
                raise InputError(f"--set {self.text}: the ranks do not all do the same, so they cannot be compared")
            alike[operations.pop()].append(number)
        steps, longer_ns = list(program.steps), np.zeros(len(program.ranks))
        for numbers in alike.values():
            if len(numbers) == 1 < len(steps):
                continue  # what lasts does not show in one step
            excess = lasting_excess_ns([steps[number].host_ns for number in numbers])
            longer_ns += excess.sum(axis=0) * len(numbers) / len(steps)
            for number in numbers:
                host = np.maximum(steps[number].host_ns - excess, 0)
                steps[number] = replace(steps[number], host_ns=compact(host))
        slowest = [column for column in np.argsort(-longer_ns, kind="stable")[:_NAMED] if longer_ns[column]]
        notes = tuple(
            f"without its waits, rank {program.ranks[column]} needs {rough_ms(longer_ns[column] / NS_PER_MS)} more per "
            "step than the typical rank"
            for column in slowest
        )
        return Changed(replace(program, steps=steps), notes)


def lasting_excess_ns(host_ns: Sequence[Column]) -> Ints:
    """Return the excess of each rank's own time before each operation (median over steps) over the typical rank's.

    In every single step one rank is the slowest, also where all are alike: what does not last is noise, no straggler.

    Args:
        host_ns: of each step, shape (operations, ranks).

    Returns:
        Nanoseconds, shape (operations, ranks), 0 where the difference is within its error. The typical rank is the
        lower median of the ranks.
    """
    excess_ns = np.zeros(host_ns[0].shape, np.int64)
    for operation in range(len(excess_ns)):
        own_ns = np.stack([step[operation] for step in host_ns])
        medians: Floats = np.median(own_ns, axis=0)
        deviation = np.median(np.abs(own_ns - medians), axis=0) * _DEVIATION_PER_MAD
        error = _ERROR_OF_MEDIAN * deviation / np.sqrt(len(own_ns))
        typical = np.argsort(medians, kind="stable")[(len(medians) - 1) // 2]
        excess = medians - medians[typical]
        excess_ns[operation] = np.where(excess > _SURE * np.hypot(error, error[typical]), np.rint(excess), 0)
    return excess_ns


@dataclass(frozen=True)
class CommSpeed(Change):
    """Communication `factor` times as fast, the backend's own time included; infinite: free. Only collectives of this
    kind, of these groups, and of this size of the full array; None: any.
    """

    factor: float
    kind: str | None = None
    groups: tuple[str, ...] | None = None
    least_bytes: int | None = None
    most_bytes: int | None = None

    def make(self, program: RunProgram) -> Changed:
        def factor(issued: Issued) -> float:
            chosen = (
                self.kind in (None, issued.kind)
                and (self.groups is None or issued.group in self.groups)
                and (self.least_bytes is None or issued.bytes >= self.least_bytes)
                and (self.most_bytes is None or issued.bytes <= self.most_bytes)
            )
            return self.factor if chosen else 1.0

        factors = _per_collective(program, factor)
        if self.factor != 1 and all((values == 1).all() for values in factors.values()):
            issued = {collective for layout in program.layouts for collective in layout.issued}
            kinds, groups = ({str(collective[field]) for collective in issued} for field in (0, 1))
            sizes = [collective.bytes for collective in issued] or [0]
            raise InputError(
                f"--set {self.text}: this run has no such collective. It has kinds {', '.join(sorted(kinds))}; groups "
                f"{', '.join(sorted(groups))}; {min(sizes)} to {max(sizes)} bytes"
            )
        steps = []
        for step in program.steps:
            times = {"cost_ns": step.cost_ns, "network_ns": step.network_ns, "backend_ns": step.backend_ns}
            divided: dict[str, Column] = {
                name: compact(np.rint(values / factors[step.layouts]).astype(np.int64))
                for name, values in times.items()
                if values is not None
            }
            steps.append(replace(step, **divided))  # type: ignore[arg-type]
        return Changed(replace(program, steps=steps))


@dataclass(frozen=True)
class NetworkChange(Change):
    """Another network; what is None stays. A value is a factor of the recorded one, or absolute."""

    field: Literal["bandwidth", "latency", "algorithm"]
    factor: float | None = None
    absolute: float | None = None
    algorithm: Algorithm | None = None

    def make(self, program: RunProgram) -> Changed:
        settings = program.network
        if settings is None:
            if self.field != "bandwidth" or self.factor is None:
                raise InputError(
                    f"--set {self.text}: the network of this run was real, and its formula is not known. Allowed: "
                    "network.bandwidth=x2, comm=x2; or record on an emulated one (fabric=emulated)"
                )
            changed = CommSpeed(self.text, self.factor).make(program)
            return changed._replace(notes=("the network is assumed to have no latency",))
        if self.algorithm is not None:
            return Changed(_charged_by(program, replace(settings, algorithm=self.algorithm)))
        unit = "bandwidth_gb_per_s" if self.field == "bandwidth" else "latency_us"
        names = [f"{where}_{unit}" for where in ("intra", "inter")]
        if self.absolute is not None:
            values = dict.fromkeys(names, self.absolute)
        else:
            assert self.factor is not None  # one of the two is set
            values = {name: getattr(settings, name) * self.factor for name in names}
        return Changed(_charged_by(program, replace(settings, **values)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class WorldSize(Change):
    """Groups of all ranks have this size."""

    size: int

    def make(self, program: RunProgram) -> Changed:
        settings, world = program.network, program.world_size
        if settings is None:
            raise InputError(f"--set {self.text}: the network of this run was real; record with fabric=emulated")
        if not any(len(issued.ranks) == world for layout in program.layouts for issued in layout.issued):
            raise InputError(f"--set {self.text}: no group of this run has all {world} ranks")
        note = (
            f"at {self.size} ranks: groups of all ranks follow the network's formula; computation, stragglers, "
            f"batches and shards as at {world}"
        )
        return Changed(_charged_by(program, replace(settings, emulated_world_size=self.size)), (note,))


def _charged_by(program: RunProgram, settings: EmulatedFabric) -> RunProgram:
    """Return the program of a run on an emulated network, as another network charges it."""
    charges = _per_collective(program, lambda issued: issued.charge_ns(program.world_size, settings))
    steps = []
    for step in program.steps:
        charged = np.rint(np.minimum(charges[step.layouts], _LONGEST_NS)).astype(np.int64)
        before, cost = step.network_ns, step.cost_ns
        assert before is not None  # an emulated network charges
        if program.law:  # what was recorded beyond the charge is a factor (jitter)
            shape = np.broadcast_shapes(charged.shape, before.shape)
            ratio = np.divide(charged, before, out=np.zeros(shape), where=before > 0)
            new = np.where(before > 0, np.rint(cost * ratio).astype(np.int64), charged)
        else:  # an addend (the backend's own time)
            new = np.maximum(cost.astype(np.int64) + charged - before, 0)
        steps.append(replace(step, cost_ns=compact(new), network_ns=compact(charged)))
    return replace(program, steps=steps, network=settings)


def _per_collective(program: RunProgram, value: Callable[[Issued], float]) -> dict[tuple[int, ...], Floats]:
    """Return layouts of a step -> a value per collective, shape (collectives, ranks), or (collectives, 1) where ranks
    agree.
    """
    of_layout = [np.array([value(issued) for issued in layout.issued], np.float64) for layout in program.layouts]
    tables: dict[tuple[int, ...], Floats] = {}
    for step in program.steps:
        if step.layouts not in tables:
            table = np.ones((len(step.cost_ns), len(step.layouts)))
            for column, layout in enumerate(step.layouts):
                table[: len(of_layout[layout]), column] = of_layout[layout]
            tables[step.layouts] = table[:, :1] if (table == table[:, :1]).all() else table
    return tables


_ORDER: Final[tuple[type[Change], ...]] = (NoStragglers, RankLateness, WorldSize, NetworkChange, CommSpeed)
"""Every change, in the order in which they are made."""
FORMS: Final = {
    "stragglers": "stragglers=none",
    "rank.N.late_ms": "rank.3.late_ms=5, rank.3.late_ms=-5",
    "ranks": "ranks=512",
    "network.bandwidth": "network.bandwidth=x2, network.bandwidth=10 (GB/s)",
    "network.latency": "network.latency=x0.5, network.latency=20 (microseconds)",
    "network.algorithm": "network.algorithm=tree",
    "comm": "comm=free, comm=x2",
    "comm.kind.KIND": "comm.kind.allreduce=free, comm.kind.allreduce=x2",
    "comm.group.NAMES": "comm.group.0=free, comm.group.1,2=x2",
    "comm.bytes.LEAST-MOST": "comm.bytes.1e6-4e6=free (either end may be left out)",
}
"""What can be set -> how it is written."""
_LAUNCHED: Final = {
    "overlap": ("parallel.overlap",),
    "buckets": ("parallel.bucket_cap_mb",),
    "prefetch": ("parallel.forward_prefetch", "parallel.backward_prefetch"),
}
"""What is not predicted, because a launch measures it -> the settings to launch."""


def parse_changes(texts: Sequence[str]) -> tuple[Change, ...]:
    """Read changes, `TARGET=VALUE`, and put them into the order in which they are made.

    Raises:
        InputError: one is not understood; the message says what is allowed.
    """
    return in_order([_parsed(text) for text in texts])


def _parsed(text: str) -> Change:
    target, _, value = (part.strip() for part in text.partition("="))
    head, *rest = target.split(".")

    def refused(why: str, *forms: str) -> InputError:
        """Return the error for what cannot be read: why, and how `forms` are written."""
        allowed = f". Allowed: {'; '.join(FORMS[form] for form in forms)}" if forms else ""
        return InputError(f"--set {text}: {why}{allowed}")

    def number(value: str, allowed: str, *forms: str) -> float:
        try:
            number = float(value)
        except ValueError:
            raise refused(f"{value!r} is not {allowed}", *forms) from None
        if not math.isfinite(number) or abs(number) > 1e12:  # larger than anything that a machine has
            raise refused(f"{value} is beyond any machine", *forms)
        return number

    def factor(form: str, allowed: str = "a factor such as x2") -> float:
        if not re.fullmatch(r"x[0-9.eE+-]+", value):
            raise refused(f"{value!r} is not {allowed}", form)
        factor = number(value[1:], "a factor such as x2", form)
        if not 1 / FACTOR_LIMIT <= factor <= FACTOR_LIMIT:
            raise refused(f"a factor is between {1 / FACTOR_LIMIT:g} and {FACTOR_LIMIT:g}, not {factor:g}", form)
        return factor

    if head in _LAUNCHED:
        plain = value if re.fullmatch(r"[0-9.]+", value) else "VALUE"
        setting = {"on": "true", "off": "false"}.get(value, plain)
        candidate = shlex.quote(" ".join(f"{name}={setting}" for name in _LAUNCHED[head]))
        raise refused(f"not predicted, because a launch measures it: aorta ab --output DIR --candidate {candidate}")
    match head, rest:
        case "stragglers", [] if value == "none":
            return NoStragglers(text)
        case "rank", [rank, "late_ms"] if is_count(rank) and value:
            late_ms = number(value, "milliseconds", "rank.N.late_ms")
            if abs(late_ms) > LATE_LIMIT_MS:
                raise refused(f"at most {LATE_LIMIT_MS:g} ms, not {late_ms:g}", "rank.N.late_ms")
            return RankLateness(text, int(rank), late_ms)
        case "ranks", [] if is_count(value) and 2 <= int(value) <= RANKS_LIMIT:
            return WorldSize(text, int(value))
        case "network", ["algorithm"] if value in {algorithm.value for algorithm in Algorithm}:
            return NetworkChange(text, "algorithm", algorithm=Algorithm(value))
        case "network", ["bandwidth" | "latency" as field] if value.startswith("x"):
            return NetworkChange(text, field, factor=factor(target))
        case "network", ["bandwidth" | "latency" as field] if value:
            unit, least = ("GB/s", 1 / FACTOR_LIMIT) if field == "bandwidth" else ("microseconds", 0)
            absolute = number(value, f"a factor such as x2, or {unit} such as 10", target)
            if absolute < least:
                raise refused(f"{absolute:g} {unit}", target)
            return NetworkChange(text, field, absolute=absolute)
        case "comm", _ if value:
            speed = math.inf if value == "free" else factor("comm", "free or a factor such as x2")
            match rest:
                case []:
                    return CommSpeed(text, speed)
                case ["kind", kind] if kind in KINDS:
                    return CommSpeed(text, speed, kind=kind)
                case ["kind", kind]:
                    hint = meant(kind, KINDS, after=" ")
                    raise refused(f"{kind!r} is no kind of collective; {hint}the kinds are {', '.join(KINDS)}")
                case ["group", *name] if name:
                    return CommSpeed(text, speed, groups=tuple(".".join(name).split(",")))
                case ["bytes", *sizes] if sizes:
                    size = r"([0-9.]+(?:[eE]\+?[0-9]+)?)?"
                    ends = re.fullmatch(f"{size}-{size}", ".".join(sizes))
                    if ends is None or not any(ends.groups()):
                        raise refused(f"{'.'.join(sizes)!r} is not a range of bytes", "comm.bytes.LEAST-MOST")
                    least_bytes, most_bytes = (
                        None if end is None else int(number(end, "bytes")) for end in ends.groups()
                    )
                    if least_bytes is not None and most_bytes is not None and least_bytes > most_bytes:
                        raise refused(f"{least_bytes} bytes are more than {most_bytes}", "comm.bytes.LEAST-MOST")
                    return CommSpeed(text, speed, least_bytes=least_bytes, most_bytes=most_bytes)
    forms = {form: shown for form, shown in FORMS.items() if form.split(".")[0] == head and value}
    if not forms:
        hint = meant(target, FORMS, " (", ")")
        raise InputError(f"--set {text}: expected TARGET=VALUE{hint}. Allowed: {'; '.join(FORMS.values())}")
    why = {
        "stragglers": "only all stragglers can be taken away",
        "network.algorithm": "the algorithms are ring and tree",
        "ranks": f"a world has 2 to {RANKS_LIMIT} ranks",
    }
    near = nearest(".".join(rest), [form.partition(".")[2] for form in forms if form != target])
    hint = f" (did you mean {head}.{near}?)" if near else ""
    raise refused(why.get(target, f"there is no {target}{hint}"), *forms)


def is_count(text: str) -> bool:
    """Return whether a text is a plain number from 0; `str.isdigit` also accepts what `int` refuses."""
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def in_order(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Return changes in the order in which they are made; several of one class stay as given."""
    return tuple(sorted(changes, key=lambda change: _ORDER.index(type(change))))


def apply(program: RunProgram, changes: Sequence[Change]) -> Changed:
    """Make changes, one after the other, in their order.

    Raises:
        InputError: one cannot be made in this program, or 64 bits of nanoseconds do not hold it.
    """
    notes: dict[str, None] = {}
    for change in in_order(changes):
        program, of_change = change.make(program)
        total_ns = 0.0  # of all times, which no time of a replay is later than
        for step in program.steps:
            for times in (step.host_ns, step.wake_ns, step.cost_ns, step.backend_ns):
                if times is not None and times.size:
                    total_ns += float(times.max(axis=1).sum(dtype=np.float64))
        if total_ns >= _LONGEST_NS:
            years = _LONGEST_NS / _NS_PER_YEAR
            raise InputError(f"--set {change.text}: the run would take more than {years:.0f} years")
        notes |= dict.fromkeys(of_change)
    return Changed(program, tuple(notes))
