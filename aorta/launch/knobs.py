"""Environment settings that silently change what is measured, found at the start of a run.

Enters: the environment, the platform and how many streams the run will use. Leaves: one sentence for each setting that
gets in the way: what it is, what it does to the measurement, what to do. Must not: change a setting (it would come too
late, W18) or refuse to run: somebody may want to measure just that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aorta.telemetry.schema import Platform

DEFAULT_HW_QUEUES = 4
"""Hardware queues of a process on ROCm unless GPU_MAX_HW_QUEUES says otherwise (ROCm: HIP environment variables)."""

_OFF = frozenset({"", "0", "false", "no", "off"})

_SERIALISING: dict[Platform, tuple[str, ...]] = {
    "cpu": (),
    "other": (),
    "cuda": ("CUDA_LAUNCH_BLOCKING",),
    # A HIP build of torch and the runtime below it read both names.
    "rocm": ("AMD_SERIALIZE_KERNEL", "AMD_SERIALIZE_COPY", "HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING"),
}
_BLOCKS = "waiting for a collective blocks the host, so the compute behind it is launched late; unset it"
_WITH_NCCL = {
    "TORCH_NCCL_BLOCKING_WAIT": _BLOCKS,
    "NCCL_BLOCKING_WAIT": _BLOCKS,
    "TORCH_NCCL_ENABLE_TIMING": (
        "torch records timing events of its own round every collective, which adds to its cost; unset it"
    ),
}


def knob_warnings(environment: Mapping[str, str], platform: Platform, streams: int) -> list[str]:
    """What in the environment changes the measurement on this platform.

    Args:
        environment: names and values as the process started with them.
        platform: where the run computes; nothing here matters on a CPU, and what matters on
            an accelerator other than CUDA's and HIP's is not known.
        streams: accelerator streams that the run will use at once.
    """
    return [] if platform in ("cpu", "other") else list(_found(environment, platform, streams))


def _found(environment: Mapping[str, str], platform: Platform, streams: int) -> Iterator[str]:
    def on(name: str) -> bool:
        return environment.get(name, "").strip().lower() not in _OFF

    for name in _SERIALISING[platform]:
        if on(name):
            yield f"{name}={environment[name]}: kernels run one after another, so nothing can overlap; unset it"
    for name, reason in _WITH_NCCL.items():
        if on(name):
            yield f"{name}={environment[name]}: {reason}"
    if on("NCCL_LAUNCH_MODE"):
        yield (
            f"NCCL_LAUNCH_MODE={environment['NCCL_LAUNCH_MODE']}: NCCL waits for other launches before its own, which "
            "moves collectives in time; unset it"
        )
    if platform == "cuda" and environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one hardware queue, so FSDP's collectives wait for the "
            "kernels launched before them and cannot overlap; unset it"
        )
    if platform == "rocm":
        queues = _hardware_queues(environment)
        if streams > queues:
            yield (
                f"GPU_MAX_HW_QUEUES={queues}: this run uses {streams} streams; those beyond {queues} share a queue, "
                f"where they wait for each other; set GPU_MAX_HW_QUEUES={streams} before the start, or take "
                "instrument.mode=off to see the run without AORTA's own streams"
            )


def _hardware_queues(environment: Mapping[str, str]) -> int:
    text = environment.get("GPU_MAX_HW_QUEUES", "").strip()
    return int(text) if text.isdecimal() else DEFAULT_HW_QUEUES
