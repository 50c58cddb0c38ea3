"""Builds the manifest, `run.json`: what a reader must know to trust, repeat or compare a run.

Must not record an environment variable that is not on the list below: tokens live in the environment.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import psutil
import torch

from aorta.distributed.accelerator import device_name
from aorta.distributed.cuda import nccl_version
from aorta.distributed.output_folder import RunFolder
from aorta.distributed.topology import Topology, default_label, platform_of
from aorta.installation import checkout, commit_of
from aorta.records.environment_variables import ENVIRONMENT_NAMES, ENVIRONMENT_PREFIXES
from aorta.records.schema import SCHEMA_VERSION
from aorta.redaction import SECRET, hide, redact
from aorta.version import __version__


@dataclass(frozen=True)
class RequestedConfig:
    """What was requested: the run's label (None: that of the platform), its configuration (JSON types), and a hash
    of the settings that change a measurement.
    """

    label: str | None
    config: Mapping[str, Any]
    manifest_hash: str


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that change a measurement, with effective values (W18); nothing that looks like a secret."""
    return {
        name: redact(value)
        for name, value in sorted(environment.items())
        if (name in ENVIRONMENT_NAMES or name.startswith(ENVIRONMENT_PREFIXES)) and not SECRET.search(name)
    }


def rank_facts(
    topology: Topology, device: torch.device, device_telemetry: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what each rank contributes to the manifest.

    Args:
        device_telemetry: the source of its device samples, and the device's settings (power cap, clock limits and
            locks).
    """
    return {
        "rank": topology.rank,
        "local_rank": topology.local_rank,
        "node_rank": topology.node_rank,
        "host": topology.host,
        "pid": topology.pid,
        "device": device_name(device),
        "environment": recorded_environment(os.environ),
        "threads": torch.get_num_threads(),
        "device_telemetry": None if device_telemetry is None else dict(device_telemetry),
    }


def build_manifest(
    asked: RequestedConfig,
    folder: RunFolder,
    topology: Topology,
    device: torch.device,
    backend: str | None,
    ranks: list[dict[str, Any]],
    plan: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of `run.json`; JSON types only.

    Args:
        ranks: `rank_facts` of every rank, in rank order.
        plan: effective settings of the parallel strategy (bucket size, wrapped blocks, ...).
    """
    kind = platform_of(device)
    environments = [facts.pop("environment") for facts in ranks]
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": folder.run_id,
        "attempt": folder.attempt,
        "elastic_run_id": topology.elastic_run_id,
        "label": asked.label or default_label(device),
        "created_unix_ns": time.time_ns(),
        "manifest_hash": asked.manifest_hash,
        "world_size": topology.world_size,
        "platform": kind,
        "backend": backend,
        "config": dict(asked.config),
        "plan": dict(plan),
        "versions": _versions(),
        "environment": environments[0],
        "environment_differences": {
            str(rank): other for rank, other in enumerate(environments) if other != environments[0]
        },
        "host_facts": {
            "machine": platform.machine(),
            "kernel": platform.release(),
            "cpus": os.cpu_count(),
            "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "devices": sorted({facts["device"] for facts in ranks}),
        "topology": ranks,
        "command": hide(sys.argv),
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "aorta": __version__,
        "aorta_commit": commit_of(checkout()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl_version(),
    }
    return versions | {name: metadata.version(name) for name in ("hydra-core", "omegaconf", "msgspec")}
