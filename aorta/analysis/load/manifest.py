"""What a report takes from the manifest of a run (`run.json`).

    manifest, why_not = manifest_of(folder, run_id)
    config_of(manifest).get("parallel")

Must not fail a report because the manifest is missing, nor use one that belongs to another run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from aorta.records.run_files import MANIFEST_FILE, read_manifest
from aorta.records.schema import READABLE_VERSIONS

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


def timed_from_python(manifest: Manifest | None) -> str | None:
    """Why collectives were timed from Python on some rank, as the manifest says; None where they were not."""
    topology = manifest.get("topology") if manifest is not None else None
    told = (
        [rank.get("interceptor") for rank in topology if isinstance(rank, dict)] if isinstance(topology, list) else []
    )
    reasons = [each.partition(":")[2].strip() for each in told if isinstance(each, str) and each.startswith("python:")]
    return reasons[0] if reasons else None


def emulated_fabric(manifest: Manifest | None) -> Mapping[str, object] | None:
    """The `fabric` node if it delays collectives on purpose, else None. Times of such a run describe
    no real hardware.
    """
    fabric = config_of(manifest).get("fabric")
    if not isinstance(fabric, dict) or fabric.get("kind") in (None, "none"):
        return None
    return fabric


def flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Leaves of a nested dictionary with dotted keys; lists and empty dictionaries are leaves."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
