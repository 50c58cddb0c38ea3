"""Warns about environment settings and numbers of ranks that silently change what is measured, at the start of a run.

Each warning says what is set, what that does to the measurement, and what to do; at error level where it destroys what
is measured. A second device tracer is refused.

Must not change a setting (it would come too late, W18), load a tracer's library, or refuse to run for a setting: its
effect may be what is to be measured.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from aorta.errors import ConfigError
from aorta.records.schema import PYTHON_COST, Platform, chosen_python

DEFAULT_HW_QUEUES = 4
"""Default of GPU_MAX_HW_QUEUES, the hardware queues of a process on ROCm, for streams of each priority (ROCm: HIP
environment variables; `acquireQueue` in ROCm/clr)."""
DEFAULT_CONNECTIONS, MOST_CONNECTIONS = 8, 32
"""Default and limit of CUDA_DEVICE_MAX_CONNECTIONS, the work queues from the host to a device, for streams of all
priorities (CUDA C++ Programming Guide, CUDA Environment Variables)."""

_OFF = frozenset({"", "0", "false", "no", "off"})

_SERIALISING: dict[Platform, tuple[str, ...]] = {
    "cuda": ("CUDA_LAUNCH_BLOCKING",),
    # A HIP build of torch and the runtime below it read both names.
    "rocm": ("AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY", "HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING"),
}
_WITHOUT_OURS = "use instrument.mode=off to run without AORTA's streams"
_BLOCKS = "waiting for a collective blocks the host, so the compute behind it is launched late; unset it"
_WITH_NCCL = {
    "TORCH_NCCL_BLOCKING_WAIT": _BLOCKS,
    "NCCL_BLOCKING_WAIT": _BLOCKS,
    "TORCH_NCCL_ENABLE_TIMING": (
        "torch records timing events of its own round every collective, which adds to its cost; unset it"
    ),
}


class EnvironmentWarning(NamedTuple):
    """One problematic setting, and the `logging` level at which to report it."""

    text: str
    level: int = logging.WARNING


def streams_used(
    own: Mapping[int, int], groups: int, *, looking: bool, priority: int | None = None
) -> Mapping[int, int]:
    """Return how many accelerator streams a run uses at most, by priority.

    The backend has one for each process group (a group bound to no device has one more for each rank it sends to or
    receives from, which are not counted). AORTA adds one for each group and each priority of issuing streams.

    Args:
        own: the strategy's streams by priority, without the compute stream.
        groups: number of process groups.
        looking: whether collectives are timed.
        priority: of AORTA's streams; None: that of the stream a collective was issued on.
    """
    used = Counter({0: 1 + groups}) + Counter(own)
    for level in ({0, *own} if priority is None else {priority}) if looking else ():
        used[level] += groups
    return used


def setting_warnings(
    environment: Mapping[str, str], platform: Platform, streams: Mapping[int, int], *, timing_events: bool
) -> list[EnvironmentWarning]:
    """Return the environment settings that change the measurement; none on a CPU, where they do not matter, or on
    accelerators other than CUDA's and HIP's, for which they are not known.

    Args:
        environment: names and values as the process started with them.
        streams: accelerator streams that the run may use at once, by priority.
        timing_events: whether the run records timing events: in every mode but `off`.
    """
    if platform in ("cpu", "other"):
        return []
    warnings: list[EnvironmentWarning] = []

    def warn(text: str, level: int = logging.WARNING) -> None:
        warnings.append(EnvironmentWarning(text, level))

    def number(name: str, default: int) -> int:
        text = environment.get(name, "").strip()
        return int(text) if text.isdecimal() else default

    def on(name: str) -> bool:
        return environment.get(name, "").strip().lower() not in _OFF

    for name in _SERIALISING[platform]:
        if on(name):
            warn(f"{name}={environment[name]}: kernels run one after another, so nothing can overlap; unset it")
    for name, reason in _WITH_NCCL.items():
        if on(name):
            warn(f"{name}={environment[name]}: {reason}")
    if on("NCCL_LAUNCH_MODE"):
        warn(
            f"NCCL_LAUNCH_MODE={environment['NCCL_LAUNCH_MODE']}: NCCL waits for other launches before its own, which "
            "moves collectives in time; unset it"
        )
    if platform == "cuda" and one_connection(environment):
        warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one hardware queue, so FSDP's collectives wait for the "
            "kernels launched before them and cannot overlap; unset it"
        )
        if timing_events:
            # github.com/pytorch/pytorch/issues/143890, github.com/NVIDIA/TransformerEngine/issues/1353 and
            # github.com/volcengine/veScale/issues/46: either alone leaves some overlap, both together leave none.
            warn(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 together with AORTA's timing events: with one hardware queue they keep "
                "kernels of two streams from running at once, so the overlap is not that of a run without AORTA; unset "
                "it, or use instrument.mode=off",
                logging.ERROR,
            )
    if platform == "rocm":
        queues = number("GPU_MAX_HW_QUEUES", DEFAULT_HW_QUEUES)
        priority, most = max(streams.items(), key=lambda used: used[1])
        if most > queues:
            warn(
                f"GPU_MAX_HW_QUEUES={queues}: this run uses up to {most} streams of priority {priority}; those beyond "
                f"{queues} share a queue, where they wait for each other; set GPU_MAX_HW_QUEUES={most} before the "
                f"start, or {_WITHOUT_OURS}"
            )
    elif not one_connection(environment):
        queues = number("CUDA_DEVICE_MAX_CONNECTIONS", DEFAULT_CONNECTIONS)
        if (everything := sum(streams.values())) > queues:
            more = f"set CUDA_DEVICE_MAX_CONNECTIONS={min(everything, MOST_CONNECTIONS)} before the start, or "
            warn(
                f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: this run uses up to {everything} streams; those beyond "
                f"{queues} share a work queue, where one may wait for another; "
                f"{more if queues < MOST_CONNECTIONS else ''}{_WITHOUT_OURS}"
            )
    return warnings


def one_connection(environment: Mapping[str, str]) -> bool:
    """Return whether all streams of a CUDA device share one hardware queue."""
    return environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1"


def python_timing_warning(interceptor: str | None) -> EnvironmentWarning | None:
    """Return a warning where collectives are timed from Python, or on a device not at all; None on a CPU where the
    configuration asks for it. `interceptor`: what times them, as the manifest has it (`native.build.interceptor_for`).
    """
    timed_by, _, why = (interceptor or "").partition(":")
    if timed_by == "none":
        return EnvironmentWarning(
            f"collectives and blocks are not timed ({why.strip()}): on a device only compiled code does that, so the "
            "record has steps alone"
        )
    if timed_by != "python" or chosen_python(why):
        return None
    return EnvironmentWarning(f"collectives are timed from Python ({why.strip()}): {PYTHON_COST}")


def one_rank(world_size: int, devices: int, started: Sequence[str]) -> EnvironmentWarning | None:
    """Return what a run of one rank lacks, and the command that has communication; None for more ranks.

    Args:
        devices: how many devices, or cores, this machine has to offer.
        started: the command line of this process, from the program on (`sys.argv`).
    """
    if world_size > 1:
        return None
    program = started[0] if started else ""
    own = program.endswith(".py") and Path(program).name != "__main__.py"
    launcher, program = ("torchrun --standalone", f" {program}") if own else ("aorta train", "")
    lacks = "one rank: it has no other rank to communicate with, so nothing shows how well communication hides; "
    if devices < 2:
        return EnvironmentWarning(
            f"{lacks}that needs a machine with at least two devices, or two CPU cores (training.device=cpu)"
        )
    return EnvironmentWarning(
        f"{lacks}start one process per device, with the same arguments: {launcher} --nproc_per_node {devices}"
        f"{program} ..."
    )


def too_many_ranks(local_world_size: int, cores: int, platform: Platform) -> EnvironmentWarning | None:
    """Return a warning where more ranks of this host compute on its CPU than it has cores; None where it has enough."""
    if platform != "cpu" or local_world_size <= cores:
        return None
    cores_text = f"{cores} core{'s' if cores > 1 else ''}"
    return EnvironmentWarning(
        f"{local_world_size} ranks on {cores_text}: ranks wait for a core as well as for each other, so computation "
        f"and communication both take longer; start at most one rank per core (--nproc_per_node {cores})"
    )


def shared_device(ranks_per_device: int, *, mps: bool) -> EnvironmentWarning | None:
    """Return a warning where ranks share a device; None where each has its own."""
    if ranks_per_device == 1:
        return None
    turns = "run concurrently (MPS)" if mps else "take turns (no MPS), so overlap means nothing"
    return EnvironmentWarning(
        f"training.ranks_per_device={ranks_per_device}: the ranks of a device {turns}, and their communication crosses "
        "no network; leave it out for one rank per device"
    )


def cores() -> int:
    """Return the cores that this host's ranks may use: those of this process and of its parent, as a launcher may bind
    each rank to one core.
    """
    own = os.sched_getaffinity(0)
    try:
        return len(own | os.sched_getaffinity(os.getppid()))
    except OSError:  # it has ended, or is not ours to ask
        return len(own)


Tracer: TypeAlias = Literal["rocprofv3", "nsys"]

_ROCPROF_TOOL = "rocprofiler-sdk-tool"
_ROCPROF_VARIABLES = ("ROCP_TOOL_LIBRARIES", "LD_PRELOAD")
_NSYS_VARIABLE = "NSYS_PROFILING_SESSION_ID"
_INJECTED = (
    "LD_PRELOAD",
    "ROCP_TOOL_LIBRARIES",
    "ROCPROFILER_LIBRARY_CTOR",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
)


def tracer_present(environment: Mapping[str, str]) -> Tracer | None:
    """Return the tracer that started this process; None without one.

    rocprofv3 preloads its tool library and names it in ROCP_TOOL_LIBRARIES (rocprofv3.py of ROCm 7.0); nsys numbers its
    session in NSYS_PROFILING_SESSION_ID (which NVTX.jl and GROMACS rely on too). Neither has been run here.
    """
    if any(_ROCPROF_TOOL in environment.get(name, "") for name in _ROCPROF_VARIABLES):
        return "rocprofv3"
    return "nsys" if environment.get(_NSYS_VARIABLE) else None


def untraced(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a helper program that must not be traced."""
    if tracer_present(environment) is None:
        return dict(environment)
    return {name: value for name, value in environment.items() if name not in _INJECTED}


def refuse_two_tracers(profiling: bool, environment: Mapping[str, str]) -> None:
    """Raise ConfigError where torch.profiler is enabled in a process that rocprofv3 or nsys traces: the device has one
    tracing session. Under rocprofv3 the second tracer hangs or fails with CONFIGURATION_LOCKED; under nsys it sees no
    device activity.
    """
    tracer = tracer_present(environment)
    if profiling and tracer is not None:
        raise ConfigError(
            f"profiling.enabled=true: this process is traced by {tracer}, and only one tracer can use the device. "
            "Set profiling.enabled=false, or profile in a separate run"
        )
