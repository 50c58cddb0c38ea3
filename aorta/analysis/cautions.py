"""What a reader of a report has to know of its runs before its numbers.

What is wrong comes first, in short (`alerts`): every report says it at its top. What happened to a run that hung or
died, where its host sets the pace and few steps are notes.

Must not compute or change a metric, or decide how far it can be trusted (`pace` does).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.devices import device_notes, throttle_notes
from aorta.analysis.stragglers import straggler_sentences
from aorta.documents import known
from aorta.documents.comparison import Comparison
from aorta.documents.dataset import DatasetEntry
from aorta.documents.formatting import TEXT, first_upper, rough_percent
from aorta.documents.metrics import HOST_BOUND, RATIO_PARTS
from aorta.read.ledger import DAMAGED, MISSING, MODES, NOTED, UNLIKE, facts
from aorta.timeline.overlap import NS_PER_MS

PROFILER_COST: Final = 0.05
"""From this on, steps that a profiler made longer are said not to be like the others."""
FEW_STEPS: Final = 20
"""Up to this, the 5th and the 95th percentile are the smallest and the largest value, or lie between these and the next
(numpy's linear interpolation: position 0.05 (n - 1) is below 1 up to n = 20)."""
_HAPPENED: Final = {
    "dead": "{} died",
    "stopped": "{} stopped by a signal or debugger",
    "slow": "{} slow, others wait",
    "signature_mismatch": "Hung: ranks called different collectives",
    "order_swapped": "Hung: collectives in different orders",
    "stuck_outside": "{} hung outside collectives",
    "rank_did_not_join": "Hung: {} did not join a collective",
    "stuck_inside": "Hung inside a collective",
    "cannot_decide": "Stuck or ended early, cause unknown",
}
"""What happened, by the kind of an autopsy's verdict; `{}`: the accused."""


def pace_notes(entry: DatasetEntry) -> Iterator[str]:
    """Yield sentences about a dataset from its entry in `summary.json`: where its host sets the pace, and effects."""
    pace = known(entry.pace)
    if pace is None:
        return
    calibration, ratio = pace.calibration, entry.metrics.get("overlap_ratio")
    by_kernels = ratio is not None and ratio.source == "kernels"
    if by_kernels:
        steps = TEXT.count(0 if calibration is None else calibration.steps, "step")
        shown = f"metrics with computation in them are of {steps} measured by the profiler's kernels"
    else:
        shown = "metrics with computation in them have no value, as not every rank has steps measured by kernels"
        if ratio is not None and ratio.bounds:
            shown = f"overlap_ratio is {TEXT.bounds(ratio.bounds, 'ratio')}"
        elif pace.host_bound:
            shown = "metrics with computation in them are bounds"
        if pace.no_calibration is not None:
            shown += f"; no steps were measured by kernels: {pace.no_calibration}"
        elif calibration is None:
            shown += "; record with instrument.calibration=3 for a number"
    if pace.host_bound:
        yield (
            f"host-bound: the host is {TEXT.quantity(pace.host_lead_ms, 'ms')} ahead of the device (median), and in "
            f"{rough_percent(pace.undecided_share or 0)} of the blocks' time marks cannot say whether kernels ran; "
            f"{shown}; fewer kernels to launch (torch.compile, CUDA graphs) put the host ahead"
        )
    elif calibration is not None and calibration.agree is False:
        yield (
            "kernels and marks of the same steps disagree: an overlap ratio of "
            f"{TEXT.number(calibration.ratio_by_kernels, 'ratio')} by kernels, "
            f"{TEXT.number(calibration.ratio_by_marks, 'ratio')} by marks; {shown}"
        )
    if calibration is None:
        return
    before, within = calibration.other_step_ms, calibration.window_step_ms
    if before and within and within / before - 1 > PROFILER_COST and by_kernels:
        yield (
            f"the steps measured by kernels took {TEXT.percent(within / before - 1)} longer than the others, which "
            "the profiler did: a host-bound step of ordinary length hides more or less than they do"
        )
    for problem in calibration.problems:
        yield f"calibration: {problem}"


def alerts(entries: Mapping[str, DatasetEntry], comparison: Comparison | None = None) -> list[str]:
    """Return what is wrong with a report, the most serious first: ranks that hung, damage, what is missing, what makes
    the sides unlike, emulation, one rank alone, other modes. Empty where nothing is. What heads the report, that its
    only run hung or that the sides did other work, is left out.
    """
    named: dict[tuple[int, str], list[str]] = {}
    for label, entry in entries.items():
        if len(entries) > 1 and (title := autopsy_title(entry)) is not None:
            named.setdefault((DAMAGED, title), []).append(label)
        for alert in _alerts(entry):
            named.setdefault(alert, []).append(label)
    if comparison is not None:
        named |= {(UNLIKE, warning): [] for warning in comparison.warnings}
    sentences = []
    for (_, sentence), labels in sorted(named.items(), key=lambda item: item[0][0]):
        of_all = not labels or len(labels) == len(entries)
        sentences.append(sentence if of_all else f"{', '.join(labels)}: {sentence}")
    return sentences


def _alerts(entry: DatasetEntry) -> Iterator[tuple[int, str]]:
    steps = entry.steps
    yield from ((fact.urgency, fact.short) for fact in facts(entry.health) if fact.urgency != NOTED)
    if (traces := known(entry.health.traces)) and not any(trace.steps for trace in traces):
        yield UNLIKE, "no step is marked: what is called a step is the whole trace"
    if (step := steps.first_loss_not_finite) is not None:
        yield DAMAGED, f"the loss was NaN or infinite, first in step {step}: what was timed may not train"
    if left_out := entry.left_out:
        launches = f"{len(left_out)} of {TEXT.count(len(left_out) + entry.launches, 'launch')} left out, the first: "
        yield DAMAGED, f"{launches}{left_out[0].path}: {left_out[0].reason}"
    records = steps.global_steps_used * steps.ranks_used
    if (absent := records - steps.rank_steps_used) > 0:
        are = "are" if absent > 1 else "is"
        yield MISSING, f"{TEXT.steps_used(entry)}; {absent} of {TEXT.count(records, 'record')} {are} missing"
    for note in [*throttle_notes(entry.devices), *(pace_notes(entry) if entry.count else ())]:
        yield MODES, note


def autopsy_notes(entry: DatasetEntry) -> list[str]:
    """Return what the autopsy of a run found, and the command that says more; empty where nothing was stuck."""
    title, autopsy = autopsy_title(entry), known(entry.autopsy)
    if title is None or autopsy is None:
        return []
    return [f"{title}: {autopsy.summary}. More: aorta autopsy {shlex.quote(entry.source.path)}"]


def autopsy_title(entry: DatasetEntry) -> str | None:
    """Return what happened to a run, in a few words; None where it has no autopsy, or nothing was stuck."""
    autopsy = known(entry.autopsy)
    if autopsy is None or autopsy.kind == "not_stuck":
        return None
    ranks = sorted({culprit.rank for culprit in autopsy.culprits})
    accused = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks) or 'some'} ranks"
    return first_upper(_HAPPENED[autopsy.kind].format(accused))


