"""Files that appear under their names only when they are complete.

    with whole_file(folder / "run.json") as part:
        part.write_bytes(text)

Must not keep a part of a file, or touch the file that was there before, where writing fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, with the same suffixes, whose file takes that name when the block ends without an
    error.
    """
    part = path.with_name(f".part.{os.getpid()}.{path.name}")
    try:
        yield part
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
