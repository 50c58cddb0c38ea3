"""Marks every step as a range that nsys and rocprofv3 show: `iteration#<global_step>`, as in torch.profiler's traces.

Without a listening tool, and unless requested, nothing is called at all. Must not fail a step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from aorta.distributed import cuda
from aorta.distributed.environment_checks import tracer_present

_log = logging.getLogger(__name__)
MARK = "iteration#{step}"


class StepMarkers:
    """The step ranges of one rank.

    Args:
        asked: True or False as configured; None: when nsys or rocprofv3 traces this process.
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
        """Mark the range of one step in the trace."""
        return self._range(global_step) if self.on else nullcontext()

    def begin(self, global_step: int) -> None:
        """Begin a step; an open range ends."""
        self.end()
        if self.on:
            cuda.begin_range(MARK.format(step=global_step))
            self._open = True

    def end(self) -> None:
        """End the open range, if any."""
        if self._open:
            self._open = False
            cuda.end_range()

    @contextmanager
    def _range(self, global_step: int) -> Iterator[None]:
        self.begin(global_step)
        try:
            yield
        finally:
            self.end()
