"""What a recording writes before its first step: the agreed folder, the manifest, and every rank's header.

Enters: what was asked of `aorta.record`, and the model. Leaves: a `RunFolder` and an open `Record`. Must not: intercept
anything yet, or guess what was not told (null, with a reason).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from aorta.capture.devices.sampler import DeviceSampler
from aorta.config.resolve import LABEL, hash_of
from aorta.config.schema import Clock, Devices, Telemetry
from aorta.errors import ConfigError
from aorta.instrument.native.build import host_tap
from aorta.instrument.seam import all_groups
from aorta.launch.clock_sync import ClockSynchronisation
from aorta.launch.knobs import Knob, knobs_found
from aorta.launch.peers import Peers
from aorta.launch.provenance import Asked, build_manifest, rank_facts
from aorta.launch.run_folder import RunFolder, prepare
from aorta.launch.topology import Topology, platform_of
from aorta.runner.model_blocks import Block
from aorta.runner.rank_record import Record, header_of, publish_manifest
from aorta.runner.recorded_run import device_sampler
from aorta.telemetry.schema import InstrumentMode

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """The arguments of `aorta.record` that the record tells its readers.

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
        for name in ("warmup_steps", "start_step"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"aorta.record: {name}={value}: must be at least 0")
        try:
            json.dumps(self.config())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"aorta.record: workload={self.workload!r}: must be a mapping of JSON types ({error})"
            ) from error

    def config(self) -> dict[str, Any]:
        """As a configuration, with the names that train.py's has."""
        return {
            "workload": None if self.workload is None else dict(self.workload),
            "parallel": None if self.parallel is None else {"strategy": self.parallel},
            "instrument": {"mode": self.mode, "stream_priority": self.stream_priority},
            "telemetry": {"warmup_steps": self.warmup_steps, "devices": self.devices},
        }


def open_record(
    folder: Path,
    settings: Settings,
    model: nn.Module,
    blocks: list[Block],
    device: torch.device,
    topology: Topology,
    peers: Peers,
) -> tuple[RunFolder, Record, ClockSynchronisation, DeviceSampler]:
    """Collective; the caller closes the record's writer.

    Raises:
        PeerFailed: on every rank, when one cannot write its part.
        RunIncomplete: the folder cannot be prepared.
    """
    run = prepare(folder, topology, peers, overwrite=False, resuming=True)  # checkpoints are the caller's
    config = settings.config()
    asked = Asked(settings.label, config, hash_of(config))
    backend = str(dist.get_backend_config()) if dist.is_initialized() else None
    clocks = ClockSynchronisation(Clock(), peers, topology, run)
    measured = clocks.at_start()
    devices = device_sampler(Telemetry(devices=Devices[settings.devices]), device)
    facts = rank_facts(topology, device, devices.facts()) | host_tap(device, settings.mode, wanted=True, emulated=False)
    ranks = peers.gather("facts", facts)
    knobs = _knobs(settings.mode, device)
    for knob in knobs if topology.rank == 0 else ():
        _log.log(knob.level, knob.text)
    plan = {"blocks": [name for name, _ in blocks], "parameters": sum(p.numel() for p in model.parameters())}
    publish_manifest(
        run,
        peers,
        lambda: {
            **build_manifest(asked, run, topology, device, backend, ranks, plan),
            "clock_sync": measured and measured.summary(),
            "warnings": [knob.text for knob in knobs],
            "reasons": _unknown(config),
        },
    )
    header = header_of(
        asked,
        run,
        topology,
        device,
        backend=backend,
        parallel=settings.parallel or "unknown",
        mode=settings.mode,
        start_step=settings.start_step,
        warmup_steps=settings.warmup_steps,
        device_telemetry=devices.header,
    )
    return run, Record.open(run, peers, header), clocks, devices


def _knobs(mode: InstrumentMode, device: torch.device) -> list[Knob]:
    """Settings of the environment that get in the way; of the caller's streams only those that must exist count."""
    groups = len(all_groups())
    looking = mode != "off"
    return knobs_found(os.environ, platform_of(device), 1 + groups * (2 if looking else 1), timing_events=looking)


def _unknown(config: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"config.{name}": f"not known: give aorta.record({name}=...)"
        for name in ("workload", "parallel")
        if config[name] is None
    }
