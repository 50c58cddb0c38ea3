"""Launch sets on disk, whose medians are known because they were written down, and metrics as a comparison has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from aorta.documents.comparison import ComparedMetric
from aorta.documents.dataset import Statistics
from tests.analysis.builders import header, metrics, partial, step, write_manifest, write_rank

CONFIG = {"workload": {"name": "ranking", "model_dim": 64}, "training": {"mixed_precision": "none"}}
COMM_MS = 10.0
WOBBLE = (-1, 0, 1, 0, -1, 1, 0)
"""Thousandths by which the steps of a launch differ: the median step is the one asked for."""


def launch(
    folder: Path,
    ratio: float,
    step_ms: float = 100.0,
    *,
    config: dict[str, Any] | None = None,
    endings: Sequence[Any] | None = None,
    manifest: bool = True,
    began_s: float = 0.0,
    wobble: Sequence[int] = WOBBLE,
    **head: Any,
) -> Path:
    """One launch of seven steps, the first a warm-up, whose medians are `ratio` and `step_ms`. It lasts about seven
    seconds, from `began_s` after the others on. Its steps differ by thousandths from that, as `wobble` says.
    """
    folder.mkdir(parents=True)
    run_id = head.pop("run_id", f"{folder.parent.name}-{folder.name}")
    for rank in range(2):
        lines = []
        for number, thousandths in enumerate(wobble):
            part = 1 + thousandths / 1000
            overlap = metrics(step_ms * part, 0.8 * step_ms, COMM_MS, COMM_MS * ratio * part)
            line = step(rank, 2, number, overlap=overlap, warmup=number == 0)
            shift_ns = round(began_s * 1e9)
            times = {"t_start_ns": line.t_start_ns + shift_ns, "t_end_ns": line.t_end_ns + shift_ns}
            lines.append(msgspec.structs.replace(line, **times))
        foot = "completed" if endings is None else endings[rank]
        write_rank(folder, header(rank, 2, run_id=run_id, **{"warmup_steps": 1} | head), lines, foot)
    if manifest:
        write_manifest(folder, CONFIG if config is None else config, run_id=run_id, world_size=2)
    return folder


def launch_set(
    folder: Path,
    ratios: Sequence[float],
    steps_ms: Sequence[float] | None = None,
    began_s: Sequence[float] | None = None,
    **words: Any,
) -> Path:
    """Launches `00`, `01`, ... in `folder`; all at the same time unless `began_s` says when each began."""
    times = steps_ms or [100.0 + 0.1 * number for number in range(len(ratios))]
    begun = began_s or [0.0] * len(ratios)
    for number, (ratio, step_ms, at) in enumerate(zip(ratios, times, begun, strict=True)):
        launch(folder / f"{number:02}", ratio, step_ms, began_s=at, **words)
    return folder


def metric(
    reference: float | None, candidate: float | None, unit: str = "ms", launches: tuple[int, int] = (4, 4), **more: Any
) -> ComparedMetric:
    """A metric of a comparison, of which less is better."""
    known = reference is not None and candidate is not None
    told: dict[str, Any] = {
        "reference": partial(Statistics, value=reference, count=launches[0]),
        "candidate": partial(Statistics, value=candidate, count=launches[1]),
        "difference": candidate - reference if known else None,
        "quotient": candidate / reference if known and reference else None,
        "judgement": "worse",
    }
    return partial(ComparedMetric, unit=unit, better="lower", **told | more)
