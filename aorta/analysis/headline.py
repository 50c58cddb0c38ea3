"""What a reader has to hear first: what came out of a comparison, and what has to be known of its runs.

A headline of at most 12 words and one line of numbers, both from the entries of the comparison's table:

    More exposed communication: 33.1 -> 76.4 ms; step time inconclusive.
    Hidden 48 % -> 0 % (significant); exposed +131 % (significant); step +24 % (inconclusive).

Step time and exposed time lead; the hidden share explains. Words behind a number are the verdict in the table, except
that a regression or an improvement is called significant: its sign says which.

Of runs, what is wrong comes first, in short (`alerts`): every report says it at its top. What happened to a run that
hung or died, where its host sets the pace and few steps are notes.

Must not decide anything (`verdict` does), state a number or a verdict that the table does not have, compute or change a
metric, or decide how far it can be trusted (`pace` does).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.compare.rank_tests import least_launches
from aorta.analysis.compare.verdict import (
    DECIDED,
    GUARD,
    NOT_COMPARABLE,
    NOT_SETTLED,
    NOT_TESTED,
    SEQUENCE,
    SHIFTED,
    WITHHELD,
    changes_of,
    is_comparable,
    mean_alone,
    slower,
)
from aorta.analysis.devices import device_notes, throttle_notes
from aorta.analysis.findings import straggler_sentences
from aorta.documents import known
from aorta.documents.comparison import ComparedMetric, Comparison
from aorta.documents.dataset import DatasetEntry
from aorta.documents.formatting import TEXT, first_upper, p_value, rough_ms, rough_percent
from aorta.documents.metrics import HOST_BOUND, RATIO_PARTS
from aorta.read.ledger import DAMAGED, MISSING, MODES, NOTED, UNLIKE, facts
from aorta.timeline.overlap import NS_PER_MS

MOST_WORDS: Final = 12
NOT_ALIKE: Final = "not comparable"
_UNLIKE_MEAN: Final = 1 / 3
"""Of the larger of both changes: where those of mean and median are further apart, the mean's is said too."""
_EXPOSED, _RATIO = SEQUENCE[:2]
_TITLES: Final = {
    GUARD: ("slower", "faster"),
    _EXPOSED: ("more exposed communication", "less exposed communication"),
    "exposed_share": ("more exposed communication", "less exposed communication"),
    _RATIO: ("less communication hidden", "more communication hidden"),
    "compute_stall_ms": ("longer stalls", "shorter stalls"),
}
"""What a regression and an improvement of a metric are called; of others the metric is named."""
_NAMES: Final = {GUARD: "step", _EXPOSED: "exposed", _RATIO: "hidden"}
_STEP_TIME: Final = {"equivalent": "unchanged", "regression": "longer", "improvement": "shorter", None: "not judged"}
"""What the headline says of the step time where it does not lead, by its verdict; others say themselves."""
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


def verdict_label(pair: ComparedMetric) -> str:
    """Return the verdict of a metric, with the launches that one which is not tested needs."""
    needed = pair.test.least_launches
    return str(pair.verdict) if needed is None else f"{pair.verdict} (needs {needed} launches)"


def leading(comparison: Comparison) -> str:
    """Return the metric that the headline is of: step time where it is decided, else the one that decides."""
    step = comparison.metrics.get(GUARD)
    if comparison.verdict == SHIFTED:
        return _RATIO
    return GUARD if step is not None and step.verdict in DECIDED else comparison.deciding


def title(comparison: Comparison) -> str:
    """Return the verdict in one to four words, in lower case."""
    if comparison.unlike:
        return NOT_ALIKE
    if not comparison.tested:
        return NOT_TESTED
    word, name = comparison.verdict, leading(comparison)
    if word in DECIDED:
        return _TITLES.get(name, (f"worse {name}", f"better {name}"))[DECIDED.index(word)]
    entry = comparison.metrics.get(name)
    return NOT_TESTED if entry is not None and entry.verdict == NOT_TESTED else str(word)


