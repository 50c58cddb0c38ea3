"""Resolves the labelled locations of a report to its inputs: runs, traces and launch sets.

Must not: hold the columns of more than one launch of a set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.compare.launch_set import LaunchSet, launch_of, read_set
from aorta.analysis.compare.verdict_rules import GUARD, Rules
from aorta.analysis.load.engines import Engine
from aorta.analysis.load.locations import launch_folders, load_source
from aorta.analysis.load.records import load_run


@dataclass(frozen=True)
class Subject:
    """What a label stands for: one run, or a launch set with `dataset` as its representative launch."""

    dataset: LabelledRun
    launches: LaunchSet | None = None

    def as_set(self) -> LaunchSet:
        """The launch set; a run compared with a launch set is a set of one launch."""
        return self.launches or LaunchSet(Path(self.dataset.run.location), (launch_of(self.dataset),), ())

    def datasets(self, engine: Engine | None = None) -> Iterator[LabelledRun]:
        """Yield the launches, each read when it is requested; a single run yields itself."""
        if self.launches is None:
            yield self.dataset
            return
        for launch in self.launches.launches:
            yield LabelledRun(self.dataset.label, load_run(launch.path, engine))


def read_subjects(
    sources: Mapping[str, str | Path], rules: Rules, engine: Engine | None = None, comm_patterns: Sequence[str] = ()
) -> dict[str, Subject]:
    """Read the location of each label.

    Raises:
        InputError: a folder cannot be read, or a launch set has no complete launch.
    """
    subjects = {}
    for label, where in sources.items():
        folders = launch_folders(where)
        if folders:
            launches = read_set(Path(where), folders, lambda folder: load_run(folder, engine))
            shown = load_run(launches.representative(*shown_by(rules)).path, engine)
            subjects[label] = Subject(LabelledRun(label, shown), launches)
        else:
            subjects[label] = Subject(LabelledRun(label, load_source(where, engine, comm_patterns)))
    return subjects


def shown_by(rules: Rules) -> tuple[str, ...]:
    """The metrics whose medians the launch is nearest to that stands for its set in pictures and details."""
    return tuple(dict.fromkeys((rules.primary, GUARD)))
