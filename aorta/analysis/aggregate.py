"""One run -> the numbers of its dataset in `summary.json`.

Enters: a `Run` and its two frames. Leaves: plain JSON values. Must not: pool warm-up with steady state (W21), or form
a ratio of anything but the milliseconds of the record.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import pandas as pd

from aorta.analysis.baselines import compute_slowdown, overlap_efficiency
from aorta.analysis.devices import devices_entry, samples_frame
from aorta.analysis.frames import collective_rows, metric_names, null_reasons, steps_frame
from aorta.analysis.matching import matched
from aorta.analysis.metrics import (
    COLLECTIVE_METRIC_NAMES,
    JOB_STEP,
    RATIO_PARTS,
    in_order,
)
from aorta.analysis.readers.run_folder import Run
from aorta.analysis.stats import describe, number_or_none
from aorta.analysis.straggler import stragglers

NOTHING_USED: Final = "no step is left after warm-up"
_MEANS: Final = {
    "mean_loss": "loss",
    "mean_overlap_ms": "compute_comm_ms",
    "mean_compute_ms": "compute_ms",
    "mean_allreduce_overlap_ms": "compute_allreduce_ms",
    "mean_reducescatter_overlap_ms": "compute_reducescatter_ms",
}
"""Keys of the first AORTA, kept for those who read them: means over the rank-steps used."""


@dataclass(frozen=True)
class Dataset:
    """A labelled run and its tables. `steps` and `collectives` hold warm-up rows too; `used` does not."""

    label: str
    run: Run

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per rank-step."""
        return steps_frame(self.run)

    @cached_property
    def device_samples(self) -> pd.DataFrame:
        """One row per sample of a rank's device."""
        return samples_frame(self.run)

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """One row per collective and rank, matched across ranks."""
        return matched(collective_rows(self.run), self.run)

    @cached_property
    def used(self) -> pd.DataFrame:
        """The rank-steps that aggregates rest on."""
        return self.steps[~self.steps["warmup"]]


def job_steps(frame: pd.DataFrame, ranks: int) -> pd.Series[float]:
    """Global step -> job step time in ms, the max over ranks, for the steps that all `ranks` ranks have."""
    by_step = frame.groupby("global_step")["step_ms"]
    return by_step.max()[by_step.count() == ranks]


def aggregate(dataset: Dataset) -> dict[str, Any]:
    """The entry of one dataset. Without a usable step it holds `count` 0, what was read, and why nothing was used."""
    devices = devices_entry(dataset.run, dataset.used, dataset.device_samples)
    facts = {
        "source": _source(dataset.run),
        "health": {**dataset.run.health.as_json(), "throttled_ranks": devices["throttled_ranks"]},
        "steps": _counts(dataset),
        "devices": devices,
    }
    if dataset.used.empty:
        return {"count": 0, "reason": NOTHING_USED, **facts}
    metrics = _metrics(dataset)
    return {
        **_first_aorta_keys(dataset, metrics),
        **facts,
        "metrics": metrics,
        "collectives": _collectives(dataset),
        "stragglers": stragglers(dataset.collectives),
    }


def _source(run: Run) -> dict[str, Any]:
    header = run.header
    shared = ("run_id", "label", "attempt", "world_size", "platform", "backend", "parallel", "timer", "start_step")
    return {
        "path": str(run.path),
        **{name: getattr(header, name) for name in shared},
        "instrument_mode": header.instrument_mode,
        "manifest_hash": header.manifest_hash,
        "hosts": sorted({record.header.host for record in run.records.values()}),
    }


def _counts(dataset: Dataset) -> dict[str, Any]:
    steps, used = dataset.steps, dataset.used
    isolated = Counter(step.phase for record in dataset.run.records.values() for step in record.isolated)
    warmups = sorted({record.header.warmup_steps for record in dataset.run.records.values()})
    return {
        "rank_steps_read": len(steps),
        "rank_steps_used": len(used),
        "rank_steps_left_out_as_warmup": len(steps) - len(used),
        "global_steps_used": int(used["global_step"].nunique()),
        "isolated_rank_steps": {phase: isolated[phase] for phase in sorted(isolated)},
        "warmup_rule": "steps flagged warmup in the record are left out (W21): the first "
        f"{' or '.join(map(str, warmups))} of the run, as its headers say",
    }


