"""Validates the arguments of `aorta.record`, and converts them to the configuration that `train.py` would have had.

Must not guess what was not given: it is null, with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from aorta.config.groups.loop import calibration_steps
from aorta.config.resolve import LABEL, hash_of
from aorta.config.schema import Clock, Devices, Loggers, Mode, Telemetry
from aorta.config.schema import Instrument as InstrumentSettings
from aorta.distributed.accelerator import lacks_streams
from aorta.distributed.provenance import Asked
from aorta.errors import ConfigError
from aorta.loggers import Logger
from aorta.records.schema import InstrumentMode
from aorta.runner.model_blocks import Block
from aorta.runner.recorded_run import RunRequest


@dataclass(frozen=True)
class RecordArguments:
    """The arguments of `aorta.record` that are stored in the record.

    Raises:
        ConfigError: one of them is not allowed.
    """

    label: str | None
    workload: Mapping[str, Any] | None
    parallel: str | None
    mode: InstrumentMode
    warmup_steps: int
    start_step: int
    stream_priority: int | None
    devices: str
    loggers: Sequence[str | Logger] = ()
    logger_interval: int = 1
    calibration: str = InstrumentSettings().calibration

    def __post_init__(self) -> None:
        if self.mode not in get_args(InstrumentMode):
            raise ConfigError(f"aorta.record: mode={self.mode!r}: must be one of {', '.join(get_args(InstrumentMode))}")
        if self.label is not None and not LABEL.fullmatch(self.label):
            raise ConfigError(
                f"aorta.record: label={self.label!r}: a label is letters, digits, '.', '_' and '-', and begins with a "
                "letter or digit"
            )
        if self.devices not in Devices.__members__:
            raise ConfigError(
                f"aorta.record: devices={self.devices!r}: must be one of {', '.join(Devices.__members__)}"
            )
        for name, least in (("warmup_steps", 0), ("start_step", 0), ("logger_interval", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"aorta.record: {name}={value}: must be at least {least}")
        _check_loggers(self.loggers)
        calibration_steps(self.calibration, on_device=True)
        try:
            json.dumps(self.config())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"aorta.record: workload={self.workload!r}: must be a mapping of JSON types ({error})"
            ) from error

    def config(self) -> dict[str, Any]:
        """As a configuration, with the key names of train.py's."""
        return {
            "workload": None if self.workload is None else dict(self.workload),
            "parallel": None if self.parallel is None else {"strategy": self.parallel},
            "instrument": {
                "mode": self.mode,
                "stream_priority": self.stream_priority,
                "calibration": self.calibration,
            },
            "telemetry": {
                "warmup_steps": self.warmup_steps,
                "devices": self.devices,
                "loggers": [each if isinstance(each, str) else type(each).__name__ for each in self.loggers],
                "logger_interval": self.logger_interval,
            },
        }

    @property
    def named_loggers(self) -> list[str]:
        """The loggers that are asked for by name."""
        return [logger for logger in self.loggers if isinstance(logger, str)]

    def request(self, model: nn.Module, blocks: list[Block], backend: str | None) -> RunRequest:
        """The run that they describe. Of the caller's accelerator streams only those that must exist are counted."""
        config = self.config()
        return RunRequest(
            Asked(self.label, config, hash_of(_same_on_all_ranks(config))),
            Clock(),
            Telemetry(
                devices=Devices[self.devices],
                loggers=[Loggers[name] for name in self.named_loggers],
                logger_interval=self.logger_interval,
            ),
            InstrumentSettings(Mode(self.mode), self.stream_priority, native=True, calibration=self.calibration),
            backend=backend,
            parallel=self.parallel or "unknown",
            plan={"blocks": [name for name, _ in blocks], "parameters": sum(p.numel() for p in model.parameters())},
            start_step=self.start_step,
            warmup_steps=self.warmup_steps,
            remarks={"reasons": _unknown(config)},
            own_loggers=[logger for logger in self.loggers if not isinstance(logger, str)],
        )


def _same_on_all_ranks(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without loggers, which rank 0 alone may have been given."""
    telemetry = {
        name: value for name, value in config["telemetry"].items() if name not in ("loggers", "logger_interval")
    }
    return {**config, "telemetry": telemetry}


def _check_loggers(loggers: Sequence[str | Logger]) -> None:
    if isinstance(loggers, str) or not isinstance(loggers, Sequence):
        raise ConfigError(f"aorta.record: loggers={loggers!r}: must be a list: loggers=[{loggers!r}]")
    for logger in loggers:
        if isinstance(logger, str):
            allowed = logger in Loggers.__members__
        else:  # a class has the methods too, but nothing to call them on
            allowed = isinstance(logger, Logger) and not isinstance(logger, type)
        if not allowed:
            raise ConfigError(
                f"aorta.record: loggers: {logger!r}: must be one of {', '.join(Loggers.__members__)}, or an object "
                "(not its class) with the methods of aorta.Logger"
            )


def device_of(model: nn.Module) -> torch.device:
    """The one device that a model's parameters are on.

    Raises:
        ConfigError: they are on several, or on one where nothing can be measured.
    """
    devices = sorted({str(parameter.device) for parameter in model.parameters()} or {"cpu"})
    device = torch.device(devices[0])
    if len(devices) > 1 or device.type == "meta":
        raise ConfigError(
            f"aorta.record: the model's parameters are on {', '.join(devices)}; they must be on one CPU or one "
            "accelerator: move the model there first"
        )
    if device.type != "cpu" and (missing := list(lacks_streams(device))):
        raise ConfigError(
            f"aorta.record: the model's parameters are on {device}, where AORTA cannot measure: {', '.join(missing)}; "
            "it needs streams of its own and events that tell the time: move the model to a device that has them, or "
            "to the CPU"
        )
    return device


def _unknown(config: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"config.{name}": f"not known: give aorta.record({name}=...)"
        for name in ("workload", "parallel")
        if config[name] is None
    }
