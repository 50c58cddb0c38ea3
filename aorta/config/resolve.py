"""Turns a configuration composed by Hydra into a typed one that can be run, or one error that lists everything wrong.

The result is a `schema.Config` whose fields are consistent, and its plain form for the manifest. Must not import torch
or touch the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aorta.config.fabric import emulated_ranks, fabric_rules
from aorta.config.loop import calibration_steps, fault_rules, number_rules, observed_every
from aorta.config.parallel import PP, data_parallel_size, mesh_rules, parallel_rules
from aorta.config.profiling import REMOVED, profiling_notes, profiling_rules
from aorta.config.schema import NAMES, SECTIONS, Config, Mode, Rpc
from aorta.config.workload import workload_notes, workload_rules
from aorta.errors import ConfigError, meant, nearest

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DEVICE = re.compile(r"[a-z][a-z0-9_]*")
RESERVED_LABELS = frozenset({"history", "logs", "checkpoints", "torch_profiler"})
HOW_TO_BUILD = (
    "the configuration file does not build on AORTA's: begin it with\n  defaults:\n    - default\n    - _self_"
)
MAX_FAKE_DRIFT_PPM = 10_000
NOT_IN_HASH = ("label", "baseline", "watchdog", "training.output_dir", "training.overwrite", "training.start_step")


def unknown_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the keys that the schema does not have, each with its value and what may stand there. Hydra adds such a key
    where it is written `+key=value`, and nothing would ever read it.
    """
    kind = OmegaConf.get_type(node)
    if kind is None or not is_dataclass(kind):
        return
    known = {field.name for field in fields(kind)}
    for name in map(str, node):
        key, value = prefix + name, node._get_node(name)
        if name not in known:
            yield "\n  ".join([f"{key}={value}: Key '{name}' not in '{kind.__name__}'", *choices(key)])
        elif isinstance(value, DictConfig) and not value._is_none():
            yield from unknown_keys(value, f"{key}.")


def keys_named(name: str) -> list[str]:
    """Return full keys whose last part is `name` or else close to it: `training.max_steps` of `max_step`."""
    keys: dict[str, dict[str, None]] = {}
    for section, nodes in SECTIONS.items():
        for last in (field.name for node in nodes.values() for field in fields(node)):
            keys.setdefault(last, {})[f"{section}.{last}"] = None
    near = name if name in keys else nearest(name, keys)
    return [] if near is None else list(keys[near])


def choices(key: str) -> Iterator[str]:
    """Yield lines that list the alternatives to the last part of `key`; none where the key itself is right."""
    section, _, last = key.rpartition(".")
    if section == "profiling" and last in REMOVED:
        yield f"  {last}: use {REMOVED[last]}"
        return
    nodes: dict[str, type[Any]] = SECTIONS.get(section, {}) if section else {"": Config}
    if not last or not nodes:
        return
    names = {where: [field.name for field in fields(node)] for where, node in nodes.items()}
    having = [where for where, known in names.items() if last in known]
    if 0 < len(having) < len(names):
        yield f"  {key} belongs to {' and '.join(having)}"
    if having:
        return
    shared = [key for key in next(iter(names.values())) if all(key in known for known in names.values())]
    yield f"  keys of {section or 'the root'}: {', '.join(shared)}"
    for where, known in names.items():
        if own := [key for key in known if key not in shared]:
            yield f"  also of {where}: {', '.join(own)}"
    if hint := meant(last, {name for known in names.values() for name in known}, "  "):
        yield hint


@dataclass(frozen=True)
class Resolved:
    """A configuration that can be run. `plain` is JSON-ready; `manifest_hash` covers what changes the measurement."""

    config: Config
    plain: dict[str, Any]
    manifest_hash: str
    notes: tuple[str, ...]


def resolve(composed: DictConfig, world_size: int | None = None) -> Resolved:
    """Check every rule between fields once, before anything starts.

    Args:
        world_size: ranks of the run; None: as many as the environment says.

    Raises:
        ConfigError: lists every broken rule, each with its key, its value and what is allowed.
    """
    if OmegaConf.get_type(composed) is not Config:
        raise ConfigError(HOW_TO_BUILD)
    try:
        config = cast(Config, OmegaConf.to_object(composed))
        plain = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, enum_to_str=True))
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    processes = environment_number("WORLD_SIZE", 1) if world_size is None else world_size
    world_size = max(emulated_ranks(config.fabric) or processes, 1)
    broken = [*unknown_keys(composed), *_broken_rules(config, world_size, processes)]
    if broken:
        raise ConfigError("the configuration cannot be run:\n" + "\n".join(f"  {rule}" for rule in broken))
    training, planned, notes = config.training, steps_planned(config, world_size), list[str]()
    if training.max_steps is not None and planned < training.max_steps:
        notes.append(
            f"training.max_steps={training.max_steps}: training.epochs={training.epochs} ends after {planned} steps "
            f"(dataset.num_samples={config.dataset.num_samples}); training.epochs=null repeats the data"
        )
    if not isinstance(config.workload, Rpc):  # RPC runs have their own windows
        notes += profiling_notes(config.profiling, training.max_steps, processes)
    notes += workload_notes(config)
    hashed = json.loads(json.dumps(plain))
    for key in NOT_IN_HASH:
        node, *rest = key.split(".")
        (hashed[node] if rest else hashed).pop(rest[0] if rest else node)
    return Resolved(config, plain, hash_of(hashed), tuple(notes))


