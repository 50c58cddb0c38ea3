"""Checks the arguments of `aorta.record`, makes of them the configuration that `train.py` would have had, and chooses
the blocks: modules that are bracketed, to distinguish compute from waiting (docs/dev/measuring.md, R5).

Without a list: from the root down, a `ModuleList`, `ModuleDict` or `Sequential` that repeats a class (two children with
parameters are of one class, containers not counted) gives its children as blocks: the layers of a transformer, the
units of a residual network's stages. Containers and DDP models among them are searched too. Siblings of a container on
the way down (embedding, head, activation) are blocks too, so that blocks cover the model without overlapping. A module
compiled by `torch.compile(module)` is one block, since hooks inside would break its graph, and so is a model that
repeats nothing.

Must not change the model, or guess what was not given: that is null, with a reason.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from aorta.config.loop import calibration_steps, observed_every
from aorta.config.resolve import LABEL
from aorta.config.schema import Devices, Loggers
from aorta.distributed.topology import lacks_streams
from aorta.errors import ConfigError
from aorta.loggers import Logger
from aorta.recording.open_recording import without_lines
from aorta.records.schema import InstrumentMode

_COMPILED = "_orig_mod"
"""Name under which torch.compile's module wrapper keeps the original."""
_FSDP1 = "_fsdp_wrapped_module"
"""Name under which FSDP1's wrapper keeps the module; when that module is called, its parameters have arrived."""
_COMPILED_IN_PLACE = "_compiled_call_impl"
"""Attribute that `module.compile()` sets: hooks on the module or inside it would become part of its graph."""
_WRAPPERS = (_COMPILED, _FSDP1, "_checkpoint_wrapped_module")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)

Block = tuple[str, nn.Module]


def find_blocks(*models: nn.Module) -> list[Block]:
    """Return the blocks of `models` by the rule above, in the order they were registered; names begin with the model's
    number where there are several. Raises ConfigError where no model has parameters.
    """
    blocks = [
        block
        for number, model in enumerate(models)
        if _has_parameters(model)
        for block in _tiles(str(number) if len(models) > 1 else "", model)
    ]
    if not blocks:
        raise ConfigError(
            f"aorta.record: {_types(models)} has no parameters, so no compute can be timed; name modules with "
            "blocks=[...]"
        )
    return _named(blocks)


def called_around(model: nn.Module) -> nn.Module:
    """Return the outermost living wrapper that is called in place of `model`: `torch.compile`'s around anything that
    holds it, and DDP's or FSDP1's directly around it; `model` without one.

    Frameworks pass the inner model to their callbacks: hooks there would break the graph of the compiled one.
    """
    wrappers: list[type] = [DistributedDataParallel, FullyShardedDataParallel]
    for kind in wrappers:
        wrappers += kind.__subclasses__()
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    optimized = () if dynamo is None else (dynamo.OptimizedModule,)
    # An instance refers to its class (CPython): only instances come out of the collector, not all of its objects.
    alive = [
        candidate for candidate in gc.get_referrers(*wrappers, *optimized) if type(candidate) in {*wrappers, *optimized}
    ]
    compiled = [candidate for candidate in alive if isinstance(candidate, optimized) and candidate is not model]
    compiled = [candidate for candidate in compiled if any(module is model for module in candidate.modules())]
    model = max(compiled, key=lambda candidate: sum(1 for _ in candidate.modules()), default=model)
    while around := [candidate for candidate in alive if type(candidate) in wrappers and model in candidate.children()]:
        model = around[0]
    return model


def strategy_of(model: nn.Module) -> str | None:
    """Return train.py's name of the strategy around the model: "ddp", "fsdp1", or "fsdp" for `fully_shard` over one
    dimension of ranks; "zero" and the stage of DeepSpeed's engine; None for anything else.
    """
    deepspeed = sys.modules.get("deepspeed.runtime.engine")
    for module in model.modules():
        if deepspeed is not None and isinstance(module, deepspeed.DeepSpeedEngine):
            return f"zero{module.zero_optimization_stage()}"
        if isinstance(module, FSDPModule):
            meshes = {getattr(parameter, "device_mesh", None) for parameter in module.parameters()}
            return "fsdp" if all(mesh is not None and mesh.ndim == 1 for mesh in meshes) else None
        if isinstance(module, FullyShardedDataParallel):
            sharded = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
            return "fsdp1" if module.sharding_strategy in sharded else None
        if isinstance(module, DistributedDataParallel):
            return "ddp"
    return None


