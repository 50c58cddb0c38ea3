"""`profiling=...`: windows of torch.profiler, and its rules. One profiler with one set of keys.

Each option is a class that states only what differs from `Profiling`. `aorta.Profiler` is the option d9d and
`aorta.TorchProfiler` the option composer, so a loop of one's own and `train.py` have the same defaults. Names of traces
are templates with variables in braces: `rank{rank}.{batch:06d}.json` -> `rank3.000120.json`. Must not distinguish
between the options, touch the disk, or import torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from string import Formatter
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aorta.config.loop import number_rules
from aorta.errors import ConfigError
from aorta.installation import CACHED, scheme_of
from aorta.redaction import redact


class Naming(Enum):
    """What a trace is called: by mesh coordinate, by rank and iterations, as TensorBoard wants it, or by a template."""

    tensorboard = "tensorboard"
    mesh = "mesh"
    rank_iter = "rank_iter"
    template = "template"


@dataclass
class Profiling:
    """A torch.profiler window, in addition to the record."""

    # capture a trace
    enabled: bool = False
    # unprofiled steps of a cycle; null = from period
    wait: int | None = 1
    # steps of a cycle that are profiled and discarded
    warmup: int = 1
    # steps of a cycle that are kept
    active: int = 2
    # cycles; 0 = unlimited
    repeat: int = 1
    # wait + warmup + active; instead of wait
    period: int | None = None
    # steps before the first cycle
    skip_first: int = 0
    # restart cycles in every epoch, whose last step closes an open window
    per_epoch: bool = False
    # profiled ranks: all, "0, 2, 4" or a list
    ranks: Any = "all"
    # shapes of inputs; may copy tensors
    record_shapes: bool = True
    # allocations
    profile_memory: bool = True
    # Python stacks; slow, and large files
    with_stack: bool = False
    # estimated FLOPs; records shapes as well
    with_flops: bool = False
    # other threads too, such as one that pins batches
    all_threads: bool = False
    # rows of each summary table logged at the end; 0 = no tables
    summary_rows: int = 0
    # a file a cycle under torch_profiler/rank<r>/ for TensorBoard and Perfetto (naming=tensorboard)
    tensorboard: bool = True
    # also a Chrome trace named trace_filename (naming=tensorboard)
    chrome_trace: bool = False
    # write traces on ROCm, where exporting has crashed
    chrome_trace_force: bool = False
    # name of the Chrome trace; several steps or cycles add _step<N>
    trace_filename: str = "trace.json"
    # NVTX (ROCTx) ranges iteration#<global_step>; null = under nsys or rocprofv3
    nvtx: bool | None = None
    # how traces are called
    naming: Naming = Naming.tensorboard
    # none, gz or tar.gz
    compression: str = "none"
    # template below training.output_dir; null = torch_profiler/ in the run's folder
    folder: str | None = None
    # name of a trace, a template (naming=template)
    filename: str = "rank{rank}.{batch}.pt.trace.json"
    # use a folder with files, and replace uploaded files
    overwrite: bool = False
    # newest windows kept on this disk, -1 = all; none goes before its upload
    num_traces_to_keep: int = -1
    # where a memory timeline goes, an .html template; null = none
    memory_filename: str | None = None
    # where saved files are uploaded (s3://bucket/path, file://folder); null = no upload
    remote_root: str | None = None
    # name there, a template; {file}: path below the trace folder; null = no upload
    remote_file_name: str | None = "{run_name}/torch_profiler/{file}"
    # the same for the memory timeline
    memory_remote_file_name: str | None = "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.trace.memory.html"
    # seconds to wait for uploads at the end
    upload_wait_s: float = 600.0


@dataclass
class MeshProfiling(Profiling):
    """A window every `period` steps: `step_<N>/rank-<rank>-coord-<coordinate>-trace.tar.gz`."""

    wait: int | None = None
    period: int | None = 50
    warmup: int = 5
    active: int = 3
    repeat: int = 0
    profile_memory: bool = False
    with_stack: bool = True
    naming: Naming = Naming.mesh
    compression: str = "tar.gz"


@dataclass
class TutorialProfiling(Profiling):
    """One late window with stacks: `rank<rank>_iter<first>_<last>.json`, 1-based, both ends included."""

    wait: int | None = 10
    warmup: int = 5
    active: int = 3
    profile_memory: bool = False
    with_stack: bool = True
    naming: Naming = Naming.rank_iter


@dataclass
class ComposerProfiling(Profiling):
    """Windows in every epoch, with memory and FLOPs, named and uploaded by templates, tables at the end."""

    wait: int | None = 0
    active: int = 4
    per_epoch: bool = True
    record_shapes: bool = False
    with_flops: bool = True
    summary_rows: int = 20
    naming: Naming = Naming.template
    folder: str | None = "{run_name}/torch_traces"
    remote_file_name: str | None = "{run_name}/torch_traces/rank{rank}.{batch}.pt.trace.json"
    # the same as compression=gz
    use_gzip: bool = False


PRESETS: dict[str, type[Profiling]] = {
    "aorta": Profiling,
    "d9d": MeshProfiling,
    "tutorial": TutorialProfiling,
    "composer": ComposerProfiling,
}
"""Option -> its class."""
REMOVED = {
    "oom_snapshot": "torch.cuda.memory._record_memory_history() before the loop, and _dump_snapshot(FILE) when it fails"
}
"""Key that was there once -> what does it now."""


def preset(name: str, settings: Mapping[str, Any], where: str) -> Profiling:
    """Return an option with some of its keys set, and switched on.

    Args:
        name: the option.
        settings: key -> value, as `train.py` takes them behind `profiling.`
        where: names the caller in error messages.

    Raises:
        ConfigError: there is no such option or key, or a value has another type.
    """
    if name not in PRESETS:
        raise ConfigError(f"{where}: there is no preset {name!r}; there are {', '.join(PRESETS)}")
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(PRESETS[name]), dict(settings) | {"enabled": settings.get("enabled", True)}
        )
        return cast(Profiling, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        known = ", ".join(PRESETS[name].__dataclass_fields__)
        message = str(error).splitlines()[0]
        message += "".join(f"; {key}: use {instead}" for key, instead in REMOVED.items() if key in settings)
        raise ConfigError(f"{where}: {message}; the keys of profiling={name} are {known}") from error


def steps_to_wait(profiling: Profiling) -> int:
    """Return the steps of a cycle that are skipped, from `wait` or from `period`; negative when they do not fit.

    Raises:
        ValueError: neither is given.
    """
    if profiling.wait is not None:
        return profiling.wait
    if profiling.period is None:
        raise ValueError("neither profiling.period nor profiling.wait is given")
    return profiling.period - profiling.warmup - profiling.active


def compression_of(profiling: Profiling) -> str:
    """Return `none`, `gz` or `tar.gz`."""
    return "gz" if getattr(profiling, "use_gzip", False) else profiling.compression


def selected_ranks(asked: Any) -> frozenset[int] | None:
    """Return the selected global ranks; None = every rank, an empty set = none.

    Raises:
        ValueError: names the part that is not a rank.
    """
    if isinstance(asked, str):
        if asked.strip().lower() == "all":
            return None
        asked = [part for part in asked.split(",") if part.strip()]
    parts = [str(part).strip() for part in (asked if isinstance(asked, Iterable) else [asked])]
    for part in parts:
        if not (part.isascii() and part.isdigit()):
            raise ValueError(f"{part!r} is not a rank: give all, a list such as [0,2], or a string such as '0, 2'")
    return frozenset(map(int, parts))


RANK_FIELDS = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")
"""Variables known before the run."""
TIME_FIELDS = (
    *("epoch", "batch", "batch_in_epoch", "sample", "sample_in_epoch", "token", "token_in_epoch"),
    *("total_wct", "epoch_wct", "batch_wct"),
)
"""Variables known when a window is saved: finished counts, and wall-clock seconds (float)."""
FILE_FIELDS = (*RANK_FIELDS, *TIME_FIELDS)
REMOTE_FIELDS = (*FILE_FIELDS, "file")
"""`file`: the path of a saved file below its trace folder."""
_WIDE = re.compile(r"\d{4,}")
_SAMPLES: dict[str, Any] = {name: 1.5 if name.endswith("_wct") else 1 for name in FILE_FIELDS}
_SAMPLES |= {"run_name": "run", "file": "file"}


def fields_of(template: str) -> set[str]:
    """Return the names of the variables in a template.

    Raises:
        ValueError: its braces do not match.
    """
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def problem_of(template: str, known: Collection[str] = FILE_FIELDS) -> str | None:
    """Return what is wrong with a template, as text; None when it can be used."""
    try:
        unknown = sorted(fields_of(template) - set(known))
        if unknown:
            return f"{{{unknown[0]}}} is no variable; there are {', '.join(known)}"
        fill(template, {name: _SAMPLES[name] for name in known})
    except (ValueError, KeyError, IndexError) as error:
        return f"not a template: {error}"
    return None


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Return the template with every variable in `values` replaced, format included; others stay as they are written.

    Raises:
        ValueError: a format does not suit its value, or the braces do not match.
    """
    parts: list[str] = []
    for text, name, form, conversion in Formatter().parse(template):
        parts.append(text)
        if name is None:
            continue
        if name in values:
            if form and _WIDE.search(form):
                raise ValueError(f"{{{name}:{form}}}: a width or precision has at most three digits")
            value = values[name]
            if conversion:
                value = Formatter().convert_field(value, conversion)
            parts.append(format(value, form or ""))
        else:
            parts.append(f"{{{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}}}")
    return "".join(parts)


