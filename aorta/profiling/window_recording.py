"""Runs torch's profiler for one loop, with global step numbers; finished windows go to a `Saver`.

Each trace holds `first_step`, `last_step` (0-based, inclusive), `partial`, `step_base`, `global_rank` and the metadata
given. A failing profiler is reported once and disabled. Must not fail the loop, write on the training thread (but for
the allocator's history, which only that thread may read).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch.profiler import ProfilerAction, profile, record_function

from aorta.config.profiling import selected_ranks
from aorta.config.schema import Naming
from aorta.distributed import cuda
from aorta.distributed.environment_checks import tracer_present
from aorta.distributed.topology import profiled
from aorta.profiling.memory_timeline import by_category
from aorta.profiling.profiler_plan import KEPT, NO_EXPORT, ProfilerPlan, export_disabled
from aorta.profiling.trace_saver import Job, Saver, TraceWindow, free_name
from aorta.records.files import whole_file
from aorta.redaction import redact

_log = logging.getLogger(__name__)
_ERROR_WAIT_S = 20.0
"""How long a loop that failed waits for its traces: torchrun kills after 30 s."""


def all_threads() -> Any:
    """Return the setting that has torch record the operators of every thread. A torch without it fails here, and in no
    window that does not ask for it.
    """
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)


MAX_ENTRIES = 100_000
"""Allocations and frees kept; a few hundred bytes each, with their stacks."""


class WindowRecording(profile):
    """torch's own profiler with global steps, whose failures do not affect the loop. Created by `open_profiler`."""

    def __init__(self, plan: ProfilerPlan, first_step: int) -> None:
        settings = plan.settings
        self.saver = Saver(settings.num_traces_to_keep, overwrite=settings.overwrite)
        self._plan, self._settings, self._schedule = plan, settings, plan.schedule(first_step)
        self._first = self._finished = first_step
        self._kept: list[int] = []
        self._closing: TraceWindow | None = None
        # Of the ranks that are profiled, which take the same steps, the first one warns.
        self._first_rank = plan.process.rank == min(selected_ranks(settings.ranks) or (0,))
        self._began: int | None = None
        self._broken = self._closed = False
        self._last_at = -1  # no window has been saved
        self._last: Any = None
        # The device allocator's own history of one window at a time, for `python -m torch.cuda._memory_viz`.
        self._keeps_history = settings.memory_filename is not None and cuda.has_memory_history()
        self._history_runs = False
        self._times = [time.monotonic()] * 3  # the loop, the epoch, the step began
        super().__init__(
            activities=profiled(),
            schedule=self._schedule,
            on_trace_ready=lambda _: self._ready(),
            record_shapes=settings.record_shapes,
            profile_memory=settings.profile_memory,
            with_stack=settings.with_stack,
            with_flops=settings.with_flops,
            experimental_config=all_threads() if settings.all_threads else None,
        )
        # torch counts from 0, and would treat the first step after a resume as step 0.
        self.step_num = first_step
        self.current_action = self._prev_schedule_action = cast(Any, self._schedule(first_step))

    @property
    def files(self) -> list[Path]:
        """Files on this disk; complete once nothing is pending."""
        return [file.path for saved in self.saver.kept() for file in saved.files if file.on_disk]

    def __enter__(self) -> Self:
        self._times = [time.monotonic()] * 3
        with self._harmless("start"):
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.close(failed=error[0] is not None)
        if self.saver.given_up:
            return
        self.saver.drain(self._settings.upload_wait_s if error[0] is None else _ERROR_WAIT_S)
        if error[0] is not None and (files := self.files):
            folders = ", ".join(sorted({str(path.parent) for path in files}))
            _log.warning(
                "profiling: the run failed, and run.json does not list its %d file(s) in %s", len(files), folders
            )

    def prepare_trace(self) -> None:
        """Run torch's method, without its warning about events of earlier windows, which have been saved."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            super().prepare_trace()

    def start_trace(self) -> None:
        if self._keeps_history:
            cuda.begin_memory_history(MAX_ENTRIES)
            self._history_runs = True
        super().start_trace()

    def _end_history(self) -> None:
        if self._history_runs:
            self._history_runs = False
            cuda.end_memory_history()

    def iteration(self, global_step: int) -> AbstractContextManager[Any]:
        if self._broken or self._closed:
            return nullcontext()
        self._began = global_step
        return record_function(f"iteration#{global_step}")

    def step(self) -> None:
        action, done = self._schedule(self._finished), self._finished
        self._finished += 1
        if self._broken or self._closed:
            return
        with self._harmless("step"):
            if action in KEPT:
                self._kept.append(done)
            if action is ProfilerAction.RECORD_AND_SAVE:
                self._mark()
            super().step()
        now, per_epoch = time.monotonic(), self._plan.counters.steps_per_epoch
        self._times[2] = now
        if per_epoch and self._finished % per_epoch == 0:
            self._times[1] = now

    def close(self, *, failed: bool = False) -> None:
        """Stop, and submit an open window; does not wait for files.

        Args:
            failed: an exception ended the loop, so the step that had begun is in the window too.
        """
        if self._closed:
            return
        self._closed, schedule = True, self._schedule
        if not self._broken:
            with self._harmless("stop"):
                if schedule(self._finished) in KEPT:
                    # A loop that does not mark its steps fails inside one: they follow each other without gaps.
                    if failed and self._began in (None, self._finished):
                        self._kept.append(self._finished)
                    self._mark()
                super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        worked = not self._broken
        with self._harmless("end the allocator's history"):
            self._end_history()
        if worked and self._last_at < 0:
            _log.log(
                logging.WARNING if self._first_rank else logging.DEBUG,
                "profiling: no trace was kept: the %d steps from step %d on include no active step (wait %d, "
                "warmup %d, active %d, repeat %d, counted from step %d)",
                self._finished - self._first,
                self._first,
                *(schedule.wait, schedule.warmup, schedule.active, schedule.repeat, schedule.skip_first),
            )
        elif worked and self._settings.summary_rows:
            self.saver.call(self._log_tables)

    def _log_tables(self) -> None:
        """Log which operators used the time and the memory, a table per sort order. Takes seconds."""
        averages, orders = self._last.key_averages(), ["cpu_time_total"]
        memory = self._settings.profile_memory
        if memory:
            orders.append("self_cpu_memory_usage")
        if len(self.activities) > 1:  # the host, and an accelerator
            orders += ["device_time_total", "self_device_memory_usage"] if memory else ["device_time_total"]
        for order in orders:
            table = averages.table(sort_by=order, row_limit=self._settings.summary_rows)
            _log.info("profiling: operators of the last window by %s\n%s", order, table)
        self._last = None

    def _mark(self) -> None:
        """Add the metadata while the trace is being recorded; afterwards it is too late."""
        self._closing = window = self._window()
        for key, value in {
            "global_rank": self._plan.process.rank,
            "first_step": window.first_step,
            "last_step": window.last_step,
            "step_base": 0,
            "partial": window.partial,
            **self._plan.metadata,
        }.items():
            self.add_metadata_json(key, redact(json.dumps(value)))

    def _window(self) -> TraceWindow:
        now, kept = time.monotonic(), self._kept
        moment = dataclasses.replace(
            self._plan.counters.at(self._finished),
            total_wct=now - self._times[0],
            epoch_wct=now - self._times[1],
            batch_wct=now - self._times[2],
        )
        if not kept:
            return TraceWindow(None, None, True, moment)
        return TraceWindow(kept[0], kept[-1], kept[-1] - kept[0] + 1 != self._schedule.active, moment)

    def _ready(self) -> None:
        if self._broken:
            return  # a failed profiler is being stopped: its content cannot be trusted
        window, inner = self._closing or self._window(), self.profiler
        self._kept, self._closing = [], None
        # The run ended right before a window's first step: torch's trace has no complete step in it. Names by
        # mesh keep it, as their tool does, unless a complete window has just taken the name.
        keeps = self._settings.naming is Naming.mesh and self._finished > self._first
        if window.first_step is None and (not keeps or self._last_at == window.finished):
            self._end_history()
            return
        if window.first_step is None and self._first_rank:
            _log.warning(
                "profiling: the loop ended after %d steps, within the first step of a window: its trace is partial, "
                "and holds no whole step",
                window.finished,
            )
        self._last_at = window.finished
        if self._settings.summary_rows:
            self._last = inner
        assert inner is not None  # torch calls this only with a trace
        outputs = list(self._plan.outputs(window))
        if self._history_runs:
            snapshot = self._plan.snapshot(window)
            snapshot.path = snapshot.path if self._settings.overwrite else free_name(snapshot.path)
            try:
                with self.saver.filling(snapshot.path.parent):
                    snapshot.path.parent.mkdir(parents=True, exist_ok=True)
                    with whole_file(snapshot.path) as part:
                        cuda.write_memory_history(part)
                outputs.insert(0, snapshot)
            except OSError as error:
                _log.error("profiling: the memory snapshot %s could not be written: %s", snapshot.path, error)
            finally:
                self._end_history()
        # Keep this object: torch replaces it at the next window, or when stopped twice.
        results = inner.kineto_results
        assert results is not None  # every build AORTA supports has Kineto
        if outputs:
            export = (lambda path: results.save(str(path))) if self._plan.exports else None
            self.saver.submit(Job(window, export, outputs, lambda: by_category(results)))

    @contextmanager
    def _harmless(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  a profiler failure must not stop the record; it is logged
            _log.error("profiling: torch.profiler failed to %s and is left out from here on: %s", what, error)
            self._broken = True
            with suppress(Exception):  # otherwise it might keep collecting for the rest of the run
                profile.stop(self)
            with suppress(Exception):
                self._end_history()


class NullProfiler:
    """Does nothing, where nothing is profiled."""

    files: tuple[Path, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def iteration(self, global_step: int) -> AbstractContextManager[Any]:  # noqa: ARG002  as WindowRecording's
        return nullcontext()

    def step(self) -> None:
        pass

    def close(self, *, failed: bool = False) -> None:
        pass


def open_profiler(plan: ProfilerPlan, first_step: int = 0) -> WindowRecording | NullProfiler:
    """Return the profiler of a loop that begins at `first_step`, for a `with` block; nothing is touched before."""
    if plan.selected and export_disabled(plan.settings):
        _log.warning(NO_EXPORT)
    if not plan.selected or not plan.records:
        return NullProfiler()
    try:
        return WindowRecording(plan, first_step)
    except Exception as error:  # noqa: BLE001  a missing prerequisite of the profiler must not stop the record
        _log.error("profiling: torch.profiler failed to start and is left out from here on: %s", error)
        return NullProfiler()


class StepMarkers:
    """The step ranges of one rank for an outside tracer, by NVTX or ROCTx.

    Args:
        asked: `profiling.nvtx`; None: if a tracer is there.
    """

    def __init__(self, asked: bool | None, environment: Mapping[str, str] = os.environ) -> None:
        tracer = tracer_present(environment)
        self.on = asked if asked is not None else tracer is not None
        self._open = False
        if self.on and not cuda.has_ranges():
            self.on = False
            why = "profiling.nvtx=true" if asked else f"{tracer} traces this process, but"
            _log.warning("%s: this torch (%s) has neither NVTX nor ROCTx: steps are not marked", why, torch.__version__)

    def iteration(self, global_step: int) -> AbstractContextManager[None]:
        return self._range(global_step) if self.on else nullcontext()

    @contextmanager
    def _range(self, global_step: int) -> Iterator[None]:
        self.begin(global_step)
        try:
            yield
        finally:
            self.end()

    def begin(self, global_step: int) -> None:
        self.end()
        if self.on:
            cuda.begin_range(f"iteration#{global_step}")
            self._open = True

    def end(self) -> None:
        if self._open:
            self._open = False
            cuda.end_range()
