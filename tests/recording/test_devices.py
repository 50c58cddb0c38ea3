"""A whole run with a stand-in for rocm-smi on PATH: its words and numbers are in the record, the report and tables."""

from __future__ import annotations

import json
import os

import pytest

import aorta.analysis
from aorta.report.summary import write_report
from tests.device_metrics.test_rocm_smi import TEXT
from tests.runs import record, train


@pytest.mark.spec("D5", "D27")
def test_D5_D27_words_and_numbers_of_rocm_smi_are_in_the_record_in_tables_and_in_the_summary(tmp_path, monkeypatch):
    (tmp_path / "rocm-smi").write_text(
        f"""#!/bin/sh
case "$*" in
    *--showmaxpower*) echo '{{"card0": {{"Max Graphics Package Power (W)": "750.0"}}}}' ;;
    *) cat <<'END'
{TEXT.replace("0000:22:00.0", "0000:0C:00.0").replace("GPU[1]", "GPU[0]")}
END
esac
"""
    )
    (tmp_path / "rocm-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    folder = tmp_path / "run"
    words = ("telemetry.devices=rocm-smi", "telemetry.rocm_smi=true", "telemetry.force=true")
    train(folder, *words, "telemetry.device_interval_s=0.1", ranks=1)
    seen = record(folder)
    told, *_ = [step for step in seen.steps if isinstance(step.rocm_smi_output, str)]
    assert "GPU[0]" in told.rocm_smi_output
    assert (told.rocm_smi_exit_code, told.rocm_smi_stderr) == (0, "")
    assert seen.header.clock.realtime_ns - 10**10 < told.rocm_smi_t_ns < seen.steps[-1].t_end_ns
    # It is a program: run once a second at most, whatever was asked.
    telemetry = seen.header.device_telemetry
    assert (telemetry.source, telemetry.interval_s) == ("rocm-smi", 1.0)
    (rank,) = json.loads((folder / "run.json").read_text())["topology"]
    assert rank["device_telemetry"]["settings"] == {"power_cap_w": 750.0, "performance_level": None}
    assert set(aorta.analysis.device_samples(folder)["power_w"]) == {139.0}
    assert set(aorta.analysis.steps(folder)["device_sclk_mhz"].dropna()) == {132.0}
    devices = write_report({"run": folder}, tmp_path / "report").summary["datasets"]["run"]["devices"]
    assert devices["throttled"] == "unknown"  # rocm-smi does not tell
