"""The sampler of this rank's device, as the configuration asks for it."""

from __future__ import annotations

import logging

import torch

from aorta.capture.devices.choice import open_source
from aorta.capture.devices.identity import identify
from aorta.capture.devices.sampler import DeviceSampler
from aorta.config.schema import Telemetry
from aorta.launch.accelerator import device_name
from aorta.launch.topology import platform_of

_log = logging.getLogger(__name__)


def device_sampler(settings: Telemetry, device: torch.device) -> DeviceSampler:
    """Open its source; nothing is sampled before the sampler is entered. What is wanted and missing is logged."""
    keep_words = settings.rocm_smi
    if keep_words and platform_of(device) != "rocm" and not settings.force:
        keep_words = False
        _log.warning(
            "telemetry.rocm_smi: this run computes on %s, so nothing is sampled; telemetry.force=true samples all the "
            "same",
            device_name(device),
        )
    opened = open_source(settings.devices, settings.device_interval_s, identify(device), keep_words)
    if opened.problem is not None:
        _log.warning("telemetry.devices=%s: no device samples: %s", settings.devices.name, opened.problem)
    elif opened.interval_s is not None and opened.interval_s > settings.device_interval_s and opened.source is not None:
        _log.info("telemetry: %s is read every %g s", opened.source.name, opened.interval_s)
    return DeviceSampler(opened, keep_words, settings.device_interval_s)
