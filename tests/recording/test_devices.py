"""A whole run with a stand-in for rocm-smi on PATH: its words and numbers are in the record, the report and tables."""

from __future__ import annotations

import json
import os

import pytest

import aorta.analysis
from aorta.report.files import write_report
from tests.device_metrics.test_rocm_smi import TEXT
from tests.rank_records import read_rank
from tests.runs import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    there = tmp_path_factory.mktemp("bin")
    (there / "rocm-smi").write_text(
        f"""#!/bin/sh
case "$*" in
    *--showmaxpower*) echo '{{"card0": {{"Max Graphics Package Power (W)": "750.0"}}}}' ;;
    *) cat <<'END'
{TEXT.replace("0000:22:00.0", "0000:0C:00.0").replace("GPU[1]", "GPU[0]")}
END
esac
"""
    )
    (there / "rocm-smi").chmod(0o755)
    folder = tmp_path_factory.mktemp("run")
    words = ("telemetry.devices=rocm-smi", "telemetry.rocm_smi=true", "telemetry.force=true")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{there}{os.pathsep}{os.environ['PATH']}")
        train(folder, *words, "telemetry.device_interval_s=0.1", ranks=1)
    return folder


@pytest.mark.spec("D5")
def test_D5_words_of_rocm_smi_and_their_time_are_in_the_record(folder):
    record = read_rank(folder / "rank_0_metrics.jsonl")
    told = [step for step in record.steps if isinstance(step.rocm_smi_output, str)]
    assert told
    assert "GPU[0]" in told[0].rocm_smi_output
    assert (told[0].rocm_smi_exit_code, told[0].rocm_smi_stderr) == (0, "")
    assert record.header.clock.realtime_ns - 10**10 < told[0].rocm_smi_t_ns < record.steps[-1].t_end_ns


@pytest.mark.spec("D27")
def test_D27_numbers_stand_beside_the_words_and_in_tables_and_summary(folder, tmp_path):
    telemetry = read_rank(folder / "rank_0_metrics.jsonl").header.device_telemetry
    # It is a program: run once a second at most, whatever was asked.
    assert (telemetry.source, telemetry.interval_s) == ("rocm-smi", 1.0)
    (rank,) = json.loads((folder / "run.json").read_text())["topology"]
    assert rank["device_telemetry"]["source"] == "rocm-smi"
    assert rank["device_telemetry"]["settings"] == {"power_cap_w": 750.0, "performance_level": None}
    assert set(aorta.analysis.device_samples(folder)["power_w"]) == {139.0}
    assert set(aorta.analysis.steps(folder)["device_sclk_mhz"].dropna()) == {132.0}
    devices = write_report({"run": folder}, tmp_path).summary["datasets"]["run"]["devices"]
    assert devices["throttled"] == "unknown"  # rocm-smi does not tell
