"""`telemetry=...`: what the record holds beside timings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Telemetry:
    """What the record holds beside timings."""

    # first steps that the report leaves out (at most half of the run)
    warmup_steps: int = 5
    # sample rocm-smi in the background (AMD devices only)
    rocm_smi: bool = False
    # seconds between two samples
    rocm_smi_interval_s: float = 1.0
    # sample even where no AMD device was found
    force: bool = False
