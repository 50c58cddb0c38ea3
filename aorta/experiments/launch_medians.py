"""The median of each metric of one launch; and the noise floor of an A/A plan: how far those of launches lie apart.

Must not pool steps of different launches (they are correlated within one), judge, or import pandas before it is asked:
a sweep starts without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from aorta.analysis.metrics import Unit
from aorta.errors import RunIncomplete
from aorta.experiments.launch_plan import Plan
from aorta.records.files import write_whole

if TYPE_CHECKING:
    from aorta.analysis.load.engines import Engine

NOISE_FILE: Final = "noise_floor.json"
NOISE_VERSION: Final = 1
_SHOWN: Final = ("job_step_ms", "overlap_ratio", "exposed_share", "compute_ms", "comm_ms", "exposed_comm_ms", "idle_ms")


def medians_of(
    folder: Path, engine: Engine | None = None
) -> tuple[dict[str, float | None], Mapping[str, object] | None]:
    """Read one launch.

    Args:
        engine: where files are read; by default on this machine's cores.

    Returns:
        The median of each metric over the rank-steps used, None where it is unknown; and what the emulated network was.

    Raises:
        InputError: it cannot be read.
    """
    from aorta.analysis.aggregate import LabelledRun, step_entry
    from aorta.analysis.load.records import load_run

    dataset = LabelledRun(folder.name, load_run(folder, engine))
    entry = step_entry(dataset)
    found = {name: metric.median for name, metric in entry.metrics.items()} if entry.count else {}
    return found, dataset.run.health.fabric


class MetricNoise(msgspec.Struct, frozen=True):
    """How the medians of launches vary, in `unit`; unknown is None, for `reason`.

    Attributes:
        launch_medians: one per launch, in their order.
        known: how many of them there are.
        sd: the sample standard deviation (n - 1).
        side_difference: median of the candidate's launches minus that of the reference's: an A/A difference, whose
            expectation is 0.
        relative_sd, relative_range: divided by the absolute mean.
    """

    unit: Unit
    launch_medians: list[float | None]
    known: int
    mean: float | None = None
    median: float | None = None
    sd: float | None = None
    min: float | None = None
    max: float | None = None
    range: float | None = None
    side_difference: float | None = None
    relative_sd: float | None = None
    relative_range: float | None = None
    reason: str | None = None


class NoiseFloor(msgspec.Struct, frozen=True):
    """The content of `noise_floor.json`. `order` names the launches as they were made."""

    noise_floor_version: int
    launches: int
    statistic: str
    order: list[str]
    fabric: Mapping[str, object] | None
    metrics: dict[str, MetricNoise]


def noise_floor(plan: Plan) -> NoiseFloor:
    """Return, of each metric, the median of every launch, in the order of the launches, and how those medians vary.

    Raises:
        RunIncomplete: launches are missing. InputError: a run folder cannot be read.
    """
    from aorta.analysis.metrics import in_order, metric_named

    order = list(plan.order())
    missing = [one.name for one in order if not plan.run_folder(one).is_dir()]
    if missing:
        raise RunIncomplete(f"no noise floor: {', '.join(missing)} missing in {plan.output}")
    found = [medians_of(plan.run_folder(one)) for one in order]
    sides = [one.side.name for one in order]
    names = in_order({name for medians, _ in found for name in medians})
    return NoiseFloor(
        NOISE_VERSION,
        len(order),
        "median over the steps of all ranks (job_step_ms: over global steps), warm-up left out",
        [one.name for one in order],
        found[-1][1],
        {
            name: variation([medians.get(name) for medians, _ in found], sides, metric_named(name).unit)
            for name in names
        },
    )


def variation(medians: Sequence[float | None], sides: Sequence[str], unit: Unit) -> MetricNoise:
    """Return how the medians of launches vary."""
    import numpy as np

    known = np.array([value for value in medians if value is not None], np.float64)
    if not len(known):
        return MetricNoise(unit, list(medians), 0, reason="unknown in every launch")
    mean, low, high = float(known.mean()), float(known.min()), float(known.max())
    enough = len(known) > 1
    sd = float(known.std(ddof=1)) if enough else None
    relative = enough and mean != 0
    parts = [
        [value for value, side in zip(medians, sides, strict=True) if side == name and value is not None]
        for name in dict.fromkeys(sides)
    ]
    both = len(parts) == 2 and all(parts)
    return MetricNoise(
        unit,
        list(medians),
        len(known),
        mean=mean,
        median=float(np.median(known)),
        sd=sd,
        min=low,
        max=high,
        range=high - low if enough else None,
        side_difference=float(np.median(parts[1]) - np.median(parts[0])) if both else None,
        relative_sd=sd / abs(mean) if relative and sd is not None else None,
        relative_range=(high - low) / abs(mean) if relative else None,
        reason=None if relative else "the mean is 0" if enough else "1 launch; a variation needs two",
    )


def publish(plan: Plan) -> str:
    """Write the noise floor into the plan's folder; returns the text for people.

    Raises:
        RunIncomplete: launches are missing, or the file cannot be written. InputError: a run folder cannot be read.
    """
    floor = noise_floor(plan)
    path = plan.output / NOISE_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(msgspec.to_builtins(floor), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise RunIncomplete(f"{path}: cannot be written: {error.strerror or error}") from error
    return noise_table(floor, path)


def noise_table(floor: NoiseFloor, path: Path) -> str:
    """Return the metrics one looks at first; the file has them all."""
    lines = [
        f"noise floor of {floor.launches} launches of the same (A/A): medians of launches",
        f"{'':20}{'median':>11}{'sd':>11}{'relative sd':>13}{'min':>11}{'max':>11}{'B - A':>11}",
    ]
    for name in _SHOWN:
        row = floor.metrics.get(name)
        if row is None or not row.known:
            lines.append(f"{name:20}{'-':>11}  {row.reason if row else 'not in the record'}")
            continue
        relative = "-" if row.relative_sd is None else f"{row.relative_sd:.2%}"
        middle = "".join(f"{_number(value):>11}" for value in (row.median, row.sd))
        ends = "".join(f"{_number(value):>11}" for value in (row.min, row.max, row.side_difference))
        lines.append(f"{name:20}{middle}{relative:>13}{ends}")
    if floor.fabric is not None:
        lines.append("EMULATED FABRIC: the noise of communication times is that of the emulation and of this machine")
    lines.append(f"all metrics, and the median of every launch: {path}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
