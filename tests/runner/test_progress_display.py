"""What rank 0 says while a run goes on, and after it."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from aorta.config.schema import Training
from aorta.records.schema import Step
from aorta.runner.progress_display import progress_of
from tests.analysis.builders import metrics, step
from tests.runs import attempt


def test_a_line_has_throughput_the_ratio_so_far_and_the_time_left(caplog: pytest.LogCaptureFixture) -> None:
    """Steps of 100 ms, the hidden part of 10 ms of communication growing from 0 to 4 ms."""
    training = Training(log_interval=5, max_steps=15)
    progress = progress_of(training, 0, 15, 64, shown=True)
    with caplog.at_level(logging.INFO, "aorta.runner.progress_display"):
        for number in range(5):
            row = step(0, 1, number, overlap=metrics(100, 80, 10, number))
            progress.show(msgspec.structs.replace(row, t_end_ns=(number + 1) * 100_000_000))
    (line,) = caplog.messages
    assert line.startswith("step 5/15  ")
    assert "overlap 0.40 (0.25 so far)" in line
    assert "640 samples/s" in line
    assert "10 steps/s" in line
    assert line.endswith("1 s left")


def host_bound(number: int) -> Step:
    """10 ms of communication, of which 2 to 6 ms are hidden."""
    values = metrics(100, 80, 10, 6) | dict.fromkeys(("compute_comm_ms", "exposed_comm_ms", "overlap_ratio"))
    bounds = {"compute_comm_ms": (2.0, 6.0), "exposed_comm_ms": (4.0, 8.0), "overlap_ratio": (0.2, 0.6)}
    return step(0, 1, number, overlap=values, bounds=bounds)


def by_kernels(number: int) -> Step:
    return step(0, 1, number, overlap=metrics(100, 80, 10, 4), measured_by="kernels")


def decided(number: int) -> Step:
    return step(0, 1, number, overlap=metrics(100, 80, 10, 9))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([host_bound] * 3, "overlap 0.20 to at most 0.60 (0.20 to at most 0.60 so far)"),
        # What marks decided is in the bounds of all, and is not chosen from among them.
        ([host_bound, decided, host_bound], "overlap 0.20 to at most 0.60 (0.55 to at most 0.75 so far)"),
        ([host_bound, by_kernels, host_bound], "overlap 0.20 to at most 0.60 (0.40 in 1 step by kernels)"),
        ([decided, by_kernels, by_kernels], "overlap 0.40 by kernels (0.40 in 2 steps by kernels)"),
        # Where marks decide, steps that a profiler measured are no part of what they say.
        ([decided, decided, by_kernels], "overlap 0.40 by kernels (0.90 so far)"),
    ],
)
def test_bounds_and_steps_of_a_calibration_are_called_what_they_are(
    caplog: pytest.LogCaptureFixture, steps: list[Callable[[int], Step]], said: str
) -> None:
    progress = progress_of(Training(log_interval=3), 0, 3, 64, shown=True)
    with caplog.at_level(logging.INFO, "aorta.runner.progress_display"):
        for number, made in enumerate(steps):
            progress.show(made(number))
    (line,) = caplog.messages
    assert f"{said}  " in line or line.endswith(said)


def test_other_ranks_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    progress = progress_of(Training(log_interval=1), 0, 2, 64, shown=False)
    with caplog.at_level(logging.DEBUG):
        progress.show(step(0, 1, 0, overlap=metrics(100, 80, 10, 5)))
    assert caplog.messages == []


@pytest.mark.dist
def test_a_run_ends_with_the_report_of_its_folder_and_the_trace_to_open(tmp_path: Path) -> None:
    done = attempt(tmp_path, "profiling.enabled=true", "label=a")
    assert (done.returncode, done.stdout) == (0, "")
    said = [line for line in done.stderr.splitlines() if line.startswith("Next: ")]
    assert said[0] == f"Next: aorta report {shlex.quote(str(tmp_path / 'a'))}"
    opened = Path(said[1].removeprefix("Next: https://ui.perfetto.dev, Open trace file: "))
    assert opened.is_file()
    assert opened.parent == tmp_path / "a" / "torch_profiler" / "rank0"