def _metrics(dataset: Dataset) -> dict[str, Any]:
    used, run = dataset.used, dataset.run
    reasons = null_reasons(run)
    entries = {name: describe(used[name], used["rank"], reasons.get(name)) for name in metric_names(run)}
    for ratio in RATIO_PARTS.keys() & entries.keys():
        entries[ratio] |= ratio_of_sums(used, ratio)
    entries |= {"overlap_efficiency": overlap_efficiency(run), "compute_slowdown": compute_slowdown(run)}
    entries[JOB_STEP] = _job_step(dataset)
    return {name: entries[name] for name in in_order(set(entries))}


def _job_step(dataset: Dataset) -> dict[str, Any]:
    health = dataset.run.health
    if health.ranks_missing:
        missing = f"{len(health.ranks_missing)} of {health.world_size} ranks are missing; the slowest may be among them"
        return describe(pd.Series(dtype="float64"), None, {missing: 1})
    return describe(job_steps(dataset.used, len(health.ranks_read)), None, {"no global step is on all ranks": 1})


def ratio_of_sums(used: pd.DataFrame, ratio: str) -> dict[str, Any]:
    """The ratio of milliseconds summed over the rank-steps where both parts are known: long steps weigh more."""
    part, whole = RATIO_PARTS[ratio]
    known = used[[part, whole]].dropna()
    total = float(known[whole].sum())
    return {
        "ratio_of_sums": float(known[part].sum()) / total if total else None,
        "ratio_of_sums_reason": None if total else f"{whole} is 0 or null in every step",
    }


def _first_aorta_keys(dataset: Dataset, metrics: dict[str, Any]) -> dict[str, Any]:
    used, reasons = dataset.used, {}
    keys: dict[str, Any] = {"count": len(used)}
    for key, column in _MEANS.items():
        keys[key] = number_or_none(used[column].mean()) if column in used else None
        if keys[key] is None:
            reasons[key] = f"{column} is null in every step"
    ratio = metrics.get("overlap_ratio")
    keys["overlap_ratio"] = ratio["median"] if ratio else None
    if keys["overlap_ratio"] is None:
        reasons["overlap_ratio"] = ratio["reason"] if ratio else "not in the record"
    return {**keys, "null_reasons": reasons}


def _collectives(dataset: Dataset) -> list[dict[str, Any]]:
    """One entry per (kind, group, group size, bytes), in that order; groups of one name and size are pooled after
    their collectives have been matched within each.
    """
    rows = dataset.collectives
    rows = rows[~rows["warmup"]]
    entries = []
    for _, part in rows.groupby(["kind", "group", "group_size", "bytes"], dropna=False, sort=True):
        first = part.iloc[0]
        once = part[~part["instance"].duplicated()]
        sources = Counter(part["end_source"].fillna("unknown"))
        entry: dict[str, Any] = {
            "kind": str(first["kind"]),
            "group": str(first["group"]),
            "group_size": None if first["members"] is None else len(first["members"]),
            "bytes": int(first["bytes"]),
            "group_ranks": [list(members) for members in sorted(set(part["members"].dropna()))],
            "collectives": len(once),
            "rows": len(part),
            "end_sources": {str(source): sources[source] for source in sorted(sources)},
            "transfer_is_upper_bound": "wait" in sources,  # such an end is when the caller looked (R6)
        }
        for name in COLLECTIVE_METRIC_NAMES:
            entry[name] = _collective_metric(name, part, once)
        entries.append(entry)
    return entries


def _collective_metric(name: str, part: pd.DataFrame, once: pd.DataFrame) -> dict[str, Any]:
    if name in ("duration_ms", "queued_ms"):
        unseen = int(part[name].isna().sum())
        why = {"its start or its end was not seen": unseen} if unseen else {}
        return describe(part[name], part["rank"], why)
    if name == "wait_ms":
        return describe(part[name], part["rank"], Counter(part["transfer_reason"].dropna()))
    column = "transfer_reason" if name == "transfer_ms" else "bandwidth_reason"
    return describe(once[name], None, Counter(once[column].dropna()))
