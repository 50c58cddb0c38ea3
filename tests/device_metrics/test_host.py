"""psutil: the real machine, and a made-up /sys beside it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest

from aorta.device_metrics.libraries import MIN_WINDOW_S, Host


def test_the_real_machine():
    source = Host()
    time.sleep(MIN_WINDOW_S * 1.5)
    values = source.read()
    assert values.mem_used_bytes is not None
    assert 0 < values.mem_used_bytes < psutil.virtual_memory().total
    assert values.util_pct is not None
    assert 0 <= values.util_pct <= 100
    assert values.power_w is None  # never 0
    assert values.temp_c is None or -20 < values.temp_c < 120
    assert values.sclk_mhz is None or 100 < values.sclk_mhz < 10_000
    assert set(source.settings()) == {"governor", "turbo", "sclk_max_mhz"}


@pytest.fixture
def times(monkeypatch):
    """The kernel's counters and the clock, set by hand."""
    now = SimpleNamespace(at=0.0, user=0.0, idle=0.0, iowait=0.0)

    class Times(tuple):
        user, idle, iowait, guest = (property(lambda self, i=i: self[i]) for i in range(4))

    monkeypatch.setattr(psutil, "cpu_times", lambda: Times((now.user, now.idle, now.iowait, 0.0)))
    monkeypatch.setattr(time, "monotonic", lambda: now.at)
    return now


def test_use_is_busy_time_over_all_time_since_the_reading_before(times, tmp_path):
    source = Host(tmp_path)
    times.at, times.user, times.idle, times.iowait = 1.0, 1.5, 0.4, 0.1
    assert source.read().util_pct == pytest.approx(75.0)
    times.at, times.idle = 2.0, 2.4
    assert source.read().util_pct == 0.0


def test_use_over_a_moment_is_unknown_not_0(times, tmp_path):
    source = Host(tmp_path)
    times.at, times.user = 0.05, 0.01
    assert source.read().util_pct is None


def test_a_package_that_was_slowed_down_since_the_reading_before(tmp_path):
    counter = tmp_path / "cpu0/thermal_throttle/package_throttle_count"
    counter.parent.mkdir(parents=True)
    counter.write_text("3\n")
    source = Host(tmp_path)
    assert source.read().throttle == []
    counter.write_text("5\n")
    assert source.read().throttle == ["thermal"]
    assert source.read().throttle == []
    counter.unlink()
    assert source.read().throttle is None


def test_how_clocks_are_governed(tmp_path):
    (tmp_path / "cpu0/cpufreq").mkdir(parents=True)
    (tmp_path / "cpu0/cpufreq/scaling_governor").write_text("powersave\n")
    (tmp_path / "intel_pstate").mkdir()
    (tmp_path / "intel_pstate/no_turbo").write_text("1\n")
    settings = Host(tmp_path).settings()
    assert (settings["governor"], settings["turbo"]) == ("powersave", False)
    assert Host(tmp_path / "elsewhere").settings()["governor"] is None


@pytest.mark.parametrize("error", [NotImplementedError("can't find current frequency file"), TypeError("NoneType")])
def test_a_machine_that_does_not_say_its_clock_keeps_the_other_settings(tmp_path, monkeypatch, error):
    def fail():
        raise error

    (tmp_path / "intel_pstate").mkdir()
    (tmp_path / "intel_pstate/no_turbo").write_text("0\n")
    monkeypatch.setattr(psutil, "cpu_freq", fail)
    assert Host(tmp_path).settings() == {"governor": None, "turbo": True, "sclk_max_mhz": None}
