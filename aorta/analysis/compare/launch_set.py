"""Reads a folder of run folders as a `LaunchSet`, one launch after another.

Keeps a few numbers per metric of every complete launch, and lists the others with the reason. Must not: hold the
columns of two launches at once, leave a launch out silently, or count one run twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aorta.analysis.aggregate import NOTHING_USED, LabelledRun
from aorta.analysis.compare.run_comparison import HEADER, facts
from aorta.analysis.compare.samples import Sample, samples
from aorta.analysis.devices import JOINED_ON, devices_entry
from aorta.analysis.load.run_facts import FORMAT
from aorta.analysis.tables import COMPLETED, Floats, Run
from aorta.errors import InputError


@dataclass(frozen=True)
class Launch:
    """One launch. `facts` says what was run, in the form of `run_comparison.facts`; `hosts` where, as far as known."""

    path: Path
    run_id: str
    samples: Mapping[str, Sample]
    facts: Mapping[str, object]
    throttled_ranks: tuple[int, ...]
    span_ns: tuple[int, int] | None = None
    """Its first and last recorded instant, Unix time; None where the source has no wall clock."""
    hosts: frozenset[str] = frozenset()
    pace: Mapping[str, Any] | None = None
    """Where the host sets the pace (`pace` of a dataset in `summary.json`)."""

    @property
    def tells_configuration(self) -> bool:
        """Whether the launch has a manifest with its configuration; otherwise only the record headers
        say what was run.
        """
        return any(not key.startswith(HEADER) for key in self.facts)

    def median(self, name: str) -> float | None:
        """The median of one metric; None where it is null or not in the record."""
        return self.samples[name].median if name in self.samples else None


@dataclass(frozen=True)
class LaunchSet:
    """The launches of one side, ordered by folder name; never empty."""

    path: Path
    launches: tuple[Launch, ...]
    left_out: tuple[tuple[Path, str], ...]
    """Folders that do not count, with the reason."""

    def of(self, name: str) -> list[Sample]:
        """One metric in every launch that has it. Where one of them has bounds alone, all have: the others would be a
        biased choice.
        """
        found = [launch.samples[name] for launch in self.launches if name in launch.samples]
        bounded = any(sample.bounds is not None for sample in found)
        return [sample.unknown() for sample in found] if bounded else found

    def medians(self, name: str) -> Floats:
        """The median of one metric in every launch, NaN where it has none."""
        return np.array([math.nan if (median := each.median(name)) is None else median for each in self.launches])

    def representative(self, *metrics: str) -> Launch:
        """The launch nearest to the medians of all these metrics at once; the first in order of name of equally near
        ones.

        Distances are in units of the metric's own mean distance from its median, and added up. A launch that lacks a
        metric which others have comes last; a metric without a median anywhere does not count.
        """
        distances = dict.fromkeys(range(len(self.launches)), 0.0)
        for metric in metrics:
            known = [median for launch in self.launches if (median := launch.median(metric)) is not None]
            if not known:
                continue
            middle = float(np.median(known))
            scale = float(np.mean(np.abs(np.subtract(known, middle)))) or 1.0
            for place, launch in enumerate(self.launches):
                median = launch.median(metric)
                distances[place] += math.inf if median is None else abs(median - middle) / scale
        return self.launches[min(distances, key=lambda place: (round(distances[place], 9), place))]


def read_set(path: Path, folders: Sequence[Path], load: Callable[[Path], Run]) -> LaunchSet:
    """Read every launch of a set.

    Raises:
        InputError: none of them is complete.
    """
    launches: list[Launch] = []
    left_out: list[tuple[Path, str]] = []
    seen: dict[str, Path] = {}
    for folder in folders:
        try:
            dataset = LabelledRun(folder.name, load(folder))
        except InputError as error:
            left_out.append((folder, str(error)))
            continue
        run_id = dataset.run.source.identity
        why = incomplete(dataset)
        if why is None and run_id in seen:
            why = f"it is run {run_id!r} again, as in {seen[run_id]}: launches have to be independent"
        if why is None:
            seen[run_id] = folder
            launches.append(launch_of(dataset))
        else:
            left_out.append((folder, why))
        del dataset  # otherwise the next launch is loaded while this one is still in memory
    if not launches:
        raise InputError(
            f"{path}: none of its {len(folders)} launches is complete:\n  "
            + "\n  ".join(f"{folder}: {why}" for folder, why in left_out)
        )
    return LaunchSet(path, tuple(launches), tuple(left_out))


def incomplete(dataset: LabelledRun) -> str | None:
    """Why a launch does not count; None if it does."""
    health = dataset.run.health
    if health.ranks_missing:
        ranks = ", ".join(map(str, health.ranks_missing[:12]))
        return f"{len(health.ranks_missing)} of {health.world_size} ranks are missing ({ranks})"
    for rank, ending in health.endings.items():
        if ending != COMPLETED:
            return f"rank {rank}: {ending}"
    return None if dataset.used.any() else NOTHING_USED


def launch_of(dataset: LabelledRun) -> Launch:
    """Reduce a dataset to what a comparison keeps of a launch."""
    devices = devices_entry(dataset.run, dataset.table(*JOINED_ON), dataset.device_samples)
    run = dataset.run
    return Launch(
        Path(run.location),
        run.source.identity,
        samples(dataset),
        facts(run),
        tuple(devices["throttled_ranks"]),
        span_of(run),
        frozenset(tables.source.host for tables in run.ranks.values() if tables.source.host is not None),
        dataset.pace.entry(),
    )


def span_of(run: Run) -> tuple[int, int] | None:
    """First and last instant of the steps of all ranks. The clock of a trace need not count from 1970, so that its
    steps say nothing of when it was made.
    """
    steps = [tables.steps for tables in run.ranks.values() if len(tables.steps)]
    if not steps or run.source.format != FORMAT:
        return None
    return min(int(each.t_start_ns.min()) for each in steps), max(int(each.t_end_ns.max()) for each in steps)
