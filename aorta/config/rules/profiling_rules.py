"""Rules of `profiling=...`, and notes to log before the run.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from aorta.config.groups.profiling import compression_of, steps_to_wait
from aorta.config.rank_words import selected_ranks
from aorta.config.rules.bounds import at_least
from aorta.config.schema import Config, Naming, Profiling, Rpc
from aorta.config.templates import FILE_FIELDS, REMOTE_FIELDS, fields_of, problem_of, tells_ranks_apart

COMPRESSIONS = ("none", "gz", "tar.gz")
IN_PROCESS = frozenset({"memory"})
"""Schemes of fsspec whose content ends with the process, so that a copy there replaces no file."""
_LOCAL = ("profiling.filename", "profiling.memory_filename")
"""Names below the trace folder; names of uploads may be full addresses."""


def profiling_rules(profiling: Profiling, world_size: int) -> Iterator[str]:
    """One message per broken rule."""
    yield from _schedule_rules(profiling)
    try:
        selected = selected_ranks(profiling.ranks)
    except ValueError as error:
        yield f"profiling.ranks={profiling.ranks!r}: {error}"
        selected = None
    several = world_size > 1 and (selected is None or len(selected) > 1)
    yield from _name_rules(profiling, several)
    yield from _memory_rules(profiling)
    yield from _upload_rules(profiling, several)


def _schedule_rules(profiling: Profiling) -> Iterator[str]:
    yield from at_least(
        0,
        {
            "profiling.wait": profiling.wait,
            "profiling.warmup": profiling.warmup,
            "profiling.repeat": profiling.repeat,
            "profiling.skip_first": profiling.skip_first,
            "profiling.summary_rows": profiling.summary_rows,
        },
    )
    yield from at_least(1, {"profiling.active": profiling.active, "profiling.period": profiling.period})
    if profiling.period is None:
        if profiling.wait is None:
            yield "profiling.period=None, profiling.wait=None: give one of them"
        return
    cycle = profiling.warmup + profiling.active
    if profiling.wait is None and profiling.period < cycle:
        yield (
            f"profiling.period={profiling.period}: must be at least profiling.warmup={profiling.warmup} + "
            f"profiling.active={profiling.active} = {cycle}"
        )
    if profiling.wait is not None and profiling.period != profiling.wait + cycle:
        yield (
            f"profiling.period={profiling.period}: disagrees with profiling.wait={profiling.wait} + "
            f"profiling.warmup={profiling.warmup} + profiling.active={profiling.active} = {profiling.wait + cycle}; "
            "set profiling.wait=null, or leave period out"
        )


def _name_rules(profiling: Profiling, several: bool) -> Iterator[str]:
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
        if several and not broken and not tells_ranks_apart(profiling.folder or "", profiling.filename):
            broken.append(
                f"profiling.filename={profiling.filename!r}: several ranks would write the same file; "
                "put {rank} into it or into profiling.folder"
            )
    yield from broken


def _template_rules(
    key: str, template: str | None, known: tuple[str, ...] = FILE_FIELDS, ending: tuple[str, ...] = ("",)
) -> Iterator[str]:
    if template is None:
        return
    if problem := problem_of(template, known):
        yield f"{key}={template!r}: {problem}"
    elif not template.endswith(ending) or not template.strip():
        yield f"{key}={template!r}: must end in {' or '.join(ending) or 'a name'}"
    elif key != "profiling.folder" and (".." in template.split("/") or (key in _LOCAL and template.startswith("/"))):
        yield f"{key}={template!r}: must stay inside its folder"


def _memory_rules(profiling: Profiling) -> Iterator[str]:
    if profiling.memory_filename is None:
        return
    yield from _template_rules("profiling.memory_filename", profiling.memory_filename, ending=(".html",))
    if not (profiling.with_stack and profiling.record_shapes and profiling.profile_memory):
        yield (
            f"profiling.memory_filename={profiling.memory_filename!r}: needs profiling.with_stack, "
            "profiling.record_shapes and profiling.profile_memory, all three true"
        )


def _upload_rules(profiling: Profiling, several: bool) -> Iterator[str]:
    keep, root = profiling.num_traces_to_keep, profiling.remote_root
    names = {"profiling.remote_file_name": profiling.remote_file_name}
    if profiling.memory_filename is not None:
        names["profiling.memory_remote_file_name"] = profiling.memory_remote_file_name
    somewhere = {key: name for key, name in names.items() if name is not None and (root or "://" in name)}
    if keep < -1:
        yield f"profiling.num_traces_to_keep={keep}: must be -1 (all) or more"
    if keep == 0 and profiling.enabled and "profiling.remote_file_name" not in somewhere:
        yield "profiling.num_traces_to_keep=0: every trace would be lost; set profiling.remote_root, or keep some"
    for key, name in somewhere.items():
        to = name if "://" in name else root or ""
        if keep >= 0 and profiling.enabled and scheme_of(to) in IN_PROCESS:
            yield (
                f"profiling.num_traces_to_keep={keep}: {key} goes to {to}, which ends with this process, so the "
                "file here is the only copy that stays; use -1, or an address that lasts"
            )
    if not 0 < profiling.upload_wait_s < float("inf"):
        yield f"profiling.upload_wait_s={profiling.upload_wait_s}: must be greater than 0 and finite"
    if root is not None and not root.strip():
        yield "profiling.remote_root='': give an address, or null"
    for key, address in {"profiling.remote_root": root, **names}.items():
        if address and "://" in address and _has_password(address):
            yield (
                f"{key}: holds a password, and addresses are written into run.json; put it into the environment or "
                "into fsspec's own configuration"
            )
    for key, name in somewhere.items():
        if ".html" not in name and "memory" in key:
            yield f"{key}={name!r}: must end in .html"
        broken = list(_template_rules(key, name, REMOTE_FIELDS))
        if not broken and several and not ("file" in fields_of(name) or tells_ranks_apart(name)):
            broken.append(f"{key}={name!r}: several ranks would upload to the same name; put {{rank}} into it")
        yield from broken


def scheme_of(address: str) -> str:
    """The scheme at the end of a chain (`simplecache::s3://bucket` -> `s3`); `file` where there is none."""
    last = address.rpartition("::")[2]
    return last.partition("://")[0] if "://" in last else "file"


def _has_password(address: str) -> bool:
    try:
        return urlsplit(address).password is not None
    except ValueError:
        return False


def profiling_notes(config: Config, world_size: int) -> Iterator[str]:
    """One note for each way in which less will be kept than was requested."""
    profiling, steps = config.profiling, config.training.max_steps
    if not profiling.enabled or isinstance(config.workload, Rpc):  # RPC runs have their own windows
        return
    before = profiling.skip_first + steps_to_wait(profiling) + profiling.warmup
    cycle = steps_to_wait(profiling) + profiling.warmup + profiling.active
    if steps is not None and before < steps < before + profiling.active:  # without any active step the profiler warns
        first = f"profiling.skip_first={profiling.skip_first}, then " if profiling.skip_first else ""
        yield (
            f"profiling: {first}a cycle takes {cycle} steps (wait {steps_to_wait(profiling)} + warmup "
            f"{profiling.warmup} + active {profiling.active}) and training.max_steps={steps}: the window will be "
            f"partial, {steps - before} of {profiling.active} steps"
        )
    absent = sorted(rank for rank in selected_ranks(profiling.ranks) or () if rank >= world_size)
    if absent:
        yield f"profiling.ranks: this run has no rank {', '.join(map(str, absent))}; its last is {world_size - 1}"
