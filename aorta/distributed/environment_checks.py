"""Warns about environment settings and numbers of ranks that silently change what is measured, at the start of a run.

From the environment, the platform, the number of streams that the run will use and its ranks, it yields one sentence
for each problem: what it is, what it does to the measurement, and what to do; at error level where it destroys what
is measured. Must not change a setting (it would come too late, W18), or refuse to run: the effect of the setting may be
what is to be measured.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from aorta.records.schema import Platform

DEFAULT_HW_QUEUES = 4
"""Default of GPU_MAX_HW_QUEUES, the hardware queues of a process on ROCm (ROCm: HIP environment variables)."""

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


class Knob(NamedTuple):
    """One problematic setting, and the `logging` level at which to report it."""

    text: str
    level: int = logging.WARNING


def knobs_found(environment: Mapping[str, str], platform: Platform, streams: int, *, timing_events: bool) -> list[Knob]:
    """The environment settings that change the measurement on this platform.

    Args:
        environment: names and values as the process started with them.
        platform: where the run computes. Nothing is reported for a CPU, where none of this matters, or for accelerators
            other than CUDA's and HIP's, for which it is not known.
        streams: accelerator streams that the run will use at once.
        timing_events: whether the run records timing events, as every mode of the instrumentation but `off` does.
    """
    return [] if platform in ("cpu", "other") else list(_found(environment, platform, streams, timing_events))


def _found(environment: Mapping[str, str], platform: Platform, streams: int, timing_events: bool) -> Iterator[Knob]:
    def on(name: str) -> bool:
        return environment.get(name, "").strip().lower() not in _OFF

    for name in _SERIALISING[platform]:
        if on(name):
            yield Knob(f"{name}={environment[name]}: kernels run one after another, so nothing can overlap; unset it")
    for name, reason in _WITH_NCCL.items():
        if on(name):
            yield Knob(f"{name}={environment[name]}: {reason}")
    if on("NCCL_LAUNCH_MODE"):
        yield Knob(
            f"NCCL_LAUNCH_MODE={environment['NCCL_LAUNCH_MODE']}: NCCL waits for other launches before its own, which "
            "moves collectives in time; unset it"
        )
    if platform == "cuda" and one_connection(environment):
        yield Knob(
            "CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one hardware queue, so FSDP's collectives wait for the "
            "kernels launched before them and cannot overlap; unset it"
        )
        if timing_events:
            # github.com/pytorch/pytorch/issues/143890, github.com/NVIDIA/TransformerEngine/issues/1353 and
            # github.com/volcengine/veScale/issues/46: either alone leaves some overlap, both together leave none.
            yield Knob(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 together with AORTA's timing events: with one hardware queue such "
                "events stop kernels of two streams from running at once, so the run measured here is not the run "
                "without AORTA, and its overlap is no finding; unset it, or take instrument.mode=off",
                logging.ERROR,
            )
    if platform == "rocm":
        queues = _hardware_queues(environment)
        if streams > queues:
            yield Knob(
                f"GPU_MAX_HW_QUEUES={queues}: this run uses {streams} streams; those beyond {queues} share a queue, "
                f"where they wait for each other; set GPU_MAX_HW_QUEUES={streams} before the start, or take "
                "instrument.mode=off to see the run without AORTA's own streams"
            )


def one_connection(environment: Mapping[str, str]) -> bool:
    """Whether all streams of a CUDA device share one hardware queue."""
    return environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1"


def _hardware_queues(environment: Mapping[str, str]) -> int:
    text = environment.get("GPU_MAX_HW_QUEUES", "").strip()
    return int(text) if text.isdecimal() else DEFAULT_HW_QUEUES


def one_rank(world_size: int, devices: int, started: Sequence[str]) -> Knob | None:
    """What a run of one rank lacks, and the command that has communication; None for more ranks.

    Args:
        devices: how many devices, or cores, this machine has to offer.
        started: the command line of this process, from the program on (`sys.argv`).
    """
    if world_size > 1:
        return None
    program = started[0] if started else ""
    own = program.endswith(".py") and Path(program).name != "__main__.py"
    launcher, program = ("torchrun --standalone", f" {program}") if own else ("aorta train", "")
    lacks = "one rank: it has no other rank to communicate with, so nothing here says how well communication hides; "
    if devices < 2:
        return Knob(f"{lacks}that takes a machine with two devices or more, or two CPU cores (training.device=cpu)")
    return Knob(
        f"{lacks}start one process per device, with the same arguments: {launcher} --nproc_per_node {devices}"
        f"{program} ..."
    )


def too_many_ranks(local_world_size: int, cores: int, platform: Platform) -> Knob | None:
    """Whether the ranks of this host compute on a CPU that has fewer cores than they are; None where it has enough."""
    if platform != "cpu" or local_world_size <= cores:
        return None
    there = f"{cores} core{'s' if cores > 1 else ''}"
    return Knob(
        f"{local_world_size} ranks on {there}: ranks wait for a core as well as for each other, which lengthens "
        f"computation and communication alike; start one rank a core at most (--nproc_per_node {cores})"
    )


def cores() -> int:
    """Cores that the ranks of this host may use together: this process and what started it, which is not bound to one
    core where a launcher binds each rank to a core of its own.
    """
    own = os.sched_getaffinity(0)
    try:
        return len(own | os.sched_getaffinity(os.getppid()))
    except OSError:  # it has ended, or is not ours to ask
        return len(own)