def headline(comparison: Comparison) -> str:
    """Return what came out in at most `MOST_WORDS` words."""
    word, metrics = first_upper(title(comparison)), comparison.metrics
    if comparison.unlike:
        first, *others = (key.removeprefix("config.") for key in comparison.unlike)
        return f"{word}: {first} and {len(others)} more differ." if others else f"{word}: {first} differs."
    if comparison.verdict == NOT_COMPARABLE:
        order = known(comparison.launch_order)
        unknown = order is not None and order.comparable is None
        return f"{word}: {'when launches ran is not known' if unknown else 'the launches did not take turns'}."
    if comparison.verdict == NOT_SETTLED:
        return f"{word}: steps still change their level after the warm-up."
    name, step = leading(comparison), metrics.get(GUARD)
    if not comparison.tested:
        pairs = {metric: metrics[metric] for metric in dict.fromkeys((name, GUARD, _RATIO)) if metric in metrics}
        shown = [_value(metric, pair) for metric, pair in pairs.items() if pair.difference is not None]
        return f"{word}: {', '.join(shown[:2]) or 'no metric is known on both sides'}."
    text = f"{word}: {_value(name, metrics.get(name))}"
    if comparison.verdict == SHIFTED:
        gained = (metrics[_RATIO].difference or 0.0) > 0
        return f"{word}, nothing {'gained' if gained else 'lost'}: {_arrow(metrics[_RATIO])} hidden."
    if name == GUARD:
        exposed = metrics.get(_EXPOSED)
        if exposed is None or exposed.verdict not in DECIDED or exposed.difference is None:
            return f"{text}."
        joined = "" if exposed.verdict == comparison.verdict else " although"
        change = f"{rough_ms(exposed.difference)} {'more' if exposed.difference > 0 else 'less'} exposed"
        return f"{text},{joined} {change}."
    if (mean := mean_alone(comparison)) is not None:
        return f"{text}; mean step {_percent(mean.change_ms / mean.reference_ms)}."
    if step is None or step.test.effect.value is None:
        return f"{text}; step time not known."
    return f"{text}; step time {_STEP_TIME.get(step.verdict, step.verdict)}."


def numbers(comparison: Comparison) -> str:
    """Return the hidden share, exposed time and step time with their verdicts in one line; where nothing was decided
    for lack of launches, or between unlike runs, what is missing.
    """
    if comparison.unlike:
        differing = {difference.key: difference for difference in comparison.manifest_differences}
        listed = [
            f"{key.removeprefix('config.')} is {differing[key].reference} in the reference, {differing[key].candidate} "
            "in the candidate"
            for key in comparison.unlike
        ]
        return f"The runs did not do the same work: {'; '.join(listed)}."
    if comparison.verdict in WITHHELD:
        return f"{first_upper(str(comparison.verdict_reason))}."
    metrics, host = comparison.metrics, comparison.host_bound
    parts = []
    for name in dict.fromkeys((comparison.deciding, _RATIO, _EXPOSED, GUARD)):
        entry = metrics.get(name)
        if entry is None or entry.difference is None:
            continue
        sides = entry.unit == "ratio" or entry.quotient is None
        change = (1.0 if entry.quotient is None else entry.quotient) - 1
        number = f"{_NAMES.get(name, name)} {_arrow(entry) if sides else _percent(change)}"
        significance = "significant" if entry.verdict in DECIDED else entry.verdict or "not judged"
        parts.append(f"{number} ({significance})" if comparison.tested else number)
    parts.sort(key=lambda part: not part.startswith(_NAMES[_RATIO]))
    text = f"{first_upper('; '.join(parts))}." if parts else ""
    lead = metrics.get(leading(comparison))
    if not comparison.tested:
        text += f" {first_upper(str(comparison.verdict_reason))}."
    elif title(comparison) == NOT_TESTED:
        text += f" Needs {least_launches(comparison.alpha)} launches per side."
    elif lead is None or lead.difference is None:
        text += f" {first_upper(str(comparison.verdict_reason))}."
    elif lead.verdict == "inconclusive" and lead.test.p is not None and lead.test.p <= comparison.alpha:
        withheld = slower(metrics.get(GUARD), comparison.alpha)
        text += f" No gain: {withheld}." if withheld is not None and lead.test.effect.low is not None else ""
    changed = changes_of(comparison, GUARD)
    if alone := [name for name in (GUARD, _EXPOSED) if mean_alone(comparison, name) is not None]:
        text += f" {first_upper(str(metrics[alone[0]].test.verdict_reason))}."
    elif changed is not None:
        of_mean, of_median = changed[0].change_ms / changed[0].reference_ms, changed[1]
        if abs(of_mean - of_median) > _UNLIKE_MEAN * max(abs(of_mean), abs(of_median)):
            text += f" The mean step: {_percent(of_mean)}."
    if host is not None:
        other = "candidate" if host.side == "reference" else "reference"
        text = f"The {host.side} is host-bound, the {other} is not. {text}"
    return text.strip()


