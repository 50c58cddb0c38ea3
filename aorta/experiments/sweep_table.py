"""The table of a sweep, one row a job: its keys, what became of it, medians of its metrics; as CSV and as text.

Must not leave a job out, or write a number where there is none.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aorta.analysis.formatting import TEXT
from aorta.analysis.metrics import STEP_METRIC_NAMES, metric_named
from aorta.experiments.run_medians import RunMedians, read_medians
from aorta.experiments.sweep_journal import JobHistory, Sweep

WIDTH: Final = 100


@dataclass(frozen=True)
class JobRow:
    """One job and what its run holds."""

    job: JobHistory
    result: RunMedians

    def value(self, metric: str) -> float | None:
        """The median over the rank-steps of the run; None where the job is not done or has none."""
        return self.result.of(metric)[0] if self.job.status == "done" else None

    def why_not(self, metric: str) -> str | None:
        """Why there is no value."""
        if self.job.status != "done":
            ended = self.job.ended
            reason = ended.reason if ended is not None else None
            return self.job.status if reason is None else f"{self.job.status}: {reason}"
        return self.result.of(metric)[1]


def rows_of(sweep: Sweep) -> list[JobRow]:
    """Every job in order, the runs of those that are done read."""
    unread = RunMedians({}, {}, readable=False)
    return [JobRow(job, read_medians(sweep.run_folder(job)) if job.status == "done" else unread) for job in sweep.jobs]


def as_csv(sweep: Sweep, rows: Sequence[JobRow]) -> str:
    """`job, status, rank_steps`, each swept key, the median of every metric any job has, and `reason` (why the sweep's
    own metric is missing). Unknown is an empty cell.
    """
    metrics = [name for name in STEP_METRIC_NAMES if any(name in row.result.medians for row in rows)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["job", "status", "rank_steps", *sweep.swept, *metrics, "reason"])
    for row in rows:
        values = [row.value(name) for name in metrics]
        writer.writerow(
            [
                row.job.name,
                row.job.status,
                row.result.rank_steps if row.job.status == "done" else "",
                *(row.job.keys.get(key, "") for key in sweep.swept),
                *("" if value is None else repr(value) for value in values),
                row.why_not(sweep.asked.metric) or "",
            ]
        )
    return out.getvalue()


def as_text(sweep: Sweep, rows: Sequence[JobRow], metrics: Sequence[str]) -> str:
    """What a terminal shows: one line a job, then everything that is missing and why."""
    asked = sweep.asked
    lines = [f"sweep {sweep.folder}: {len(rows)} jobs, {asked.nproc} rank(s) each, begun {asked.started}"]
    lines.append(f"  {' '.join(asked.words)}")
    if any(row.result.emulated for row in rows):
        lines.append("  EMULATED FABRIC: times are the emulation's, not a network's")
    heads = ["job", *sweep.swept, *metrics, "status"]
    cells = [heads]
    for row in rows:
        numbers = [_shown(row.value(name), name) for name in metrics]
        cells.append([row.job.name, *(row.job.keys.get(key, "-") for key in sweep.swept), *numbers, row.job.status])
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    left = {0, len(heads) - 1}
    for line in cells:
        aligned = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join(aligned).rstrip())
    lines.append("values: medians over the steps of each job, warm-up left out; one launch a job is no verdict")
    lines += [textwrap.fill(note, WIDTH, subsequent_indent="    ") for note in _notes(sweep, rows, metrics)]
    return "\n".join(lines)


def _notes(sweep: Sweep, rows: Sequence[JobRow], metrics: Sequence[str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        for name in metrics:
            if (why := row.why_not(name)) is not None:
                subject = row.job.name if row.job.status != "done" else f"{row.job.name} {name}"
                named = by_reason.setdefault(why, [])
                if subject not in named:
                    named.append(subject)
    return [
        *(f"  ! {', '.join(subjects)}: {why}" for why, subjects in by_reason.items()),
        *(f"  ! {problem}" for problem in sweep.problems),
    ]


def _shown(value: float | None, metric: str) -> str:
    return "-" if value is None else TEXT.number(value, metric_named(metric).unit)
