"""What plans and sweeps keep to when one is taken up again: only the same request goes on, and nothing is overwritten.

Must not touch the disk beyond asking what is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aorta.analysis.load.manifest import flatten


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING: Final = _Nothing()


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Where two requests differ, a line per key with both values, as in `  words: ['a=2'] there, nothing now`.

    Args:
        there: as it was read from a file.
        now: JSON values.
    """
    before, after = dict(flatten(there)), dict(flatten(json.loads(json.dumps(now))))
    values = {key: (before.get(key, _NOTHING), after.get(key, _NOTHING)) for key in [*before, *after]}
    return "\n".join(f"  {key}: {old!r} there, {new!r} now" for key, (old, new) in values.items() if old != new)


def unused(path: Path) -> Path:
    """`path`, or the first of `path-2`, `path-3`, ... where nothing is yet."""
    free, copies = path, 1
    while free.exists():
        copies += 1
        free = path.with_name(f"{path.name}-{copies}")
    return free
