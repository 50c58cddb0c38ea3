"""Sessions of torch.profiler: acts before the next one in this process, whoever begins it, and records the kernels of
one device, and nothing else: no operators, stacks or shapes.

    forget = before_next_session(act)  # `act()` runs once, on the thread that begins the session
    forget()                           # unless it has run: not any more

    recording = KernelRecording(device)
    recording.start()
    ...                           # steps
    kernels = recording.stop()    # waits for the device

`start` and `stop` raise `ProfilerUnavailable` with the reason where kernels cannot be had. Kineto has one conversion of
CUPTI's time stamps for the whole process, and a session that is configured replaces it (`get_time_converter` in
libkineto). In a trace that is written afterwards, kernels have time 0 or one that is off: seen with torch 2.11 on an
H200. Must not disturb another profiler: a recording does not start beside one, and gives way to one that starts later.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.autograd import DeviceType, _profiler_enabled
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, profile

from aorta.distributed.topology import profiled
from aorta.records.clocks import read_clocks
from aorta.timeline.classes import DeviceKernel, copies

_PREPARE = "_prepare_profiler"
"""The function by which every profiler of torch begins. Private: with a torch that does not have it, nothing acts."""
_acts: list[Callable[[], None]] = []
_lock = threading.Lock()
_original: Callable[..., Any] | None = None


def before_next_session(act: Callable[[], None]) -> Callable[[], None]:
    """Run `act` when the next session is about to begin; the result forgets it, from any thread."""
    global _original
    with _lock:
        if not _acts:
            _original = getattr(torch_profiler, _PREPARE, None)
            if _original is not None:
                setattr(torch_profiler, _PREPARE, _begin)
        _acts.append(act)

    def forget() -> None:
        with _lock:
            if act in _acts:
                _acts.remove(act)
                if not _acts:
                    _leave()

    return forget


def _begin(*words: Any, **named: Any) -> Any:
    with _lock:
        acts, begin = list(_acts), _original
        _acts.clear()
        _leave()
    for act in acts:
        act()
    # A thread that forgot the last act meanwhile has restored torch's own.
    return (begin or getattr(torch_profiler, _PREPARE))(*words, **named)


def _leave() -> None:
    """Leave torch as it was."""
    global _original
    if _original is not None:
        setattr(torch_profiler, _PREPARE, _original)
        _original = None


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
