"""Prepares the output folder of a run, one for all ranks, agreed through rank 0, and writes its manifest, `run.json`:
what a reader must know to trust, repeat or compare a run.

An earlier run in the folder is moved to `history/`, and all ranks share the new run's id. Must not delete anything that
is not this project's, mix two runs (docs in `artifacts/README.md`), or record an environment variable that is not on
the list below: tokens live in the environment.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from aorta.command_line import shown_path, to_stderr
from aorta.distributed.cuda import loaded_library, nccl_version
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology, default_label, device_name, platform_of
from aorta.errors import ConfigError, RunIncomplete
from aorta.installation import checkout, commit_of
from aorta.records.clocks import CLOCK_SYNC_FILE
from aorta.records.files import (
    OF_THIS_PROCESS,
    json_text,
    lock_file,
    shared_folder,
    shared_lock,
    unused,
    write_whole,
)
from aorta.records.progress import PROGRESS_DIR
from aorta.records.ring_record import salvage
from aorta.records.run_files import (
    AUTOPSY_DIR,
    ENVIRONMENT_NAMES,
    ENVIRONMENT_PREFIXES,
    HISTORY_DIR,
    MANIFEST_FILE,
    RANK_FILE,
    RANK_FILE_GLOB,
    RPC_FILE,
    STREAMS_FILE,
    TENSORBOARD_DIR,
    WANDB_DIR,
    history_name,
    read_manifest,
)
from aorta.records.schema import SCHEMA_VERSION
from aorta.redaction import SECRET, hide, redact
from aorta.version import __version__

LOG_DIR = "logs"
TRACE_DIR = "torch_profiler"
CHECKPOINT_DIR = "checkpoints"
RUN_ID_FILE = "run_id"
"""In a checkpoint: the id of the run that took it."""
RESUMED = (TRACE_DIR, CHECKPOINT_DIR, TENSORBOARD_DIR)
"""Folders in which a resumed run goes on."""
LOCK_FILE = ".aorta.lock"
"""Never removed: a process that had it open would lock a file that nobody else sees."""
_HELD = b"run "
"""How a lock file begins that a run has held."""
_LONGEST_HOLDER = 1000
_STAYS = (HISTORY_DIR, "lost+found")
"""In a folder that is on a disk of its own."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of one attempt of one run. `attempt` counts torchrun's restarts from 0."""

    path: Path
    run_id: str
    attempt: int

    def record(self, rank: int) -> Path:
        return self.path / RANK_FILE.format(rank=rank)

    def log(self, rank: int) -> Path:
        return self.path / LOG_DIR / f"rank_{rank}.log"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINT_DIR

    def traces(self, rank: int) -> Path:
        return self.path / TRACE_DIR / f"rank{rank}"


@contextmanager
def occupied(path: Path, topology: Topology, peers: Peers) -> Iterator[RunFolder]:
    """Agree on run id and attempt, and keep other runs out of the folder for the length of a `with` block.

    Every rank holds a shared lock on a file that stays there; rank 0 and the first rank of each other node, whose disk
    may be its own, take it exclusively first. A process that is killed holds no lock.

    Raises:
        ConfigError: on every rank, where another run uses the folder; names its host and process.
        RunIncomplete: on every rank, where one cannot write the folder; names it.
    """
    path = path.absolute()
    earlier, attempt = _earlier_manifest(path), topology.restart_count
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    restarted = attempt > 0 and earlier.get("elastic_run_id") == topology.elastic_run_id
    if restarted and isinstance(earlier.get("run_id"), str):
        run_id = str(earlier["run_id"])
    folder = RunFolder(path, *peers.from_first_rank("run", (run_id, attempt)))
    this_run = _HELD + f"{folder.run_id}, attempt {folder.attempt}, process ".encode()
    first, of_node = peers.is_first, topology.local_rank == 0
    with ExitStack() as stack:
        for turn, is_ours in (("first", first), ("nodes", of_node and not first), ("rest", not of_node)):
            with _turn(path, peers, turn):
                if is_ours:
                    path.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(shared_lock(path / LOCK_FILE))
                    OF_THIS_PROCESS.add(file.fileno())
                    stack.callback(OF_THIS_PROCESS.discard, file.fileno())
                    if of_node and lock_file(file):
                        if not (file.read(len(_HELD)) or _HELD).startswith(_HELD):
                            raise OSError(errno.EINVAL, f"{LOCK_FILE} is no lock of AORTA's; move it away")
                        file.truncate(0)
                        file.write(this_run + f"{topology.pid} on {topology.host}".encode())
                    file.seek(0)
                    holder = file.read(_LONGEST_HOLDER)
                    if not lock_file(file, shared=True) or not holder.startswith(this_run):
                        raise ConfigError(
                            f"{path}: in use by {holder.decode(errors='replace') or 'another run'}; wait for its end, "
                            "stop it, or choose another folder"
                        )
        yield folder


@contextmanager
def _turn(path: Path, peers: Peers, turn: str) -> Iterator[None]:
    """Wait until every rank has left this `with` block; where one failed in it, all raise."""
    error: ConfigError | str | None = None
    try:
        yield
    except ConfigError as refused:
        error = refused
    except OSError as problem:
        error = f"cannot prepare {path}: {problem.strerror or problem}; choose another folder"
    errors = peers.gather(f"folder/{turn}", [isinstance(error, ConfigError), error and str(error)])
    failed = [(kind, f"rank {rank}: {text}") for rank, (kind, text) in zip(peers.ranks, errors, strict=True) if text]
    if failed:
        raise (ConfigError if all(kind for kind, _ in failed) else RunIncomplete)("; ".join(text for _, text in failed))