def environment_number(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return an integer from an environment variable such as torchrun sets.

    Raises:
        ConfigError: it is not an integer.
    """
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r}: must be a whole number") from None


def steps_planned(config: Config, world_size: int) -> int:
    """Return the optimizer steps of the whole training: the earlier of `max_steps` and the end of the last epoch. The
    dataset is repeated as often as `max_steps` needs unless `epochs` says how often.
    """
    training = config.training
    if training.epochs is None and training.max_steps is not None:
        return training.max_steps
    per_step = training.batch_size * training.gradient_accumulation * data_parallel_size(config, world_size)
    in_epochs = (training.epochs or 1) * (config.dataset.num_samples // per_step)
    return in_epochs if training.max_steps is None else min(training.max_steps, in_epochs)


def hash_of(values: Mapping[str, Any]) -> str:
    """Return a hash of a configuration (JSON types) in 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _broken_rules(config: Config, world_size: int, processes: int) -> Iterator[str]:
    training, scheduler, dataset, instrument = config.training, config.scheduler, config.dataset, config.instrument
    label, reserved = config.label, ", ".join(sorted(RESERVED_LABELS))
    if label is not None and (
        not LABEL.fullmatch(label) or label in RESERVED_LABELS or label.endswith((".json", ".jsonl"))
    ):
        yield (
            f"label={label!r}: a label is a folder name of at most 64 letters, digits, '.', '_' and '-' that begins "
            f"with a letter or digit, does not end in .json or .jsonl and is none of {reserved}"
        )
    if not DEVICE.fullmatch(training.device):
        yield (
            f"training.device={training.device!r}: must be auto, cpu, or the type of an accelerator as torch names it "
            "(cuda, xpu, ...), without a number: the local rank chooses the device"
        )
    for section in SECTIONS:
        if section not in ("fabric", "profiling"):  # whose rules are also asked for by themselves
            yield from number_rules(section, getattr(config, section))
    if not abs(drift := config.clock.fake_drift_ppm) <= MAX_FAKE_DRIFT_PPM:
        yield f"clock.fake_drift_ppm={drift}: must be within +-{MAX_FAKE_DRIFT_PPM}"
    betas = list(config.optimizer.betas)  # OmegaConf checks the types in a tuple, not its length
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"optimizer.betas={betas}: must be two numbers in [0, 1)"
    for group, name in (key.split(".") for key in NAMES):
        node = getattr(config, group)
        if (value := getattr(node, name)) != getattr(type(node), name):
            yield f"{group}.{name}={value}: repeats the option chosen; choose with {group}={value}"
    warmup, total = scheduler.warmup_steps, scheduler.total_steps
    if total is not None and warmup > total:
        yield f"scheduler.warmup_steps={warmup}: must not exceed scheduler.total_steps={total}"
    if not training.output_dir.strip():
        yield "training.output_dir='': name a folder, for instance artifacts"
    if dataset.on_device and (workers := config.dataloader.num_workers):
        yield (
            f"dataloader.num_workers={workers}: loader processes cannot read device memory; set "
            "dataset.on_device=false as well, or num_workers=0"
        )
    mesh = list(mesh_rules(config, world_size))
    yield from mesh
    batches = world_size if mesh else data_parallel_size(config, world_size)
    per_step = training.batch_size * training.gradient_accumulation * batches
    if dataset.num_samples < per_step:
        shared = "" if batches == world_size else f", {world_size // batches} ranks sharing a batch"
        yield (
            f"dataset.num_samples={dataset.num_samples}: one step needs {per_step} "
            f"({training.batch_size} per micro-batch x {training.gradient_accumulation} x {world_size} ranks{shared})"
        )
    elif per_step > 0 and training.start_step and training.start_step >= (planned := steps_planned(config, world_size)):
        yield (
            f"training.start_step={training.start_step}: must be below the {planned} steps planned "
            f"(training.max_steps={training.max_steps}, training.epochs={training.epochs})"
        )
    yield from fault_rules(config.fault, processes, in_pipeline=isinstance(config.parallel, PP))
    yield from workload_rules(config)
    yield from parallel_rules(config)
    yield from profiling_rules(config.profiling, processes)
    try:
        calibration_steps(instrument.calibration, on_device=True)
        observed_every(instrument.every)
    except ConfigError as error:
        yield str(error)
    if instrument.dedicated_async and instrument.mode is not Mode.dedicated:
        mode = f"instrument.mode={instrument.mode.value}"
        yield f"instrument.dedicated_async=true: {mode} moves no collective; set instrument.mode=dedicated"
    if config.baseline.enabled and instrument.mode is Mode.off:
        yield "instrument.mode=off: baseline=true replaces what is seen; set instrument.mode=observe or dedicated"
    yield from fabric_rules(config, processes)
