"""Where the device cannot be had, that is said; and who asks for it gets it or an error, never the CPU in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated import build
from tests.simulated.programs import needs_device, python

needs_cpu_build = pytest.mark.skipif(
    "CPU build" in (build.why_not() or ""), reason="the simulated device needs a CPU build of torch"
)


@needs_cpu_build
def test_no_compiler_is_a_reason_and_a_library_that_is_built_needs_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler (no-such-compiler)" in (build.why_not() or "")
    with pytest.raises(RuntimeError, match="no C"):
        build.build()
    build.library().parent.mkdir()
    build.library().touch()
    assert build.why_not() is None
    assert build.build() == build.library()


@needs_cpu_build
def test_a_process_that_asks_for_what_is_not_built_ends(tmp_path: Path) -> None:
    done = python("-c", "import torch", AORTA_SIMULATED_DEVICE="virtual", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode != 0
    assert build.BUILD_COMMAND in done.stderr


@needs_device
@pytest.mark.simulated
def test_in_wall_time_a_kernel_takes_its_length_and_the_host_goes_on() -> None:
    text = """
import time, torch
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
before = time.perf_counter_ns()
begin.record(); torch.cuda._sleep(3_000_000_000); end.record()
issued = end.query()
torch.cuda.synchronize()
print(issued, begin.elapsed_time(end) >= 3000, time.perf_counter_ns() - before >= 3_000_000_000)
"""
    done = python("-c", text, AORTA_SIMULATED_DEVICE="wall")
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


def test_a_process_that_does_not_ask_does_not_get_it() -> None:
    done = python("-c", "import torch; print(torch.cuda.is_available())", AORTA_SIMULATED_DEVICE="")
    assert done.stdout.strip() == "False"
