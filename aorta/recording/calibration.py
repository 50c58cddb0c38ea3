"""The calibration window of a run: a few steps measured by the profiler's kernels as well as by marks.

Marks bound when a block computed, kernels say when (docs/dev/measuring.md, W28). The profiler starts one step before
the window, since it misses what was launched before it, and stops after the last one, both between two steps. Some
steps later the record gets a `Calibration` line. Must not be a condition of the training: a problem is a sentence in
that line, and the marks stand.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from aorta.config.loop import calibration_steps
from aorta.distributed.cuda import is_capturing
from aorta.distributed.environment_checks import tracer_present
from aorta.instrument.recorder import Recorder
from aorta.profiling.sessions import KernelRecording, ProfilerUnavailable
from aorta.records.schema import BlockKernels, Calibration, CalibrationPlan, InstrumentMode, Step
from aorta.records.window_kernels import WindowKernels

_log = logging.getLogger(__name__)
_FARTHEST = 1000
"""How many steps windows of `profiling` may delay the window."""


def calibration_plan(
    setting: str,
    device: torch.device,
    mode: InstrumentMode,
    start_step: int,
    warmup_steps: int,
    stop: int | None = None,
    profiled: Callable[[int], bool] = lambda _step: False,
    environment: Mapping[str, str] = os.environ,
) -> CalibrationPlan | None:
    """Return which steps are measured by kernels; None on a CPU where nobody asked for it.

    Args:
        setting: `instrument.calibration`.
        start_step, stop: global steps of the run, the latter exclusive; None: not known.
        warmup_steps: flagged as warm-up; the window follows them.
        profiled: whether the run's own profiler is on in a global step.
    """
    on_device = device.type != "cpu"
    asked = calibration_steps(setting, on_device=on_device)
    if not on_device and not asked:
        return None
    first = start_step + max(warmup_steps, 1)

    def none(problem: str | None) -> CalibrationPlan:
        return CalibrationPlan(setting, first, 0, problem)

    if not asked:
        return none(None)
    if not on_device:
        return none("a CPU has no kernels")
    if mode == "off":
        return none("instrument.mode=off: nothing is measured")
    if (tool := tracer_present(environment)) is not None:  # CUPTI and roctracer serve one at a time
        return none(f"{tool} profiles this program")
    possible = range(first, first + _FARTHEST)
    begin = next((step for step in possible if not any(map(profiled, range(step - 1, step + asked)))), None)
    if begin is None:
        return none(f"profiling windows leave no {asked + 1} consecutive steps")
    steps = asked if stop is None else min(asked, stop - begin)
    return CalibrationPlan(setting, begin, steps) if steps > 0 else none("the run is too short")


class Calibrator:
    """The calibration window of one rank; a plan without steps does nothing. `write` takes the record's line."""

    def __init__(
        self, plan: CalibrationPlan | None, device: torch.device, write: Callable[[Calibration], None]
    ) -> None:
        self._write = write
        self._first, self._last = (0, -1) if plan is None else (plan.first_step, plan.first_step + plan.steps - 1)
        self._recording: KernelRecording | None = KernelRecording(device) if self._first <= self._last else None
        self._recorder: Recorder | None = None
        self._kernels: WindowKernels | None = None
        self._spent_s = 0.0
        self._inside_ms: list[float] = []
        self._behind_ms: list[float] = []

    def attach(self, recorder: Recorder) -> None:
        """Attach the recorder of the steps, before the first of them."""
        self._recorder = recorder

    def before(self, global_step: int) -> None:
        """Begin the window before its first step; call it before every training step, and `after` behind it."""
        if self._recording is None or self._recorder is None:
            return
        if global_step == self._first - 1:
            self._kernels = WindowKernels()
            if is_capturing():
                self._kernels.failed("a CUDA graph was being captured")
            else:
                began_s = time.monotonic()
                try:
                    self._recording.start()
                except ProfilerUnavailable as error:
                    self._kernels.failed(str(error))
                self._spent_s += time.monotonic() - began_s
        if self._kernels is not None and not self._kernels.known:
            self._recorder.kernels = self._kernels if self._first <= global_step <= self._last else None

    def after(self, global_step: int) -> None:
        """Stop the profiler after the window's last step."""
        kernels = self._kernels
        if kernels is None or kernels.known or global_step < self._last or is_capturing():
            return
        assert self._recording is not None
        assert self._recorder is not None
        self._recorder.kernels = None
        began_s = time.monotonic()
        try:
            kernels.arrived(self._recording.stop())
        except ProfilerUnavailable as error:
            kernels.failed(str(error))
        self._spent_s += time.monotonic() - began_s

    def close(self) -> None:
        """End the training: there are no more steps."""
        self.after(self._last)

    def take(self, step: Step) -> None:
        """Count a written step; writes the line once as many steps after the window are written."""
        if self._kernels is None or step.phase != "train" or step.global_step < self._first:
            return
        inside = step.global_step <= self._last
        taken_ms = step.overlap.get("window_ms")
        if taken_ms is not None:
            (self._inside_ms if inside else self._behind_ms).append(taken_ms)
        if not inside and self._kernels.known and len(self._behind_ms) > self._last - self._first:
            self.finish()

    def finish(self) -> None:
        """Write the line, unless it has been written."""
        kernels, self._kernels = self._kernels, None
        if self._recording is not None:
            self._recording.abandon()
            self._recording = None
        if kernels is None:
            return
        seen = kernels.compared
        at_most = seen.marked_hidden_ns + seen.marked_exposed_ns
        problem = kernels.problem
        if problem is None and seen.steps <= self._last - self._first:
            problem = "the other steps could not be observed, or the run ended before them"
        if problem is not None:
            _log.warning("calibration: measured %d of %d steps: %s", seen.steps, self._last - self._first + 1, problem)
        self._write(
            Calibration(
                first_step=self._first,
                last_step=self._last,
                steps=seen.steps,
                problem=problem,
                ratio_by_kernels=seen.hidden_ns / seen.comm_ns if seen.comm_ns else None,
                ratio_by_marks=seen.marked_hidden_ns / at_most if at_most else None,
                blocks=[
                    BlockKernels(block, phase, length / 1e6, ran / length if length else None)
                    for (block, phase), (length, ran) in seen.blocks.items()
                ],
                window_step_ms=median(self._inside_ms) if self._inside_ms else None,
                other_step_ms=median(self._behind_ms) if self._behind_ms else None,
                setup_ms=self._spent_s * 1e3,
            )
        )
