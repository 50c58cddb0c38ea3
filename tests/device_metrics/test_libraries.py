"""NVML and amdsmi through modules that stand in for them: units, missing sensors, lost devices, throttle bits."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest

from aorta.device_metrics.sources import AmdSmi, DeviceIdentity, Nvml, throttlers, violations
from aorta.errors import DeviceUnreadable
from aorta.records.device_values import Values


class NVMLError(Exception):
    """What pynvml raises."""


class AmdSmiException(Exception):
    """What amdsmi raises."""


gone, not_supported = (Mock(side_effect=NVMLError(said)) for said in ("GPU is lost", "Not Supported"))
no = Mock(side_effect=AmdSmiException("not supported"))


@pytest.fixture
def pynvml(monkeypatch):
    """A driver with a card of which everything is known, one of two."""
    known = {
        "Count": 2,
        "Temperature": 44,
        "PowerUsage": 698_123,
        "UtilizationRates": SimpleNamespace(gpu=99, memory=40),
        "MemoryInfo": SimpleNamespace(total=10, used=7, free=3),
        "CurrentClocksEventReasons": 0,
        "EnforcedPowerLimit": 700_000,
        "PowerManagementDefaultLimit": 700_000,
        "ApplicationsClock": 1410,
        "DefaultApplicationsClock": 1980,
    }
    numbers = {"NVML_TEMPERATURE_GPU": 0, "NVML_CLOCK_GRAPHICS": 0, "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2}
    module = Mock(NVMLError=NVMLError, **numbers)
    module.configure_mock(**{f"nvmlDeviceGet{name}.return_value": value for name, value in known.items()})
    for clock in (module.nvmlDeviceGetClockInfo, module.nvmlDeviceGetMaxClockInfo):
        clock.side_effect = lambda _, kind: {1: 1980, 2: 3201}[kind]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def found_by(pynvml):
    """By what the card was found, and whether the library was closed."""
    return [(name, *args) for name, args, _ in pynvml.method_calls if "HandleBy" in name or name == "nvmlShutdown"]


def test_nvml_in_the_records_units_and_a_missing_sensor_is_null(pynvml):
    source = Nvml(DeviceIdentity("cuda", pci="0000:83:00.0", uuid="5ebe", index=1))
    assert source.read() == Values(44.0, 698.123, 1980.0, 3201.0, 99.0, 7, [])
    settings = source.settings()
    assert settings["power_cap_w"] == 700.0
    assert (settings["sclk_application_mhz"], settings["sclk_application_default_mhz"]) == (1410, 1980)
    pynvml.nvmlDeviceGetUtilizationRates = not_supported  # as on a MIG instance
    pynvml.nvmlDeviceGetApplicationsClock = not_supported
    assert source.read() == Values(44.0, 698.123, 1980.0, 3201.0, None, 7, [])
    assert source.settings()["sclk_application_mhz"] is None
    source.close()
    assert found_by(pynvml) == [("nvmlDeviceGetHandleByPciBusId", "0000:83:00.0"), ("nvmlShutdown",)]
    pynvml.nvmlDeviceGetPowerUsage.assert_called_with(pynvml.nvmlDeviceGetHandleByPciBusId.return_value)


@pytest.mark.parametrize(
    ("identity", "asked"),
    [
        (DeviceIdentity("cuda", uuid="5ebe-9f"), ("nvmlDeviceGetHandleByUUID", "GPU-5ebe-9f")),
        (DeviceIdentity("cuda", index=1), ("nvmlDeviceGetHandleByIndex", 1)),
        (DeviceIdentity("cuda"), ("nvmlShutdown",)),
    ],
)
def test_nvml_finds_the_card_by_what_torch_tells_and_does_not_guess(pynvml, identity, asked):
    if asked == ("nvmlShutdown",):
        with pytest.raises(DeviceUnreadable, match="cannot tell which of 2 devices"):
            Nvml(identity)
    else:
        Nvml(identity)
    assert found_by(pynvml) == [asked]


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x1 | 0x2 | 0x100, []),  # idle, clocks that somebody set, the display's
        (0x4, ["power_cap"]),
        (0x20 | 0x40 | 0x8, ["hw_slowdown", "thermal"]),
        (0x80 | 0x10, ["power_brake", "sync_boost"]),
    ],
)
def test_nvml_reasons(pynvml, bits, reasons):
    del pynvml.nvmlDeviceGetCurrentClocksEventReasons
    pynvml.nvmlDeviceGetCurrentClocksThrottleReasons.return_value = bits  # the name before driver 535
    assert Nvml(DeviceIdentity("cuda", index=0)).read().throttle == reasons


def test_nvml_a_lost_device_and_no_driver_or_package_are_errors(pynvml, monkeypatch):
    source = Nvml(DeviceIdentity("cuda", index=0))
    for name in [name for name in dir(pynvml) if name.startswith("nvmlDeviceGet")] + ["nvmlInit"]:
        setattr(pynvml, name, gone)
    with pytest.raises(DeviceUnreadable, match="GPU is lost"):
        source.read()
    with pytest.raises(DeviceUnreadable, match="nvml: GPU is lost"):
        Nvml(DeviceIdentity("cuda", index=0))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DeviceUnreadable, match="pip install nvidia-ml-py"):
        Nvml(DeviceIdentity("cuda", index=0))


@pytest.fixture
def amdsmi(monkeypatch):
    """A MI300X, the second of two."""
    module = ModuleType("amdsmi")
    temperatures = {"HOTSPOT": 71}

    def temperature(_, kind, metric):
        assert metric == "current"
        return temperatures[kind] if kind in temperatures else no()

    violation = {"active_ppt_pwr": True, "active_socket_thrm": False, "active_vr_thrm": "N/A"}
    clocks = {"GFX": {"clk": 2100, "max_clk": 2100, "clk_locked": True}, "MEM": {"clk": 900, "max_clk": "N/A"}}
    vars(module).update(
        AmdSmiException=AmdSmiException,
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT="HOTSPOT", EDGE="EDGE"),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT="current"),
        AmdSmiClkType=SimpleNamespace(GFX="GFX", MEM="MEM"),
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: ["first", "second"],
        amdsmi_get_gpu_device_bdf=lambda handle: {"first": "0000:0c:00.0", "second": "0000:22:00.0"}[handle],
        amdsmi_get_temp_metric=temperature,
        amdsmi_get_power_info=lambda _: {"socket_power": 0, "current_socket_power": 542, "average_socket_power": "N/A"},
        amdsmi_get_clock_info=lambda _, kind: clocks[kind],
        amdsmi_get_gpu_activity=lambda _: {"gfx_activity": 87, "umc_activity": 12, "mm_activity": "N/A"},
        amdsmi_get_gpu_vram_usage=lambda _: {"vram_total": 196592, "vram_used": 283},
        amdsmi_get_violation_status=lambda _: violation,
        amdsmi_get_gpu_metrics_info=no,
        amdsmi_get_power_cap_info=lambda _: {"power_cap": 750_000_000, "default_power_cap": 750},
        amdsmi_get_gpu_perf_level=lambda _: "AMDSMI_DEV_PERF_LEVEL_DETERMINISM",
    )
    module.temperatures = temperatures
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    return module


def test_amdsmi_in_the_records_units(amdsmi):
    source = AmdSmi(DeviceIdentity("rocm", pci="0000:22:00.0"))
    assert source.read() == Values(71.0, 542.0, 2100.0, 900.0, 87.0, 283 * 1024 * 1024, ["power_cap"])
    assert source.settings() == {
        "power_cap_w": 750.0,
        "power_cap_default_w": 750.0,
        "sclk_max_mhz": 2100,
        "mclk_max_mhz": None,
        "sclk_locked": True,
        "performance_level": "AMDSMI_DEV_PERF_LEVEL_DETERMINISM",
    }
    source.close()
    with pytest.raises(DeviceUnreadable, match="cannot tell which of 2 devices"):
        AmdSmi(DeviceIdentity("rocm", pci="0000:99:00.0", index=0))


def test_amdsmi_earlier_cards(amdsmi):
    del amdsmi.temperatures["HOTSPOT"]
    amdsmi.temperatures["EDGE"] = 40
    amdsmi.amdsmi_get_clock_info = lambda *_: {"cur_clk": 1700}
    amdsmi.amdsmi_get_violation_status = no
    amdsmi.amdsmi_get_gpu_metrics_info = lambda _: {"indep_throttle_status": 1 << 36 | 1 << 17 | 1 << 3}
    values = AmdSmi(DeviceIdentity("rocm", pci="0000:0c:00.0")).read()
    assert (values.temp_c, values.sclk_mhz, values.throttle) == (40.0, 1700.0, ["current", "power_cap", "thermal"])


@pytest.mark.parametrize(
    ("ask", "answer", "reasons"),
    [
        (throttlers, {"indep_throttle_status": 0, "throttle_status": 0}, []),
        (throttlers, {"indep_throttle_status": "N/A", "throttle_status": True}, ["other"]),
        (throttlers, {"indep_throttle_status": 0xFFFF_FFFF_FFFF_FFFF, "throttle_status": "N/A"}, None),
        (throttlers, {}, None),
        (violations, {"active_ppt_pwr": "N/A", "active_prochot_thrm": "N/A"}, None),
        (violations, {"active_ppt_pwr": 0, "active_hbm_thrm": 1}, ["memory_thermal"]),
    ],
)
def test_amdsmi_throttling_that_is_not_answered_is_unknown(ask, answer, reasons):
    assert ask(answer) == reasons


def test_amdsmi_without_rocm_prints_nothing_and_is_an_error(monkeypatch, tmp_path, capsys):
    package = tmp_path / "amdsmi"
    package.mkdir()
    # What the package of the PyPI does on a machine without ROCm.
    (package / "__init__.py").write_text("print('Unable to find libamd_smi.so')\n{}['libamd_smi.so']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(DeviceUnreadable, match=r"amdsmi: cannot be used.*KeyError.*pip install /opt/rocm"):
        AmdSmi(DeviceIdentity("rocm", index=0))
    assert capsys.readouterr().out == ""
