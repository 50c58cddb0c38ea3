"""rocm-smi in the background, with a stand-in on PATH (row D5)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from aorta.capture.rocm_smi import RocmSmiSampler, read_rocm_smi


@pytest.fixture
def rocm_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "bin" / "rocm-smi"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\necho "GPU[0] : $*"\necho careful >&2\nexit 3\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    return script


def test_D5_output_exit_code_and_stderr_are_kept(rocm_smi: Path) -> None:  # noqa: N802
    sample = read_rocm_smi()
    assert sample["rocm_smi_output"] == "GPU[0] : --showtemp --showuse --showpower --showmemuse\n"
    assert (sample["rocm_smi_exit_code"], sample["rocm_smi_stderr"]) == (3, "careful\n")
    assert abs(sample["rocm_smi_t_ns"] - time.time_ns()) < 60e9


def test_D5_without_the_tool_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: N802
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_rocm_smi()["rocm_smi_error"] == "rocm-smi not available"


def test_a_sample_is_taken_once(rocm_smi: Path) -> None:
    with RocmSmiSampler(interval_s=60) as sampler:
        deadline = time.monotonic() + 10
        while not (sample := sampler.take()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "rocm_smi_output" in sample
        assert sampler.take() == {}
