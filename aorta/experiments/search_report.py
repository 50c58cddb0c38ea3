"""What `aorta study` says at its end, for people and as JSON, CSV and a heat map.

Must not decide anything: `recommendation` did.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aorta.analysis.compare.verdict import Rules
from aorta.analysis.documents.comparison import ComparedMetric, Comparison, Side
from aorta.analysis.metrics import JOB_STEP
from aorta.command_line import shown_path
from aorta.errors import InputError
from aorta.experiments.launch_plan import CANDIDATE, REFERENCE, StudyCell, StudyDefinition
from aorta.experiments.recommendation import ALPHA, format_effect, format_interval, select_for_json
from aorta.records.environment_variables import hide, shown_values, shown_variables
from aorta.records.files import write_whole
from aorta.terminal_style import csv_text, filled, paragraph, table
from aorta.version import __version__

STUDY_VERSION: Final = 1
STUDY_FILE: Final = "study.json"
CSV_FILE: Final = "study.csv"
HEAT_FILE: Final = "heat.png"


@dataclass(kw_only=True)
class Search:
    """Candidates launched against one base, and their results; what comes after the launches is filled in then.

    Attributes:
        judged_by: the rules for each candidate.
        launches: of each side.
        judgements: side -> its comparison with the base.
        chosen: the recommended side, or None, for `reason`.
    """

    judged_by: Rules
    launches: int
    judgements: Mapping[str, Comparison] = field(default_factory=dict)
    chosen: str | None = None
    reason: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """Those of all comparisons."""
        return [warning for found in self.judgements.values() for warning in found.warnings]

    def conclusion(self, name: str) -> Iterator[str]:
        """Yield the last lines: the recommendation, `name` in the words a person copies; or why there is none."""
        if self.chosen is None:
            yield paragraph(f"no recommendation: {self.reason}")
            return
        yield f"recommendation: {name}"
        step = self.judgements[self.chosen].metrics[JOB_STEP]
        yield paragraph(f"  step time {format_effect(step.effect)}; {self.reason}")

    def details(self, launches: Path) -> str:
        """Return the command that compares a side with the base, to be copied: in one line."""
        side = self.chosen or next(iter(self.judgements))
        reference, candidate = (str(shown_path(launches / name)) for name in (REFERENCE, side))
        return f"details: {shlex.join(['aorta', 'report', f'--{REFERENCE}', reference, f'--{CANDIDATE}', candidate])}"


@dataclass(kw_only=True)
class Study(Search):
    """Every cell of a study."""

    asked: StudyDefinition
    cells: Sequence[StudyCell]

    def sides(self) -> Iterator[tuple[str, StudyCell, Comparison]]:
        """Yield side, cell and comparison of each."""
        for number, cell in enumerate(self.cells, start=1):
            side = f"{CANDIDATE}-{number}"
            yield side, cell, self.judgements[side]

    @property
    def base(self) -> Mapping[str, ComparedMetric]:
        """Metrics of any comparison: all have the same base."""
        return next(iter(self.judgements.values())).metrics

    def as_json(self) -> dict[str, Any]:
        """Return the content of `study.json`."""
        asked, cells = self.asked, {side: cell for side, cell, _ in self.sides()}
        chosen = None if self.chosen is None else cells[self.chosen]
        return {
            "study_version": STUDY_VERSION,
            "aorta_version": __version__,
            "varied": {key: list(dict.fromkeys(cell.shown[key] for cell in self.cells)) for key in asked.varied},
            "words": list(asked.words),
            "environment": shown_values(asked.environment),
            "alpha": ALPHA,
            "alpha_per_cell": self.judged_by.alpha,
            "margin": self.judged_by.margin,
            "launches": {"per_side": self.launches, "total": self.launches * (1 + len(cells))},
            "cells": [
                {"side": side, "name": cell.name, **cell.as_json(), "comparison": select_for_json(found)}
                for side, cell, found in self.sides()
            ],
            "recommendation": None if chosen is None else {"side": self.chosen, **chosen.as_json()},
            "reason": self.reason,
            "notes": list(asked.notes),
        }

    def text(self, written: Sequence[str], launches: Path) -> str:
        """Return the end of the command: a table, the notes, the files, the recommendation."""
        asked_of_all = [*shown_variables(self.asked.environment), *hide(self.asked.words)]
        rows = [("", f"{JOB_STEP}", "delta, interval", "overlap", "verdict")]
        base = self.base
        rows.append(("base", _ms(base[JOB_STEP].reference), "", _ratio(base, "reference"), ""))
        for _, cell, found in self.sides():
            step, overlap = found.metrics[JOB_STEP], _ratio(found.metrics, "candidate")
            rows.append((cell.name, _ms(step.candidate), format_effect(step.effect), overlap, found.verdict))
        level = f"each cell at {self.judged_by.alpha:.2g}: {ALPHA:g} shared among {len(self.cells)} (Bonferroni)"
        lines = [
            f"base: {' '.join(asked_of_all) or 'train.py as it is by default'}",
            *table(rows, indent="  "),
            f"values: medians of {self.launches} launches; verdicts on step time, {level}",
        ]
        lines += [f"note: {note}" for note in dict.fromkeys([*self.asked.notes, *self.warnings])]
        name = next((cell.name for side, cell, _ in self.sides() if side == self.chosen), "")
        return "\n".join([filled(lines), *written, self.details(launches), "", *self.conclusion(name)])

    def as_csv(self) -> str:
        """Return `side`, each varied key, then step time of base and cell in milliseconds, effect, its interval, p,
        verdict. Unknown is an empty cell.
        """
        head = ["base_step_ms", "step_ms", "effect", "effect_low", "effect_high", "p", "verdict"]
        rows: list[list[str | float | None]] = [["side", *self.asked.varied, *head]]
        for side, cell, found in self.sides():
            step = found.metrics[JOB_STEP]
            numbers = [step.reference, step.candidate, step.effect.value, step.effect.low, step.effect.high, step.p]
            rows.append([side, *cell.shown.values(), *numbers, found.verdict])
        return csv_text(rows)

    def write(self, folder: Path) -> list[str]:
        """Write the files; what to say of each.

        Raises:
            InputError: the folder cannot be written.
        """
        try:
            for name, content in ((STUDY_FILE, json.dumps(self.as_json(), indent=2) + "\n"), (CSV_FILE, self.as_csv())):
                write_whole(folder / name, content.encode())
            why_not = self._draw(folder / HEAT_FILE)
            if why_not is not None:
                (folder / HEAT_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from error
        drawn = str(shown_path(folder / HEAT_FILE)) if why_not is None else f"no heat map: {why_not}"
        return [*(str(shown_path(folder / name)) for name in (STUDY_FILE, CSV_FILE)), drawn]

    def _draw(self, path: Path) -> str | None:
        """Draw the heat map; returns None, or why there is none."""
        if any(cell.shown != cell.values for cell in self.cells):
            return "its axes would show values that look like secrets"
        if len(self.asked.varied) != 2:
            return f"it takes two keys, {len(self.asked.varied)} varied"
        from aorta.experiments.sweep_report import HeatPoint, arrange, draw

        y_key, x_key = self.asked.varied
        points = [
            HeatPoint(cell.values, step.candidate, below=format_interval(step.effect))
            for _, cell, found in self.sides()
            for step in (found.metrics[JOB_STEP],)
        ]
        base = _ms(self.base[JOB_STEP].reference)
        title = f"median of {self.launches} launches a cell (interval of the change); base {base} ms"
        return draw(arrange(points, JOB_STEP, x_key, y_key), title, path)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ratio(metrics: Mapping[str, ComparedMetric], side: Side) -> str:
    metric = metrics.get("overlap_ratio")
    value = None if metric is None else metric.value(side)
    return "-" if value is None else f"{value:.3f}"
