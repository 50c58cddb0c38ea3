"""Other costs for the collectives of a program: some faster, or what another network would charge.

Must not change what a rank does in its own time, or replay anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from aorta.analysis.tables import Floats, Ints
from aorta.analysis.whatif.changes import Selection
from aorta.analysis.whatif.network import charge_ns
from aorta.analysis.whatif.program import Column, Issued, RunProgram, StepProgram, compact
from aorta.config.schema import EmulatedFabric
from aorta.errors import InputError

LONGEST_NS: Final = 2.0**62
"""What 64 bits of nanoseconds hold, with room for a sum of two."""
_NS_PER_YEAR: Final = 365 * 24 * 3600 * 1e9


def faster(program: RunProgram, text: str, which: Selection, factor: float) -> RunProgram:
    """Collectives `factor` times as fast, the backend's own time included.

    Raises:
        InputError: the program has none of those selected.
    """

    def factors(issued: Issued, place: int) -> float:
        return factor if _selects(which, issued, place) else 1.0

    found = _of_places(program, factors)
    if not any((each != 1).any() for each in found.values()) and factor != 1:
        raise InputError(f"--set {text}: this run has no such collective. {_there_are(program)}")
    steps = []
    for step in program.steps:
        divisor = found[step.layouts]
        backend = None if step.backend_ns is None else compact(_divided(step.backend_ns, divisor))
        network = None if step.network_ns is None else compact(_divided(step.network_ns, divisor))
        cost = compact(_divided(step.cost_ns, divisor))
        steps.append(replace(step, cost_ns=cost, backend_ns=backend, network_ns=network))
    return replace(program, steps=steps)


def charged_by(program: RunProgram, text: str, settings: EmulatedFabric) -> RunProgram:
    """The program of a run on an emulated network, as another one charges it.

    Raises:
        InputError: 64 bits of nanoseconds do not hold it.
    """
    facts = program.facts
    charged = _charges(program, text, settings)
    steps = [_charged(step, charged[step.layouts], facts.law) for step in program.steps]
    return replace(program, steps=steps, facts=replace(facts, network=settings))


def of_plain_ring(program: RunProgram, text: str, gb_per_s: float) -> RunProgram:
    """Every collective with the time of a ring of this bandwidth, without latency.

    Raises:
        InputError: 64 bits of nanoseconds do not hold it.
    """
    plain = EmulatedFabric(
        intra_latency_us=0,
        inter_latency_us=0,
        intra_bandwidth_gb_per_s=gb_per_s,
        inter_bandwidth_gb_per_s=gb_per_s,
    )
    charged = _charges(program, text, plain)
    return replace(program, steps=[replace(step, cost_ns=compact(charged[step.layouts])) for step in program.steps])


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
    found = _of_places(program, lambda issued, _place: charge_ns(issued, program.world_size, settings))
    if any(each.max(initial=0.0) > LONGEST_NS for each in found.values()):
        raise _too_long(text)
    return {layouts: np.rint(each).astype(np.int64) for layouts, each in found.items()}


def _selects(which: Selection, issued: Issued, place: int) -> bool:
    """Whether a collective is one of those selected."""
    return (
        which.kind in (None, issued.kind)
        and which.group in (None, issued.group)
        and which.position in (None, place)
        and (which.least_bytes is None or issued.bytes >= which.least_bytes)
        and (which.most_bytes is None or issued.bytes <= which.most_bytes)
    )


def _of_places(program: RunProgram, value: Callable[[Issued, int], float]) -> dict[tuple[int, ...], Floats]:
    """A value of every collective: layouts of a step -> shape (places, ranks), or (places, 1) where ranks agree."""
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