def chosen_blocks(wanted: Iterable[str | nn.Module], *models: nn.Module) -> list[Block]:
    """Return the blocks given as modules, which may be outside the models (a loss), or by name: as in
    `named_modules()`, without wrappers, after the model's number where there are several.

    Raises:
        ConfigError: a name that the models do not have, or nothing at all.
    """
    names = {
        ".".join(filter(None, (str(number) if len(models) > 1 else "", _clean(name)))): module
        for number, model in enumerate(models)
        for name, module in model.named_modules()
    }
    by_identity = {id(module): name for name, module in names.items()}
    blocks = []
    for item in wanted:
        if isinstance(item, nn.Module):
            blocks.append((by_identity.get(id(item)) or type(item).__name__, item))
        elif item in names:
            blocks.append((item, names[item]))
        else:
            near = [name for name in names if name.rpartition(".")[2] == item.rpartition(".")[2]] or list(names)[1:]
            raise ConfigError(
                f"aorta.record: blocks={item!r}: {_types(models)} has no such module; it has, for example: "
                f"{', '.join(near[:8]) or 'none'}"
            )
    if not blocks:
        raise ConfigError("aorta.record: blocks=[]: name at least one, or leave it out")
    return _named(blocks)


def outside_compiled(whole: nn.Module, blocks: list[Block]) -> tuple[list[Block], str | None]:
    """Replace blocks compiled in place, or inside a module that was, by the nearest called module around them that was
    not: hooks would become part of the graph, and change what is measured.

    Args:
        whole: holds all models.

    Returns:
        The blocks, which do not overlap, and a sentence that says what was replaced, if anything. No block is left
        where the outermost module was compiled in place.
    """
    compiled = compiled_in_place(whole, blocks)
    replaced = [name for name, block in blocks if id(block) in compiled]
    if not replaced:
        return blocks, None
    modules = dict(whole.named_modules())
    full_names = {id(module): name for name, module in modules.items()}
    kept = [(name, block) for name, block in blocks if id(block) not in compiled]
    instead = []
    for block in (block for _, block in blocks if id(block) in compiled and id(block) in full_names):
        parts = full_names[id(block)].split(".")
        around = [".".join(parts[:depth]) for depth in reversed(range(len(parts)))]
        called = (name for name in around if not isinstance(modules[name], _WITHOUT_FORWARD))
        instead += [(name, modules[name]) for name in called if id(modules[name]) not in compiled][:1]
    inside = {id(inner) for _, block in instead for inner in block.modules() if inner is not block}
    instead = _named([(name, block) for name, block in instead if id(block) not in inside])
    named = _named([*((name, block) for name, block in kept if id(block) not in inside), *instead])
    what = f"timed instead: {', '.join(name for name, _ in instead)}" if instead else "their compute is not timed"
    return named, (
        f"cannot hook modules compiled in place by .compile(): {', '.join(replaced[:4])}"
        f"{', ...' if len(replaced) > 4 else ''}; {what}. Use `x = torch.compile(x)`, which can be hooked"
    )


def compiled_in_place(whole: nn.Module, blocks: Iterable[Block] = ()) -> set[int]:
    """Return the ids of modules that were compiled by their own `compile()`, and of what is inside them."""
    modules = [*whole.modules(), *(block for _, block in blocks)]
    compiled = [module for module in modules if getattr(module, _COMPILED_IN_PLACE, None) is not None]
    return {id(inner) for module in compiled for inner in module.modules()}


def _tiles(name: str, module: nn.Module) -> Iterator[Block]:
    children = dict(module.named_children())
    if isinstance(module, DistributedDataParallel):
        yield from _tiles(name, module.module)
    elif _FSDP1 in children:
        yield from _tiles(_join(name, _FSDP1), children[_FSDP1])
    elif _repeats(module):
        for child_name, child in children.items():
            if isinstance(child, (*_CONTAINERS, DistributedDataParallel)):
                yield from _tiles(_join(name, child_name), child)
            elif not isinstance(child, nn.Identity):
                yield _join(name, child_name), _inside_fsdp1(child)
    elif isinstance(module, _WITHOUT_FORWARD) or _repeats_below(module):
        for child_name, child in children.items():
            yield from _tiles(_join(name, child_name), child)
    elif not isinstance(module, nn.Identity):
        yield name, module


