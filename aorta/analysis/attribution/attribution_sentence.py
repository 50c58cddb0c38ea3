"""The breakdown of a difference in a few sentences that an engineer can act on.

Every number of them stands in the rows of `breakdown.sentence_rows`, which are shown below: a value of a side, a
difference or a share. Must not form another number, name a cause that is too small for its effect, or call a difference
large or small (that is the comparison's verdict).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from aorta.analysis.attribution.breakdown import Breakdowns, Means
from aorta.analysis.attribution.keys import (
    BUCKETED,
    PARTS,
    TRANSFER,
    WAIT,
    ExposedKey,
    place_name,
)
from aorta.analysis.documents.comparison import AttributionRow
from aorta.analysis.formatting import TEXT, first_upper, json_text
from aorta.analysis.frames import Region

SAME: Final = 0.01
"""Means of exposed communication that differ by less than this fraction of the larger one are called the same."""
_MOST: Final = 0.5
_NEARLY_ALL, _ALL = 0.95, 0.9995
_LEADS, _MUCH = 0.6, 0.85
"""A block leads the sentence if it has the first fraction of the difference and no collective the second of that."""
_SHOWN_SETTINGS: Final = 3
NOTHING, SOME = 0.005, 0.05
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
Setting = tuple[str, object, object]
"""Key and both values of a setting in which the sides differ."""
_Chosen = Callable[[ExposedKey], bool]


def sentence(
    means: Means,
    breakdowns: Breakdowns,
    computing: Sequence[AttributionRow],
    late: Sequence[AttributionRow],
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
    before, after = means.reference.sums, means.candidate.sums
    exposed, hidden, comm = (
        (means.ms(means.reference, left), means.ms(means.candidate, right))
        for left, right in (
            (before.exposed_ns, after.exposed_ns),
            (before.hidden_ns, after.hidden_ns),
            (before.comm_ns, after.comm_ns),
        )
    )
    if abs(means.difference_ms) <= SAME * max(exposed):
        more = ""
        if abs(hidden[1] - hidden[0]) > SAME * max(comm):
            more = f"; {'more' if hidden[1] > hidden[0] else 'less'} is hidden of {_change(comm)} in all"
        return f"Mean exposed communication is the same: {_change(exposed)} a step{more}.", None
    toggled = _toggled(means, breakdowns, configured, parallel)
    if toggled is not None:
        return toggled, max(breakdowns.part, key=_portion)
    gone = comm[1] and hidden[1] <= NOTHING * comm[1] and hidden[0] > SOME * comm[0]
    came = comm[0] and hidden[0] <= NOTHING * comm[0] and hidden[1] > SOME * comm[1]
    what, pair = ("hidden", hidden) if gone or came else ("exposed", exposed)
    text = f"Mean {what} communication: {_change(pair)} a step."
    if configured:
        shown = [f"{key} {json_text(left)} -> {json_text(right)}" for key, left, right in configured[:_SHOWN_SETTINGS]]
        more = f" and {len(configured) - _SHOWN_SETTINGS} more" if len(configured) > _SHOWN_SETTINGS else ""
        text += f" Configuration: {', '.join(shown)}{more}."
    cause, lead = _cause(means, breakdowns, late)
    text += f" {cause}."
    lost = breakdowns.balance[1]
    if _portion(lost) >= _MOST:
        text += f" Of {_change(comm)} of communication {_ms(lost)} {'less' if lost.difference_ms > 0 else 'more'}"
        text += f" is hidden, beside {_computation(means, computing)}."
    return text, lead


def _portion(row: AttributionRow) -> float:
    """Return the share of the whole difference; 0 where that is 0."""
    return row.share or 0.0


def _ms(row: AttributionRow) -> str:
    return TEXT.quantity(abs(row.difference_ms), "ms")


def _change(pair: tuple[float, float]) -> str:
    return f"{TEXT.number(pair[0], 'ms')} -> {TEXT.quantity(pair[1], 'ms')}"


def _toggled(means: Means, breakdowns: Breakdowns, configured: Sequence[Setting], parallel: str) -> str | None:
    """Return what overlap turned on or off did; None where it was not, or what is hidden did not change accordingly."""
    value = next((after for key, before, after in configured if key == _OVERLAP and before is not after), None)
    communication, hidden = breakdowns.balance
    if not isinstance(value, bool) or _portion(hidden) < _MOST or (hidden.difference_ms > 0) == value:
        return None
    buckets = parallel in BUCKETED and {row.kind for row in breakdowns.kind if row.listed} == {"allreduce"}
    moved = f"that was {'exposed is hidden' if value else 'hidden is exposed'}"
    if (communication.difference_ms < 0) != value and abs(_portion(communication)) > NOTHING:
        moved = f"{'more' if value else 'less'} is hidden"  # communication itself takes less (more) time
    text = f"{_OVERLAP} {json_text(not value)} -> {json_text(value)}. {_TOGGLED[buckets, value]}: a mean of "
    text += f"{_ms(hidden)} a step {moved}"
    shares = {row.part: _portion(row) for row in breakdowns.part if row.difference_ms}
    if shares and not set(shares) - {TRANSFER, WAIT} and min(shares.values()) >= NOTHING:
        rises, change_ms = "rises" if means.difference_ms > 0 else "falls", abs(means.difference_ms)
        text += f". Mean exposed time {rises} by {TEXT.quantity(change_ms, 'ms')}: "
        text += ", ".join(f"{TEXT.percent(shares[part], 0)} {PARTS[part]}" for part in PARTS if part in shares)
    return f"{text}."


def _cause(means: Means, breakdowns: Breakdowns, late: Sequence[AttributionRow]) -> tuple[str, AttributionRow]:
    """Return the largest cause, with its share, part and place: a straggler, a block, a collective, or the whole kind
    where several sizes share a cause and none makes up most of it.
    """
    straggler = max((row for row in late if _portion(row) >= _MOST), key=_portion, default=None)
    if straggler is not None:
        chosen = [_matching(straggler, "group", "group_size"), lambda key: key.part == WAIT]
        return _share(means, straggler) + (_place(means, chosen) if straggler.alone else ""), straggler
    kind, row, block = (
        max((row for row in rows if row.listed), key=_portion)
        for rows in (breakdowns.kind, breakdowns.collective, breakdowns.block)
    )
    names = ["kind", "group", "group_size", "bytes"]
    if _portion(kind) >= _MOST and (_portion(row) < 0.7 * _portion(kind) or row.kind != kind.kind):
        row, names = kind, ["kind"]
    leads = block.block is not None and _portion(block) >= _LEADS and _portion(row) < _MUCH * _portion(block)
    if leads:
        row, names = block, ["block"]
    chosen = [_matching(row, *names)]
    part, share = _largest(means, chosen, lambda key: key.part)
    of = f": {'' if share >= _NEARLY_ALL else 'most of it '}{PARTS[part]}" if share >= _MOST else ""
    return f"{_share(means, row)}{of}{'' if leads else _place(means, chosen)}", row


def _matching(row: AttributionRow, *names: str) -> _Chosen:
    fields = {"group_size": "size"}
    return lambda key: all(getattr(key, fields.get(name, name)) == getattr(row, name) for name in names)


def _largest(means: Means, chosen: Sequence[_Chosen], of: Callable[[ExposedKey], Any]) -> tuple[Any, float]:
    """Return the part of the chosen exposed time whose mean changed most in the direction of the whole, and its share
    of the change of all that is chosen.
    """
    sides: list[Counter[Any]] = [Counter(), Counter()]
    for side, totals in zip(sides, (means.reference, means.candidate), strict=True):
        for key, length in totals.exposed.items():
            if all(test(key) for test in chosen):
                side[of(key)] += length
    changes = {
        name: means.ms(means.candidate, sides[1][name]) - means.ms(means.reference, sides[0][name])
        for name in dict.fromkeys([*sides[0], *sides[1]])
    }
    name, whole = max(changes, key=lambda key: changes[key] * means.difference_ms), sum(changes.values())
    return name, changes[name] / whole if whole else 0.0


def _place(means: Means, chosen: Sequence[_Chosen]) -> str:
    place, share = _largest(means, chosen, lambda key: Region(key.phase, key.block))
    if share < _MOST or place.phase is None:
        return ""
    return f", {'' if share >= _NEARLY_ALL else 'most of it '}in {place_name(place)}"


def _share(means: Means, row: AttributionRow) -> str:
    """Return how much of the increase or decrease a row is, with both its values. Where other parts went the other way
    a share says little: then by how much it changed.
    """
    values = _change((row.reference_ms, row.candidate_ms))
    grew, others = ("rose", "fell") if means.difference_ms > 0 else ("fell", "rose")
    if _portion(row) > 2 - _ALL:
        # The name of a module is as in the model.
        return f"{row.what if isinstance(row.block, str) else first_upper(row.what)} {grew}, {values}, others {others}"
    amount = "All" if _portion(row) >= _ALL else TEXT.percent(row.share, 0)
    return f"{amount} of the {'increase' if means.difference_ms > 0 else 'decrease'} is {row.what}, {values}"


def _computation(means: Means, computing: Sequence[AttributionRow]) -> str:
    """Return the computation of both sides, with the block in which most of its change is."""
    before, after = means.reference.sums.compute_ns, means.candidate.sums.compute_ns
    left, right = means.ms(means.reference, before), means.ms(means.candidate, after)
    text = f"{_change((left, right))} of computation"
    row = max(
        (row for row in computing if row.listed), key=lambda row: row.difference_ms * (right - left), default=None
    )
    if abs(right - left) <= SAME * max(left, right) or row is None or row.difference_ms / (right - left) < _MOST:
        return text
    return f"{text} (most of the change in {row.what})"
