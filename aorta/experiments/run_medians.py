"""The median of each metric of one run: what a job of a sweep came to.

Must not import pandas before it is asked; the sweep itself starts without.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aorta.analysis.metrics import STEP_METRIC_NAMES
from aorta.errors import InputError


@dataclass(frozen=True)
class RunMedians:
    """Medians over the rank-steps used of a run.

    `medians` and `reasons` together name every metric; `problem` says why there are none of either.
    """

    medians: dict[str, float]
    reasons: dict[str, str]
    rank_steps: int = 0
    emulated: bool = False
    readable: bool = True
    problem: str | None = None

    def of(self, metric: str) -> tuple[float | None, str | None]:
        """The median, or None and why."""
        if metric in self.medians:
            return self.medians[metric], None
        return None, self.reasons.get(metric) or self.problem or f"{metric} is not in the record"


def check_metric(name: str, option: str) -> str:
    """The name, if runs have such a metric.

    Raises:
        InputError: lists those there are.
    """
    if name not in STEP_METRIC_NAMES:
        raise InputError(f"{option}={name}: no metric of a run; there are {', '.join(STEP_METRIC_NAMES)}")
    return name


def read_medians(folder: Path) -> RunMedians:
    """Read one run. What cannot be read is said in `problem`: one bad job must not hide the others."""
    from aorta.analysis.aggregate import LabelledRun, step_entry
    from aorta.analysis.load.engines import Local
    from aorta.analysis.load.records import load_run

    try:
        dataset = LabelledRun(folder.name, load_run(folder, Local(1)))
        entry = step_entry(dataset)
    except InputError as error:
        return RunMedians({}, {}, readable=False, problem=str(error))
    emulated = dataset.run.health.fabric is not None
    if "metrics" not in entry:
        return RunMedians({}, {}, emulated=emulated, problem=str(entry["reason"]))
    metrics = entry["metrics"]
    return RunMedians(
        {name: found["median"] for name, found in metrics.items() if found["median"] is not None},
        {name: str(found["reason"]) for name, found in metrics.items() if found["median"] is None},
        int(entry["count"]),
        emulated,
    )
