"""What `aorta study` says at its end: a table, study.json, study.csv and, over two keys, a heat map of step time.

Must not decide anything: `tune_verdict` did.
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import aorta
from aorta.analysis.compare.verdict_rules import Rules
from aorta.analysis.formatting import TEXT
from aorta.analysis.metrics import JOB_STEP
from aorta.command_line import shown_path
from aorta.distributed.redaction import shown_values
from aorta.errors import InputError
from aorta.experiments.launch_plan import CANDIDATE
from aorta.experiments.study_cells import StudyCell, StudyWords
from aorta.experiments.tune_report import between, columns, comparison_json, details, filled
from aorta.experiments.tune_verdict import ALPHA, step_of
from aorta.records.whole_files import whole_file
from aorta.terminal_style import LEAST_WIDTH

STUDY_VERSION: Final = 1
STUDY_FILE: Final = "study.json"
CSV_FILE: Final = "study.csv"
HEAT_FILE: Final = "heat.png"


@dataclass(frozen=True)
class Study:
    """Everything there is to say.

    Attributes:
        launches: of the base and of each cell.
        comparisons: side -> comparison with the base; chosen: the recommended side, or None, for `reason`.
    """

    asked: StudyWords
    cells: Sequence[StudyCell]
    judged_by: Rules
    launches: int
    comparisons: Mapping[str, Mapping[str, Any]]
    chosen: str | None
    reason: str

    def sides(self) -> Iterator[tuple[str, StudyCell, Mapping[str, Any]]]:
        """Side, cell and comparison of each."""
        for number, cell in enumerate(self.cells, start=1):
            side = f"{CANDIDATE}-{number}"
            yield side, cell, self.comparisons[side]

    def as_json(self) -> dict[str, Any]:
        """The content of `study.json`."""
        rows = [
            {
                "side": side,
                "name": cell.name,
                "overrides": list(cell.overrides),
                "environment": shown_values(cell.environment),
                "comparison": comparison_json(found),
            }
            for side, cell, found in self.sides()
        ]
        chosen = [row for row in rows if row["side"] == self.chosen]
        return {
            "study_version": STUDY_VERSION,
            "aorta_version": aorta.__version__,
            "varied": {key: list(dict.fromkeys(cell.shown[key] for cell in self.cells)) for key in self.asked.varied},
            "words": list(self.asked.words),
            "environment": shown_values(self.asked.environment),
            "alpha": ALPHA,
            "alpha_per_cell": self.judged_by.alpha,
            "margin": self.judged_by.margin,
            "launches": {"per_side": self.launches, "total": self.launches * (1 + len(rows))},
            "cells": rows,
            "recommendation": {key: chosen[0][key] for key in ("side", "overrides", "environment")} if chosen else None,
            "reason": self.reason,
            "notes": list(self.asked.notes),
        }

    def text(self, written: Sequence[str], launches: Path) -> str:
        """The end of the command: a table, the notes, the files, the recommendation."""
        rows = [("", f"{JOB_STEP}", "delta, interval", "overlap", "verdict")]
        first = next(iter(self.comparisons.values()))
        rows.append(("base", _number(step_of(first)["reference"]), "", _overlap(first, "reference"), ""))
        for _, cell, found in self.sides():
            step = step_of(found)
            delta = f"{TEXT.effect(step['effect']['value'], step['effect']['kind'])} {between(step['effect'])}"
            rows.append(
                (cell.name, _number(step["candidate"]), delta.strip(), _overlap(found, "candidate"), found["verdict"])
            )
        warnings = [warning for found in self.comparisons.values() for warning in found["warnings"]]
        level = f"each cell at {self.judged_by.alpha:.2g}: {ALPHA:g} shared among {len(rows) - 2} (Bonferroni)"
        lines = [*columns(rows), f"values: medians of {self.launches} launches; verdicts on step time, {level}"]
        lines += [f"note: {note}" for note in dict.fromkeys([*self.asked.notes, *warnings])]
        side = self.chosen or next(iter(self.comparisons))
        return "\n".join([filled(lines), *written, details(launches, side), "", *self._end()])

    def _end(self) -> Iterator[str]:
        if self.chosen is None:
            yield textwrap.fill(f"no recommendation: {self.reason}", LEAST_WIDTH, subsequent_indent="  ")
            return
        cell = next(cell for side, cell, _ in self.sides() if side == self.chosen)
        step = step_of(self.comparisons[self.chosen])
        change = TEXT.effect(step["effect"]["value"], step["effect"]["kind"])
        yield f"recommendation: {cell.name}"
        said = f"  step time {change} {between(step['effect'])}; {self.reason}"
        yield textwrap.fill(said, LEAST_WIDTH, subsequent_indent="  ")

    def as_csv(self) -> str:
        """`side`, each varied key, then step time of base and cell in milliseconds, effect, its interval, p, verdict.
        Unknown is an empty cell.
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        head = ["base_step_ms", "step_ms", "effect", "effect_low", "effect_high", "p", "verdict"]
        writer.writerow(["side", *self.asked.varied, *head])
        for side, cell, found in self.sides():
            step = step_of(found)
            effect = step["effect"]
            numbers = [step["reference"], step["candidate"], effect["value"], effect["low"], effect["high"]]
            numbers.append(step["p"])
            shown = ["" if number is None else repr(number) for number in numbers]
            writer.writerow([side, *cell.shown.values(), *shown, found["verdict"]])
        return out.getvalue()

    def write(self, folder: Path) -> list[str]:
        """Write the files; what to say of each.

        Raises:
            InputError: the folder cannot be written.
        """
        try:
            for name, content in ((STUDY_FILE, json.dumps(self.as_json(), indent=2) + "\n"), (CSV_FILE, self.as_csv())):
                with whole_file(folder / name) as part:
                    part.write_text(content, encoding="utf-8")
            drawn = self._draw(folder / HEAT_FILE)
        except OSError as error:
            raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from error
        return [str(shown_path(folder / name)) for name in (STUDY_FILE, CSV_FILE)] + [drawn]

    def _draw(self, path: Path) -> str:
        """Draw the heat map, or say why there is none."""
        if any(cell.shown != cell.values for cell in self.cells):
            path.unlink(missing_ok=True)
            return "no heat map: its axes would show values that look like secrets"
        if len(self.asked.varied) != 2:
            path.unlink(missing_ok=True)
            return f"no heat map: it takes two keys, {len(self.asked.varied)} varied"
        from aorta.experiments.heat_map import HeatCell, HeatGrid, draw

        (y_key, y), (x_key, x) = self.asked.varied.items()
        found = {tuple(cell.values.values()): step_of(each) for _, cell, each in self.sides()}
        cells = tuple(
            tuple(HeatCell(found[at]["candidate"], 1, None, between(found[at]["effect"])) for at in product((at_y,), x))
            for at_y in y
        )
        base = _number(step_of(next(iter(self.comparisons.values())))["reference"])
        title = f"median of {self.launches} launches a cell (interval of the change); base {base} ms"
        why_not = draw(HeatGrid(x_key, y_key, x, y, cells, JOB_STEP), title, path)
        return str(shown_path(path)) if why_not is None else f"no heat map: {why_not}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _overlap(found: Mapping[str, Any], side: str) -> str:
    value = found["metrics"].get("overlap_ratio", {}).get(side)
    return "-" if value is None else f"{value:.3f}"
