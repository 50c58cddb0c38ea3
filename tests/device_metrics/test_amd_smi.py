"""amd-smi: both shapes of its JSON, "N/A" everywhere, and options only where it has them."""

from __future__ import annotations

import json

import pytest

from aorta.device_metrics.device_identity import DeviceIdentity
from aorta.device_metrics.smi_programs import AmdSmiProgram, amd_smi_values, entries
from aorta.errors import DeviceUnreadable
from aorta.records.device_values import Values


def unit(value: float, name: str) -> dict[str, object]:
    return {"value": value, "unit": name}


NOTHING = {"clk": "N/A", "min_clk": "N/A", "max_clk": "N/A", "clk_locked": "N/A", "deep_sleep": "N/A"}
MI300 = {
    "gpu": 0,
    "usage": {"gfx_activity": unit(87, "%"), "umc_activity": unit(12, "%"), "vcn_activity": ["N/A", "N/A"]},
    "power": {"socket_power": unit(542, "W"), "gfx_voltage": "N/A", "throttle_status": "N/A"},
    "clock": {
        "gfx_0": {**NOTHING, "clk": unit(2100, "MHz"), "max_clk": unit(2100, "MHz"), "clk_locked": "DISABLED"},
        "gfx_1": {**NOTHING, "clk": unit(1900, "MHz")},
        "gfx_2": NOTHING,
        "mem_0": {**NOTHING, "clk": unit(900, "MHz"), "max_clk": unit(1300, "MHz")},
        "vclk_0": {**NOTHING, "clk": unit(29, "MHz")},
    },
    "temperature": {"edge": "N/A", "hotspot": unit(71, "C"), "mem": unit(54, "C")},
    "mem_usage": {"total_vram": unit(196592, "MB"), "used_vram": unit(283, "MB")},
    "throttle": {
        "accumulation_counter": 11240028,
        "prochot_violation_status": "NOT ACTIVE",
        "ppt_violation_status": "ACTIVE",
        "socket_thermal_violation_status": "NOT ACTIVE",
        "vr_thermal_violation_status": "N/A",
        "hbm_thermal_violation_status": "NOT ACTIVE",
    },
}
"""After the documentation of amd-smi (ROCm 7) and outputs that were published."""
R9700 = {
    "gpu": 1,
    "usage": {"gfx_activity": unit(91, "%")},
    "power": {"socket_power": unit(301, "W"), "throttle_status": "THROTTLED"},
    "clock": {"gfx_0": {**NOTHING, "clk": unit(2774, "MHz"), "max_clk": unit(0, "MHz")}, "gfx_1": NOTHING},
    "temperature": {"edge": unit(54, "C"), "hotspot": unit(63, "C")},
    "mem_usage": {"used_vram": unit(20450, "MB")},
    "throttle": {"ppt_violation_status": "N/A", "prochot_violation_status": "N/A"},
    "perf_level": "AMDSMI_DEV_PERF_LEVEL_AUTO",
}
OLD = {
    "gpu": 0,
    "usage": "N/A",
    "power": {"current_socket_power": 99, "throttle_status": "UNTHROTTLED"},
    "clock": {"gfx": {"clk": "N/A"}},
    "temperature": {"edge": 40, "hotspot": "N/A"},
    "mem_usage": "N/A",
}
BLIND = {"gpu": 0, "usage": "N/A", "power": {"socket_power": "N/A"}, "clock": "N/A", "throttle": {}}
MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("card", "values"),
    [
        (MI300, Values(71.0, 542.0, 2000.0, 900.0, 87.0, 283 * MIB, ["power_cap"])),
        (R9700, Values(63.0, 301.0, 2774.0, None, 91.0, 20450 * MIB, ["other"])),
        (OLD, Values(40.0, 99.0, None, None, None, None, [])),
        (BLIND, Values()),
    ],
)
def test_values_of_cards_new_and_old(card, values):
    assert amd_smi_values(card) == values


def test_both_shapes():
    assert entries({"gpu_data": [MI300]}) == entries([MI300]) == [MI300]
    with pytest.raises(DeviceUnreadable, match="neither a list"):
        entries({"error": "no"})


HELP = (
    "usage: amd-smi metric [--json] [-g GPU] [--usage] [--power] [--clock] [--temperature] [--mem-usage] [--throttle]"
)


@pytest.fixture
def smi(program, tmp_path):
    """amd-smi with two cards; gives its calls so far."""

    def put(cards, listed=None, text=HELP):
        listed = listed or [{"gpu": 0, "bdf": "0000:0c:00.0"}, {"gpu": 1, "bdf": "0000:22:00.0"}]
        program(
            "amd-smi",
            f"""echo "$*" >>{tmp_path}/calls
case "$*" in
    "metric --help") echo '{text}' ;;
    "list --json") echo '{json.dumps(listed)}' ;;
    *) echo 'WARNING: [x] some lines first'; cat <<'END'
{json.dumps(cards)}
END
esac""",
        )

    put.calls = lambda: (tmp_path / "calls").read_text().splitlines()
    return put


def test_a_rank_asks_for_its_own_card_and_for_sections_that_are_there(smi):
    smi({"gpu_data": [R9700]})
    source = AmdSmiProgram(DeviceIdentity("rocm", pci="0000:22:00.0"))
    assert source.read().power_w == 301.0
    sections = "--power --temperature --clock --mem-usage --usage --throttle"
    assert smi.calls()[-1] == f"metric --gpu 1 {sections} --json"


def test_the_older_shape_and_the_later_name_of_a_section(smi):
    smi([OLD], listed=[{"gpu": 0, "bdf": "0000:0c:00.0"}], text=f"{HELP} [--violation]")
    assert AmdSmiProgram(DeviceIdentity("rocm", pci="0000:0c:00.0")).read().power_w == 99.0
    assert "--violation" not in smi.calls()[-1]


def test_clock_limits_and_locks(smi):
    smi({"gpu_data": [MI300]})
    assert AmdSmiProgram(DeviceIdentity("rocm", index=0)).settings() == {
        "sclk_max_mhz": 2100.0,
        "mclk_max_mhz": 1300.0,
        "sclk_locked": False,
        "performance_level": None,
    }


def test_a_device_that_cannot_be_told_or_says_nothing(smi):
    smi({"gpu_data": [BLIND]})
    with pytest.raises(DeviceUnreadable, match="cannot tell which of 2 devices"):
        AmdSmiProgram(DeviceIdentity("rocm", pci="0000:99:00.0"))
    with pytest.raises(DeviceUnreadable, match="every value is N/A"):
        AmdSmiProgram(DeviceIdentity("rocm", index=0)).read()
    with pytest.raises(DeviceUnreadable, match="no device 1 in its output"):
        AmdSmiProgram(DeviceIdentity("rocm", index=1)).read()
