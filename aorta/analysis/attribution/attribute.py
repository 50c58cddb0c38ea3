"""Explains where the difference in exposed communication between two sides of a comparison lies
(docs/dev/attribution.md).

Each side is one dataset or several launches, which are read one at a time. The result is a few sentences, the ranked
causes, every breakdown of the difference, and of each side the achieved TFLOP/s, from the model FLOPs of its manifest.
Every number of the sentences stands in the rows of `breakdown.sentence_rows`, which are shown below them.

Must not: judge whether there is a difference (`compare` does), hold two launches, name a cause that is too small for
its effect, or count recomputation or work that is no matrix product, so that two stacks are measured against the same
work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.attribution.breakdown import (
    BUCKETED,
    PARTS,
    TRANSFER,
    UNEXPLAINED,
    WAIT,
    ExposedKey,
    Means,
    Totals,
    computing,
    dimensions,
    place_name,
    ranked,
    stragglers,
    totals_of,
)
from aorta.analysis.cautions import ONE_RANK
from aorta.analysis.compare.run_comparison import NOT_SET
from aorta.documents.comparison import AttributedSide, Attribution, AttributionRow, FactDifference
from aorta.documents.dataset import ExposedBreakdown, ExposedRow
from aorta.documents.formatting import TEXT, json_text
from aorta.read.frames import Region
from aorta.read.run import ExposedSums

Launches: TypeAlias = LabelledRun | Iterable[LabelledRun]
DEFINITION: Final = (
    "mean exposed_comm_ms over the steps of all ranks after warm-up, candidate minus reference; every exposed "
    "nanosecond belongs to one collective, one place and one part, so the rows of each dimension add up to the "
    "difference (docs/dev/attribution.md)"
)
_NO_SETTING: Final = ("label", "instrument.interceptor", "environment.LD_PRELOAD", "environment.LD_LIBRARY_PATH")
"""Differences that no setting makes: a name, what was compiled on the machine, and where libraries come from."""
_NOTHING: Final = "no step after warm-up whose exposed communication is known"


def attribute(reference: Launches, candidate: Launches, differences: Sequence[FactDifference] = ()) -> Attribution:
    """Compute `attribution` of a comparison. Its rows are in milliseconds per rank-step.

    Args:
        reference, candidate: a dataset, or an iterable of launches. Launches are consumed one at a time, so they may be
            loaded lazily.
        differences: `manifest_differences` of it; all but those of the headers are named in the sentence.

    Raises:
        InputError: a record cannot be read again.
    """
    sides = {
        side: totals_of([launches] if isinstance(launches, LabelledRun) else launches)
        for side, launches in (("reference", reference), ("candidate", candidate))
    }
    unknown = [f"{side}: {totals.host_bound}" for side, totals in sides.items() if totals.host_bound is not None]
    if unknown:
        return Attribution(definition=DEFINITION, sentence=None, reason="; ".join(unknown))
    empty = [side for side, totals in sides.items() if not totals.sums.rank_steps]
    if empty:
        return Attribution(definition=DEFINITION, sentence=None, reason=f"{' and '.join(empty)}: {_NOTHING}")
    means = Means(**sides)
    parallel = means.reference.parallel if means.reference.parallel == means.candidate.parallel else ""
    configured = [
        (key, each.reference, each.candidate)
        for each in differences
        if not each.key.startswith("header.") and (key := each.key.removeprefix("config.")) not in _NO_SETTING
    ]
    found, late, blocks = dimensions(means, parallel), stragglers(means), computing(means)
    text, lead = sentence(means, found, blocks, late, configured, parallel)
    return Attribution(
        definition=DEFINITION,
        unit="ms per step and rank",
        sentence=text,
        reason=None,
        difference_ms=means.difference_ms,
        **{side: _side(totals) for side, totals in sides.items()},
        causes=ranked(found, late, lead),
        dimensions=found,
        stragglers=late,
        computing=blocks,
    )


def exposed_breakdown(dataset: LabelledRun) -> ExposedBreakdown:
    """Break the exposed communication of one run down by group, collective, region of the step, part and rank: the
    difference from a run that has none.

    Raises:
        InputError: a record cannot be read again.
    """
    if dataset.pace.basis("overlap_ratio").reason == ONE_RANK:
        return ExposedBreakdown(reason=ONE_RANK)
    totals = totals_of([dataset])
    if totals.host_bound is not None or not totals.sums.rank_steps:
        return ExposedBreakdown(reason=totals.host_bound or _NOTHING)
    means = Means(Totals(sums=ExposedSums(rank_steps=1)), totals)
    found = dimensions(means, totals.parallel)
    rows = {
        name: [ExposedRow(row.what, row.candidate_ms, row.share) for row in found[name]]
        for name in ("group", "collective", "region", "part", "rank")
    }
    steps = totals.sums.rank_steps
    return ExposedBreakdown(reason=None, rank_steps=steps, exposed_ms=means.difference_ms, **rows)


def _side(totals: Totals) -> AttributedSide:
    sums = totals.sums
    return AttributedSide(
        launches=totals.launches,
        rank_steps=sums.rank_steps,
        rank_steps_left_out=sums.left_out,
        window_ms=totals.ms(sums.window_ns),
        comm_ms=totals.ms(sums.comm_ns),
        compute_comm_ms=totals.ms(sums.hidden_ns),
        exposed_comm_ms=totals.ms(sums.exposed_ns),
        exposed_comm_ns=sums.exposed_ns,
        compute_ms=totals.ms(sums.compute_ns),
        untold_ns=sum(length_ns for key, length_ns in totals.exposed.items() if key.kind == UNEXPLAINED),
    )


SAME: Final = 0.01
"""Means of exposed communication that differ by less than this fraction of the larger one are called the same."""
_MOST: Final = 0.5
_NEARLY_ALL, _ALL = 0.95, 0.9995
_LEADS, _MUCH = 0.6, 0.85
"""A block leads the sentence if it has the first fraction of the difference and no collective the second of that."""
_SHOWN_SETTINGS: Final = 3
_NONE_HIDDEN, _SOME_HIDDEN = 0.005, 0.05
"""Shares of communication: below the first nothing is hidden, above the second something is."""
_OVERLAP: Final = "parallel.overlap"
"""The setting that turns overlap on and off (docs/configuration.md)."""
_TOGGLED: Final = {
    (True, False): "All-reduce now starts after backward",
    (True, True): "All-reduce now starts during backward",
    (False, False): "Every collective is now waited for before computing goes on",
    (False, True): "Collectives now run ahead of the computing that needs them",
}
"""What each value of the setting does, to all-reduces of DistributedDataParallel (True) and to anything else."""
Setting: TypeAlias = tuple[str, object, object]
"""Key and both values of a setting in which the sides differ."""
Rows: TypeAlias = Sequence[AttributionRow]


def sentence(
    means: Means,
    breakdowns: Mapping[str, Rows],
    computing: Rows,
    late: Rows,
    configured: Sequence[Setting] = (),
    parallel: str = "",
) -> tuple[str, AttributionRow | None]:
    """Say what changed, what was configured differently, and then which cause makes up most of it, whether it is
    waiting or transfer, and where it is exposed. Where overlap was turned on or off and that explains it, say that and
    no more. Every number is a mean over steps and ranks.

    Args:
        computing: compute time of each pass of each block.
        late: what stragglers are waited for.
        configured: the settings in which the sides differ.
        parallel: the strategy of both sides.

    Returns:
        The text, and the row of that cause; None where there is nothing to attribute.
    """
    before, after = means.reference, means.candidate
    exposed = before.ms(before.sums.exposed_ns), after.ms(after.sums.exposed_ns)
    hidden = before.ms(before.sums.hidden_ns), after.ms(after.sums.hidden_ns)
    comm = before.ms(before.sums.comm_ns), after.ms(after.sums.comm_ns)
    if abs(means.difference_ms) <= SAME * max(exposed):
        more = ""
        if abs(hidden[1] - hidden[0]) > SAME * max(comm):
            more = f"; {'more' if hidden[1] > hidden[0] else 'less'} communication is hidden"
        return f"Mean exposed communication is the same: {_change(*exposed)} a step{more}.", None
    toggled = _toggled(means, breakdowns, configured, parallel)
    if toggled is not None:
        return toggled, max(breakdowns["part"], key=_portion)
    gone = comm[1] and hidden[1] <= _NONE_HIDDEN * comm[1] and hidden[0] > _SOME_HIDDEN * comm[0]
    came = comm[0] and hidden[0] <= _NONE_HIDDEN * comm[0] and hidden[1] > _SOME_HIDDEN * comm[1]
    what, pair = ("hidden", hidden) if gone or came else ("exposed", exposed)
    text = f"Mean {what} communication: {_change(*pair)} a step."
    if configured:
        # Keys that only one side has follow from another, as those of an emulated fabric do from its kind.
        both = [each for each in configured if NOT_SET not in each] or configured
        shown = [f"{key} {json_text(left)} -> {json_text(right)}" for key, left, right in both[:_SHOWN_SETTINGS]]
        more = f" and {len(configured) - len(shown)} more" if len(configured) > len(shown) else ""
        text += f" Configuration: {', '.join(shown)}{more}."
    cause, lead = _cause(means, breakdowns, late)
    text += f" {cause}."
    lost = breakdowns["balance"][1]
    if _portion(lost) < _MOST:
        return text, lead
    amount = f"{TEXT.quantity(abs(lost.difference_ms), 'ms')} {'less' if lost.difference_ms > 0 else 'more'}"
    left, right = before.ms(before.sums.compute_ns), after.ms(after.sums.compute_ns)
    text += f" Hidden: {amount}, of {_change(*comm)} of communication. Computation: {_change(left, right)}"
    blocks = [row for row in computing if row.listed and row.phase is not None]
    if blocks and abs(right - left) > SAME * max(left, right):
        row = max(blocks, key=lambda row: row.difference_ms * (right - left))
        if row.difference_ms / (right - left) >= _MOST:
            text += f" (most of the change in {row.what})"
    return f"{text}.", lead


def _portion(row: AttributionRow) -> float:
    """Return the share of the whole difference; 0 where that is 0."""
    return row.share or 0.0


def _change(before_ms: float, after_ms: float) -> str:
    return f"{TEXT.number(before_ms, 'ms')} -> {TEXT.quantity(after_ms, 'ms')}"


def _toggled(means: Means, breakdowns: Mapping[str, Rows], configured: Sequence[Setting], parallel: str) -> str | None:
    """Return what overlap turned on or off did; None where it was not, or what is hidden did not change accordingly."""
    value = next((after for key, before, after in configured if key == _OVERLAP and before is not after), None)
    communication, hidden = breakdowns["balance"]
    if not isinstance(value, bool) or _portion(hidden) < _MOST or (hidden.difference_ms > 0) == value:
        return None
    buckets = parallel in BUCKETED and {row.kind for row in breakdowns["kind"] if row.listed} == {"allreduce"}
    moved = f"per step that was {'exposed is hidden' if value else 'hidden is exposed'}"
    if (communication.difference_ms < 0) != value and abs(_portion(communication)) > _NONE_HIDDEN:
        moved = f"{'more' if value else 'less'} per step is hidden"  # communication itself takes less (more) time
    text = f"{_OVERLAP} {json_text(not value)} -> {json_text(value)}. {_TOGGLED[buckets, value]}: on average "
    text += f"{TEXT.quantity(abs(hidden.difference_ms), 'ms')} {moved}"
    shares = {row.part: _portion(row) for row in breakdowns["part"] if row.difference_ms}
    if shares and not set(shares) - {TRANSFER, WAIT} and min(shares.values()) >= _NONE_HIDDEN:
        rises, change_ms = "rises" if means.difference_ms > 0 else "falls", abs(means.difference_ms)
        text += f". Mean exposed time {rises} by {TEXT.quantity(change_ms, 'ms')}: "
        text += ", ".join(f"{TEXT.percent(shares[part], 0)} {PARTS[part]}" for part in PARTS if part in shares)
    return f"{text}."


def _cause(means: Means, breakdowns: Mapping[str, Rows], late: Rows) -> tuple[str, AttributionRow]:
    """Return the largest cause, with its share, part and place: a straggler, a block, a collective, or the whole kind
    where several sizes share a cause and none makes up most of it.
    """
    straggler = max((row for row in late if _portion(row) >= _MOST), key=_portion, default=None)
    if straggler is not None:
        fields = {"group": straggler.group, "group_size": straggler.group_size, "part": WAIT}
        return _share(means, straggler) + (_place(means, fields) if straggler.alone else ""), straggler
    kind, row, block = (
        max((row for row in breakdowns[dimension] if row.listed), key=_portion)
        for dimension in ("kind", "collective", "block")
    )
    names = ["kind", "group", "group_size", "bytes"]
    if _portion(kind) >= _MOST and (_portion(row) < 0.7 * _portion(kind) or row.kind != kind.kind):
        row, names = kind, ["kind"]
    leads = block.block is not None and _portion(block) >= _LEADS and _portion(row) < _MUCH * _portion(block)
    if leads:
        row, names = block, ["block"]
    fields = {name: getattr(row, name) for name in names}
    part, share = _largest(means, fields, lambda key: key.part)
    of = f": {'' if share >= _NEARLY_ALL else 'most of it '}{PARTS[part]}" if share >= _MOST else ""
    return f"{_share(means, row)}{of}{'' if leads else _place(means, fields)}", row


def _largest(means: Means, fields: Mapping[str, object], of: Callable[[ExposedKey], Any]) -> tuple[Any, float]:
    """Return which `of` the exposed time with these fields changed most in the direction of the whole, and its share
    of the change of all exposed time with these fields.
    """
    changes: Counter[Any] = Counter()
    for sign, totals in ((-1, means.reference), (1, means.candidate)):
        sums: Counter[Any] = Counter()
        for key, length_ns in totals.exposed.items():
            if all(getattr(key, name) == value for name, value in fields.items()):
                sums[of(key)] += length_ns
        for name, total_ns in sums.items():
            changes[name] += sign * totals.ms(total_ns)  # type: ignore[assignment]
    name, whole = max(changes, key=lambda name: changes[name] * means.difference_ms), sum(changes.values())
    return name, changes[name] / whole if whole else 0.0


def _place(means: Means, fields: Mapping[str, object]) -> str:
    place, share = _largest(means, fields, lambda key: Region(key.phase, key.block))
    if share < _MOST or place.phase is None:
        return ""
    return f", {'' if share >= _NEARLY_ALL else 'most of it '}in {place_name(place)}"


def _share(means: Means, row: AttributionRow) -> str:
    """Return how much of the increase or decrease a row is, with both its values. Where other parts went the other way
    a share says little: then by how much it changed.
    """
    values = _change(row.reference_ms, row.candidate_ms)
    change, others = ("increase", "others fell") if means.difference_ms > 0 else ("decrease", "others rose")
    if _portion(row) > 2 - _ALL:
        return f"More than the whole {change} is {row.what}, {values} ({others})"
    amount = "All" if _portion(row) >= _ALL else TEXT.percent(row.share, 0)
    return f"{amount} of the {change} is {row.what}, {values}"
