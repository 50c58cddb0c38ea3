"""What would gain most in a run, for its report: replayed from the last steps of its record (docs/what-if.md).

    most_to_gain(run)["gains"][0]["words"]      "overlap on"

Bounded, so that the report of a large run stays quick. Must not predict by itself, or leave out why there is no
prediction.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from aorta.analysis.load.run_facts import FORMAT
from aorta.analysis.tables import Run
from aorta.analysis.whatif.gains import gains
from aorta.analysis.whatif.marginals import marginals
from aorta.analysis.whatif.predicted_value import LEVEL
from aorta.analysis.whatif.prediction import base_of
from aorta.analysis.whatif.read_program import program_of
from aorta.errors import InputError

LAST_STEPS: Final = 50
RANK_STEPS: Final = 6400
"""Replayed for a report; of more ranks fewer steps, and none where not even `_LEAST_STEPS` of them fit."""
_LEAST_STEPS: Final = 8
SHOWN_MARGINALS: Final = 5


def most_to_gain(run: Run) -> dict[str, Any]:
    """`what_if` of a dataset in `summary.json`, as plain JSON values; with a `reason` there is nothing else in it."""
    try:
        return {"reason": None, **_replayed(run)}
    except (InputError, OSError) as error:  # a record is read again
        words = str(error)
        for known in (f"{run.location}: ", "a replay is not possible: ", "no prediction: "):
            words = words.removeprefix(known)
        return {"reason": words}


def _replayed(run: Run) -> dict[str, Any]:
    last = min(LAST_STEPS, RANK_STEPS // max(len(run.ranks), 1))
    ask = f"aorta whatif {shlex.quote(run.location)}"
    if run.source.format != FORMAT:
        raise InputError(f"a report replays AORTA's own records, not traces; ask {ask}")
    if last < _LEAST_STEPS:
        raise InputError(f"{len(run.ranks)} ranks are too many to be replayed for a report; ask {ask}")
    program = program_of(run, last)
    base = base_of(program)
    found, parts = gains(base), marginals(program)
    shown = [each for at, each in enumerate(parts.of) if at < SHOWN_MARGINALS or each.what == "kind"]
    first = found.of[0].change if found.of else "network.bandwidth=x2"
    return {
        "steps": len(program.steps),
        "ranks": len(program.ranks),
        "level": LEVEL,
        "step_ms": parts.step_ms,
        "check": base.identity.problem(),
        "gains": [each.as_json() for each in found.of],
        "marginals": [asdict(each) for each in shown],
        "bounds": [asdict(each) for each in parts.bounds],
        "notes": [*found.notes, *parts.notes],
        "flags": list(found.flags),
        # Of the same steps, so that the answer is the same.
        "command": f"{ask} --set {shlex.quote(first)}" + (f" --last {last}" if len(program.steps) == last else ""),
    }


def with_marginals(attribution: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, Any]:
    """An attribution whose causes say what the candidate would gain without what they blame: all collectives of that
    kind, or the straggler. As it was where the candidate was not replayed.

    Args:
        candidate: its `what_if`.
    """
    causes: Sequence[Mapping[str, Any]] = attribution.get("causes") or ()
    if candidate["reason"] is not None or not causes:
        return dict(attribution)
    rows = [dict(cause) | _marginal_of(cause, candidate) for cause in causes]
    return {**attribution, "causes": rows}


def _marginal_of(cause: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, Any]:
    """`marginal` of a cause that names a kind of collectives or a straggler; empty for others, and for what only the
    reference has.
    """
    wanted = ("bound", "no straggler") if cause["dimension"] == "straggler" else ("kind", cause.get("kind"))
    for each in (*candidate["marginals"], *candidate["bounds"]):
        if (each["what"], each["name"]) == wanted:
            name = "any straggler" if each["what"] == "bound" else f"the cost of all {each['name']}"
            return {"marginal": {"name": name, **{key: each[key] for key in ("gain_ms", "low_ms", "high_ms")}}}
    return {}
