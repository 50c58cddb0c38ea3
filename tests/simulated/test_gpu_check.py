"""The check that users run, as they start it, on two simulated devices: what it prints, writes and ends with."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from aorta.gpu_check.check_table import CheckReport, CheckRow, CheckVerdict
from tests.gpu.test_check import SMALL
from tests.simulated.programs import needs_device, python

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]


def checked(path: Path, *words: str, devices: int) -> tuple[CheckReport, str]:
    """What it leaves, and prints."""
    own = {"AORTA_SIMULATED_DEVICE": "virtual", "AORTA_SIMULATED_DEVICES": str(devices)}
    told = ("check-gpu", "--json", str(path), "--pairs", "1", "parallel=ddp", *SMALL, *words)
    done = python("-m", "aorta", *told, **own)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return msgspec.json.decode(path.read_bytes(), type=CheckReport), done.stdout


def found(report: CheckReport, rank: int, what: str) -> CheckRow:
    (row,) = [row for row in report.rows[rank] if row.what == what]
    return row


def test_every_rank_has_every_row_and_all_is_well(tmp_path: Path) -> None:
    """Virtual time: no host is slow, so all that there is to compare is judged. Telemetry and kernels say the same,
    through torch.profiler, with the device's rows in its trace.
    """
    report, printed = checked(tmp_path / "check.json", devices=2)
    everything = [row for rows in report.rows for row in rows]
    assert [row for row in everything if row.verdict is CheckVerdict.FAILED] == []
    assert {row.verdict for row in everything if row.is_time} == {CheckVerdict.OK}
    assert "(exit code 0)" in printed
    assert (report.exit_code, report.facts["world_size"], report.facts["device"]) == (0, 2, "Simulated")
    for rank in (0, 1):
        races = [row.verdict for row in report.rows[rank] if row.case == "race"]
        assert races == [CheckVerdict.OK] * 18
        assert found(report, rank, "coverage").value == "6 of 6 steps"
        assert found(report, rank, "synchronisations in 6 steps").value == "none"
        telemetry, kernels = found(report, rank, "overlap ratio, telemetry / kernels").value.split(" / ")
        assert abs(float(telemetry) - float(kernels)) <= 0.02
        assert found(report, rank, "clocks, telemetry - profiler").value in {"+0.0 us", "-0.0 us"}
        assert found(report, rank, "communication, telemetry / kernels").value.startswith("1.000, ")
        for what in ("end, telemetry - kernel", "start, telemetry not behind kernel"):
            assert found(report, rank, what).value.split(", ")[1].startswith("0 of ")


def test_two_ranks_share_a_device_where_nccl_is_set_to_let_them(tmp_path: Path) -> None:
    report, _ = checked(tmp_path / "check.json", "training.ranks_per_device=2", devices=1)
    assert (report.facts["world_size"], report.facts["ranks_per_device"]) == (2, 2)
    hosts = [found(report, rank, "NCCL_HOSTID").value for rank in (0, 1)]
    assert hosts[0] != hosts[1]
    for rank in (0, 1):
        assert found(report, rank, "MPS").value == "not found: ranks take turns on their device"
        for what in ("overlap ratio, telemetry / kernels", "step time, instrumented / off"):
            assert found(report, rank, what).why == "no MPS: ranks take turns on the device"
        assert found(report, rank, "end, telemetry - kernel").verdict is CheckVerdict.OK
