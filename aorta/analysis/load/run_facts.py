"""Read what holds for a run as a whole: its manifest (`run.json`), the headers and footers of its records, and how far
its collectives were covered.

    manifest, why_not = manifest_of(folder, run_id)
    config_of(manifest).get("parallel")

Must not fail a report because the manifest is missing, nor use one that belongs to another run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from aorta.analysis.tables import COMPLETED, NO_TIME, Collectives, CoverageFacts, Source, Steps
from aorta.records.run_files import MANIFEST_FILE, read_manifest
from aorta.records.schema import READABLE_VERSIONS, Footer, Header, chosen_python

FORMAT: Final = "aorta"
"""`Source.format` of AORTA's own records."""
KILLED: Final = "killed (no footer)"
Manifest: TypeAlias = Mapping[str, object]


def manifest_of(folder: Path, run_id: str) -> tuple[Manifest | None, str | None]:
    """The manifest that belongs to some records.

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
    if manifest.get("schema_version") not in READABLE_VERSIONS:
        return None, (
            f"{MANIFEST_FILE} has schema version {manifest.get('schema_version')!r}, this AORTA reads "
            f"{' and '.join(map(str, READABLE_VERSIONS))}: it is not used"
        )
    return manifest, None


def config_of(manifest: Manifest | None) -> Mapping[str, object]:
    """The resolved configuration, nested as it was written; empty without a manifest."""
    config = manifest.get("config") if manifest is not None else None
    return config if isinstance(config, dict) else {}


def interceptor(manifest: Manifest | None) -> str | None:
    """What timed the collectives of a run on its ranks: `native`, `python`, both joined by `, ` where ranks
    differ; None where the manifest does not say (an older run). In schema 1 the key was `host_tap`.
    """
    topology = manifest.get("topology") if manifest is not None else None
    ranks = topology if isinstance(topology, list) else []
    told = [rank.get("interceptor", rank.get("host_tap")) for rank in ranks if isinstance(rank, dict)]
    return ", ".join(sorted({each.partition(":")[0] for each in told if isinstance(each, str)})) or None


def timed_from_python(manifest: Manifest | None, platform: str | None) -> str | None:
    """Why collectives were timed from Python on some rank, as the manifest says; None where they were not, and on a CPU
    where the configuration asked for it.
    """
    topology = manifest.get("topology") if manifest is not None else None
    told = (
        [rank.get("interceptor") for rank in topology if isinstance(rank, dict)] if isinstance(topology, list) else []
    )
    reasons = [each.partition(":")[2].strip() for each in told if isinstance(each, str) and each.startswith("python:")]
    if platform == "cpu":
        reasons = [why for why in reasons if not chosen_python(why)]
    return reasons[0] if reasons else None


def emulated_fabric(manifest: Manifest | None) -> Mapping[str, object] | None:
    """The `fabric` node if it delays collectives on purpose, else None. Times of such a run describe
    no real hardware.
    """
    fabric = config_of(manifest).get("fabric")
    if not isinstance(fabric, dict) or fabric.get("kind") in (None, "none"):
        return None
    return fabric


def source_of(path: Path, header: Header, footer: Footer | None) -> Source:
    """Describe where the record of one rank comes from, by its first and last line."""
    return Source(
        path=str(path),
        format=FORMAT,
        rank=header.rank,
        world_size=header.world_size,
        lanes=header.lanes,
        timer=header.timer,
        instrument_mode=header.instrument_mode,
        groups={} if footer is None else footer.groups,
        host=header.host,
        platform=header.platform,
        device=header.device,
        backend=header.backend,
        parallel=header.parallel,
        run_id=header.run_id,
        label=header.label,
        attempt=header.attempt,
        local_rank=header.local_rank,
        node_rank=header.node_rank,
        start_step=header.start_step,
        warmup_steps=header.warmup_steps,
        manifest_hash=header.manifest_hash,
        device_telemetry=header.device_telemetry,
        stall_cutoff=header.stall_cutoff,
        ending=_ending(footer),
    )


def _ending(footer: Footer | None) -> str:
    match footer:
        case None:
            return KILLED
        case Footer(reason="signal"):
            return f"stopped by {footer.signal or 'a signal'}, exit code {footer.exit_code}"
        case Footer(reason="error"):
            return f"ended by an error, exit code {footer.exit_code}: {footer.error or 'not recorded'}"
        case _:
            return COMPLETED


def coverage_facts(steps: Steps, collectives: Collectives) -> CoverageFacts:
    """Summarise coverage. A step of unknown coverage does not count as one in which a collective was missed."""
    reasons, uncovered, first = Counter[str](), 0, None
    assert steps.coverage is not None
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
    used = np.repeat(steps.used, steps.row_counts) & (collectives.end_ns != NO_TIME)
    found = Counter[str | None]()
    counts = np.bincount(collectives.name[used], minlength=len(collectives.names)).tolist()
    for name, count in zip(collectives.names, counts, strict=True):
        if count:
            found[name.end_source] += count
    return CoverageFacts(dict(found), uncovered, dict(reasons), first)