def _repeats(module: nn.Module) -> bool:
    """Return whether a module is a container with two children of one class with parameters."""
    if not isinstance(module, _CONTAINERS):
        return False
    units = [_inside_fsdp1(child) for child in module.children() if _has_parameters(child)]
    classes = Counter(type(unit) for unit in units if not isinstance(unit, _CONTAINERS))
    return max(classes.values(), default=0) > 1


def _repeats_below(module: nn.Module) -> bool:
    """Return whether anything inside repeats; a compiled module counts as a whole."""
    children = dict(module.named_children())
    return _COMPILED not in children and any(_repeats(child) or _repeats_below(child) for child in children.values())


def _types(models: Iterable[nn.Module]) -> str:
    return ", ".join(type(model).__name__ for model in models)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _inside_fsdp1(module: nn.Module) -> nn.Module:
    inner = dict(module.named_children()).get(_FSDP1)
    return module if inner is None else inner


def _named(blocks: list[Block]) -> list[Block]:
    """Return the blocks without duplicates, with unique names that leave out the wrappers' parts."""
    seen: set[int] = set()
    names: Counter[str] = Counter()
    result = []
    for name, module in blocks:
        if id(module) in seen:
            continue
        seen.add(id(module))
        clean = _clean(name) or type(module).__name__
        names[clean] += 1
        result.append((clean if names[clean] == 1 else f"{clean}#{names[clean]}", module))
    return result


def _clean(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def checked_config(
    label: str | None,
    workload: Mapping[str, Any] | None,
    parallel: str | None,
    mode: InstrumentMode,
    warmup_steps: int,
    start_step: int,
    stream_priority: int | None,
    devices: str,
    loggers: Sequence[str | Logger],
    logger_interval: int,
    calibration: str,
    every: str,
) -> dict[str, Any]:
    """Return arguments of `aorta.record` as a configuration, with the key names of train.py's. Raises ConfigError where
    one is not allowed.
    """
    if mode not in get_args(InstrumentMode):
        raise ConfigError(f"aorta.record: mode={mode!r}: must be one of {', '.join(get_args(InstrumentMode))}")
    if label is not None and not LABEL.fullmatch(label):
        raise ConfigError(
            f"aorta.record: label={label!r}: a label is letters, digits, '.', '_' and '-', and begins with a letter or "
            "digit"
        )
    if devices not in Devices.__members__:
        raise ConfigError(f"aorta.record: devices={devices!r}: must be one of {', '.join(Devices.__members__)}")
    numbers = {"warmup_steps": warmup_steps, "start_step": start_step, "logger_interval": logger_interval}
    for name, value in numbers.items():
        least = 1 if name == "logger_interval" else 0
        if value < least:
            raise ConfigError(f"aorta.record: {name}={value}: must be at least {least}")
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
    calibration_steps(calibration, on_device=True)
    observed_every(every)
    try:
        config = {
            "workload": None if workload is None else dict(workload),
            "parallel": None if parallel is None else {"strategy": parallel},
            "instrument": {
                "mode": mode,
                "stream_priority": stream_priority,
                "calibration": calibration,
                "every": every,
            },
            "telemetry": {
                "steps_end_by": "the optimizer" if without_lines.get() else "recording.step()",
                "warmup_steps": warmup_steps,
                "devices": devices,
                "loggers": [logger if isinstance(logger, str) else type(logger).__name__ for logger in loggers],
                "logger_interval": logger_interval,
            },
        }
        json.dumps(config)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"aorta.record: workload={workload!r}: must be a mapping of JSON types ({error})") from error
    return config


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; raises ConfigError where there are several, or it is unsuited."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()} or {"cpu"})
    device = torch.device(devices[0])
    if len(devices) > 1 or device.type == "meta":
        raise ConfigError(
            f"aorta.record: the model's parameters are on {', '.join(devices)}; they must be on one CPU or one "
            "accelerator: move the model there first"
        )
    if device.type != "cpu" and (missing := list(lacks_streams(device))):
        raise ConfigError(
            f"aorta.record: AORTA cannot measure on {device}, where the model's parameters are: {', '.join(missing)}; "
            "it needs streams and timing events: move the model to a device that has them, or to the CPU"
        )
    return device
