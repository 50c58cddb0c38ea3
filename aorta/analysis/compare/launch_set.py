"""Reads launch sets, one launch after another, and decides whether those of two sides took turns in time.

Of each complete launch the statistics that `aggregate` publishes are kept; others are listed with the reason. A rank
test takes launches for exchangeable, which they are not where the machine drifts and one side ran after the other (W27;
docs/dev/verdicts.md).

Must not: define a metric again, hold the columns of two launches at once, leave a launch out silently, count one run
twice, or judge the order by a measured value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from aorta.analysis.account import StepAccount, account_of
from aorta.analysis.aggregate import NOTHING_RECORDED, NOTHING_USED, LabelledRun, job_step_times, metrics_of
from aorta.analysis.attribution import Totals, totals_of
from aorta.analysis.compare.run_comparison import HEADER, facts
from aorta.analysis.compare.verdict import GUARD, Rules
from aorta.analysis.devices import devices_entry
from aorta.analysis.pace import LevelChange, level_change, unsettled
from aorta.documents.comparison import LaunchOrderFacts
from aorta.documents.dataset import Ends, LaunchLeftOut, PaceFacts, Statistics
from aorta.documents.statistics import describe
from aorta.errors import InputError
from aorta.read.engines import Engine
from aorta.read.frames import Bools, Floats, Ints
from aorta.read.locations import Location, launch_folders, load_source
from aorta.read.record import load_run
from aorta.read.record_columns import FORMAT
from aorta.read.run import COMPLETED, Run


@dataclass(frozen=True)
class Launch:
    """What a comparison keeps of a launch.

    Attributes:
        samples: metric -> its statistics over the steps.
        facts: what was run, as `run_comparison.facts` says it.
        span_ns: its first and last recorded instant, Unix time; None where the source has no wall clock.
        hosts: where it ran, as far as known.
        pace: where the host sets the pace (`pace` of a dataset in `summary.json`).
        account: where its mean step goes, or why that is not known.
        exposed: its exposed communication in detail, or why that is not known.
        level: where its job steps change their level, if they do.
    """

    path: Path
    run_id: str
    samples: Mapping[str, Statistics]
    facts: Mapping[str, object]
    throttled_ranks: tuple[int, ...]
    span_ns: tuple[int, int] | None = None
    hosts: frozenset[str] = frozenset()
    pace: PaceFacts | None = None
    account: StepAccount | str = "not read"
    exposed: Totals | str = "not read"
    level: LevelChange | None = None

    @classmethod
    def of(cls, dataset: LabelledRun) -> Launch:
        """Reduce a dataset to a launch."""
        run = dataset.run
        steps = [tables.steps for tables in run.ranks.values() if len(tables.steps)]
        span_ns = None
        if steps and run.source.format == FORMAT:  # the clock of a trace need not count from 1970
            span_ns = (
                min(int(frame.t_start_ns.min()) for frame in steps),
                max(int(frame.t_end_ns.max()) for frame in steps),
            )
        return cls(
            Path(run.location),
            run.source.identity,
            metrics_of(dataset, by_rank=False),
            facts(run),
            tuple(devices_entry(run, dataset.device_samples).throttled_ranks),
            span_ns,
            frozenset(tables.source.host for tables in run.ranks.values() if tables.source.host is not None),
            dataset.pace.entry(),
            account_of(dataset),
            totals_of(dataset),
            level_change(job_step_times(dataset)[0]),
        )

    @property
    def has_configuration(self) -> bool:
        """Whether the launch has a manifest with its configuration, not headers of its records alone."""
        return any(not key.startswith(HEADER) for key in self.facts)

    def median(self, name: str) -> float | None:
        """Return the median of one metric; None where it is null or not in the record."""
        return self.samples[name].median if name in self.samples else None


@dataclass(frozen=True)
class LaunchSet:
    """The launches of one side, ordered by folder name; never empty. `left_out`: folders that do not count, and why."""

    path: Path
    launches: tuple[Launch, ...]
    left_out: list[LaunchLeftOut]

    def medians(self, name: str) -> Floats:
        """Return the median of one metric in every launch, NaN where it has none; in all where a launch has bounds
        alone, as the others would be a biased choice.
        """
        samples = [launch.samples.get(name) for launch in self.launches]
        if any(sample and sample.ends for sample in samples):
            return np.full(len(samples), np.nan)
        return np.array([sample.median if sample else None for sample in samples], np.float64)

    @property
    def statistics(self) -> dict[str, Statistics]:
        """Every metric over the launches: of their medians, and where one has bounds alone, the medians of what is
        known at least and at most.
        """
        described = {}
        for name in dict.fromkeys(name for launch in self.launches for name in launch.samples):
            samples = [launch.samples[name] for launch in self.launches if name in launch.samples]
            reasons = Counter(sample.reason for sample in samples if sample.reason is not None)
            described[name] = describe(self.medians(name), None, reasons)
            if any(sample.ends for sample in samples):
                least = [sample.ends.at_least if sample.ends else sample.value for sample in samples]
                most = [sample.ends.at_most if sample.ends else sample.value for sample in samples]
                described[name].bounds = Ends(
                    *(median(end for end in ends if end is not None) for ends in (least, most))
                )
        return described

    @property
    def accounts(self) -> list[StepAccount] | str:
        """The accounts of all launches in the order in which they ran, or why one has none."""
        by_time = sorted(self.launches, key=lambda launch: launch.span_ns or (0, 0))
        accounts = [launch.account for launch in by_time if isinstance(launch.account, StepAccount)]
        reasons = (f"{launch.path}: {launch.account}" for launch in by_time if isinstance(launch.account, str))
        return next(reasons, None) or accounts

    @property
    def unsettled(self) -> str | None:
        """Why its steps have not settled; None where they have."""
        return unsettled([launch.level for launch in self.launches])

    def representative(self, *metrics: str) -> Launch:
        """Return the launch nearest to the medians of all these metrics at once; the first in order of name of equally
        near ones.

        Distances are in units of the metric's own mean distance from its median, and added up. A launch that lacks a
        metric which others have comes last; a metric without a median anywhere does not count.
        """
        total = np.zeros(len(self.launches))
        for medians in map(self.medians, metrics):
            if not np.isnan(medians).all():
                distances = np.abs(medians - np.nanmedian(medians))
                total += np.nan_to_num(distances / (np.nanmean(distances) or 1.0), nan=np.inf)
        return self.launches[int(np.argmin(total.round(9)))]


def read_set(path: Path, folders: Sequence[Path], load: Callable[[Path], Run]) -> LaunchSet:
    """Read every launch of a set.

    Raises:
        InputError: none of them is complete.
    """
    launches: list[Launch] = []
    left_out: list[LaunchLeftOut] = []
    seen: dict[str, Path] = {}
    for folder in folders:
        try:
            dataset = LabelledRun(folder.name, load(folder))
        except InputError as error:
            left_out.append(LaunchLeftOut(str(folder), str(error)))
            continue
        run_id = dataset.run.source.identity
        why = incomplete(dataset)
        if why is None and run_id in seen:
            why = f"it is run {run_id!r} again, as in {seen[run_id]}: launches have to be independent"
        if why is None:
            seen[run_id] = folder
            launches.append(Launch.of(dataset))
        else:
            left_out.append(LaunchLeftOut(str(folder), why))
        del dataset  # otherwise the next launch is loaded while this one is still in memory
    if not launches:
        raise InputError(
            f"{path}: none of its {len(folders)} launches is complete:\n  "
            + "\n  ".join(f"{launch.path}: {launch.reason}" for launch in left_out)
        )
    return LaunchSet(path, tuple(launches), left_out)


def incomplete(dataset: LabelledRun) -> str | None:
    """Return why a launch does not count; None if it does."""
    health = dataset.run.health
    if health.ranks_missing:
        ranks = ", ".join(map(str, health.ranks_missing[:12]))
        return f"{len(health.ranks_missing)} of {health.world_size} ranks are missing ({ranks})"
    for rank, ending in health.endings.items():
        if ending != COMPLETED:
            return f"rank {rank}: {ending}"
    if not len(dataset.used):
        return NOTHING_RECORDED
    return None if dataset.used.any() else NOTHING_USED


@dataclass(frozen=True)
class Subject:
    """What a label stands for: one run, or a launch set with `dataset` as its representative launch."""

    dataset: LabelledRun
    launches: LaunchSet | None = None

    def as_set(self) -> LaunchSet:
        """Return the launch set; a run compared with a launch set is a set of one launch."""
        return self.launches or LaunchSet(Path(self.dataset.run.location), (Launch.of(self.dataset),), [])

    @property
    def exposed(self) -> list[Totals | str]:
        """The exposed communication of each launch in detail."""
        return [launch.exposed for launch in self.launches.launches] if self.launches else [totals_of(self.dataset)]


def read_subjects(
    sources: Mapping[str, Location], rules: Rules, engine: Engine | None = None, comm_patterns: Sequence[str] = ()
) -> dict[str, Subject]:
    """Read the location of each label.

    Raises:
        InputError: a folder cannot be read, or a launch set has no complete launch.
    """
    subjects = {}
    for label, where in sources.items():
        folders = launch_folders(where)
        if folders:
            launches = read_set(folders[0].parent, folders, lambda folder: load_run(folder, engine, exposed=True))
            shown = load_run(launches.representative(*selection_metrics(rules)).path, engine, exposed=True)
            subjects[label] = Subject(LabelledRun(label, shown), launches)
        else:
            subjects[label] = Subject(LabelledRun(label, load_source(where, engine, comm_patterns, exposed=True)))
    return subjects


def selection_metrics(rules: Rules) -> tuple[str, ...]:
    """Return the metrics by which the launch is chosen that represents its set in pictures and details."""
    return tuple(dict.fromkeys((rules.primary, GUARD)))


AUTOCORRELATION: Final = 0.9
"""Of the drift that an order has to withstand, from one launch to the next (W27)."""
MOST: Final = 1.5
"""Largest `drift_inflation` of an order in which the sides count as interleaved. A B B A and pairs in random order lie
below it, and 3 in 4 of all orders drawn at random. On a machine that drifts so, orders below it have 0.6 to 1.0 % false
regressions on average and 5 % at worst, those above up to 25 % (docs/dev/verdicts.md)."""


def launch_order(reference: LaunchSet, candidate: LaunchSet, *, assume_no_drift: bool = False) -> LaunchOrderFacts:
    """Return the order of all launches of both sides, and whether it separates a difference of the sides from a drift.

    Returns:
        `comparable`: whether the sides took turns; None = unknown. `sequence`: R for a launch of the reference, C for
        one of the candidate, by time; those that ran at the same time in parentheses. `reason`: why it is not
        comparable, or not known.
    """
    launches = [*reference.launches, *candidate.launches]
    unknown = [str(launch.path) for launch in launches if launch.span_ns is None]
    if unknown:
        not_known = f"when {len(unknown)} of {len(launches)} launches ran is not known ({unknown[0]} for one)"
        return LaunchOrderFacts(None, None, None, MOST, not_known, assume_no_drift)
    turns = concurrent([launch.span_ns for launch in launches if launch.span_ns is not None])
    of_candidate = np.arange(len(launches)) >= len(reference.launches)
    by_time = np.lexsort((of_candidate, turns))
    together = (
        "".join("RC"[int(of_candidate[index])] for index in same) for _, same in groupby(by_time, key=turns.__getitem__)
    )
    sequence = "".join(letters if len(letters) == 1 else f"({letters})" for letters in together)
    inflation = drift_inflation(turns, of_candidate)
    why = None
    if inflation > MOST:
        why = (
            f"the launches of the two sides did not take turns ({sequence}): a drift of the machine would look like a "
            f"difference, {inflation:.1f} times as much as in a random order ({MOST:g} at most)"
        )
    return LaunchOrderFacts(why is None, sequence, inflation, MOST, why, assume_no_drift)


def concurrent(spans: Sequence[tuple[int, int]]) -> Ints:
    """Return the turn in time, from 0, of launches with these first and last instants. Launches share one where the
    later began before half of the first of them had passed: what happens to the machines then happens to all of them.
    """
    turns = np.zeros(len(spans), np.int64)
    turn, half_ns = -1, 0
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        start_ns, end_ns = spans[index]
        if turn < 0 or start_ns > half_ns:
            turn, half_ns = turn + 1, (start_ns + end_ns) // 2
        turns[index] = turn
    return turns


def drift_inflation(turns: Ints, of_candidate: Bools) -> float:
    """Return by how much a drift moves the sides apart in this order, relative to the average over all orders: the
    variance of the difference of the sides' means over what it is when sides are drawn at random (1). The larger of two
    drifts': a straight line, and a first-order autoregression with `AUTOCORRELATION` from one place to the next.

    Args:
        turns: of each launch in time, as `concurrent` gives them.
        of_candidate: whether it is one of the candidate's; both sides have one at least.
    """
    wandering = AUTOCORRELATION ** np.abs(turns[:, None] - turns[None, :])
    straight = np.outer(turns - turns.mean(), turns - turns.mean())
    return max(inflation(wandering, of_candidate), inflation(straight, of_candidate))


def inflation(covariance: Floats, of_candidate: Bools) -> float:
    """Return `drift_inflation` by a drift with this covariance, shape (launches, launches).

    The average over random sides is (1/m + 1/n) times the expected sample variance of all values (Imbens and Rubin,
    *Causal Inference*, 2015, section 6.4, without an effect).
    """
    sizes = (~of_candidate).sum(), of_candidate.sum()
    weights = np.where(of_candidate, 1 / sizes[1], -1 / sizes[0])
    spread = (np.trace(covariance) - covariance.mean() * len(covariance)) / (len(covariance) - 1)
    if spread <= 1e-12:
        return 0.0  # all at one time: no drift lies between any two of them
    return float(weights @ covariance @ weights / (spread * (1 / sizes[0] + 1 / sizes[1])))
