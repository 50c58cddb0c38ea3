"""What would gain most in a run, for its report: replayed from the last steps of its record (docs/what-if.md).

    most_to_gain(run).gains[0].words      "overlap on"

Bounded, so that the report of a large run stays quick. Must not predict by itself, or leave out why there is no
prediction.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Final

import msgspec

from aorta.analysis.documents.comparison import Attribution, AttributionRow, Marginal
from aorta.analysis.documents.dataset import GainEntry, MarginalEntry, WhatIf
from aorta.analysis.load.run_facts import FORMAT
from aorta.analysis.tables import Run
from aorta.analysis.whatif.gains import gains, marginals
from aorta.analysis.whatif.prediction import LEVEL, base_of
from aorta.analysis.whatif.read_program import program_of
from aorta.errors import InputError

LAST_STEPS: Final = 50
RANK_STEPS: Final = 6400
"""Replayed for a report; of more ranks fewer steps, and none where not even `_LEAST_STEPS` of them fit."""
_LEAST_STEPS: Final = 8
SHOWN_MARGINALS: Final = 5


def most_to_gain(run: Run) -> WhatIf:
    """`what_if` of a dataset in `summary.json`; with a `reason` there is nothing else in it."""
    try:
        return _replayed(run)
    except (InputError, OSError) as error:  # a record is read again
        words = str(error)
        for known in (f"{run.location}: ", "a replay is not possible: ", "no prediction: "):
            words = words.removeprefix(known)
        return WhatIf(reason=words)


def _replayed(run: Run) -> WhatIf:
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
    return WhatIf(
        reason=None,
        steps=len(program.steps),
        ranks=len(program.ranks),
        level=LEVEL,
        step_ms=parts.step_ms,
        check=base.identity.problem(),
        gains=[GainEntry(**each.as_json()) for each in found.of],
        marginals=[MarginalEntry(**asdict(each)) for each in shown],
        bounds=[MarginalEntry(**asdict(each)) for each in parts.bounds],
        notes=[*found.notes, *parts.notes],
        flags=list(found.flags),
        # Of the same steps, so that the answer is the same.
        command=f"{ask} --set {shlex.quote(first)}" + (f" --last {last}" if len(program.steps) == last else ""),
    )


def add_marginals(attribution: Attribution, candidate: WhatIf) -> None:
    """Let the causes of an attribution say what the candidate would gain without what they blame: all collectives of
    that kind, or the straggler. They stay as they are where the candidate was not replayed.

    Args:
        candidate: its `what_if`.
    """
    if candidate.reason is None and attribution.causes:
        attribution.causes = [_with_marginal(cause, candidate) for cause in attribution.causes]


def _with_marginal(cause: AttributionRow, candidate: WhatIf) -> AttributionRow:
    """A cause with its `marginal`, where it names a kind of collectives or a straggler that the candidate has."""
    wanted = ("bound", "no straggler") if cause.dimension == "straggler" else ("kind", cause.kind)
    for each in (*candidate.marginals, *candidate.bounds):
        if (each.what, each.name) == wanted:
            name = "any straggler" if each.what == "bound" else f"the cost of all {each.name}"
            found = Marginal(name, each.gain_ms, each.low_ms, each.high_ms)
            return msgspec.structs.replace(cause, marginal=found)  # its breakdown keeps the row without
    return cause
