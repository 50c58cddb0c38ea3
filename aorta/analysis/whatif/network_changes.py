"""Changes of what collectives cost: some faster, another network, more ranks.

Must not change what a rank does in its own time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal, Self

import numpy as np

from aorta.analysis.tables import Floats, Ints
from aorta.analysis.whatif.program import (
    FACTOR_LIMIT,
    Change,
    Changed,
    Column,
    Issued,
    RunProgram,
    StepProgram,
    compact,
    factor_of,
    is_count,
    number_of,
)
from aorta.config.schema import Algorithm, EmulatedFabric
from aorta.errors import InputError, meant
from aorta.timeline.classes import KINDS

LONGEST_NS: Final = 2.0**62
"""What 64 bits of nanoseconds hold, with room for a sum of two."""
_NS_PER_YEAR: Final = 365 * 24 * 3600 * 1e9
RANKS_LIMIT: Final = 1 << 20


@dataclass(frozen=True)
class Selection:
    """Which collectives: all of one kind, group, size and place in their step; None: any."""

    kind: str | None = None
    group: str | None = None
    least_bytes: int | None = None
    most_bytes: int | None = None
    position: int | None = None

    def has(self, issued: Issued, place: int) -> bool:
        """Return whether a collective is one of those selected."""
        return (
            self.kind in (None, issued.kind)
            and self.group in (None, issued.group)
            and self.position in (None, place)
            and (self.least_bytes is None or issued.bytes >= self.least_bytes)
            and (self.most_bytes is None or issued.bytes <= self.most_bytes)
        )


@dataclass(frozen=True)
class CommSpeed(Change):
    """Communication `factor` times as fast, the backend's own time included; infinite: free."""

    HEAD: ClassVar = "comm"
    FORMS: ClassVar[Mapping[str, str]] = {
        "comm": "comm=free, comm=x2",
        "comm.kind.KIND": "comm.kind.allreduce=free, comm.kind.allreduce=x2",
        "comm.group.NAME": "comm.group.0=free",
        "comm.bytes.LEAST-MOST": "comm.bytes.1e6-4e6=free (either end may be left out)",
        "comm.position.N": "comm.position.3=free (counted from 0)",
    }
    TURN: ClassVar = 9

    which: Selection
    factor: float

    @classmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        """Read which collectives, and free or a factor."""
        factor = math.inf if value == "free" else factor_of(cls, text, value, "comm", "free or a factor such as x2")
        match rest:
            case []:
                return cls(text, Selection(), factor)
            case ["kind", kind]:
                if kind not in KINDS:
                    hint = meant(kind, KINDS, after=" ")
                    raise cls.refused(
                        text, f"{kind!r} is no kind of collective; {hint}the kinds are {', '.join(KINDS)}"
                    )
                return cls(text, Selection(kind=kind), factor)
            case ["group", *name] if name:
                return cls(text, Selection(group=".".join(name)), factor)
            case ["position", place]:
                if not is_count(place):
                    raise cls.refused(text, f"position {place!r} is no number from 0", "comm.position.N")
                return cls(text, Selection(position=int(place)), factor)
            case ["bytes", *sizes] if sizes:
                least, most = cls._sizes(text, ".".join(sizes))
                return cls(text, Selection(least_bytes=least, most_bytes=most), factor)
        raise cls.refused(text, "not a selection of collectives", *cls.FORMS)

    @classmethod
    def _sizes(cls, text: str, value: str) -> tuple[int | None, int | None]:
        form = "comm.bytes.LEAST-MOST"
        match = re.fullmatch(r"([0-9.]+(?:[eE]\+?[0-9]+)?)?-([0-9.]+(?:[eE]\+?[0-9]+)?)?", value)
        if match is None or not any(match.groups()):
            raise cls.refused(text, f"{value!r} is no range of bytes", form)
        least, most = (None if each is None else int(number_of(cls, text, each, "bytes")) for each in match.groups())
        if least is not None and most is not None and least > most:
            raise cls.refused(text, f"{least} bytes are more than {most}", form)
        return least, most

    def make(self, program: RunProgram) -> Changed:
        """Divide what those collectives cost."""

        def factors(issued: Issued, place: int) -> float:
            return self.factor if self.which.has(issued, place) else 1.0

        found = _of_places(program, factors)
        if not any((each != 1).any() for each in found.values()) and self.factor != 1:
            raise InputError(f"--set {self.text}: this run has no such collective. {_there_are(program)}")
        steps = []
        for step in program.steps:
            divisor = found[step.layouts]
            backend = None if step.backend_ns is None else compact(_divided(step.backend_ns, divisor))
            network = None if step.network_ns is None else compact(_divided(step.network_ns, divisor))
            cost = compact(_divided(step.cost_ns, divisor))
            steps.append(replace(step, cost_ns=cost, backend_ns=backend, network_ns=network))
        return Changed(replace(program, steps=steps))


