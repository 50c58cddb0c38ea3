"""`profiling=...`: windows of torch.profiler. One profiler with one set of keys.

The defaults are here; each option's file in `config/profiling/` states only what differs. Must not distinguish between
the options.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


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
    # rows of each summary table logged at the end; 0 = no tables
    summary_rows: int = 0
    # one file a cycle under torch_profiler/rank<r>/, as TensorBoard and Perfetto read it (naming=tensorboard)
    tensorboard: bool = True
    # also a Chrome trace named trace_filename (naming=tensorboard); off on ROCm unless forced
    chrome_trace: bool = False
    # write Chrome traces on ROCm as well
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
class ComposerProfiling(Profiling):
    """Windows in every epoch, with memory and FLOPs, named and uploaded by templates, tables at the end."""

    # the same as compression=gz
    use_gzip: bool = False


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
