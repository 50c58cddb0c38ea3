"""Events of traces as rows that can be taken away, renamed, moved or added, whatever format they are of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

KERNEL, COPY, CALL, OPERATOR, MARK, OTHER = "kernel", "copy", "call", "operator", "mark", "other"


STEP: Final = re.compile(r"(ProfilerStep#|iteration#|aorta\.step=|step[= ])\d+$")


Json = dict[str, Any]


@dataclass
class Row:
    """An event: what it is, and what all formats say of it. Times are in ns of the trace."""

    what: str
    name: str
    start_ns: int
    end_ns: int
    device: Any = None
    stream: Any = None
    link: Any = None
    category: str | None = None
    args: Json = field(default_factory=dict)
    raw: Any = None

    @property
    def communicates(self) -> bool:
        return self.what in (KERNEL, OPERATOR) and COMMUNICATES.match(self.name) is not None


COMMUNICATES: Final = re.compile(
    r".*(nccl(Symk)?(Dev)?Kernel|rcclGenericKernel|msccl|cross_device_reduce|multimem_all|nvshmem)|gloo:", re.IGNORECASE
)
"""What a device, or gloo, ran of a collective."""


ISSUES: Final = re.compile(r"c10d::|_c10d_functional::|record_param_comms|nccl:|nccl[A-Z]")


@dataclass
class File:
    """One trace. `facts`: what it says of its process: `rank`, `world_size`, `host`, `clock`, `process`; None is left
    out.
    """

    path: Path
    format: str
    rows: list[Row]
    facts: Json
    rest: Any = None

    def changed(self, rows: Iterable[Row] | None = None, **facts: Any) -> File:
        return replace(self, rows=[*self.rows] if rows is None else [*rows], facts={**self.facts, **facts})
