"""Warns about a dataset's numbers: a host that sets the pace, few steps, denominators of 0, impossible efficiencies, an
overlap ratio that rests on the stall cut-off (`cutoffs_ns`, with which `collective_metrics` computes too).

Must not repeat what `health` says of the record, change a number, or apply the rule of the cut-off
(`aorta.instrument.step_builder` does, when a step is recorded).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from aorta.analysis.documents import known
from aorta.analysis.documents.dataset import CutoffFacts, DatasetEntry
from aorta.analysis.formatting import TEXT, first_upper
from aorta.analysis.host_bound import HOST_BOUND, pace_notes
from aorta.analysis.metrics import RATIO_PARTS
from aorta.analysis.run import HOST_TIMER, Run
from aorta.records.schema import STALL_CUTOFF_NS
from aorta.timeline.overlap import NS_PER_MS

FEW_STEPS: Final = 20
"""Up to this, the 5th and the 95th percentile are the smallest and the largest value, or lie between these and the next
(numpy's linear interpolation: position 0.05 (n - 1) is below 1 up to n = 20)."""
_SHARES: Final = ("overlap_ratio", "exposed_share", "overlap_efficiency")
"""Metrics that are shares of a whole, and so lie between 0 and 1 where their parts fit together."""
_HAPPENED: Final = {
    "dead": "{} died",
    "stopped": "{} stopped by a signal or debugger",
    "slow": "{} slow, others wait",
    "signature_mismatch": "Hung: ranks called different collectives",
    "order_swapped": "Hung: collectives in different orders",
    "stuck_outside": "{} hung outside collectives",
    "rank_did_not_join": "Hung: {} did not join a collective",
    "stuck_inside": "Hung inside a collective",
    "cannot_decide": "Hung, cause unknown",
}
"""What happened, by the kind of an autopsy's verdict; `{}`: the accused."""


def autopsy_notes(entry: DatasetEntry) -> list[str]:
    """Return what the autopsy of a run found, and the command that says more; empty where nothing was stuck."""
    title, found = autopsy_title(entry), known(entry.autopsy)
    if title is None or found is None:
        return []
    return [f"{title}: {found.summary}. More: aorta autopsy {shlex.quote(entry.source.path)}"]


def autopsy_title(entry: DatasetEntry) -> str | None:
    """Return what happened to a run, in a few words; None where it has no autopsy, or nothing was stuck."""
    found = known(entry.autopsy)
    if found is None or found.kind == "not_stuck":
        return None
    ranks = sorted({each.rank for each in found.culprits})
    accused = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks) or 'some'} ranks"
    return first_upper(_HAPPENED[found.kind].format(accused))


def cautions(entry: DatasetEntry) -> list[str]:
    """Return one sentence for each; none for a dataset without a usable step, which says so itself."""
    if not entry.count:
        return []
    return [*pace_notes(entry), *_steps(entry), *_denominators(entry), *_outside(entry)]


def _steps(entry: DatasetEntry) -> Iterator[str]:
    count, values = entry.steps.global_steps_used, entry.steps.rank_steps_used
    if count <= FEW_STEPS:
        extremes = "p5 and p95 are the minimum and maximum, and " if values <= FEW_STEPS else ""
        yield (
            f"only {TEXT.count(count, 'step')} after warm-up: {extremes}one slow step moves a mean; record more than "
            f"{FEW_STEPS}"
        )


def _denominators(entry: DatasetEntry) -> Iterator[str]:
    for name, values in entry.metrics.items():
        others = {why: count for why, count in values.null_reasons.items() if why != HOST_BOUND}
        left_out = sum(others.values())
        if name in RATIO_PARTS and left_out and values.median is not None:
            why, *more = others
            yield (
                f"{name} is known in {values.count} of {values.count + left_out} steps of ranks; in the others: "
                f"{why}{' (and other reasons)' if more else ''}"
            )


def _outside(entry: DatasetEntry) -> Iterator[str]:
    for name in _SHARES:
        values = entry.metrics.get(name)
        ends = () if values is None else (values.min, values.max)
        seen = [value for value in ends if value is not None and not 0 <= value <= 1]
        if seen:
            shown = " and ".join(TEXT.number(value, "ratio") for value in dict.fromkeys(seen))
            yield (
                f"{name} is {shown}, outside 0 to 100 %: its parts were measured in different steps and do not add up; "
                "record more steps"
            )


_NOT_RECORDED: Final = "the record does not state its cut-off"


def cutoffs_ns(run: Run) -> list[int]:
    """Return the cut-off of each rank that has one, or had the one of its time; empty for accelerators and traces."""
    sources = [tables.source for tables in run.ranks.values()]
    return [
        STALL_CUTOFF_NS if source.stall_cutoff is None else source.stall_cutoff.cutoff_ns
        for source in sources
        if source.stall_cutoff is not None or (source.timer == HOST_TIMER and source.instrument_mode != "off")
    ]


def cutoff_entry(run: Run, at_cutoffs: Sequence[float | None]) -> CutoffFacts | None:
    """Return the value of `stall_cutoff` of a dataset: the cut-offs of its ranks, where they come from, and the median
    overlap ratio at half and at twice the cut-off; None where none applies.

    Args:
        at_cutoffs: these medians; None where unknown.
    """
    found = cutoffs_ns(run)
    if not found:
        return None
    stated = [tables.source.stall_cutoff for tables in run.ranks.values() if tables.source.stall_cutoff is not None]
    ratios = [median for median in at_cutoffs if median is not None]
    problems = (
        [_NOT_RECORDED] if not stated else sorted({cutoff.problem for cutoff in stated if cutoff.problem is not None})
    )
    return CutoffFacts(
        min(found),
        max(found),
        sorted({cutoff.source for cutoff in stated}),
        overlap_ratio_range=ratios if len(ratios) == len(at_cutoffs) else None,
        reason="; ".join(problems) or None,
    )


def cutoff_line(entry: DatasetEntry) -> str | None:
    """Return the same as a line of a report; None where no cut-off applies."""
    found = known(entry.stall_cutoff)
    if found is None:
        return None
    ends = [f"{end_ns / NS_PER_MS:.2g}" for end_ns in (found.lowest_ns, found.highest_ns)]
    line = f"stall cut-off {' to '.join(dict.fromkeys(ends))} ms"
    line += f" ({' and '.join(found.sources)})" if found.sources else ""
    if found.overlap_ratio_range is not None:
        half, twice = (TEXT.number(value, "ratio") for value in found.overlap_ratio_range)
        line += f": the median overlap_ratio is {half} at half of it, {twice} at twice"
    return line if found.reason is None else f"{line}; {found.reason}"
