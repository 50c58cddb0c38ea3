"""torch.profiler windows: a trace per cycle and rank, in steps of the training loop.

Enters: a schedule and where traces go. Leaves: `<host>_<pid>.<time_ns>.pt.trace.json` under the rank's folder, as
TensorBoard and Perfetto read them. Must not: fail the run; a profiler that breaks is reported once and left out.
"""

from __future__ import annotations

import gzip
import logging
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, tensorboard_trace_handler

from aorta.capture.schedule import Action, Schedule
from aorta.config.schema import Profiling

_log = logging.getLogger(__name__)
_ACTIONS = {
    Action.NONE: ProfilerAction.NONE,
    Action.WARMUP: ProfilerAction.WARMUP,
    Action.ACTIVE: ProfilerAction.RECORD,
    Action.ACTIVE_AND_SAVE: ProfilerAction.RECORD_AND_SAVE,
}


class ProfilerWindow:
    """The profiler of one rank, for the length of a `with` block.

    Args:
        settings: the profiling group. folder: the rank's trace folder, made when the first trace is written.
        first_step: global step at which the loop begins.
    """

    def __init__(self, settings: Profiling, folder: Path, first_step: int) -> None:
        self._settings, self._folder = settings, folder
        self._schedule = Schedule(settings.wait, settings.warmup, settings.active, settings.repeat)
        self._first_step = self._steps_done = first_step
        self._profiler: Any = None
        self._chrome = False
        self._caught = False
        self.files: list[Path] = []

    def __enter__(self) -> ProfilerWindow:
        self._chrome = self._settings.enabled and self._settings.chrome_trace and self._chrome_allowed()
        if self._settings.enabled and (self._settings.tensorboard or self._chrome):
            with self._harmless("start"):
                self._profiler = self._new_profiler()
                self._profiler.__enter__()
        return self

    def _new_profiler(self) -> Any:
        return profile(
            activities=[ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
            # torch counts from 0 at start; the schedule is on global steps, so that all attempts agree.
            schedule=lambda step: _ACTIONS[self._schedule(self._first_step + step)],
            on_trace_ready=self._save,
            record_shapes=self._settings.record_shapes,
            profile_memory=self._settings.profile_memory,
            with_stack=self._settings.with_stack,
            with_flops=self._settings.with_flops,
            acc_events=True,
        )

    def __exit__(self, *error: object) -> None:
        if self._profiler is not None:
            with self._harmless("stop"):
                self._profiler.__exit__(*error)
            if self._profiler is not None and not self.files:
                _log.warning(
                    "profiling: no trace was kept: none of the %d steps from step %d is an active one (wait %d, "
                    "warmup %d, active %d, repeat %d, counted from step 0)",
                    self._steps_done - self._first_step,
                    self._first_step,
                    self._settings.wait,
                    self._settings.warmup,
                    self._settings.active,
                    self._settings.repeat,
                )

    def iteration(self, global_step: int) -> AbstractContextManager[Any]:
        """Mark one step in the trace as `iteration#<global_step>`."""
        if self._profiler is None:
            return nullcontext()
        self._caught |= self._schedule(global_step) in (Action.ACTIVE, Action.ACTIVE_AND_SAVE)
        return record_function(f"iteration#{global_step}")

    def step(self) -> None:
        """One step is done."""
        self._steps_done += 1
        if self._profiler is not None:
            with self._harmless("step"):
                self._profiler.step()

    @contextmanager
    def _harmless(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever breaks in a profiler, the record goes on; it is logged
            _log.error("profiling: torch.profiler failed to %s and is left out from here on: %s", what, error)
            profiler, self._profiler = self._profiler, None
            with suppress(Exception):  # else it might go on collecting for the rest of the run
                profiler.stop()

    def _save(self, profiler: Any) -> None:
        if not self._caught:
            return  # the run ended right before its first active step: torch has begun a trace, with no step in it
        self._caught = False
        self._folder.mkdir(parents=True, exist_ok=True)
        chrome = self._folder / self._chrome_name()
        if self._settings.tensorboard:
            before = set(self._folder.glob("*"))
            tensorboard_trace_handler(str(self._folder))(profiler)
            (trace,) = set(self._folder.glob("*")) - before
            self.files.append(trace)
            if self._chrome:
                _copy(trace, chrome)  # torch saves a trace once only
        else:
            profiler.export_chrome_trace(str(chrome))
        if self._chrome:
            self.files.append(chrome)

    def _chrome_allowed(self) -> bool:
        if torch.version.hip is None or self._settings.chrome_trace_force:
            return True
        _log.warning(
            "profiling.chrome_trace: not written on ROCm, where exporting has crashed; "
            "profiling.chrome_trace_force=true writes it all the same"
        )
        return False

    def _chrome_name(self) -> str:
        name = self._settings.trace_filename
        if self._settings.repeat == 1 and self._settings.active == 1:
            return name
        stem, dot, suffixes = name.partition(".")
        return f"{stem}_step{self._steps_done}{dot}{suffixes}"


def _copy(trace: Path, target: Path) -> None:
    with trace.open("rb") as source, gzip.open(target, "wb") if target.suffix == ".gz" else target.open("wb") as copy:
        shutil.copyfileobj(source, copy)