@dataclass(frozen=True)
class NetworkChange(Change):
    """Another network: what is None stays. A value is a factor of the recorded one, or absolute."""

    HEAD: ClassVar = "network"
    FORMS: ClassVar[Mapping[str, str]] = {
        "network.bandwidth": "network.bandwidth=x2, network.bandwidth=10 (GB/s)",
        "network.latency": "network.latency=x0.5, network.latency=20 (microseconds)",
        "network.algorithm": "network.algorithm=tree",
    }
    TURN: ClassVar = 8

    field: Literal["bandwidth", "latency", "algorithm"]
    factor: float | None = None
    absolute: float | None = None
    algorithm: Algorithm | None = None

    @classmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        """Read which property, and a factor or its value."""
        match rest:
            case ["algorithm"]:
                if value not in {each.value for each in Algorithm}:
                    raise cls.refused(text, f"{value!r} is no algorithm; ring and tree are")
                return cls(text, "algorithm", algorithm=Algorithm(value))
            case ["bandwidth" | "latency" as name]:
                form = f"network.{name}"
                field: Literal["bandwidth", "latency"] = "bandwidth" if name == "bandwidth" else "latency"
                unit = "GB/s" if field == "bandwidth" else "microseconds"
                if value.startswith("x"):
                    return cls(text, field, factor=factor_of(cls, text, value, form))
                number = number_of(cls, text, value, f"a factor such as x2, or {unit} such as 10", form)
                if number < 0 or (field == "bandwidth" and number < 1 / FACTOR_LIMIT):
                    raise cls.refused(text, f"{number:g} {unit}", form)
                return cls(text, field, absolute=number)
        raise cls.refused(text, "not a property of a network", *cls.FORMS)

    def make(self, program: RunProgram) -> Changed:
        """Charge what the other network would charge."""
        settings = program.facts.network
        if settings is None:
            return self._make_on_real_network(program)
        if self.algorithm is not None:
            return Changed(_charged_by(program, self.text, replace(settings, algorithm=self.algorithm)))
        unit = "bandwidth_gb_per_s" if self.field == "bandwidth" else "latency_us"
        names = [f"{where}_{unit}" for where in ("intra", "inter")]
        if self.absolute is not None:
            values = dict.fromkeys(names, self.absolute)
        else:
            assert self.factor is not None  # one of the two is set
            values = {name: getattr(settings, name) * self.factor for name in names}
        return Changed(_charged_by(program, self.text, replace(settings, **values)))  # type: ignore[arg-type]

    def _make_on_real_network(self, program: RunProgram) -> Changed:
        """Change a network whose law is not known."""
        if self.field != "bandwidth":
            raise InputError(
                f"--set {self.text}: the network of this run was real: how much of its times is {self.field} is "
                "not known. Allowed: network.bandwidth=x2, comm=x2; or record on an emulated one (fabric=emulated)"
            )
        if self.factor is not None:
            changed = CommSpeed(self.text, Selection(), self.factor).make(program)
            return replace(changed, flags=("upper bound: assumes no latency",))
        assert self.absolute is not None  # bandwidth is one of the two
        flag = f"assumes a ring of {self.absolute:g} GB/s without latency"
        plain = EmulatedFabric(
            intra_latency_us=0,
            inter_latency_us=0,
            intra_bandwidth_gb_per_s=self.absolute,
            inter_bandwidth_gb_per_s=self.absolute,
        )
        charged = _charges(program, self.text, plain)
        steps = [replace(step, cost_ns=compact(charged[step.layouts])) for step in program.steps]
        return Changed(replace(program, steps=steps), (flag,))


