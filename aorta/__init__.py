"""AORTA: how well communication hides behind computation in distributed PyTorch training.

    import aorta
    with aorta.record("artifacts/mine", model=model) as recording:  # around any training loop
        ...
    with aorta.Profiler("traces", 50, 5, 3, dist_context=None) as profiler:  # windows of torch.profiler around it
        ...

Importing this package imports nothing else: the run half needs torch, the analysis half needs pandas, and
neither should pay for the other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from aorta.version import __version__

if TYPE_CHECKING:
    from aorta.loggers import Logger
    from aorta.recording.api import record, start
    from aorta.recording.open_recording import Recording
    from aorta.recording.profilers import Profiler, TorchProfiler

__all__ = ["Logger", "Profiler", "Recording", "TorchProfiler", "__version__", "record", "start"]


def __getattr__(name: str) -> object:
    """Return the public names, loaded when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    profilers = dict.fromkeys(("Profiler", "TorchProfiler"), "aorta.recording.profilers")
    module = {"Logger": "aorta.loggers", **profilers}.get(name, "aorta.recording.api")
    return getattr(import_module(module), name)
