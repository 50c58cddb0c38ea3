"""The noise floor of an A/A plan: how far the medians of its launches lie apart.

Must not pool steps of different launches (they are correlated within one), or judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

from aorta.documents.metrics import Unit
from aorta.errors import RunIncomplete
from aorta.experiments.plan import Plan
from aorta.records.files import json_text, write_whole

NOISE_FILE: Final = "noise_floor.json"
NOISE_VERSION: Final = 1
_SHOWN: Final = ("job_step_ms", "overlap_ratio", "exposed_share", "compute_ms", "comm_ms", "exposed_comm_ms", "idle_ms")


def publish(plan: Plan) -> str:
    """Write the noise floor into the plan's folder: of each metric the median of every launch, in the order of the
    launches, and how those medians vary. Returns the metrics one looks at first, as text.

    Raises:
        RunIncomplete: launches are missing, or the file cannot be written. InputError: a run folder cannot be read.
    """
    from aorta.analysis.aggregate import LabelledRun, metrics_of
    from aorta.documents.metrics import in_order, metric_named
    from aorta.read.record import load_run
    from aorta.report.tables import Column, Table, text_column, text_lines

    order = list(plan.order())
    missing = [launch.name for launch in order if not plan.run_folder(launch).is_dir()]
    if missing:
        raise RunIncomplete(f"no noise floor: {', '.join(missing)} missing in {plan.output}")
    launches: list[dict[str, float | None]] = []  # metric -> its median over the rank-steps used
    for folder in map(plan.run_folder, order):
        dataset = LabelledRun(folder.name, load_run(folder))
        fabric = dataset.run.health.emulated_fabric
        of_launch = metrics_of(dataset, by_rank=False) if dataset.used.any() else {}
        launches.append({name: metric.median for name, metric in of_launch.items()})
    sides = [launch.side.name for launch in order]
    metrics = {
        name: variation([medians.get(name) for medians in launches], sides, metric_named(name).unit)
        for name in in_order({name for medians in launches for name in medians})
    }
    floor = {
        "noise_floor_version": NOISE_VERSION,
        "launches": len(order),
        "statistic": "median over the steps of all ranks (job_step_ms: over global steps), warm-up left out",
        "order": [launch.name for launch in order],
        "fabric": fabric,
        "metrics": metrics,
    }
    path = plan.output / NOISE_FILE
    try:
        write_whole(path, json_text(floor).encode())
    except OSError as error:
        raise RunIncomplete(f"{path}: cannot be written: {error.strerror or error}") from error

    def of_metric(key: str, title: str) -> Column:
        return Column(key, title, unit=itemgetter("unit"))

    columns = [
        Column("metric"),
        *(of_metric(key, key) for key in ("median", "sd")),
        Column("relative_sd", "relative sd", unit="ratio"),
        *(of_metric(key, key) for key in ("min", "max")),
        Column("side_difference", "B - A", unit=itemgetter("unit"), signed=True),
        text_column("reason"),
    ]
    rows = [{"metric": name, "unit": "", "reason": "not in the record"} | metrics.get(name, {}) for name in _SHOWN]
    caption = f"noise floor of {len(order)} launches of the same (A/A): medians of launches"
    lines = text_lines(Table("noise", caption, columns, rows))
    if fabric is not None:
        lines.append("EMULATED FABRIC: the noise of communication times is that of the emulation and of this machine")
    return "\n".join([*lines, f"all metrics, and the median of every launch: {path}"])


def variation(medians: Sequence[float | None], sides: Sequence[str], unit: Unit) -> dict[str, Any]:
    """Return how the medians of launches vary, in `unit`; unknown is None, for `reason`.

    Returns:
        `known` counts the launches that have one, `sd` is the sample standard deviation (n - 1), `side_difference` the
        median of the candidate's launches minus that of the reference's: an A/A difference, whose expectation is 0.
        `relative_sd` and `relative_range` are divided by the absolute mean.
    """
    import numpy as np

    known = np.array([value for value in medians if value is not None], np.float64)
    row: dict[str, Any] = {"unit": unit, "launch_medians": list(medians), "known": len(known)}
    row |= dict.fromkeys(("mean", "median", "sd", "min", "max", "range", "side_difference"))
    row |= {"relative_sd": None, "relative_range": None, "reason": None}
    if not len(known):
        return row | {"reason": "unknown in every launch"}
    mean, low, high = float(known.mean()), float(known.min()), float(known.max())
    row |= {"mean": mean, "median": float(np.median(known)), "min": low, "max": high}
    parts = [
        [value for value, side in zip(medians, sides, strict=True) if side == name and value is not None]
        for name in dict.fromkeys(sides)
    ]
    if len(parts) == 2 and all(parts):
        row["side_difference"] = float(np.median(parts[1]) - np.median(parts[0]))
    if len(known) == 1:
        return row | {"reason": "1 launch; a variation needs two"}
    row |= {"sd": float(known.std(ddof=1)), "range": high - low}
    if not mean:
        return row | {"reason": "the mean is 0"}
    return row | {"relative_sd": row["sd"] / abs(mean), "relative_range": row["range"] / abs(mean)}
