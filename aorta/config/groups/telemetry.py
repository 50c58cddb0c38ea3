"""`telemetry=...`: what the record holds beside timings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

Devices = Enum(
    "Devices",
    {
        "auto": "auto",
        "nvml": "nvml",
        "amdsmi": "amdsmi",
        "amd-smi": "amd-smi",
        "rocm-smi": "rocm-smi",
        "psutil": "psutil",
        "off": "off",
    },
)
"""Where samples of the device come from; `auto`: the best source for the platform. Names with a hyphen are programs."""


class Loggers(Enum):
    """Tools that get the scalars of steps while the run goes on: the names of `aorta.loggers.by_name`."""

    tensorboard = "tensorboard"
    prometheus = "prometheus"
    wandb = "wandb"
    mlflow = "mlflow"


@dataclass
class Telemetry:
    """What the record holds beside timings."""

    # first steps that the report leaves out (at most half of the run)
    warmup_steps: int = 5
    # source of device samples (temperature, power, clocks, use, memory, throttling), taken in the background
    devices: Devices = Devices.auto
    # seconds between two samples; programs (amd-smi, rocm-smi) are run at most once a second, by auto every 5 s
    device_interval_s: float = 1.0
    # also keep what rocm-smi prints (AMD devices only)
    rocm_smi: bool = False
    # run rocm-smi even where no AMD device was found; devices=auto then takes its values
    force: bool = False
    # tools that rank 0 gives the scalars of its steps to, while the run goes on; each is an extra (docs/loggers.md)
    loggers: list[Loggers] = field(default_factory=list)
    # steps from one that is logged to the next
    logger_interval: int = 1
    # folder of node_exporter's textfile collector, for the file of loggers=[prometheus]; null: the run's folder
    prometheus_dir: str | None = None
