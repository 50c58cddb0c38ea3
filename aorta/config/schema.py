"""The typed schema of a configuration: names, types, defaults and meaning. `config/*.yaml` states what differs.

Each field's comment on the line(s) above it is its documentation: `docs/configuration.md` is generated from it. Hydra
overrides need mutable dataclasses, so none is frozen. Other packages take the classes of the groups from here, but for
`aorta.analysis`, which must not load Hydra. Must not import torch, or check one field against another (`resolve` does).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from aorta.config import CONFIG_DIR
from aorta.config.fabric import Algorithm, EmulatedFabric, Fabric, Sharing
from aorta.config.loop import (
    Baseline,
    Clock,
    Compile,
    Dataloader,
    Dataset,
    Devices,
    DType,
    Fault,
    Instrument,
    Loggers,
    Mode,
    Optimizer,
    Precision,
    Scheduler,
    Telemetry,
    Training,
    Watchdog,
    Wording,
)
from aorta.config.parallel import (
    CP,
    DDP,
    EP,
    FSDP,
    FSDP1,
    FSDPCP,
    FSDPEP,
    FSDPPP,
    FSDPTP,
    HSDP,
    PP,
    TP,
    BackwardPrefetch,
    NoParallel,
    Parallel,
    Sharding,
)
from aorta.config.profiling import PRESETS, Naming, Profiling
from aorta.config.workload import Gpt, Moe, Ranking, Resnet18, Rpc, Streams, Workload


@dataclass
class Config:
    """What belongs to no section."""

    # name of the run; its files go to <output_dir>/<label>/
    label: str | None = None
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    dataset: Dataset = field(default_factory=Dataset)
    dataloader: Dataloader = field(default_factory=Dataloader)
    compile: Compile = field(default_factory=Compile)
    instrument: Instrument = field(default_factory=Instrument)
    baseline: Baseline = field(default_factory=Baseline)
    clock: Clock = field(default_factory=Clock)
    watchdog: Watchdog = field(default_factory=Watchdog)
    fault: Fault = field(default_factory=Fault)
    workload: Workload = MISSING
    parallel: Parallel = MISSING
    profiling: Profiling = MISSING
    fabric: Fabric = MISSING
    telemetry: Telemetry = MISSING


GROUPS: dict[str, dict[str, type[Any]]] = {
    "workload": {node.name: node for node in (Ranking, Resnet18, Gpt, Moe, Rpc, Streams)},
    "parallel": {
        node.strategy: node
        for node in (NoParallel, DDP, FSDP1, FSDP, HSDP, TP, FSDPTP, EP, FSDPEP, PP, FSDPPP, CP, FSDPCP)
    },
    "profiling": dict(PRESETS),
    "fabric": {"none": Fabric, "emulated": EmulatedFabric},
    "telemetry": {"default": Telemetry},
}
"""Config group -> option -> its schema, whose defaults are the option's values."""

SECTIONS: dict[str, dict[str, Any]] = {
    section.name: {f"{section.name}={option}": node for option, node in GROUPS[section.name].items()}
    if section.name in GROUPS
    else {section.name: section.default_factory}
    for section in fields(Config)
    if section.name in GROUPS or is_dataclass(section.default_factory)
}
"""Section -> where it is chosen (`parallel=fsdp`, `training`) -> its schema."""

NAMES = ("workload.name", "parallel.strategy", "fabric.kind")
"""Keys that repeat the chosen option: they are recorded, and not meant to be set."""


@cache
def register() -> None:
    """Register with Hydra, once a process, what `config/default.yaml` names: `base_config`, every option of the groups
    (as `base_<option>` where a file states what else it sets).
    """
    store = ConfigStore.instance()
    store.store(name="base_config", node=Config)
    for group, options in GROUPS.items():
        for option, node in options.items():
            has_file = (CONFIG_DIR / group / f"{option}.yaml").exists()
            store.store(group=group, name=f"base_{option}" if has_file else option, node=node)
