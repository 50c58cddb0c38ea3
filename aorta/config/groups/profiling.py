"""`profiling=...`: windows of torch.profiler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Profiling:
    """A torch.profiler window, beside the record and never a condition of it."""

    # capture a trace
    enabled: bool = False
    # steps of a cycle that are left alone
    wait: int = 1
    # steps of a cycle that are profiled and thrown away
    warmup: int = 1
    # steps of a cycle that are kept
    active: int = 2
    # cycles; 0 = for ever
    repeat: int = 1
    # shapes of inputs
    record_shapes: bool = True
    # allocations
    profile_memory: bool = True
    # Python stacks
    with_stack: bool = False
    # estimated FLOPs
    with_flops: bool = False
    # one file a cycle under torch_profiler/rank<r>/, as TensorBoard and Perfetto read it
    tensorboard: bool = True
    # also a Chrome trace named trace_filename; off on ROCm unless forced
    chrome_trace: bool = False
    # write Chrome traces on ROCm as well
    chrome_trace_force: bool = False
    # name of the Chrome trace; several steps or cycles add _step<N>
    trace_filename: str = "trace.json"
    # NVTX (ROCTx) ranges iteration#<global_step>, for nsys and rocprofv3; null = when one of them traces this process
    nvtx: bool | None = None
