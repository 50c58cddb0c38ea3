"""What `aorta tune` says at its end, for people and as `tune.json`.

Must not decide anything: `tune_proposals` and `tune_verdict` did.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import aorta
from aorta.analysis.compare.verdict_rules import Rules
from aorta.analysis.formatting import TEXT
from aorta.analysis.whatif.prediction import Base
from aorta.command_line import shown_path
from aorta.experiments.launch_plan import CANDIDATE, REFERENCE, Plan
from aorta.experiments.tune_proposals import TRIED, Proposal
from aorta.experiments.tune_verdict import ALPHA, step_of
from aorta.terminal_style import LEAST_WIDTH

TUNE_VERSION: Final = 1
_KEPT: Final = (
    *("verdict", "verdict_reason", "headline", "warnings", "launches", "launch_order", "left_out", "primary"),
    *("alpha", "margin", "interval_level"),
)
"""Of a comparison, besides its metrics of step time and overlap."""


@dataclass
class Tuning:
    """Everything there is to say; what comes after the launches is filled in then.

    Attributes:
        recorded: the run that was predicted from.
        base: it, replayed; None: it could not be.
        judged_by: the rules for each candidate.
        launches: of each side.
        recordings: launches made to have a record: of the base, but with --from, and of settings to refine from.
        comparisons: side -> comparison; chosen: the recommended side.
    """

    recorded: Path
    base: Base | None
    proposals: list[Proposal]
    judged_by: Rules
    launches: int
    recordings: int
    comparisons: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    chosen: str | None = None
    reason: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def sides(self) -> dict[str, Proposal]:
        """The proposals that are launched, by the name of their side."""
        tried = [one for one in self.proposals if one.why == TRIED]
        return {f"{CANDIDATE}-{number}": one for number, one in enumerate(tried, start=1)}

    def as_json(self) -> dict[str, Any]:
        """The content of `tune.json`."""
        sides = {id(one): side for side, one in self.sides.items()}
        chosen = None if self.chosen is None else self.sides[self.chosen]
        return {
            "tune_version": TUNE_VERSION,
            "aorta_version": aorta.__version__,
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
            "proposals": [
                {
                    **one.as_json(),
                    "side": sides.get(id(one)),
                    "comparison": comparison_json(self.comparisons.get(sides.get(id(one), ""))),
                }
                for one in self.proposals
            ],
            "recommendation": None
            if chosen is None
            else {
                "side": self.chosen,
                "overrides": list(chosen.overrides),
                "environment": chosen.as_json()["environment"],
            },
            "reason": self.reason,
            "notes": self._notes(),
        }

    def proposals_text(self) -> str:
        """The proposals as predicted."""
        return filled(self._proposal_lines())

    def _proposal_lines(self) -> Iterator[str]:
        problem = None if self.base is None else self.base.identity.problem()
        if problem is not None:
            yield f"check: {problem}"
        for side, one in self.sides.items():
            predicted = "not predicted" if one.step_ms is None else f"predicted {_predicted(one)} ms from {one.source}"
            yield f"{side}: {one.name}, {predicted}"
        yield from self._not_launched()
        yield from (f"note: {note}" for note in self._notes())

    def text(self, plan: Plan) -> str:
        """The end of the command: a table, what was not launched, the notes, the recommendation."""
        lines = [*self._table(), *self._not_launched()]
        lines += [f"note: {note}" for note in self._notes()]
        more = [details(plan.output, self.chosen or next(iter(self.comparisons)))] if self.comparisons else []
        return "\n".join([filled(lines), *more, "", *self._end()])

    def _table(self) -> Iterator[str]:
        if not self.comparisons:
            return
        rows = [("", "predicted ms", "measured ms", "delta", "verdict")]
        first = step_of(next(iter(self.comparisons.values())))
        replayed = "-" if self.base is None else f"{self.base.identity.replayed_ms:.2f}"
        rows.append(("base", replayed, f"{first['reference']:.2f}", "", ""))
        for side, found in self.comparisons.items():
            step = step_of(found)
            effect = step["effect"]
            delta = f"{TEXT.effect(effect['value'], effect['kind'])} {between(effect)}"
            rows.append(
                (
                    _label(self.sides[side]),
                    _predicted(self.sides[side]),
                    f"{step['candidate']:.2f}",
                    delta,
                    found["verdict"],
                )
            )
        yield from columns(rows)
        for side, found in self.comparisons.items():
            one = self.sides[side]
            source = "" if one.step_ms is None else f"; predicted from the record in {one.source}/"
            yield f"{_label(one)}: {found['verdict']}, {found['verdict_reason']}{source}"

    def _not_launched(self) -> Iterator[str]:
        reasons: dict[str, list[str]] = {}
        for one in self.proposals:
            if one.why != TRIED:
                predicted = "" if one.step_ms is None else f" ({one.step_ms.value:.2f} ms)"
                reasons.setdefault(one.why, []).append(f"{_label(one)}{predicted}")
        for why, names in reasons.items():
            yield f"not launched, {why}: {', '.join(names)}"

    def _notes(self) -> list[str]:
        flags = [flag for one in self.sides.values() for flag in one.flags]
        warnings = [warning for found in self.comparisons.values() for warning in found["warnings"]]
        return list(dict.fromkeys([*self.notes, *flags, *warnings]))

    def _end(self) -> Iterator[str]:
        if self.chosen is None:
            yield textwrap.fill(f"no recommendation: {self.reason}", LEAST_WIDTH, subsequent_indent="  ")
            return
        step = step_of(self.comparisons[self.chosen])
        change = TEXT.effect(step["effect"]["value"], step["effect"]["kind"])
        yield f"recommendation: {self.sides[self.chosen].name}"
        yield textwrap.fill(
            f"  step time {change} {between(step['effect'])}; {self.reason}",
            LEAST_WIDTH,
            subsequent_indent="  ",
        )


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of a table, indented, each column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def details(plan_folder: Path, side: str) -> str:
    """The command that compares a side with the base, to be copied: in one line."""
    reference, candidate = (str(shown_path(plan_folder / name)) for name in (REFERENCE, side))
    command = shlex.join(["aorta", "report", f"--{REFERENCE}", reference, f"--{CANDIDATE}", candidate])
    return f"details: {command}"


def filled(lines: Iterable[str]) -> str:
    """Lines no wider than a terminal; the table, whose rows are indented, stays as it is."""
    return "\n".join(
        line if line.startswith("  ") else textwrap.fill(line, LEAST_WIDTH, subsequent_indent="  ") for line in lines
    )


def _label(one: Proposal) -> str:
    return " ".join(one.changes) or one.name or "the replay"


def _predicted(one: Proposal) -> str:
    step = one.step_ms
    return "no prediction" if step is None else f"{step.value:.2f} ({step.low:.2f} to {step.high:.2f})"


def between(effect: Mapping[str, Any]) -> str:
    """The interval of an effect, in brackets; nothing without one."""
    if effect["low"] is None or effect["high"] is None:
        return ""
    low, high = (TEXT.effect(effect[end], effect["kind"]) for end in ("low", "high"))
    return f"({low} to {high})"


def comparison_json(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A comparison without its metrics, but for those of step time and overlap."""
    if found is None:
        return None
    metrics = {name: found["metrics"][name] for name in ("job_step_ms", "overlap_ratio") if name in found["metrics"]}
    return {name: found[name] for name in _KEPT} | {"metrics": metrics}
