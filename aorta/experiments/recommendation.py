"""Which of several candidates `aorta study` recommends: the verdicts of the comparison, one for each.

With several candidates the chance that one of them looks better grows; so each is judged at `rules(...)`, whose level
is shared among them (Bonferroni, which holds however the candidates depend on each other; here all share the base's
launches). Must not judge anything that the comparison did not, or recommend what it did not call an improvement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aorta.analysis.compare.launch_comparison import compare_launches
from aorta.analysis.compare.launch_set import read_subjects
from aorta.analysis.compare.verdict import Rules, least_launches
from aorta.analysis.documents import as_json
from aorta.analysis.documents.comparison import Comparison, Effect
from aorta.analysis.formatting import TEXT
from aorta.analysis.metrics import JOB_STEP
from aorta.errors import InputError
from aorta.experiments.launch_plan import REFERENCE, Plan

ALPHA: Final = 0.05
"""Chance of even one wrong verdict, improvement or regression, among all candidates: at most 1 in 20."""
_MANY: Final = 2.0
"""From three times the base on a change is said as a factor: +2343.7 % is 24x."""
_SHOWN: Final = (JOB_STEP, "overlap_ratio")
_KEPT: Final = (
    *("verdict", "verdict_reason", "headline", "warnings", "launches", "launch_order", "left_out", "primary"),
    *("alpha", "margin", "interval_level"),
)
"""Of a comparison, besides its metrics of step time and overlap."""


def format_effect(effect: Effect) -> str:
    """Format an effect and its interval."""
    return f"{_format_value(effect, effect.value)} {format_interval(effect)}".strip()


def format_interval(effect: Effect) -> str:
    """Format the interval of an effect, in brackets; nothing without one."""
    if effect.low is None or effect.high is None:
        return ""
    return f"({_format_value(effect, effect.low)} to {_format_value(effect, effect.high)})"


def _format_value(effect: Effect, value: float | None) -> str:
    """Format a value of an effect in per cent; several times the base as a factor."""
    many = value is not None and effect.kind == "quotient" and value >= _MANY
    return f"{1 + value:.2g}x" if many and value is not None else TEXT.effect(value, effect.kind)


def select_for_json(comparison: Comparison) -> dict[str, Any]:
    """Select what `study.json` holds of a comparison."""
    document = as_json(comparison)
    metrics = {name: as_json(each) for name, each in comparison.metrics.items() if name in _SHOWN}
    return {name: document[name] for name in _KEPT if name in document} | {"metrics": metrics}


def rules(candidates: int, margin: float) -> Rules:
    """Return the rules by which each of several candidates is judged: on step time, at its share of `ALPHA`."""
    return Rules(primary=JOB_STEP, alpha=ALPHA / max(candidates, 1), margin=margin)


def check_launches(launches: int, candidates: int, asked_by: str) -> None:
    """Refuse launches that could come to no verdict, before any is made.

    Args:
        asked_by: what the candidates come from, in words.

    Raises:
        InputError: names how many are needed.
    """
    least = least_launches(ALPHA / max(candidates, 1))
    if launches < least:
        raise InputError(
            f"--launches {launches}: with {candidates} candidate{'s' if candidates > 1 else ''} ({asked_by}) no "
            f"verdict is possible from fewer than {least} a side; give more launches, or fewer candidates"
        )


def compared(plan: Plan, judged_by: Rules) -> dict[str, Comparison]:
    """Compare the launches of each candidate of a plan with those of its base.

    Returns:
        Side -> its comparison.

    Raises:
        InputError: launches cannot be read, or did different work.
    """
    subjects = read_subjects({side.name: plan.output / side.name for side in plan.sides}, judged_by)
    base = subjects.pop(REFERENCE)
    return {
        name: compare_launches(
            (base.dataset, candidate.dataset),
            (base.as_set(), candidate.as_set()),
            ([], []),  # not shown
            judged_by,
        )
        for name, candidate in subjects.items()
    }


def recommended(judgements: Mapping[str, Comparison]) -> tuple[str | None, str]:
    """Return the side to recommend, or None, and the reason.

    Args:
        judgements: side -> its comparison with the base.
    """
    better = {name: found for name, found in judgements.items() if found.verdict == "improvement"}
    if better:
        chosen = min(better, key=lambda name: (better[name].metrics[JOB_STEP].candidate, name))
        others = f"; of {len(better)} improvements it has the shortest step" if len(better) > 1 else ""
        return chosen, f"{better[chosen].verdict_reason}{others}"
    if not judgements:
        return None, "there was nothing to launch against the base"
    return None, f"none of the {len(judgements)} launched was shown to be better than the base"