def distinguishes_ranks(*templates: str) -> bool:
    """Return whether two ranks always get different names."""
    names = set().union(*map(fields_of, templates))
    return "rank" in names or {"local_rank", "node_rank"} <= names


COMPRESSIONS = ("none", "gz", "tar.gz")
IN_PROCESS = "memory://"
"""What is put there ends with the process, so that a copy there replaces no file."""


def profiling_rules(profiling: Profiling, world_size: int) -> Iterator[str]:
    """Yield one message per broken rule."""
    yield from number_rules("profiling", profiling)
    period, wait, cycle = profiling.period, profiling.wait, profiling.warmup + profiling.active
    parts = f"profiling.warmup={profiling.warmup} + profiling.active={profiling.active}"
    if period is None and wait is None:
        yield "profiling.period=None, profiling.wait=None: give one of them"
    elif period is not None and wait is None and period < cycle:
        yield f"profiling.period={period}: must be at least {parts} = {cycle}"
    elif period is not None and wait is not None and period != wait + cycle:
        yield (
            f"profiling.period={period}: disagrees with profiling.wait={wait} + {parts} = {wait + cycle}; set "
            "profiling.wait=null, or leave period out"
        )
    try:
        selected = selected_ranks(profiling.ranks)
    except ValueError as error:
        yield f"profiling.ranks={profiling.ranks!r}: {error}"
        selected = None
    several = world_size > 1 and (selected is None or len(selected) > 1)
    if "/" in profiling.trace_filename or not profiling.trace_filename.endswith((".json", ".json.gz")):
        yield f"profiling.trace_filename={profiling.trace_filename!r}: a file name ending in .json or .json.gz"
    by_tensorboard = profiling.naming is Naming.tensorboard
    if profiling.enabled and by_tensorboard and not (profiling.tensorboard or profiling.chrome_trace):
        yield "profiling.enabled=true: nothing would be written; set profiling.tensorboard or profiling.chrome_trace"
    if profiling.chrome_trace and not by_tensorboard:
        yield f"profiling.chrome_trace=true: naming={profiling.naming.value} writes one Chrome trace already"
    if profiling.compression not in COMPRESSIONS:
        yield f"profiling.compression={profiling.compression!r}: one of {', '.join(COMPRESSIONS)}"
    elif compression_of(profiling) == "gz" and profiling.compression == "tar.gz":
        yield "profiling.use_gzip=true: disagrees with profiling.compression=tar.gz"
    broken = list(_template_rules("profiling.folder", profiling.folder))
    if profiling.naming is Naming.template:
        broken += _template_rules("profiling.filename", profiling.filename, ending=(".json", ".json.gz", ".tar.gz"))
        if several and not broken and not distinguishes_ranks(profiling.folder or "", profiling.filename):
            fix = "put {rank} into it or into profiling.folder"
            broken.append(f"profiling.filename={profiling.filename!r}: several ranks would write the same file; {fix}")
    yield from broken
    if (memory := profiling.memory_filename) is not None:
        yield from _template_rules("profiling.memory_filename", memory, ending=(".html",))
        if not (profiling.with_stack and profiling.record_shapes and profiling.profile_memory):
            needed = "profiling.with_stack, profiling.record_shapes and profiling.profile_memory"
            yield f"profiling.memory_filename={memory!r}: needs {needed}, all three true"
    yield from _upload_rules(profiling, several)


