"""Evaluates the device samples of a run: tables, columns of steps, and the `devices` entry of the summary.

A sample belongs to the step in which it was taken. A step shorter than the sampling interval gets the nearest sample,
if that is within one interval of its middle. Must not: use a sample further away than that, or report a device without
throttling data as unthrottled.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np
import pandas as pd

from aorta.documents.dataset import DeviceFacts, DeviceValue, RankDevice, Throttled
from aorta.read.run import Run, Source
from aorta.records.schema import DeviceSample

VALUES: Final = ("temp_c", "power_w", "sclk_mhz", "mclk_mhz", "util_pct", "mem_used_bytes")
THROTTLED: Final = "device_throttled"
_TIMES: Final = ("start_mono_ns", "end_mono_ns")
JOINED_ON: Final = ("rank", *_TIMES)
"""Columns of the steps that are needed to join samples."""
STEP_COLUMNS: Final = (*(f"device_{name}" for name in VALUES), THROTTLED)
_NS_PER_S: Final = 1e9
_DEFAULT_INTERVAL_S: Final = 1.0
_NEVER: Final = 2**63 - 1


def samples_frame(run: Run) -> pd.DataFrame:
    """Return one row per sample, by rank and time: `rank`, the columns of `records.schema.DeviceSample` (`throttle` a
    list or None), `failed` and, where it is, `reason`.
    """
    rows = [(rank, *sample) for rank, tables in run.ranks.items() for sample in tables.details.device_samples()]
    columns: dict[str, Any] = {"rank": pd.Series([rank for rank, _, _ in rows], dtype="int64")}
    for name in DeviceSample.__struct_fields__:
        dtype = "int64" if name.endswith("_mono_ns") else "object" if name == "throttle" else "float64"
        columns[name] = pd.Series([getattr(sample, name) for _, sample, _ in rows], dtype=dtype)
    frame = pd.DataFrame(columns)
    failed = frame[[*VALUES, "throttle"]].isna().all(axis=1) if rows else pd.Series(dtype="bool")
    why = pd.Series([why for _, _, why in rows], dtype="object").where(failed, None)
    frame = frame.assign(failed=failed, reason=why)
    return frame.sort_values(["rank", "start_mono_ns"], kind="stable", ignore_index=True)


def step_columns(run: Run, steps: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Return `STEP_COLUMNS` for the rows of `steps`: means over the samples taken within the step, or the nearest
    sample. `device_throttled` is 1.0 where any of them was throttled, 0.0 where none was, NaN where none says.
    """
    found = pd.DataFrame(np.nan, index=steps.index, columns=list(STEP_COLUMNS))
    throttled = [np.nan if reasons is None else float(bool(reasons)) for reasons in samples["throttle"]]
    values = samples[list(VALUES)].assign(**{THROTTLED: throttled})
    for rank, mine in steps.groupby("rank"):
        places = samples.index[(samples["rank"] == rank) & ~samples["failed"]]
        if not len(places):
            continue
        middles = (samples.loc[places, list(_TIMES)].sum(axis=1) // 2).to_numpy()
        order = np.argsort(middles, kind="stable")
        telemetry = run.ranks[int(str(rank))].source.device_telemetry
        limit = ((telemetry.interval_s if telemetry is not None else None) or _DEFAULT_INTERVAL_S) * _NS_PER_S
        found.loc[mine.index] = _joined(mine, middles[order], values.loc[places].to_numpy()[order], limit)
    return found


def _joined(steps: pd.DataFrame, at: np.ndarray, values: np.ndarray, limit_ns: float) -> np.ndarray:
    """Return for each step the combined rows of `values` (taken at times `at`, ascending) that belong to it."""
    starts, ends = steps[list(_TIMES)].to_numpy().T
    joined = np.full((len(steps), values.shape[1]), np.nan)
    for row, (low, high) in enumerate(zip(np.searchsorted(at, starts), np.searchsorted(at, ends), strict=True)):
        if high > low:
            taken = values[low:high]
        else:
            middle = (starts[row] + ends[row]) // 2
            near = [place for place in (low - 1, low) if 0 <= place < len(at)]
            place = min(near, key=lambda place: abs(int(at[place]) - int(middle)))
            taken = values[place : place + 1] if abs(int(at[place]) - int(middle)) <= limit_ns else values[:0]
        known = ~np.isnan(taken)
        counts = known.sum(axis=0)
        np.divide(np.where(known, taken, 0).sum(axis=0), counts, out=joined[row], where=counts > 0)
        if counts[-1]:
            joined[row, -1] = np.nanmax(taken[:, -1])
    return joined


def devices_entry(run: Run, used: pd.DataFrame, samples: pd.DataFrame) -> DeviceFacts:
    """Return the `devices` entry of a dataset: per rank and in total, over samples taken during the steps used.

    Args:
        used: `rank`, `start_mono_ns` and `end_mono_ns` of the rank-steps that are not warm-up.
    """
    ranks: dict[str, RankDevice] = {}
    begun, ended = used.groupby("rank")["start_mono_ns"].min(), used.groupby("rank")["end_mono_ns"].max()
    by_rank = {int(str(rank)): part for rank, part in samples.groupby("rank")}
    for rank, tables in run.ranks.items():
        mine = by_rank.get(rank, samples[:0])
        inside = (mine["end_mono_ns"] >= begun.get(rank, _NEVER)) & (mine["start_mono_ns"] <= ended.get(rank, -_NEVER))
        ranks[str(rank)] = _rank_entry(tables.source, mine[inside])
    states = [entry.throttled for entry in ranks.values()]
    throttled: Throttled = "yes" if "yes" in states else "no" if set(states) == {"no"} else "unknown"
    return DeviceFacts(throttled, [int(rank) for rank, entry in ranks.items() if entry.throttled == "yes"], ranks)


def _rank_entry(source: Source, samples: pd.DataFrame) -> RankDevice:
    telemetry, throttles, failed = source.device_telemetry, samples["throttle"].dropna(), samples[samples["failed"]]
    reasons = Counter(reason for sample in throttles for reason in sample)
    values: dict[str, DeviceValue | None] = {}
    for name in VALUES:
        known = samples[name].dropna()
        ends = (float(known.median()), float(known.min()), float(known.max())) if len(known) else None
        values[name] = None if ends is None else DeviceValue(len(known), *ends)
    return RankDevice(
        source=None if telemetry is None else telemetry.source,
        interval_s=None if telemetry is None else telemetry.interval_s,
        problem=None if telemetry is None else telemetry.problem,
        samples=len(samples),
        samples_failed=len(failed),
        failure=None if failed.empty else failed["reason"].iloc[-1],
        throttled="yes" if reasons else "no" if len(throttles) else "unknown",
        throttled_samples=int(sum(bool(sample) for sample in throttles)),
        throttle_reasons=dict(sorted(reasons.items())),
        **values,
    )


def device_notes(entry: DeviceFacts) -> list[str]:
    """Return what every reader of the results must know: throttled ranks, failed samples, missing sources."""
    notes = []
    for rank, device in entry.ranks.items():
        if device.throttled == "yes":
            why = ", ".join(f"{reason} in {count}" for reason, count in device.throttle_reasons.items())
            least = device.sclk_mhz
            clock = "" if least is None else f"; clock {least.median:.0f} MHz, at least {least.min:.0f}"
            notes.append(f"rank {rank} THROTTLED ({why} of {device.samples} samples){clock}")
        if device.samples_failed:
            notes.append(f"rank {rank}: {device.samples_failed} device sample(s) failed: {device.failure}")
        if device.problem:
            notes.append(f"rank {rank}: no device samples: {device.problem}")
    return notes


def device_line(entry: DeviceFacts) -> str | None:
    """Return one line of text about the devices of all ranks; None without a sample."""
    ranks = [device for device in entry.ranks.values() if device.samples > device.samples_failed]
    if not ranks:
        return None
    parts = []
    for name, unit in (("sclk_mhz", "MHz"), ("power_w", "W"), ("temp_c", "C"), ("util_pct", "% busy")):
        values: list[DeviceValue] = [value for device in ranks if (value := getattr(device, name)) is not None]
        if values:
            least = min(value.min for value in values)
            extreme = f" (at least {least:.0f})" if name == "sclk_mhz" else ""
            parts.append(f"{np.median([value.median for value in values]):.0f} {unit}{extreme}")
    sources = "/".join(sorted({device.source or "?" for device in ranks}))
    count = sum(device.samples for device in ranks)
    return f"devices ({sources}, {count} samples): {', '.join([*parts, 'throttled: ' + entry.throttled])}"