@dataclass(frozen=True)
class WorldSize(Change):
    """Groups of all ranks have this size."""

    HEAD: ClassVar = "ranks"
    FORMS: ClassVar[Mapping[str, str]] = {"ranks": "ranks=512"}
    TURN: ClassVar = 7

    size: int

    @classmethod
    def read(cls, text: str, rest: Sequence[str], value: str) -> Self:
        """Read a number of ranks."""
        if rest or not is_count(value) or not 2 <= int(value) <= RANKS_LIMIT:
            raise cls.refused(text, f"a world has 2 to {RANKS_LIMIT} ranks", "ranks")
        return cls(text, int(value))

    def make(self, program: RunProgram) -> Changed:
        """Charge groups of all ranks what the network's law says of so many."""
        settings, world = program.facts.network, program.world_size
        if settings is None:
            raise InputError(
                f"--set {self.text}: the network of this run was real, and what it would charge at another size is "
                "not known; record on an emulated one (fabric=emulated)"
            )
        if program.shared_links:
            raise InputError(
                f"--set {self.text}: the groups of this run share links (sharing=link), and which of them its groups "
                "would take at another size is not worked out; record with sharing=group"
            )
        if not any(len(issued.ranks) == world for layout in program.layouts for issued in layout.issued):
            raise InputError(f"--set {self.text}: no group of this run has all {world} ranks")
        flag = (
            f"at {self.size} ranks groups of all ranks cost what the network's law says, compute is as recorded on "
            f"{world}: no more stragglers than there were, batches and shards as they were"
        )
        return Changed(_charged_by(program, self.text, replace(settings, emulated_world_size=self.size)), (flag,))


def _charged_by(program: RunProgram, text: str, settings: EmulatedFabric) -> RunProgram:
    """Return the program of a run on an emulated network, as another one charges it.

    Raises:
        InputError: 64 bits of nanoseconds do not hold it.
    """
    facts = program.facts
    charged = _charges(program, text, settings)
    steps = [_charged(step, charged[step.layouts], facts.law) for step in program.steps]
    return replace(program, steps=steps, facts=replace(facts, network=settings))


def check_length(program: RunProgram, text: str) -> None:
    """Refuse what 64 bits of nanoseconds might not hold: no time is later than the sum of all there are.

    Raises:
        InputError: they might not.
    """

    def longest(values: Column) -> float:
        return float(values.max(axis=1).sum(dtype=np.float64)) if values.size else 0.0

    total = 0.0
    for step in program.steps:
        times = (step.host_ns, step.wake_ns, step.cost_ns, step.backend_ns)
        total += sum(longest(each) for each in times if each is not None)
    if total > LONGEST_NS:
        raise _too_long(text)


def _too_long(text: str) -> InputError:
    return InputError(f"--set {text}: the run would take more than {LONGEST_NS / _NS_PER_YEAR:.0f} years")


def _charges(program: RunProgram, text: str, settings: EmulatedFabric) -> dict[tuple[int, ...], Ints]:
    found = _of_places(program, lambda issued, _place: issued.charge_ns(program.world_size, settings))
    if any(each.max(initial=0.0) > LONGEST_NS for each in found.values()):
        raise _too_long(text)
    return {layouts: np.rint(each).astype(np.int64) for layouts, each in found.items()}


def _of_places(program: RunProgram, value: Callable[[Issued, int], float]) -> dict[tuple[int, ...], Floats]:
    """Return a value per collective: layouts of a step -> shape (places, ranks), or (places, 1) where ranks agree."""
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


def _divided(values: Column, factor: Floats) -> Ints:
    return np.asarray(np.rint(values / factor), np.int64)


def _charged(step: StepProgram, charged: Ints, law: bool) -> StepProgram:
    """Return a step in which the network charges something else. What was recorded beyond the charge stays: on the
    law's network a factor (jitter), elsewhere an addend (the backend's own time).
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
