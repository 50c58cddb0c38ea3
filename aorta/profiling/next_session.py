"""Acts before torch begins another profiler session in this process, whoever begins it.

    forget = before_next_session(act)  # `act()` runs once, on the thread that begins the session
    forget()                           # unless it has run: not any more

Kineto has one conversion of CUPTI's time stamps for the whole process, and a session that is configured replaces it
(`get_time_converter` in libkineto). In a trace that is written afterwards, kernels have time 0 or one that is off: seen
with torch 2.11 on an H200.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler as torch_profiler

_PREPARE = "_prepare_profiler"
"""The function by which every profiler of torch begins. Private: with a torch that does not have it, nothing acts."""
_acts: list[Callable[[], None]] = []
_lock = threading.Lock()
_original: Callable[..., Any] | None = None


def before_next_session(act: Callable[[], None]) -> Callable[[], None]:
    """Run `act` when the next session is about to begin; the result forgets it, from any thread."""
    global _original
    with _lock:
        if not _acts:
            _original = getattr(torch_profiler, _PREPARE, None)
            if _original is not None:
                setattr(torch_profiler, _PREPARE, _begin)
        _acts.append(act)

    def forget() -> None:
        with _lock:
            if act in _acts:
                _acts.remove(act)
                if not _acts:
                    _leave()

    return forget


def _begin(*words: Any, **named: Any) -> Any:
    with _lock:
        acts, begin = list(_acts), _original
        _acts.clear()
        _leave()
    for act in acts:
        act()
    # A thread that forgot the last act meanwhile has restored torch's own.
    return (begin or getattr(torch_profiler, _PREPARE))(*words, **named)


def _leave() -> None:
    """Leave torch as it was."""
    global _original
    if _original is not None:
        setattr(torch_profiler, _PREPARE, _original)
        _original = None
