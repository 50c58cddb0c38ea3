"""What `aorta study` and `aorta tune` say at their ends, for people and as JSON, CSV and a heat map.

Must not decide anything: `recommendation` did.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from aorta.analysis.compare.verdict import Rules
from aorta.analysis.documents.comparison import ComparedMetric, Comparison, Side
from aorta.analysis.metrics import JOB_STEP
from aorta.analysis.whatif.prediction import Base
from aorta.command_line import shown_path
from aorta.errors import InputError
from aorta.experiments.launch_plan import CANDIDATE, REFERENCE, Plan, StudyCell, StudyDefinition
from aorta.experiments.recommendation import ALPHA, format_effect, format_interval, select_for_json
from aorta.experiments.tune_proposals import TRIED, Proposal
from aorta.records.environment_variables import hide, shown_values, shown_variables
from aorta.records.files import write_whole
from aorta.terminal_style import csv_text, filled, paragraph, table
from aorta.version import __version__

TUNE_VERSION: Final = 1
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


@dataclass(kw_only=True)
class Tuning(Search):
    """Every proposal of a tuning.

    Attributes:
        recorded: the run that was predicted from.
        base: it, replayed; None: it could not be.
        recordings: launches made to have a record: of the base, but with --from, and of settings to refine from.
    """

    recorded: Path
    base: Base | None
    proposals: list[Proposal]
    recordings: int

    @property
    def sides(self) -> dict[str, Proposal]:
        """The proposals that are launched, by the name of their side."""
        tried = [one for one in self.proposals if one.why == TRIED]
        return {f"{CANDIDATE}-{number}": one for number, one in enumerate(tried, start=1)}

    def as_json(self) -> dict[str, Any]:
        """Return the content of `tune.json`."""
        sides = {id(one): side for side, one in self.sides.items()}
        chosen = None if self.chosen is None else self.sides[self.chosen].as_json()
        return {
            "tune_version": TUNE_VERSION,
            "aorta_version": __version__,
            "predicted_from": str(self.recorded),
            "base": None if self.base is None else asdict(self.base.identity),
            "alpha": ALPHA,
            "alpha_per_candidate": self.judged_by.alpha,
            "margin": self.judged_by.margin,
            "launches": {
                "recordings": self.recordings,
                "per_side": self.launches,
                "total": self.recordings + (self.launches * (1 + len(sides)) if sides else 0),
            },
            "proposals": [self._row(one, sides.get(id(one))) for one in self.proposals],
            "recommendation": None
            if chosen is None
            else {"side": self.chosen, **{key: chosen[key] for key in ("overrides", "environment")}},
            "reason": self.reason,
            "notes": self.all_notes,
        }

    def _row(self, one: Proposal, side: str | None) -> dict[str, Any]:
        found = None if side is None else self.judgements.get(side)
        return {**one.as_json(), "side": side, "comparison": None if found is None else select_for_json(found)}

    @property
    def all_notes(self) -> list[str]:
        """What the predictions of launched proposals do not know and what comparisons warn of, among the notes."""
        flags = [flag for one in self.sides.values() for flag in one.flags]
        return list(dict.fromkeys([*self.notes, *flags, *self.warnings]))

    def proposals_text(self) -> str:
        """Return the proposals as predicted."""
        problem = None if self.base is None else self.base.identity.problem()
        lines = [] if problem is None else [f"check: {problem}"]
        for side, one in self.sides.items():
            predicted = "not predicted" if one.step_ms is None else f"predicted {_predicted(one)} ms from {one.source}"
            lines.append(f"{side}: {one.name}, {predicted}")
        return filled([*lines, *self._not_launched(), *(f"note: {note}" for note in self.all_notes)])

    def text(self, plan: Plan) -> str:
        """Return the end of the command: a table, what was not launched, the notes, the recommendation."""
        lines = [*self._table(), *self._not_launched(), *(f"note: {note}" for note in self.all_notes)]
        more = [self.details(plan.output)] if self.judgements else []
        name = "" if self.chosen is None else self.sides[self.chosen].name
        return "\n".join([filled(lines), *more, "", *self.conclusion(name)])

    def _table(self) -> Iterator[str]:
        if not self.judgements:
            return
        rows = [("", "predicted ms", "measured ms", "delta", "verdict")]
        replayed = None if self.base is None else self.base.identity.replayed_ms
        rows.append(
            ("base", _ms(replayed), _ms(next(iter(self.judgements.values())).metrics[JOB_STEP].reference), "", "")
        )
        reasons = []
        for side, found in self.judgements.items():
            one, step = self.sides[side], found.metrics[JOB_STEP]
            rows.append((_label(one), _predicted(one), _ms(step.candidate), format_effect(step.effect), found.verdict))
            source = "" if one.step_ms is None else f"; predicted from the record in {one.source}/"
            reasons.append(f"{_label(one)}: {found.verdict}, {found.verdict_reason}{source}")
        yield from table(rows, indent="  ")
        yield from reasons

    def _not_launched(self) -> Iterator[str]:
        reasons: dict[str, list[str]] = {}
        for one in self.proposals:
            if one.why != TRIED:
                predicted = "" if one.step_ms is None else f" ({one.step_ms.value:.2f} ms)"
                reasons.setdefault(one.why, []).append(f"{_label(one)}{predicted}")
        for why, names in reasons.items():
            yield f"not launched, {why}: {', '.join(names)}"


def _label(one: Proposal) -> str:
    return " ".join(one.changes) or one.name or "the replay"


def _predicted(one: Proposal) -> str:
    step = one.step_ms
    return "no prediction" if step is None else f"{step.value:.2f} ({step.low:.2f} to {step.high:.2f})"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ratio(metrics: Mapping[str, ComparedMetric], side: Side) -> str:
    metric = metrics.get("overlap_ratio")
    value = None if metric is None else metric.value(side)
    return "-" if value is None else f"{value:.3f}"
