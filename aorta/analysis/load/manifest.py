"""Reads the manifest of a run (`run.json`), or says why there is none.

Takes a run folder and the run id that its records agree on; gives plain JSON values. Must not: fail a report because
the manifest is missing, or use one that belongs to another run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from aorta.telemetry.schema import MANIFEST_FILE, SCHEMA_VERSION

Manifest: TypeAlias = Mapping[str, object]


def read_manifest(folder: Path, run_id: str) -> tuple[Manifest | None, str | None]:
    """The manifest and None, or None and the reason why it was not used."""
    path = folder / MANIFEST_FILE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        return None, f"there is no {MANIFEST_FILE}: only what the headers say is known"
    except OSError as error:
        return None, f"{MANIFEST_FILE} cannot be read ({error.strerror or error}): only what the headers say is known"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
    """The resolved configuration, nested as it was written; empty without a manifest."""
    config = manifest.get("config") if manifest is not None else None
    return config if isinstance(config, dict) else {}


def host_tap(manifest: Manifest | None) -> str | None:
    """What timed the collectives on the ranks of a run: `native`, `python`, or both joined by `, ` where ranks differ;
    None where the manifest does not say (an older run).
    """
    ranks = manifest.get("topology") if manifest is not None else None
    told = [rank.get("host_tap") for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    return ", ".join(sorted({tap.partition(":")[0] for tap in told if isinstance(tap, str)})) or None


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
