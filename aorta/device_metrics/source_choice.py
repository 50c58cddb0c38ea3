"""Selects the source of device metrics for a rank: the one requested, or the best available.

It gives an open source, or the reason why there is none. Must not fail a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from aorta.config.schema import Devices
from aorta.device_metrics.amdsmi import AmdSmi
from aorta.device_metrics.device_identity import DeviceIdentity
from aorta.device_metrics.host_metrics import Host
from aorta.device_metrics.nvml import Nvml
from aorta.device_metrics.sample_values import SampleSource
from aorta.device_metrics.smi_programs import AmdSmiProgram, RocmSmi
from aorta.errors import DeviceUnreadable

_log = logging.getLogger(__name__)
BEST: dict[str, tuple[str, ...]] = {
    "cuda": ("nvml",),
    "rocm": ("amdsmi", "amd-smi", "rocm-smi"),
    "cpu": ("psutil",),
    "other": (),
}
"""In order of preference: libraries before programs, maintained ones before others."""
UNASKED_PROGRAM_INTERVAL_S = 5.0
"""Interval for a program that was not requested explicitly: each run uses a core for up to a second, on every rank."""


@dataclass(frozen=True)
class Opened:
    """An open source. Where `source` is None, `problem` says why; if that is None too, none was requested."""

    source: SampleSource | None = None
    interval_s: float | None = None
    problem: str | None = None


def open_source(
    asked: Devices, interval_s: float, identity: DeviceIdentity, keep_words: bool = False, *, forced: bool = False
) -> Opened:
    """Open the source; the caller closes it.

    Args:
        asked: `telemetry.devices`.
        interval_s: requested seconds between two samples.
        keep_words: rocm-smi, if it is chosen, keeps its raw output.
        forced: rocm-smi is run in any case (`telemetry.force`): by auto it is the source then, so that what it prints
            is read too.
    """
    if asked is Devices.off:
        return Opened()
    makers: dict[str, Callable[[], SampleSource]] = {
        "nvml": lambda: Nvml(identity),
        "amdsmi": lambda: AmdSmi(identity),
        "amd-smi": lambda: AmdSmiProgram(identity),
        "rocm-smi": lambda: RocmSmi(identity, keep_words),
        "psutil": Host,
    }
    named = ("rocm-smi",) if asked is Devices.auto and forced else () if asked is Devices.auto else (asked.name,)
    problems = []
    for name in (*named, *(BEST[identity.platform] if asked is Devices.auto else ())):
        try:
            source = makers[name]()
        except DeviceUnreadable as error:
            problems.append(str(error))
            continue
        is_program = source.min_interval_s >= 1
        unasked = is_program and name not in named
        least = UNASKED_PROGRAM_INTERVAL_S if unasked else source.min_interval_s
        return Opened(source, max(interval_s, least))
    return Opened(problem="; ".join(problems) or "no source is known for this kind of device")
