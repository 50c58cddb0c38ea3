"""What `run.json` holds, for its JSON Schema. It is written as plain values where it is collected
(`aorta.distributed.output_folder`).

Must not be needed by AORTA itself.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from aorta.records.schema import Platform


class Versions(msgspec.Struct):
    """Of AORTA, Python, torch and what else decides a measurement; null: not there."""

    aorta: str
    aorta_commit: str | None
    python: str
    torch: str


class HostFacts(msgspec.Struct):
    """The machine of rank 0."""

    machine: str
    kernel: str
    cpus: int | None
    cpus_usable: int | None
    memory_bytes: int


class CollectiveLibrary(msgspec.Struct):
    """The file from which NCCL's or RCCL's functions come."""

    path: str | None
    version: str | None
    bytes: int | None
    sha256: str | None


class RankFacts(msgspec.Struct):
    """One rank and where it ran."""

    rank: int
    local_rank: int
    node_rank: int
    host: str
    pid: int
    device: str
    threads: int
    device_telemetry: dict[str, Any] | None


class Manifest(msgspec.Struct):
    """`run.json`."""

    schema_version: int
    run_id: str
    attempt: int
    elastic_run_id: str | None
    label: str
    created_unix_ns: int
    manifest_hash: str
    world_size: int
    platform: Platform
    backend: str | None
    config: dict[str, Any]
    plan: dict[str, Any]
    versions: Versions
    environment: dict[str, str]
    environment_differences: dict[str, dict[str, str]]
    collective_library: CollectiveLibrary | None
    collective_library_differences: dict[str, CollectiveLibrary | None]
    host_facts: HostFacts
    devices: list[str]
    topology: list[RankFacts]
    command: list[str]
    clock_sync: dict[str, Any] | None
    warnings: list[str]
    steps_planned: int | UnsetType = UNSET
    traces: dict[str, Any] | UnsetType = UNSET
    reasons: dict[str, str] | UnsetType = UNSET
