"""The stall cut-off of a run, and how much its overlap ratio rests on it, as `summary.json` and reports say it.

Must not: apply the rule (`aorta.instrument.step_builder` does, when a step is recorded).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aorta.analysis.documents import known
from aorta.analysis.documents.dataset import CutoffFacts, DatasetEntry, Described
from aorta.analysis.formatting import TEXT
from aorta.analysis.tables import HOST_TIMER, Run
from aorta.records.schema import STALL_CUTOFF_NS
from aorta.timeline.overlap import AT_CUTOFFS, NS_PER_MS

_NOT_RECORDED: Final = "made before records stated their cut-off: how much the ratio rests on it is not known"


def cutoffs_ns(run: Run) -> list[int]:
    """The cut-off of each rank that has one, or had the one of its time; empty for accelerators and traces."""
    sources = [tables.source for tables in run.ranks.values()]
    return [
        STALL_CUTOFF_NS if source.stall_cutoff is None else source.stall_cutoff.cutoff_ns
        for source in sources
        if source.stall_cutoff is not None or (source.timer == HOST_TIMER and source.instrument_mode != "off")
    ]


def cutoff_entry(run: Run, metrics: Mapping[str, Described]) -> CutoffFacts | None:
    """The value of `stall_cutoff` of a dataset: the cut-offs of its ranks, where they come from, and the median overlap
    ratio at half and at twice the cut-off; None where none applies.

    Args:
        metrics: the dataset's, with `median` each.
    """
    found = cutoffs_ns(run)
    if not found:
        return None
    told = [tables.source.stall_cutoff for tables in run.ranks.values() if tables.source.stall_cutoff is not None]
    medians = [metrics[name].median for name in AT_CUTOFFS if name in metrics]
    ratios = [median for median in medians if median is not None]
    problems = (
        [_NOT_RECORDED] if not told else sorted({cutoff.problem for cutoff in told if cutoff.problem is not None})
    )
    return CutoffFacts(
        min(found),
        max(found),
        sorted({cutoff.source for cutoff in told}),
        overlap_ratio_range=ratios if len(ratios) == len(AT_CUTOFFS) else None,
        reason="; ".join(problems) or None,
    )


def cutoff_line(entry: DatasetEntry) -> str | None:
    """The same as a line of a report; None where no cut-off applies."""
    found = known(entry.stall_cutoff)
    if found is None:
        return None
    ends = [f"{end_ns / NS_PER_MS:.2g}" for end_ns in (found.lowest_ns, found.highest_ns)]
    line = f"stall cut-off {' to '.join(dict.fromkeys(ends))} ms"
    line += f" ({' and '.join(found.sources)})" if found.sources else ""
    if found.overlap_ratio_range is not None:
        half, twice = (TEXT.number(value, "ratio", fewer=1) for value in found.overlap_ratio_range)
        line += f": the median overlap_ratio is {half} at half of it, {twice} at twice"
    return line if found.reason is None else f"{line}; {found.reason}"