def prepare(
    folder: RunFolder,
    topology: Topology,
    peers: Peers,
    *,
    overwrite: bool,
    resuming: bool,
    keep: Collection[str] = (),
) -> None:
    """Move an earlier run in the folder to `history/`, or delete it; a resumed run keeps checkpoints and traces.

    One process per node does it, rank 0 first: on a shared disk it moves everything, on local disks each node its own.

    Args:
        keep: names of the caller's folders, which stay in any case.

    Raises:
        RunIncomplete: on every rank, where one cannot write the folder; names it.
    """
    path, first = folder.path, peers.is_first
    overwrite = overwrite and topology.restart_count == 0  # an earlier attempt of this run is not an earlier run
    for turn, is_ours in (("clear first", first), ("clear", topology.local_rank == 0 and not first)):
        with _turn(path, peers, turn):
            if is_ours:
                moved = _clear(path, overwrite=overwrite, stays={*keep, *(RESUMED if resuming else ())})
                if moved is not None and first:
                    to_stderr(f"aorta: the earlier run in {shown_path(path)} is kept in {shown_path(moved)}")


def write_manifest(folder: RunFolder, manifest: dict[str, Any]) -> None:
    write_whole(folder.path / MANIFEST_FILE, json_text(manifest).encode())


def _earlier_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the run that was here before; {} where it cannot be read."""
    try:
        return read_manifest(path)
    except (OSError, ValueError):
        return {}


def _clear(path: Path, *, overwrite: bool, stays: Collection[str]) -> Path | None:
    """Make room for a run; returns where an earlier one went, None where there was none or it was deleted."""
    files = (MANIFEST_FILE, CLOCK_SYNC_FILE, RPC_FILE, STREAMS_FILE)
    names = (*files, LOG_DIR, PROGRESS_DIR, AUTOPSY_DIR, TRACE_DIR, CHECKPOINT_DIR, TENSORBOARD_DIR, WANDB_DIR)
    ours = (path / name for name in names if name not in stays)
    left = [*path.glob(RANK_FILE_GLOB), *(item for item in ours if item.is_file() or _content(item))]
    if not left:
        return None
    if overwrite:
        for item in left:
            for inner in _content(item):
                shutil.rmtree(inner) if inner.is_dir() else inner.unlink(missing_ok=True)
            with suppress(OSError):  # another disk, or what stays in it
                item.rmdir() if item.is_dir() else item.unlink(missing_ok=True)
        return None
    salvage(path)
    earlier = _earlier_manifest(path)
    name = history_name(earlier.get("run_id", "unknown"), earlier.get("attempt", 0))
    target = unused(path / HISTORY_DIR / name)
    moved: list[tuple[Path, Path]] = []
    try:
        for item in left:
            _move(item, target, moved)
    except OSError:
        for source, destination in reversed(moved):  # all of it is moved, or nothing
            with suppress(OSError):
                destination.rename(source)
                destination.parent.rmdir()
        raise
    return target


def _content(item: Path) -> list[Path]:
    """Return what a run left in a folder; nothing for a file."""
    return [inner for inner in item.iterdir() if inner.name not in _STAYS] if item.is_dir() else []


def _move(item: Path, folder: Path, moved: list[tuple[Path, Path]]) -> None:
    """Move a file or a folder into `folder`, and note it. Where a disk of its own is mounted in its place, what is on
    that moves to `history/` there.
    """
    shared_folder(folder)
    try:
        item.rename(folder / item.name)
        moved.append((item, folder / item.name))
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EXDEV) or not item.is_dir():
            raise
        for inner in _content(item):
            _move(inner, item / HISTORY_DIR / folder.name, moved)


@dataclass(frozen=True)
class RequestedConfig:
    """A label (None: the platform's), a configuration (JSON types), and a hash of what changes a measurement."""

    label: str | None
    config: Mapping[str, Any]
    manifest_hash: str


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change a measurement (W18); nothing that looks like a secret."""
    return {
        name: redact(value)
        for name, value in sorted(environment.items())
        if (name in ENVIRONMENT_NAMES or name.startswith(ENVIRONMENT_PREFIXES)) and not SECRET.search(name)
    }


def rank_facts(
    topology: Topology, device: torch.device, device_telemetry: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a rank's part of the manifest. `device_telemetry`: source of its samples, and the device's settings."""
    return {
        "rank": topology.rank,
        "local_rank": topology.local_rank,
        "node_rank": topology.node_rank,
        "host": topology.host,
        "pid": topology.pid,
        "device": device_name(device),
        "environment": recorded_environment(os.environ),
        "collective_library": loaded_library(),
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
        plan: effective settings of the parallel strategy.
    """
    kind = platform_of(device)
    environments = [facts.pop("environment") for facts in ranks]
    libraries = [facts.pop("collective_library") for facts in ranks]

    def differences(values: list[Any]) -> dict[str, Any]:
        return {str(facts["rank"]): value for facts, value in zip(ranks, values, strict=True) if value != values[0]}

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
        "versions": {
            "aorta": __version__,
            "aorta_commit": commit_of(checkout()),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "nccl": nccl_version(),
            **{name: metadata.version(name) for name in ("hydra-core", "omegaconf", "msgspec")},
        },
        "environment": environments[0],
        "environment_differences": differences(environments),
        "collective_library": libraries[0],
        "collective_library_differences": differences(libraries),
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
