"""Occupancy and CU utilisation from raw counters of rocprofv3: values calculated by hand, and reasons where unknown."""

from __future__ import annotations

import re

import numpy as np
import pytest

from aorta.analysis.load.interval_table import CounterValues
from aorta.analysis.load.kernels import counter_means
from aorta.analysis.load.rocprof_csv import ROCPROF_CSV, Agent, with_derived
from tests.analysis.load import rocprof_files as rocprof
from tests.analysis.load.tables import read_with

MI200_DIE = Agent("gfx90a", xccs=1, cus=104.0)
MI300X = Agent("gfx942", xccs=8, cus=304.0)
RADEON = Agent("gfx1100", xccs=1, cus=96.0)


def collected(**counters: dict[int, float]) -> CounterValues:
    rows = [(kernel, code, value) for code, values in enumerate(counters.values()) for kernel, value in values.items()]
    kernels, codes, values = zip(*rows, strict=True)
    return CounterValues(np.array(kernels), np.array(codes), np.array(values, np.float64), tuple(counters))


def derived(made: CounterValues) -> dict[str, dict[int, float]]:
    """Metric -> kernel -> value, of what was derived."""
    found: dict[str, dict[int, float]] = {name: {} for name in made.derived_from}
    for kernel, code, value in zip(made.origin, made.counter, made.value, strict=True):
        if made.names[code] in found:
            found[made.names[code]][int(kernel)] = float(value)
    return found


def test_on_cdna_a_wave_cycle_is_four_cycles_and_each_kernel_has_its_own_value() -> None:
    made = with_derived(
        collected(
            SQ_WAVE_CYCLES={1: 83_200, 2: 41_600, 3: 5},
            GRBM_GUI_ACTIVE={1: 1_000, 2: 1_000, 4: 7},
            SQ_BUSY_CU_CYCLES={1: 52_000, 2: 104_000},
            GRBM_COUNT={1: 1_000, 2: 2_000},
        ),
        [MI200_DIE, MI200_DIE],
    )
    # 83,200 x 4 cycles / 1,000 cycles / 104 CUs are 3.2 waves a CU, of 32: 10 %. Kernels 3 and 4 lack one of the two.
    assert derived(made) == {
        "SIMD_UTILIZATION": {1: pytest.approx(0.5), 2: pytest.approx(0.5)},
        "OccupancyPercent": {1: pytest.approx(10.0), 2: pytest.approx(5.0)},
    }
    assert made.derived_from["OccupancyPercent"] == "SQ_WAVE_CYCLES, GRBM_GUI_ACTIVE"
    assert made.missing == ()


def test_on_rdna_3_it_is_one_cycle_and_waves_are_known_too() -> None:
    made = with_derived(
        collected(SQ_WAVE_CYCLES={1: 768_000}, GRBM_GUI_ACTIVE={1: 1_000}, SQ_BUSY_CYCLES={1: 64_000}), [RADEON]
    )
    # 768,000 / 1,000 / 96 are 8 waves a CU, a quarter of 32; 768,000 / 64,000 are 12 waves while it was busy.
    assert derived(made) == {
        "OccupancyPercent": {1: pytest.approx(25.0)},
        "MeanOccupancyPerCU": {1: pytest.approx(8.0)},
        "MeanOccupancyPerActiveCU": {1: pytest.approx(12.0)},
    }


def test_what_the_tool_gave_is_kept_and_a_kernel_without_cycles_has_no_value() -> None:
    given = collected(SQ_WAVE_CYCLES={1: 8, 2: 8}, GRBM_GUI_ACTIVE={1: 1, 2: 0}, OccupancyPercent={1: 33})
    kept = with_derived(given, [MI200_DIE])
    assert (kept.names, kept.value.tolist(), kept.derived_from) == (given.names, given.value.tolist(), {})
    without = collected(SQ_WAVE_CYCLES={1: 832, 2: 8}, GRBM_GUI_ACTIVE={1: 10, 2: 0})
    assert derived(with_derived(without, [MI200_DIE])) == {"OccupancyPercent": {1: pytest.approx(10.0)}}


@pytest.mark.parametrize(
    ("agents", "why"),
    [
        (
            [],
            "OccupancyPercent, MeanOccupancyPerCU, MeanOccupancyPerActiveCU not derived: no agent_info.csv beside",
        ),
        (
            [MI300X],
            "OccupancyPercent not derived: it takes the largest GRBM_GUI_ACTIVE of 8 XCCs, and the CSV has their",
        ),
        ([Agent("gfx90a", None, 104.0)], "the largest GRBM_GUI_ACTIVE of an unknown number of XCCs"),
        ([Agent("gfx90a", 1, None)], "agent_info.csv has no number of compute units"),
        ([MI200_DIE, RADEON], r"the GPUs of agent_info.csv are not alike \(gfx90a, gfx1100\)"),
        ([Agent("gfx906", 1, 60.0)], "OccupancyPercent.* not derived: rocprofiler-sdk has no formula for gfx906"),
    ],
)
def test_where_an_input_is_not_known_nothing_is_derived_and_the_reason_is_said(agents: list[Agent], why: str) -> None:
    made = with_derived(collected(SQ_WAVE_CYCLES={1: 8}, GRBM_GUI_ACTIVE={1: 1}), agents)
    assert not made.derived_from
    assert re.search(why, "; ".join(made.missing))


def test_a_counter_that_was_not_collected_is_named() -> None:
    made = with_derived(collected(SQ_BUSY_CU_CYCLES={1: 8}), [MI200_DIE])
    assert made.missing == ("SIMD_UTILIZATION not derived: GRBM_COUNT was not collected with SQ_BUSY_CU_CYCLES",)


def test_the_device_comes_from_agent_info_beside_the_counters() -> None:
    head = "Dispatch_Id,Agent_Id,Kernel_Name,Counter_Name,Counter_Value"
    values = {"SQ_WAVE_CYCLES": 83_200, "GRBM_GUI_ACTIVE": 1_000, "SQ_BUSY_CU_CYCLES": 9}
    lines = [f'1,"Agent 5","{rocprof.GEMM}",{name},{value}' for name, value in values.items()]
    agents = [
        "Node_Id,Logical_Node_Id,Agent_Type,Simd_Count,Num_Xcc,Simd_Per_Cu,Name",
        '0,0,"CPU",0,0,0,"EPYC"',
        '1,1,"GPU",416,1,4,"gfx90a"',
    ]
    files = {
        **rocprof.as_csv("direct"),
        "4242_counter_collection.csv": "\n".join([head, *lines]).encode(),
        "4242_agent_info.csv": "\n".join(agents).encode(),
    }
    (made,) = read_with(ROCPROF_CSV, files)
    rows, reason = counter_means(made)
    (found,) = (each for each in rows if each.counter == "OccupancyPercent")
    assert (found.name, found.count, found.mean) == (rocprof.GEMM, 1, pytest.approx(10.0))
    assert found.derived_from == "SQ_WAVE_CYCLES, GRBM_GUI_ACTIVE"
    assert {each.derived_from for each in rows if each.counter != "OccupancyPercent"} == {None}
    assert reason == "SIMD_UTILIZATION not derived: GRBM_COUNT was not collected with SQ_BUSY_CU_CYCLES"
