"""Destinations of uploads: where each kind of file goes, and its name there.

Must not upload (that is `upload`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from aorta.config.templates import fill
from aorta.profiling.trace_names import compressed
from aorta.profiling.upload import Remote


class Destination:
    """One upload destination, and the template of names there.

    Args:
        root: `profiling.remote_root`; not needed where the template is a full address.
        template: of names.
        known: variables known before the run.

    Raises:
        ConfigError: the destination cannot be used.
    """

    def __init__(self, root: str | None, template: str, known: Mapping[str, Any], *, overwrite: bool) -> None:
        if "://" in template:
            begin, brace, rest = fill(template, known).partition("{")
            root, _, name = begin.rpartition("/")
            template = name + brace + rest
        assert root  # `destination` creates none without
        self.remote, self._template = Remote(root, overwrite=overwrite), template

    def name(self, values: Mapping[str, Any], file: PurePosixPath, compression: str) -> str:
        """Name of a file at the destination.

        Args:
            values: variables of file templates.
            file: its path below the trace folder, compression included.
        """
        wanted = PurePosixPath(fill(self._template, {**values, "file": str(file)}).lstrip("/"))
        return str(compressed(wanted, compression))

    def holds(self, path: Path, name: str) -> bool:
        """Whether a copy is there that may replace this file; see `Remote.holds`."""
        return self.remote.holds(path, name)

    def put(self, path: Path, name: str) -> str:
        """Upload; see `Remote.put`."""
        return self.remote.put(path, name)


def destination(
    root: str | None, template: str | None, known: Mapping[str, Any], *, overwrite: bool
) -> Destination | None:
    """The configured destination; None where nothing is to be uploaded.

    Raises:
        ConfigError: the destination cannot be used.
    """
    if template is None or not (root or "://" in template):
        return None
    return Destination(root, template, known, overwrite=overwrite)
