"""Reads what holds for a run as a whole: its manifest (`run.json`), the headers and footers of its records, and how far
its collectives were covered.

    manifest, why_not = manifest_of(folder, run_id)
    config_of(manifest).get("parallel")

Must not: fail a report because the manifest is missing, or use one of another run.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from aorta.analysis.frames import NO_TIME, Collectives, Steps
from aorta.analysis.run import COMPLETED, CoverageFacts, Source
from aorta.autopsy.processes import process_facts
from aorta.records.clocks import boot_id
from aorta.records.run_files import MANIFEST_FILE, read_manifest
from aorta.records.schema import SCHEMA_VERSION, Footer, Header, chosen_python

FORMAT: Final = "aorta"
"""`Source.format` of AORTA's own records."""
KILLED: Final = "killed (no footer)"
RUNNING: Final = "still running"
Manifest: TypeAlias = Mapping[str, object]


def manifest_of(folder: Path, run_id: str) -> tuple[Manifest | None, str | None]:
    """Return the manifest that belongs to some records.

    Args:
        folder: where they are.
        run_id: the run that they agree on.

    Returns:
        It and None, or None and why it was not used.
    """
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return None, f"there is no {MANIFEST_FILE}: only what the headers say is known"
    except OSError as error:
        return None, f"{MANIFEST_FILE} cannot be read ({error.strerror or error}): only what the headers say is known"
    except ValueError as error:
        return None, f"{MANIFEST_FILE} is not a JSON object ({error}): only what the headers say is known"
    if manifest.get("run_id") != run_id:
        return None, (
            f"{MANIFEST_FILE} belongs to run {manifest.get('run_id')!r}, the records to {run_id!r}: it is not used"
        )
    if manifest.get("schema_version") != SCHEMA_VERSION:
        return None, (
            f"{MANIFEST_FILE} has schema version {manifest.get('schema_version')!r}, this AORTA reads "
            f"{SCHEMA_VERSION}: it is not used"
        )
    return manifest, None


def config_of(manifest: Manifest | None) -> Mapping[str, object]:
    """Return the resolved configuration, nested as it was written; empty without a manifest."""
    config = manifest.get("config") if manifest is not None else None
    return config if isinstance(config, dict) else {}


def interceptor(manifest: Manifest | None) -> str | None:
    """Return what timed the collectives of a run on its ranks: `native`, `python`, both joined by `, ` where ranks
    differ; None where the manifest does not say.
    """
    stated = [rank.get("interceptor") for rank in _topology(manifest)]
    return ", ".join(sorted({each.partition(":")[0] for each in stated if isinstance(each, str)})) or None


def collective_library(manifest: Manifest | None) -> str | None:
    """Return version and SHA-256 of the file from which NCCL's or RCCL's functions come, its path where there is no
    SHA-256, and ranks that have another; None where the manifest states none.
    """
    found = (manifest or {}).get("collective_library")
    if not isinstance(found, dict):
        return None
    digest, others = found.get("sha256"), (manifest or {}).get("collective_library_differences")
    build = f"sha256 {digest[:12]}" if isinstance(digest, str) else found.get("path")
    ranks = f", another on rank {', '.join(others)}" if isinstance(others, dict) and others else ""
    return f"{found.get('version')} ({build}){ranks}"


def timed_from_python(manifest: Manifest | None, platform: str | None) -> str | None:
    """Return why collectives were timed from Python on some rank, as the manifest says; None where they were not, and
    on a CPU where the configuration asked for it.
    """
    stated = [rank.get("interceptor") for rank in _topology(manifest)]
    reasons = [
        each.partition(":")[2].strip() for each in stated if isinstance(each, str) and each.startswith("python:")
    ]
    if platform == "cpu":
        reasons = [why for why in reasons if not chosen_python(why)]
    return reasons[0] if reasons else None


def _topology(manifest: Manifest | None) -> list[Mapping[str, object]]:
    """Return what the manifest says of each rank."""
    topology = manifest.get("topology") if manifest is not None else None
    return [rank for rank in topology if isinstance(rank, dict)] if isinstance(topology, list) else []


def emulated_fabric(manifest: Manifest | None) -> Mapping[str, object] | None:
    """Return the `fabric` node if it delays collectives on purpose, else None. Times of such a run describe no real
    hardware.
    """
    fabric = config_of(manifest).get("fabric")
    if not isinstance(fabric, dict) or fabric.get("kind") in (None, "none"):
        return None
    return fabric


def source_of(path: Path, header: Header, footer: Footer | None) -> Source:
    """Describe where the record of one rank comes from, by its first and last line."""
    shared = {name: getattr(header, name) for name in header.__struct_fields__ if name in Source.__dataclass_fields__}
    groups = {} if footer is None else footer.groups
    ending = RUNNING if footer is None and _is_running(header) else _ending(footer)
    return Source(path=str(path), format=FORMAT, groups=groups, ending=ending, **shared)


def _is_running(header: Header) -> bool:
    """Return whether the process that writes a record is alive: on this host since its boot, and not a later one with
    the same pid. Of another host or pid namespace that is not known.
    """
    facts = process_facts(header.pid)
    if facts is None or header.boot_id != boot_id() or header.host != socket.gethostname():
        return False
    started_ns = facts.start_ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return facts.state not in "ZX" and started_ns <= header.clock.boottime_ns


def _ending(footer: Footer | None) -> str:
    match footer:
        case None:
            return KILLED
        case Footer(reason="signal"):
            return f"stopped by {footer.signal or 'a signal'}, exit code {footer.exit_code}"
        case Footer(reason="error", exit_code=0):
            return f"recorded in part: {footer.error or 'not recorded why'}"
        case Footer(reason="error"):
            return f"ended by an error, exit code {footer.exit_code}: {footer.error or 'not recorded'}"
        case _:
            return COMPLETED


def coverage_facts(steps: Steps, collectives: Collectives, footer: Footer | None) -> CoverageFacts:
    """Summarise coverage. A step of unknown coverage does not count as one in which a collective was missed."""
    reasons, uncovered, first = Counter[str](), 0, None
    for code, coverage in enumerate(steps.coverages):
        missed = coverage.issued is not None and coverage.seen != coverage.issued
        if coverage.complete and not missed:
            continue
        at = np.flatnonzero(steps.coverage == code)
        if not len(at):
            continue
        if not coverage.complete:
            uncovered += len(at)
            reasons[coverage.reason or f"{coverage.seen} collectives seen, {coverage.issued} issued"] += len(at)
        if missed:
            step = int(steps.global_step[at[0]])
            first = step if first is None else min(first, step)
    used = steps.used[collectives.step] & (collectives.end_ns != NO_TIME)
    found = Counter[str | None]()
    counts = np.bincount(collectives.name[used], minlength=len(collectives.names)).tolist()
    for name, count in zip(collectives.names, counts, strict=True):
        if count:
            found[name.end_source] += count
    times = [(steps.coverages[code], count) for code, count in enumerate(np.bincount(steps.coverage).tolist())]
    outside = sum(coverage.outside * count for coverage, count in times)
    outside += 0 if footer is None else footer.outside
    seen = sum(coverage.seen * count for coverage, count in times)
    unwatched = sum(coverage.unwatched * count for coverage, count in times) / max(seen, 1)
    return CoverageFacts(dict(found), uncovered, dict(reasons), first, outside, unwatched)
