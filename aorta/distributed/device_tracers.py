"""Detects which device tracer this process runs under, from the environment variables that tracers set.

Must not load a tracer's library, or change the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from aorta.errors import ConfigError

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
    """The tracer that started this process; None without one.

    rocprofv3 preloads its tool library and names it in ROCP_TOOL_LIBRARIES (rocprofv3.py of ROCm 7.0); nsys numbers its
    session in NSYS_PROFILING_SESSION_ID (which NVTX.jl and GROMACS rely on too). Neither has been run here.
    """
    if any(_ROCPROF_TOOL in environment.get(name, "") for name in _ROCPROF_VARIABLES):
        return "rocprofv3"
    return "nsys" if environment.get(_NSYS_VARIABLE) else None


def untraced(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a helper program that must not be traced."""
    if tracer_present(environment) is None:
        return dict(environment)
    return {name: value for name, value in environment.items() if name not in _INJECTED}


def refuse_two_tracers(profiling: bool, environment: Mapping[str, str]) -> None:
    """Reject a second tracer: both need the device's only tracing session.

    Raises:
        ConfigError: torch.profiler is enabled in a process that rocprofv3 or nsys traces. Under rocprofv3 the second
            one hangs or fails with CONFIGURATION_LOCKED; under nsys it gets no device activity.
    """
    tracer = tracer_present(environment)
    if profiling and tracer is not None:
        raise ConfigError(
            f"profiling.enabled=true: this process is traced by {tracer}, and torch.profiler cannot trace the device "
            "beside it. Set profiling.enabled=false, or take its traces in a run of their own"
        )
