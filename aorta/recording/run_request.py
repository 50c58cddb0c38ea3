"""What a recorded run is of, and where it takes place: all in which runs differ, whoever drives them.

Must not do anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aorta.config.schema import Clock, Telemetry, Watchdog
from aorta.config.schema import Instrument as InstrumentSettings
from aorta.distributed.output_folder import RequestedConfig, RunFolder
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology
from aorta.loggers import Logger
from aorta.records.schema import CalibrationPlan


@dataclass(frozen=True)
class RunSite:
    """Where a run takes place: the folder that all ranks agreed on, which rank this is, and its device."""

    folder: RunFolder
    topology: Topology
    device: torch.device
    peers: Peers


@dataclass(frozen=True)
class RunRequest:
    """One recorded run: everything in its manifest and headers that does not follow from the machine."""

    asked: RequestedConfig
    clock: Clock
    telemetry: Telemetry
    instrument: InstrumentSettings
    backend: str | None  # of torch.distributed; None: there is no process group
    parallel: str  # the strategy's name
    plan: Mapping[str, Any]  # effective settings of the strategy
    start_step: int  # global step of the first one
    warmup_steps: int  # first steps that are flagged as warm-up
    emulated_fabric: bool = False
    emulated_ranks: int | None = None  # ranks that the only process stands for; None: every rank is a process
    ranks_per_device: int = 1
    own_streams: Mapping[int, int] = field(default_factory=dict)  # of the run, by priority, without the compute stream
    facts: Mapping[str, Any] = field(default_factory=dict)  # entries of the manifest before the warnings
    remarks: Mapping[str, Any] = field(default_factory=dict)  # entries of the manifest after the warnings
    own_loggers: Sequence[Logger] = ()  # of the caller, beside those that `telemetry` names
    samples_per_step: int | None = None  # of all ranks together; None: not known
    calibration: CalibrationPlan | None = None  # None: on a CPU
    watchdog: Watchdog = field(default_factory=Watchdog)
    profiled: Callable[[int], bool] = lambda _step: False  # whether the run's own profiler is on in a global step