def evidence(comparison: Comparison) -> str:
    """Return the test behind the verdict: effect with its interval, p, launches, the reason, and what these launches
    could have found; empty where nothing was tested.
    """
    entry = comparison.metrics.get(leading(comparison))
    if not (comparison.tested and is_comparable(comparison)) or entry is None or entry.test.effect.value is None:
        return ""
    test, effect, power = entry.test, entry.test.effect, entry.test.power
    text = f"{leading(comparison)}: {TEXT.effect(effect.value, effect.kind)}"
    if effect.low is not None:
        text += f", {TEXT.percent(test.interval_level, 0)} interval {TEXT.interval(effect)}"
    text += f", p {p_value(test.p)}, {entry.counts[0]} against {entry.counts[1]} launches: {test.verdict_reason}."
    if power.smallest_effect is None:
        return f"{text} Smallest detectable effect: not known ({power.smallest_effect_reason})."
    share, smallest = TEXT.percent(power.probability, 0), TEXT.effect(power.smallest_effect, effect.kind).lstrip("+")
    text += f" Smallest detectable effect: {smallest} ({share} power)."
    if entry.verdict == "inconclusive" and test.p is not None and test.p > comparison.alpha:
        wanted = TEXT.effect(max(abs(effect.value or 0.0), test.margin), effect.kind).lstrip("+")
        count = power.launches_reason if power.launches is None else f"{power.launches} launches per side"
        text += f" To detect {wanted}: {count}."
    return text


def _value(name: str, entry: ComparedMetric | None) -> str:
    """Return both sides of a metric; without values, that only bounds or nothing is known."""
    named = _NAMES.get(name, name)
    if entry is None or entry.difference is None:
        return f"{named} {'known in bounds only' if entry is not None and entry.bounded else 'not known'}"
    arrow = _arrow(entry)
    return arrow if entry.verdict in DECIDED and name != GUARD else f"{named} {arrow}"


def _percent(change: float) -> str:
    return TEXT.percent(change, 0 if abs(change) >= 0.1 else 1, signed=True)


def _arrow(entry: ComparedMetric) -> str:
    """Return `33.1 -> 76.4 ms` or `48 % -> 0 %`, with more digits where these are the same on both sides."""
    sides = entry.reference.value or 0.0, entry.candidate.value or 0.0
    if entry.unit == "ratio":
        left, right = (TEXT.percent(side, 0 if abs(sides[0] - sides[1]) >= 0.02 else 1) for side in sides)
        return f"{left} -> {right}"
    left, right = (TEXT.number(side, entry.unit) for side in sides)
    if left == right and sides[0] != sides[1]:
        left, right = (f"{side:.6g}" for side in sides)
    return f"{left} -> {right} {entry.unit}"


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
