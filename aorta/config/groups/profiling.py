"""`profiling=...`: windows of torch.profiler. One profiler with one set of keys.

Each option is a class that states only what differs from `Profiling`. `aorta.Profiler` is the option d9d and
`aorta.TorchProfiler` the option composer, so a loop of one's own and `train.py` have the same defaults. Must not
distinguish between the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aorta.errors import ConfigError


class Naming(Enum):
    """What a trace is called: by mesh coordinate, by rank and iterations, as TensorBoard wants it, or by a template."""

    tensorboard = "tensorboard"
    mesh = "mesh"
    rank_iter = "rank_iter"
    template = "template"


@dataclass
class Profiling:
    """A torch.profiler window, beside the record and never a condition of it."""

    # capture a trace
    enabled: bool = False
    # steps of a cycle that are left alone; null = what period leaves
    wait: int | None = 1
    # steps of a cycle that are profiled and thrown away
    warmup: int = 1
    # steps of a cycle that are kept
    active: int = 2
    # cycles; 0 = for ever
    repeat: int = 1
    # steps of a whole cycle, wait + warmup + active; give this or wait, or both if they agree
    period: int | None = None
    # steps left alone before the first cycle
    skip_first: int = 0
    # count steps and cycles anew in every epoch; an epoch's last step closes an open window
    per_epoch: bool = False
    # ranks that are profiled: all, "0, 2, 4" or a list; the others only train
    ranks: Any = "all"
    # shapes of inputs; holds references to tensors, and may copy them
    record_shapes: bool = True
    # allocations
    profile_memory: bool = True
    # Python stacks; slow, and large files
    with_stack: bool = False
    # estimated FLOPs; records shapes as well
    with_flops: bool = False
    # threads besides those of training too, such as one that pins batches; their operators get lanes of their own
    all_threads: bool = False
    # keep the history of the device's allocator during the whole loop, and write it where memory runs out
    oom_snapshot: bool = False
    # rows of each summary table logged at the end; 0 = no tables
    summary_rows: int = 0
    # one file a cycle under torch_profiler/rank<r>/, as TensorBoard and Perfetto read it (naming=tensorboard)
    tensorboard: bool = True
    # also a Chrome trace named trace_filename (naming=tensorboard)
    chrome_trace: bool = False
    # on ROCm, where exporting has crashed, write traces (all of them are in Chrome format) all the same
    chrome_trace_force: bool = False
    # name of the Chrome trace; several steps or cycles add _step<N>
    trace_filename: str = "trace.json"
    # NVTX (ROCTx) ranges iteration#<global_step>, for nsys and rocprofv3; null = when one of them traces this process
    nvtx: bool | None = None
    # tensorboard, mesh, rank_iter or template
    naming: Naming = Naming.tensorboard
    # none, gz or tar.gz
    compression: str = "none"
    # where traces go, relative to training.output_dir, a template; null = torch_profiler/ in the run's folder
    folder: str | None = None
    # name of a trace, a template (naming=template)
    filename: str = "rank{rank}.{batch}.pt.trace.json"
    # use a folder that already holds files, and replace files that are uploaded already
    overwrite: bool = False
    # newest windows kept on this disk, -1 = all; with an upload, a file goes only after it has arrived
    num_traces_to_keep: int = -1
    # where a memory timeline goes, an .html template; null = none
    memory_filename: str | None = None
    # upload every saved file to this place, for instance s3://bucket/path or file://folder; null = no upload
    remote_root: str | None = None
    # name of a trace there, a template or a whole address; {file} is its path below the trace folder; null = no upload
    remote_file_name: str | None = "{run_name}/torch_profiler/{file}"
    # the same for the memory timeline
    memory_remote_file_name: str | None = "{run_name}/torch_memory_traces/rank{rank}.{batch}.pt.trace.memory.html"
    # seconds the end of the run waits for uploads that are under way
    upload_wait_s: float = 600.0


@dataclass
class MeshProfiling(Profiling):
    """A window every `period` steps, for ever: `step_<N>/rank-<rank>-coord-<coordinate>-trace.tar.gz`."""

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


def preset(name: str, settings: Mapping[str, Any], where: str) -> Profiling:
    """An option with some of its keys set, and switched on.

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
        said = str(error).splitlines()[0]
        raise ConfigError(f"{where}: {said}; the keys of profiling={name} are {known}") from error


def steps_to_wait(profiling: Profiling) -> int:
    """Steps of a cycle that are skipped, from `wait` or from `period`; negative when they do not fit.

    Raises:
        ValueError: neither is given.
    """
    if profiling.wait is not None:
        return profiling.wait
    if profiling.period is None:
        raise ValueError("neither profiling.period nor profiling.wait is given")
    return profiling.period - profiling.warmup - profiling.active


def compression_of(profiling: Profiling) -> str:
    """`none`, `gz` or `tar.gz`."""
    return "gz" if getattr(profiling, "use_gzip", False) else profiling.compression
