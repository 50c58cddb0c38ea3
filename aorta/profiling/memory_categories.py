"""Divides the memory of a profiled window into parameters, gradients, optimizer state, activations and the rest.

torch infers the category of each tensor from the window itself: which tensors modules and optimizers hold, what a
backward pass reads and writes. It needs shapes, stacks and allocations, and at least one whole step. Must not be called
on the training thread: it reads every event of the window in Python.
"""

from __future__ import annotations

from typing import Any

NAMES = {
    "PARAMETER": "parameters",
    "GRADIENT": "gradients",
    "OPTIMIZER_STATE": "optimizer state",
    "ACTIVATION": "activations",
    "INPUT": "inputs",
    "TEMPORARY": "temporary",
    "AUTOGRAD_DETAIL": "autograd's own",
    None: "unknown",
}
"""torch's category -> what pages call it, in the order in which they are stacked."""


def by_category(results: Any) -> dict[str, dict[str, Any]]:
    """Device (`cpu`, `cuda:0`) -> `times_us`, and `bytes`: category -> bytes allocated at each of these times.

    Args:
        results: of Kineto, of one window.

    Raises:
        Exception: this torch does not offer it, or cannot make it of this window.
    """
    from torch.profiler import _memory_profiler as of_torch

    timeline = of_torch.MemoryProfileTimeline(of_torch.MemoryProfile(results))
    # Column 0 of each row is torch's own, for stacking.
    columns = {index + 1: category for category, index in of_torch._CATEGORY_TO_INDEX.items()}
    found: dict[str, dict[str, Any]] = {}
    for device in sorted({str(key.device) for _, _, (key, _), _ in timeline.timeline}):
        times, rows = timeline._coalesce_timeline(device)  # type: ignore[no-untyped-call]
        sizes = {
            NAMES[category and category.name]: [row[column] for row in rows] for column, category in columns.items()
        }
        found[device] = {"times_us": times, "bytes": {name: sizes[name] for name in NAMES.values()}}
    return found
