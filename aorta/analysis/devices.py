"""Evaluates the device samples of a run: tables, columns of steps, and the `devices` entry of the summary.

A sample belongs to the step in which it was taken. A step shorter than the sampling interval gets the nearest sample,
if that is within one interval of its middle. Must not: use a sample further away than that, or report a device without
throttling data as unthrottled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aorta.documents.dataset import DeviceFacts, DeviceValue, RankDevice, Throttled
from aorta.documents.formatting import TEXT
from aorta.read.frames import Bools, Floats, Ints
from aorta.read.run import Run
from aorta.records.schema import DeviceSample

if TYPE_CHECKING:
    import pandas as pd

VALUES: Final = ("temp_c", "power_w", "sclk_mhz", "mclk_mhz", "util_pct", "mem_used_bytes")
THROTTLED: Final = "device_throttled"
STEP_COLUMNS: Final = (*(f"device_{name}" for name in VALUES), THROTTLED)
_NS_PER_S: Final = 1e9
_DEFAULT_INTERVAL_S: Final = 1.0
_PASSING: Final = 1
_PASSING_SHARE: Final = 0.05
"""Throttled samples of a rank, and their share, that are passed over: one says nothing of a run."""


@dataclass(frozen=True)
class DeviceSamples:
    """The samples of all ranks' devices, by rank, then time of start.

    Attributes:
        rank: [samples].
        samples: as recorded.
        reasons: why each failed, where that is known.
        middle_ns: of each sample, on the clock of its rank's steps.
        values: [samples, `VALUES` and whether it was throttled (1 or 0)]; NaN where a sample does not have it.
        failed: whether a sample has no value at all.
    """

    rank: Ints
    samples: list[DeviceSample]
    reasons: list[str | None]
    middle_ns: Ints
    values: Floats
    failed: Bools


def samples_of(run: Run) -> DeviceSamples:
    """Return all samples of a run."""
    rows = [(rank, *sample) for rank, tables in run.ranks.items() for sample in tables.details.device_samples()]
    rows.sort(key=lambda row: (row[0], row[1].start_mono_ns))
    samples = [sample for _, sample, _ in rows]
    values = [
        [*(getattr(sample, name) for name in VALUES), None if sample.throttle is None else float(bool(sample.throttle))]
        for sample in samples
    ]
    table = np.array(values, np.float64).reshape(len(rows), len(STEP_COLUMNS))
    return DeviceSamples(
        np.array([rank for rank, _, _ in rows], np.int64),
        samples,
        [why for _, _, why in rows],
        np.array([(sample.start_mono_ns + sample.end_mono_ns) // 2 for sample in samples], np.int64),
        table,
        np.asarray(np.isnan(table).all(axis=1)),
    )


def samples_frame(run: Run) -> pd.DataFrame:
    """Return one row per sample, by rank and time: `rank`, the columns of `records.schema.DeviceSample` (`throttle` a
    list or None), `failed` and, where it is, `reason`.
    """
    import pandas as pd

    sampled = samples_of(run)
    columns: dict[str, Any] = {"rank": sampled.rank}
    for name in DeviceSample.__struct_fields__:
        dtype = "int64" if name.endswith("_mono_ns") else "object" if name == "throttle" else "float64"
        columns[name] = pd.Series([getattr(sample, name) for sample in sampled.samples], dtype=dtype)
    why = [why if failed else None for why, failed in zip(sampled.reasons, sampled.failed, strict=True)]
    return pd.DataFrame(columns | {"failed": sampled.failed, "reason": pd.Series(why, dtype="object")})


def step_columns(run: Run, samples: DeviceSamples) -> dict[str, Floats]:
    """Return `STEP_COLUMNS` for every rank-step: means over the samples taken within the step, or the nearest sample.
    `device_throttled` is 1.0 where any of them was throttled, 0.0 where none was, NaN where none says.
    """
    steps = run.steps
    columns = np.full((len(steps), len(STEP_COLUMNS)), np.nan)
    for rank, tables in run.ranks.items():
        own = np.flatnonzero((samples.rank == rank) & ~samples.failed)
        if not len(own):
            continue
        own = own[np.argsort(samples.middle_ns[own], kind="stable")]
        at, values = samples.middle_ns[own], samples.values[own]
        telemetry = tables.source.device_telemetry
        limit_ns = ((telemetry.interval_s if telemetry is not None else None) or _DEFAULT_INTERVAL_S) * _NS_PER_S
        rows = np.flatnonzero(run.rank_of_step == rank)
        start_ns, end_ns = steps.start_mono_ns[rows], steps.end_mono_ns[rows]
        ends = (np.searchsorted(at, time_ns).tolist() for time_ns in (start_ns, end_ns))
        for row, begun_ns, ended_ns, first, behind in zip(
            rows.tolist(), start_ns.tolist(), end_ns.tolist(), *ends, strict=True
        ):
            taken = values[first:behind]
            if behind <= first:
                middle = (begun_ns + ended_ns) // 2
                near = [index for index in (first - 1, first) if 0 <= index < len(at)]
                nearest = min(near, key=lambda index: abs(int(at[index]) - middle))
                taken = values[nearest : nearest + 1] if abs(int(at[nearest]) - middle) <= limit_ns else taken
            known = ~np.isnan(taken)
            counts = known.sum(axis=0)
            np.divide(np.where(known, taken, 0).sum(axis=0), counts, out=columns[row], where=counts > 0)
            if counts[-1]:
                columns[row, -1] = np.nanmax(taken[:, -1])
    return dict(zip(STEP_COLUMNS, columns.T, strict=True))


def devices_entry(run: Run, samples: DeviceSamples) -> DeviceFacts:
    """Return the `devices` entry of a dataset: per rank and in total, over samples taken during the steps used."""
    ranks: dict[str, RankDevice] = {}
    steps = run.steps
    for rank, tables in run.ranks.items():
        used = steps.used & (run.rank_of_step == rank)
        inside = list[int]()
        if used.any():
            begun, ended = steps.start_mono_ns[used].min(), steps.end_mono_ns[used].max()
            inside = [
                index
                for index in np.flatnonzero(samples.rank == rank).tolist()
                if samples.samples[index].end_mono_ns >= begun and samples.samples[index].start_mono_ns <= ended
            ]
        telemetry, failed = tables.source.device_telemetry, [row for row in inside if samples.failed[row]]
        throttles = [throttle for row in inside if (throttle := samples.samples[row].throttle) is not None]
        reasons = Counter(reason for sample in throttles for reason in sample)
        values: dict[str, DeviceValue | None] = dict.fromkeys(VALUES)
        for index, name in enumerate(VALUES):
            column = samples.values[inside, index]
            if len(known := column[~np.isnan(column)]):
                ends = float(np.median(known)), float(known.min()), float(known.max())
                values[name] = DeviceValue(len(known), *ends)
        ranks[str(rank)] = RankDevice(
            source=None if telemetry is None else telemetry.source,
            interval_s=None if telemetry is None else telemetry.interval_s,
            problem=None if telemetry is None else telemetry.problem,
            samples=len(inside),
            samples_failed=len(failed),
            failure=samples.reasons[failed[-1]] if failed else None,
            throttled="yes" if reasons else "no" if throttles else "unknown",
            throttled_samples=sum(bool(sample) for sample in throttles),
            throttle_reasons=dict(sorted(reasons.items())),
            **values,
        )
    states = [entry.throttled for entry in ranks.values()]
    throttled: Throttled = "yes" if "yes" in states else "no" if set(states) == {"no"} else "unknown"
    held_back = [
        int(rank)
        for rank, entry in ranks.items()
        if entry.throttled_samples > _PASSING and entry.throttled_samples >= _PASSING_SHARE * entry.samples
    ]
    return DeviceFacts(throttled, held_back, ranks)


def throttle_notes(entry: DeviceFacts) -> list[str]:
    """Return which ranks were throttled in more than a passing sample."""
    notes = []
    for rank in entry.throttled_ranks:
        device = entry.ranks[str(rank)]
        why = ", ".join(f"{reason} in {count}" for reason, count in device.throttle_reasons.items())
        least = device.sclk_mhz
        clock = "" if least is None else f"; clock {least.median:.0f} MHz, at least {least.min:.0f}"
        notes.append(f"rank {rank} THROTTLED ({why} of {device.samples} samples){clock}")
    return notes


def device_notes(entry: DeviceFacts) -> list[str]:
    """Return what every reader of the results must know: throttled ranks, failed samples, missing sources."""
    notes = throttle_notes(entry)
    for rank, device in entry.ranks.items():
        if device.samples_failed:
            notes.append(f"rank {rank}: {TEXT.count(device.samples_failed, 'device sample')} failed: {device.failure}")
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
