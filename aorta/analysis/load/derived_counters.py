"""Derives occupancy and CU utilisation from raw counters of rocprofv3, where it was not asked for them.

The formulas are those of rocprofiler-sdk, `counter_defs.yaml`, under its names. Its CSV has the sum of a counter over
all its instances (`generateCSV.cpp`); a formula that takes the largest of one instance per XCC can be computed from it
only where there is one XCC. Must not: guess what a device is, or replace a value that rocprofv3 gave.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from aorta.analysis.load.interval_table import CounterValues

_CDNA: Final = ("gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")
_RDNA: Final = ("gfx1010", "gfx1030", "gfx1031", "gfx1032")
_RDNA_3: Final = ("gfx1100", "gfx1101", "gfx1102")
_COUNTED_BY_XCC: Final = frozenset({"GRBM_GUI_ACTIVE", "GRBM_COUNT"})
"""Cycles, counted by each XCC; formulas take the largest."""
_SLOTS: Final = 32
"""Waves a CU can hold, in the formulas of `OccupancyPercent`."""


class Formula(NamedTuple):
    """`metric` = `factor` x counter `of` / counter `by`, and by the number of CUs where it is `per_cu`."""

    metric: str
    architectures: tuple[str, ...]
    factor: float
    of: str
    by: str
    per_cu: bool


FORMULAS: Final = (
    # Of the cycles of all CUs the share in which a CU was busy, 0 to 1.
    Formula("SIMD_UTILIZATION", _CDNA, 1, "SQ_BUSY_CU_CYCLES", "GRBM_COUNT", True),
    # Percent; on CDNA SQ_WAVE_CYCLES counts every fourth cycle.
    Formula("OccupancyPercent", _CDNA, 400 / _SLOTS, "SQ_WAVE_CYCLES", "GRBM_GUI_ACTIVE", True),
    Formula("OccupancyPercent", _RDNA + _RDNA_3, 100 / _SLOTS, "SQ_WAVE_CYCLES", "GRBM_GUI_ACTIVE", True),
    # Waves. On CDNA both need SQ_LEVEL_WAVES added up cycle by cycle, which no raw counter in the CSV is.
    Formula("MeanOccupancyPerCU", _RDNA_3, 1, "SQ_WAVE_CYCLES", "GRBM_GUI_ACTIVE", True),
    Formula("MeanOccupancyPerActiveCU", _RDNA_3, 1, "SQ_WAVE_CYCLES", "SQ_BUSY_CYCLES", False),
)


@dataclass(frozen=True)
class Agent:
    """A GPU in rocprofv3's `agent_info`: its architecture, and how many XCCs and CUs it has; None where not stated. The
    number of CUs is SIMDs / SIMDs per CU, as in rocprofiler-sdk (`CU_NUM`).
    """

    name: str
    xccs: int | None
    cus: float | None


def with_derived(counters: CounterValues, agents: Sequence[Agent]) -> CounterValues:
    """Add what `FORMULAS` gives for each kernel that has both counters, except where rocprofv3 gave it.

    Args:
        agents: the GPUs of the machine. Which of them a kernel ran on is not needed while they are alike.
    """
    architectures = {each.name for each in agents}
    wanted = [each for each in FORMULAS if each.of in counters.names and each.metric not in counters.names]
    known = [each for each in wanted if not agents or architectures & {*each.architectures}]
    missing: dict[str, list[str]] = defaultdict(list)
    for formula in known:
        if (why := _why_not_derived(formula, counters, agents)) is not None:
            missing[why].append(formula.metric)
            continue
        of, by = (np.flatnonzero(counters.counter == counters.names.index(name)) for name in (formula.of, formula.by))
        kernels, left, right = np.intersect1d(
            counters.origin[of], counters.origin[by], assume_unique=True, return_indices=True
        )
        divisor = counters.value[by[right]]
        used = divisor > 0
        per_cu = agents[0].cus if formula.per_cu and agents[0].cus else 1
        values = formula.factor * counters.value[of[left[used]]] / divisor[used] / per_cu
        counters = replace(
            counters,
            origin=np.append(counters.origin, kernels[used]),
            counter=np.append(counters.counter, np.full(len(values), len(counters.names))),
            value=np.append(counters.value, values),
            names=(*counters.names, formula.metric),
            derived_from={**counters.derived_from, formula.metric: f"{formula.of}, {formula.by}"},
        )
    if wanted and not known:
        unknown = f"rocprofiler-sdk has no formula for {', '.join(sorted(architectures))}"
        missing[unknown] = [each.metric for each in wanted]
    said = [f"{', '.join(dict.fromkeys(metrics))} not derived: {why}" for why, metrics in missing.items()]
    return replace(counters, missing=tuple(said))


def _why_not_derived(formula: Formula, counters: CounterValues, agents: Sequence[Agent]) -> str | None:
    """Return why a formula cannot be computed; None: it can."""
    if not agents:
        return "no agent_info.csv beside the counters says what device it is"
    agent, *others = dict.fromkeys(agents)
    if others:
        return f"the GPUs of agent_info.csv are not alike ({', '.join(each.name for each in (agent, *others))})"
    if formula.by not in counters.names:
        return f"{formula.by} was not collected with {formula.of}"
    if formula.per_cu and not agent.cus:
        return "agent_info.csv has no number of compute units"
    if formula.by in _COUNTED_BY_XCC and agent.xccs != 1:
        count = "an unknown number of" if agent.xccs is None else agent.xccs
        return f"it takes the largest {formula.by} of {count} XCCs, and the CSV has their sum; name it behind --pmc"
    return None
