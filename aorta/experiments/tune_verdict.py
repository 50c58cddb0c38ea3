"""Which of several candidates `aorta tune` and `aorta study` recommend: the verdicts of the comparison, one for each.

With several candidates the chance that one of them looks better grows; so each is judged at `rules(...)`, whose level
is shared among them (Bonferroni, which holds however the candidates depend on each other; here all share the base's
launches). Must not judge anything that the comparison did not, or recommend what it did not call an improvement.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aorta.analysis.compare.inputs import read_subjects
from aorta.analysis.compare.launch_comparison import compare_launches
from aorta.analysis.compare.run_comparison import differing, facts
from aorta.analysis.compare.verdict import least_launches
from aorta.analysis.compare.verdict_rules import Rules
from aorta.analysis.load.records import load_run
from aorta.analysis.metrics import JOB_STEP
from aorta.errors import InputError

ALPHA: Final = 0.05
"""Chance of even one wrong verdict, improvement or regression, among all candidates: at most 1 in 20."""
_REFERENCE: Final = "reference"
_ELSEWHERE: Final = ("config.training.output_dir", "config.label")
"""Keys that say where a run was written, not what it did."""


def rules(candidates: int, margin: float) -> Rules:
    """The rules by which each of several candidates is judged: on step time, at its share of `ALPHA`."""
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


def compared(base: Path, candidates: Mapping[str, Path], judged_by: Rules) -> dict[str, dict[str, Any]]:
    """Compare the launches of each candidate with those of the base; candidate -> the comparison.

    Args:
        base: the folder of the base's launches; `candidates`: of each candidate's.

    Raises:
        InputError: launches cannot be read, or did different work.
    """
    subjects = read_subjects({_REFERENCE: base, **candidates}, judged_by)
    reference = subjects[_REFERENCE]
    return {
        name: compare_launches(
            (reference.dataset, subjects[name].dataset),
            (reference.as_set(), subjects[name].as_set()),
            ([], []),  # not shown
            judged_by,
        )
        for name in candidates
    }


def recommended(comparisons: Mapping[str, Mapping[str, Any]]) -> tuple[str | None, str]:
    """The candidate to recommend, or None, and the reason.

    Args:
        comparisons: candidate -> its comparison, of which `verdict`, `verdict_reason` and the metric of step time are
            read.
    """
    better = [name for name, found in comparisons.items() if found["verdict"] == "improvement"]
    if better:
        chosen = min(better, key=lambda name: (step_of(comparisons[name])["candidate"], name))
        others = f"; of {len(better)} improvements it has the shortest step" if len(better) > 1 else ""
        return chosen, f"{comparisons[chosen]['verdict_reason']}{others}"
    if not comparisons:
        return None, "there was nothing to launch against the base"
    return None, f"none of the {len(comparisons)} launched was shown to be better than the base"


def step_of(comparison: Mapping[str, Any]) -> Mapping[str, Any]:
    """Step time in a comparison: medians of both sides, effect, p-value."""
    found: Mapping[str, Any] = comparison["metrics"][JOB_STEP]
    return found


def unlike(recorded: Path, launched: Path) -> list[str]:
    """Where the run that the predictions come from was configured otherwise than the base that was launched."""
    sides = [facts(load_run(folder)) for folder in (recorded, launched)]
    return [
        f"{each['key']}: {each['reference']!r} in the run predicted from, {each['candidate']!r} in the base launched"
        for each in differing(*sides)
        if each["key"] not in _ELSEWHERE
    ]