def _template_rules(
    key: str, template: str | None, known: tuple[str, ...] = FILE_FIELDS, ending: tuple[str, ...] = ("",)
) -> Iterator[str]:
    if template is None:
        return
    # Names below the trace folder are relative; names of uploads may be full addresses.
    absolute = template.startswith("/") and key in ("profiling.filename", "profiling.memory_filename")
    if problem := problem_of(template, known):
        yield f"{key}={template!r}: {problem}"
    elif not template.endswith(ending) or not template.strip():
        yield f"{key}={template!r}: must end in {' or '.join(ending) or 'a name'}"
    elif key != "profiling.folder" and (".." in template.split("/") or absolute):
        yield f"{key}={template!r}: must stay inside its folder"


def _upload_rules(profiling: Profiling, several: bool) -> Iterator[str]:
    keep, root = profiling.num_traces_to_keep, profiling.remote_root
    names = {"profiling.remote_file_name": profiling.remote_file_name}
    if profiling.memory_filename is not None:
        names["profiling.memory_remote_file_name"] = profiling.memory_remote_file_name
    uploaded = {key: name for key, name in names.items() if name is not None and (root or "://" in name)}
    if keep < -1:
        yield f"profiling.num_traces_to_keep={keep}: must be -1 (all) or more"
    if keep == 0 and profiling.enabled and "profiling.remote_file_name" not in uploaded:
        yield "profiling.num_traces_to_keep=0: every trace would be lost; set profiling.remote_root, or keep some"
    if root is not None and not root.strip():
        yield "profiling.remote_root='': give an address, or null"
    for key, address in {"profiling.remote_root": root, **names}.items():
        try:
            scheme_of(address or "")
        except ValueError as error:
            yield f"{key}={error}"
        if address and "://" in address and redact(address) != address:
            yield (
                f"{key}: holds a password or a key, and addresses are written into run.json; put it into the "
                "environment or into fsspec's own configuration"
            )
    for key, name in uploaded.items():
        to = name if "://" in name else root or ""
        if keep >= 0 and profiling.enabled and to.removeprefix(CACHED).startswith(IN_PROCESS):
            yield (
                f"profiling.num_traces_to_keep={keep}: {key} goes to {to}, which ends with this process, so the "
                "file here is the only copy that stays; use -1, or an address that lasts"
            )
        if ".html" not in name and "memory" in key:
            yield f"{key}={name!r}: must end in .html"
        broken = list(_template_rules(key, name, REMOTE_FIELDS))
        if not broken and several and not ("file" in fields_of(name) or distinguishes_ranks(name)):
            broken.append(f"{key}={name!r}: several ranks would upload to the same name; put {{rank}} into it")
        yield from broken


def profiling_notes(profiling: Profiling, steps: int | None, world_size: int) -> Iterator[str]:
    """Yield one note for each way in which less will be kept of a training of so many steps than was requested."""
    if not profiling.enabled:
        return
    wait, warmup, active = steps_to_wait(profiling), profiling.warmup, profiling.active
    before = profiling.skip_first + wait + warmup
    if steps is not None and before < steps < before + active:  # without any active step the profiler warns
        first = f"profiling.skip_first={profiling.skip_first}, then " if profiling.skip_first else ""
        yield (
            f"profiling: {first}a cycle takes {wait + warmup + active} steps (wait {wait} + warmup {warmup} + active "
            f"{active}) and training.max_steps={steps}: the window will be partial, {steps - before} of {active} steps"
        )
    absent = sorted(rank for rank in selected_ranks(profiling.ranks) or () if rank >= world_size)
    if absent:
        yield f"profiling.ranks: this run has no rank {', '.join(map(str, absent))}; its last is {world_size - 1}"
