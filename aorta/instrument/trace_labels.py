"""Labels collectives in torch.profiler's trace, so that its rows can be matched across ranks (C17).

Gloo's own rows carry no sequence number. While a profiler is on, each collective is issued inside a range
`comm:<kind>#<seq> group=<name>`. Must not cost more than checking one flag otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.autograd import profiler

_T = TypeVar("_T")


def labelled(kind: str, seq: int, group: str, issue: Callable[[], _T]) -> Callable[[], _T]:
    """`issue` unchanged, or wrapped in its label while a profiler is on, which a flag of torch tells."""
    if not profiler._is_profiler_enabled:
        return issue

    def call() -> _T:
        with profiler.record_function(f"comm:{kind}#{seq} group={group}"):
            return issue()

    return call
