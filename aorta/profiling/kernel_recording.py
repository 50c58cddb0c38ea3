"""Records the kernels of one device with torch.profiler, and nothing else: no operators, stacks or shapes.

    recording = KernelRecording(device)
    recording.start()
    ...                           # steps
    kernels = recording.stop()    # waits for the device

Both raise `ProfilerUnavailable` with the reason where kernels cannot be had. Must not disturb another profiler: it does
not start beside one, and gives way to one that starts later.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.autograd import DeviceType, _profiler_enabled
from torch.profiler import ProfilerActivity, profile

from aorta.distributed.topology import profiled
from aorta.profiling.next_session import before_next_session
from aorta.records.clocks import read_clocks
from aorta.timeline.classes import DeviceKernel, copies


class ProfilerUnavailable(Exception):
    """There are no kernels; the message says why."""


class KernelRecording:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profiler: profile | None = None
        self._problem: str | None = None
        self._forget: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin, between two steps.

        Raises:
            ProfilerUnavailable: kernels of this device cannot be recorded, or a profiler runs already.
        """
        activities = [activity for activity in profiled() if activity is not ProfilerActivity.CPU]
        if not activities:
            raise ProfilerUnavailable(f"this torch's profiler does not see kernels of {self._device.type}")
        if _profiler_enabled():
            raise ProfilerUnavailable("another profiler was recording")
        try:
            profiler = profile(activities=activities)
            profiler.start()
        except Exception as error:  # whatever a vendor's library raises: the training goes on without it
            raise ProfilerUnavailable(f"torch.profiler did not start: {error}") from error
        self._profiler = profiler
        self._forget = before_next_session(self._give_way)

    def _give_way(self) -> None:
        with suppress(ProfilerUnavailable):
            self.stop()
        self._problem = "the caller's own profiler started meanwhile"

    def stop(self) -> list[DeviceKernel]:
        """End, between two steps; the kernels in order of start. Waits for the device.

        Raises:
            ProfilerUnavailable: the profiler failed, saw none, or gave way to another one.
        """
        profiler, self._profiler = self._profiler, None
        self.abandon()
        if profiler is None:
            raise ProfilerUnavailable(self._problem or "it was not started")
        try:
            with warnings.catch_warnings():
                # There is one cycle, whose events are not built: that takes seconds.
                warnings.filterwarnings("ignore", message=".*Profiler clears events", category=UserWarning)
                profiler.stop()
            inner = profiler.profiler
            results = None if inner is None else inner.kineto_results
            kernels = [] if results is None else self._kernels(results.events())
        except Exception as error:
            raise ProfilerUnavailable(f"torch.profiler failed: {error}") from error
        if not kernels:
            raise ProfilerUnavailable(
                "torch.profiler saw no kernel (CUPTI or roctracer is missing, in use, or not permitted)"
            )
        return kernels

    def _kernels(self, events: list[Any]) -> list[DeviceKernel]:
        clocks = read_clocks()
        to_monotonic_ns = clocks.monotonic_ns - clocks.realtime_ns
        index = self._device.index or 0
        kernels = [
            DeviceKernel(
                event.name(),
                event.device_resource_id(),
                event.start_ns() + to_monotonic_ns,
                event.start_ns() + event.duration_ns() + to_monotonic_ns,
            )
            for event in events
            if event.device_type() != DeviceType.CPU and event.device_index() == index and _is_kernel(event)
        ]
        return sorted(kernels, key=lambda kernel: kernel.start_ns)

    def abandon(self) -> None:
        """Leave torch as it was, and wait for nothing: after an error the device may never reach the end."""
        if self._forget is not None:
            self._forget()
            self._forget = None


def _is_kernel(event: Any) -> bool:
    """Return whether a row of a device is a kernel: by category where torch tells it, which 2.11 does not (W13)."""
    category = getattr(event, "activity_type", None)
    if category is not None:
        return bool(category() == "kernel" and not copies(event.name()))
    annotation = getattr(event, "is_user_annotation", None)
    return not copies(event.name()) and not (annotation is not None and annotation())
