"""The noise floor, from an A/A plan: how far launches of one and the same thing lie apart, metric by metric.

Must not pool steps of different launches (they are correlated within one), or judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from aorta.errors import RunIncomplete
from aorta.experiments.launch_plan import Plan
from aorta.records.whole_files import whole_file

NOISE_FILE: Final = "noise_floor.json"
NOISE_VERSION: Final = 1
_SHOWN: Final = ("job_step_ms", "overlap_ratio", "exposed_share", "compute_ms", "comm_ms", "exposed_comm_ms", "idle_ms")


def noise_floor(plan: Plan) -> dict[str, Any]:
    """The content of `noise_floor.json`: of each metric the median of every launch, in the order of the launches, and
    how those medians vary. Unknown is null with a reason.

    Raises:
        RunIncomplete: launches are missing. InputError: a run folder cannot be read.
    """
    from aorta.analysis.aggregate import LabelledRun, step_entry
    from aorta.analysis.load.records import load_run
    from aorta.analysis.metrics import in_order, metric_named

    order = list(plan.order())
    missing = [one.name for one in order if not plan.run_folder(one).is_dir()]
    if missing:
        raise RunIncomplete(f"no noise floor: {', '.join(missing)} missing in {plan.output}")
    entries, fabric = [], None
    for one in order:
        run = load_run(plan.run_folder(one))
        entries.append(step_entry(LabelledRun(one.name.replace("/", "-"), run)).get("metrics", {}))
        fabric = run.health.fabric
    sides = [one.side.name for one in order]
    names = in_order({name for metrics in entries for name in metrics})
    return {
        "noise_floor_version": NOISE_VERSION,
        "launches": len(order),
        "statistic": "median over the steps of all ranks (job_step_ms: over global steps), warm-up left out",
        "order": [one.name for one in order],
        "fabric": fabric,
        "metrics": {
            name: {
                "unit": metric_named(name).unit,
                **variation([metrics.get(name, {}).get("median") for metrics in entries], sides),
            }
            for name in names
        },
    }


def variation(medians: Sequence[float | None], sides: Sequence[str]) -> dict[str, Any]:
    """How the medians of launches vary. `sd` is the sample standard deviation (n - 1); `relative_*` divide by the
    absolute mean; `side_difference` is median of the candidate's launches minus that of the reference's: an A/A
    difference, whose expectation is 0.

    Args:
        medians: one per launch, None where it has none. sides: the side of each launch.
    """
    import numpy as np

    known = np.array([value for value in medians if value is not None], np.float64)
    found: dict[str, Any] = {"launch_medians": list(medians), "known": len(known)}
    if not len(known):
        return found | dict.fromkeys((*_NAMES, *_RELATIVE)) | {"reason": "unknown in every launch"}
    mean, low, high = float(known.mean()), float(known.min()), float(known.max())
    enough = len(known) > 1
    sd = float(known.std(ddof=1)) if enough else None
    relative = enough and mean != 0
    parts = [
        [value for value, side in zip(medians, sides, strict=True) if side == name and value is not None]
        for name in dict.fromkeys(sides)
    ]
    both = len(parts) == 2 and all(parts)
    return found | {
        "mean": mean,
        "median": float(np.median(known)),
        "sd": sd,
        "min": low,
        "max": high,
        "range": high - low if enough else None,
        "side_difference": float(np.median(parts[1]) - np.median(parts[0])) if both else None,
        "relative_sd": sd / abs(mean) if relative and sd is not None else None,
        "relative_range": (high - low) / abs(mean) if relative else None,
        "reason": None if relative else "the mean is 0" if enough else "1 launch; a variation needs two",
    }


_NAMES: Final = ("mean", "median", "sd", "min", "max", "range", "side_difference")
_RELATIVE: Final = ("relative_sd", "relative_range")


def publish(plan: Plan) -> str:
    """Write the noise floor into the plan's folder; returns the text for people.

    Raises:
        RunIncomplete: launches are missing, or the file cannot be written. InputError: a run folder cannot be read.
    """
    floor = noise_floor(plan)
    path = plan.output / NOISE_FILE
    try:
        with whole_file(path) as part:
            part.write_text(json.dumps(floor, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunIncomplete(f"{path}: cannot be written: {error.strerror or error}") from error
    return noise_table(floor, path)


def noise_table(floor: Mapping[str, Any], path: Path) -> str:
    """The metrics one looks at first; the file has them all."""
    lines = [
        f"noise floor of {floor['launches']} launches of the same (A/A): medians of launches",
        f"{'':20}{'median':>11}{'sd':>11}{'relative sd':>13}{'min':>11}{'max':>11}{'B - A':>11}",
    ]
    for name in _SHOWN:
        row = floor["metrics"].get(name)
        if row is None or not row["known"]:
            lines.append(f"{name:20}{'-':>11}  {row['reason'] if row else 'not in the record'}")
            continue
        relative = "-" if row["relative_sd"] is None else f"{row['relative_sd']:.2%}"
        values = [_number(row[key]) for key in ("median", "sd")]
        ends = [_number(row[key]) for key in ("min", "max", "side_difference")]
        lines.append(f"{name:20}{values[0]:>11}{values[1]:>11}{relative:>13}" + "".join(f"{end:>11}" for end in ends))
    if floor["fabric"] is not None:
        lines.append("EMULATED FABRIC: the noise of communication times is that of the emulation and of this machine")
    lines.append(f"all metrics, and the median of every launch: {path}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