def cautions(entry: DatasetEntry) -> list[str]:
    """Return warnings: a host that sets the pace, few steps, denominators of 0. A dataset without a usable step has
    none.
    """
    if not entry.count:
        return []
    notes = [*pace_notes(entry)]
    steps, values = entry.steps.global_steps_used, entry.steps.rank_steps_used
    if steps <= FEW_STEPS:
        extremes = "p5 and p95 are the minimum and maximum, and " if values <= FEW_STEPS else ""
        notes.append(
            f"only {TEXT.count(steps, 'step')} after warm-up: {extremes}one slow step moves a mean; record more than "
            f"{FEW_STEPS}"
        )
    if unclear := entry.steps.unclear_rank_steps:
        more = " (and other reasons)" if len(unclear) > 1 else ""
        notes.append(
            f"{sum(unclear.values())} of {TEXT.count(values, 'step')} of ranks may be longer or shorter than shown, as "
            f"it is not clear where they begin or end: {next(iter(unclear))}{more}"
        )
    for name in RATIO_PARTS:
        described = entry.metrics.get(name)
        others = [] if described is None else [why for why in described.null_reasons if why != HOST_BOUND]
        if described is not None and others and described.median is not None:
            count = described.count + sum(described.null_reasons[why] for why in others)
            more = " (and other reasons)" if len(others) > 1 else ""
            notes.append(
                f"{name} is known in {described.count} of {count} steps of ranks; in the others: {others[0]}{more}"
            )
    return notes


def notes_of(dataset: LabelledRun, entry: DatasetEntry, *, all_of_record: bool = True) -> list[str]:
    """Return what a reader of a dataset's numbers has to know: that it hung, and a slow rank, first.

    Args:
        all_of_record: with what is wrong with the record in full; `alerts` says it in short.
    """
    nothing, health = [f"nothing to measure: {entry.reason}"] if entry.reason else [], dataset.run.health
    gaps = [gap.why for gap in health.gaps]
    of_record = [
        note for note in health.notes if all_of_record or (entry.traces and not any(why in note for why in gaps))
    ]
    of_record = [*of_record, *cautions(entry), *device_notes(entry.devices)]
    return [*autopsy_notes(entry), *nothing, *diagnoses(entry), *of_record]


def diagnoses(entry: DatasetEntry) -> list[str]:
    """Return who holds the others up, what the rules found, and who computes longer, which nothing may come of."""
    stragglers = known(entry.stragglers)
    uneven = [stragglers.uneven] if stragglers is not None and stragglers.uneven is not None else []
    return [*straggler_sentences(stragglers), *(finding.sentence for finding in known(entry.findings) or ()), *uneven]


def sampling_line(entry: DatasetEntry) -> str | None:
    """Return which steps were observed; None where all were."""
    sampling = known(entry.sampling)
    if sampling is None:
        return None
    if sampling.every is None:
        return f"none of {TEXT.count(sampling.steps, 'step')} observed (instrument.every={sampling.asked})"
    which = f"1 in {sampling.every} steps observed at random" if sampling.every > 1 else "every step observed"
    return f"{which}: {sampling.steps_drawn} of {sampling.steps}"


def cutoff_line(entry: DatasetEntry) -> str | None:
    """Return the stall cut-off as a line of a report; None where none applies."""
    cutoff = known(entry.stall_cutoff)
    if cutoff is None:
        return None
    ends = [f"{end_ns / NS_PER_MS:.2g}" for end_ns in (cutoff.lowest_ns, cutoff.highest_ns)]
    line = f"stall cut-off {' to '.join(dict.fromkeys(ends))} ms"
    line += f" ({' and '.join(cutoff.sources)})" if cutoff.sources else ""
    return line if cutoff.reason is None else f"{line}; {cutoff.reason}"
