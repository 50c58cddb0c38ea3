"""Changes of what collectives cost: some faster, another network, more ranks.

Must not change what a rank does in its own time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from aorta.analysis.frames import Floats
from aorta.analysis.whatif.program import Change, Changed, Column, Issued, RunProgram, compact
from aorta.config.schema import Algorithm, EmulatedFabric
from aorta.errors import InputError

LONGEST_NS: Final = 2.0**62
"""What 64 bits of nanoseconds hold, with room for a sum of two."""


@dataclass(frozen=True)
class CommSpeed(Change):
    """Communication `factor` times as fast, the backend's own time included; infinite: free.

    Collectives of one kind, group and size (of the full array); None: any.
    """

    factor: float
    kind: str | None = None
    group: str | None = None
    least_bytes: int | None = None
    most_bytes: int | None = None

    def make(self, program: RunProgram) -> Changed:
        def factors(issued: Issued) -> float:
            chosen = (
                self.kind in (None, issued.kind)
                and self.group in (None, issued.group)
                and (self.least_bytes is None or issued.bytes >= self.least_bytes)
                and (self.most_bytes is None or issued.bytes <= self.most_bytes)
            )
            return self.factor if chosen else 1.0

        found = _of_places(program, factors)
        if not any((each != 1).any() for each in found.values()) and self.factor != 1:
            issued = {each for layout in program.layouts for each in layout.issued}
            kinds, groups = ({str(each[at]) for each in issued} for at in (0, 1))
            sizes = [each.bytes for each in issued] or [0]
            raise InputError(
                f"--set {self.text}: this run has no such collective. It has kinds {', '.join(sorted(kinds))}; groups "
                f"{', '.join(sorted(groups))}; {min(sizes)} to {max(sizes)} bytes"
            )
        steps = []
        for step in program.steps:
            times = {"cost_ns": step.cost_ns, "network_ns": step.network_ns, "backend_ns": step.backend_ns}
            divided: dict[str, Column] = {
                name: compact(np.rint(values / found[step.layouts]).astype(np.int64))
                for name, values in times.items()
                if values is not None
            }
            steps.append(replace(step, **divided))  # type: ignore[arg-type]
        return Changed(replace(program, steps=steps))


@dataclass(frozen=True)
class NetworkChange(Change):
    """Another network: what is None stays. A value is a factor of the recorded one, or absolute."""

    field: Literal["bandwidth", "latency", "algorithm"]
    factor: float | None = None
    absolute: float | None = None
    algorithm: Algorithm | None = None

    def make(self, program: RunProgram) -> Changed:
        settings = program.facts.network
        if settings is None:
            if self.field != "bandwidth" or self.factor is None:
                raise InputError(
                    f"--set {self.text}: the network of this run was real, and its law is not known. Allowed: "
                    "network.bandwidth=x2, comm=x2; or record on an emulated one (fabric=emulated)"
                )
            changed = CommSpeed(self.text, self.factor).make(program)
            return replace(changed, flags=("upper bound: assumes no latency",))
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
        settings, world = program.facts.network, program.world_size
        if settings is None:
            raise InputError(f"--set {self.text}: the network of this run was real; record with fabric=emulated")
        if program.shared_links:
            raise InputError(f"--set {self.text}: its groups share links (sharing=link); record with sharing=group")
        if not any(len(issued.ranks) == world for layout in program.layouts for issued in layout.issued):
            raise InputError(f"--set {self.text}: no group of this run has all {world} ranks")
        flag = (
            f"at {self.size} ranks: groups of all ranks follow the network's formula; computation, stragglers, "
            f"batches and shards as at {world}"
        )
        return Changed(_charged_by(program, replace(settings, emulated_world_size=self.size)), (flag,))


def _charged_by(program: RunProgram, settings: EmulatedFabric) -> RunProgram:
    """Return the program of a run on an emulated network, as another one charges it."""
    facts = program.facts
    charges = _of_places(program, lambda issued: issued.charge_ns(program.world_size, settings))
    steps = []
    for step in program.steps:
        charged = np.rint(np.minimum(charges[step.layouts], LONGEST_NS)).astype(np.int64)
        before, cost = step.network_ns, step.cost_ns
        assert before is not None  # an emulated network charges
        if facts.law:  # what was recorded beyond the charge is a factor (jitter)
            shape = np.broadcast_shapes(charged.shape, before.shape)
            ratio = np.divide(charged, before, out=np.zeros(shape), where=before > 0)
            new = np.where(before > 0, np.rint(cost * ratio).astype(np.int64), charged)
        else:  # an addend (the backend's own time)
            new = np.maximum(cost.astype(np.int64) + charged - before, 0)
        steps.append(replace(step, cost_ns=compact(new), network_ns=compact(charged)))
    return replace(program, steps=steps, facts=replace(facts, network=settings))


def _of_places(program: RunProgram, value: Callable[[Issued], float]) -> dict[tuple[int, ...], Floats]:
    """Return a value per collective: layouts of a step -> shape (places, ranks), or (places, 1) where ranks agree."""
    of_layout = [np.array([value(issued) for issued in layout.issued], np.float64) for layout in program.layouts]
    found: dict[tuple[int, ...], Floats] = {}
    for step in program.steps:
        if step.layouts not in found:
            table = np.ones((len(step.cost_ns), len(step.layouts)))
            for column, layout in enumerate(step.layouts):
                table[: len(of_layout[layout]), column] = of_layout[layout]
            found[step.layouts] = table[:, :1] if (table == table[:, :1]).all() else table
    return found
