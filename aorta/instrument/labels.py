"""A collective's name in torch.profiler's trace, so that its rows can be matched across ranks (C17).

Gloo's own rows carry no sequence number. Enters: one collective and the call that issues it. Leaves: the same call,
inside `comm:<kind>#<seq> group=<name>` while a profiler is on. Must not: cost more than a look at one flag otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.autograd import profiler

_T = TypeVar("_T")


def labelled(kind: str, seq: int, group: str, issue: Callable[[], _T]) -> Callable[[], _T]:
    """`issue` as it is, or inside its label. torch sets the flag while any of its profilers is on."""
    if not profiler._is_profiler_enabled:
        return issue

    def call() -> _T:
        with profiler.record_function(f"comm:{kind}#{seq} group={group}"):
            return issue()

    return call
