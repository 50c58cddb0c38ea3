"""What the files of a run folder are called, which of them are there, and what `run.json` says.

    for path in rank_files(folder):     # rank_0_metrics.jsonl, rank_1_metrics.jsonl, ...
        ...
    read_manifest(folder)["run_id"]

Every other package finds and reads the manifest of a run through this module; what it makes of one that is missing,
damaged or of another run is its own affair. Must not write, or judge whose files these are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from aorta.records.untrusted_files import decode_json, read_small

RANK_FILE: Final = "rank_{rank}_metrics.jsonl"
RANK_FILE_GLOB: Final = "rank_*_metrics.jsonl"
RANK_FILE_NAME: Final = re.compile(r"^rank_(\d+)_metrics\.jsonl$")
MANIFEST_FILE: Final = "run.json"
COPY_OVERLAP_FILE: Final = "copy_overlap.json"
TENSORBOARD_DIR: Final = "tensorboard"
REPORT_EVENTS: Final = ".aorta_report"
"""Ends the names of a report's event files, which the next report may remove; those of a run stay."""
PROMETHEUS_FILE: Final = "aorta_{name}.prom"
WANDB_DIR: Final = "wandb"
"""What loggers leave; the last is W&B's own name."""
AUTOPSY_DIR: Final = "autopsy"
"""What the watchdog saved of ranks that were stuck or died, and the report on it."""
HISTORY_DIR: Final = "history"
"""What earlier runs and attempts left, a folder each."""

_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])


def rank_files(folder: Path) -> list[Path]:
    """The records directly in `folder`, by rank; empty when there are none or the folder cannot be listed."""
    try:
        named = [(RANK_FILE_NAME.match(path.name), path) for path in folder.glob(RANK_FILE_GLOB)]
    except OSError:
        return []
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match and path.is_file())]


def history_name(run_id: object, attempt: object) -> str:
    """The name of the folder in `history/` to which one attempt of a run is moved; a number may follow it."""
    # The content of run.json is not trusted.
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{run_id}-attempt{attempt}")[-128:].lstrip(".")


def in_history(folder: Path, run_id: str, attempt: int) -> list[Path]:
    """Where a later run in `folder` has moved the files of that attempt; empty when they are not there."""
    name = history_name(run_id, attempt)
    try:
        found = sorted((folder / HISTORY_DIR).iterdir())
    except OSError:
        return []
    return [path for path in found if path.name == name or path.name.startswith(f"{name}-")]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Everything that the manifest of a run folder says, as it was written. Its `schema_version` is not looked at.

    Raises:
        OSError: it is not there (FileNotFoundError), or cannot be read.
        ValueError: it is not a JSON object; the message says why.
    """
    return decode_json(read_small(folder / MANIFEST_FILE), _OBJECT)


def flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Leaves of a nested dictionary with dotted keys; lists and empty dictionaries are leaves."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
