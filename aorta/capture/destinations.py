"""Where each kind of file is uploaded, and what it is called there. Must not: upload (that is `upload`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from aorta.capture.naming import compressed
from aorta.capture.upload import Remote
from aorta.config.templates import fill


class Destination:
    """One place, and the template of names there.

    Args:
        root: `profiling.remote_root`; not needed where the template is a whole address.
        template: of names. known: variables known before the run.

    Raises:
        ConfigError: the place cannot be used.
    """

    def __init__(self, root: str | None, template: str, known: Mapping[str, Any], *, overwrite: bool) -> None:
        if "://" in template:
            begin, brace, rest = fill(template, known).partition("{")
            root, _, name = begin.rpartition("/")
            template = name + brace + rest
        assert root  # `destination` makes none without
        self.remote, self._template = Remote(root, overwrite=overwrite), template

    def name(self, values: Mapping[str, Any], file: PurePosixPath, compression: str) -> str:
        """What a file is called there.

        Args:
            values: what file templates know. file: its path below the trace folder, compression included.
        """
        wanted = PurePosixPath(fill(self._template, {**values, "file": str(file)}).lstrip("/"))
        return str(compressed(wanted, compression))

    def put(self, path: Path, name: str) -> str:
        """Upload; see `Remote.put`."""
        return self.remote.put(path, name)


def destination(
    root: str | None, template: str | None, known: Mapping[str, Any], *, overwrite: bool
) -> Destination | None:
    """The destination asked for; None where nothing is to be uploaded.

    Raises:
        ConfigError: the place cannot be used.
    """
    if template is None or not (root or "://" in template):
        return None
    return Destination(root, template, known, overwrite=overwrite)
