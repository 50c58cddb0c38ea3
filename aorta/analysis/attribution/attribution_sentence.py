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
    BUBBLE_PART,
    BUCKETED,
    TRANSFER,
    UNKNOWN_PART,
    WAIT,
    ExposedKey,
    Region,
    place_name,
)
from aorta.analysis.documents.comparison import AttributionRow
from aorta.analysis.formatting import TEXT, first_upper, json_text, rough_ms

SAME: Final = 0.01
"""Means of exposed communication that differ by less than this fraction of the larger one are called the same."""
_MOST: Final = 0.5
_NEARLY_ALL: Final = 0.95
_ALMOST, _ALL = 0.995, 0.9995
"""Shares from which on a part is nearly all of a difference, and all of it."""
_LEADS, _MUCH = 0.6, 0.85
"""A block leads the sentence if it has the first fraction of the difference and no collective the second of that."""
_LITTLE: Final = 0.25
"""A change of compute time below this fraction of the communication that is no longer hidden is about none."""
_SHOWN_SETTINGS: Final = 3
NOTHING, SOME = 0.005, 0.05
"""Shares of communication: below the first nothing is hidden, above the second something is."""
_OVERLAP: Final = "parallel.overlap"
"""The setting that turns overlap on and off (docs/configuration.md)."""
_BUCKETS: Final = {False: "All-reduce now starts after backward", True: "All-reduce now starts during backward"}
_WAITED_FOR: Final = {
    False: "Every collective is now waited for before computing goes on",
    True: "Collectives now run ahead of the computing that needs them",
}
"""What each value of the setting does: to all-reduces of DistributedDataParallel, and to anything else."""
Setting = tuple[str, object, object]
"""Key and both values of a setting in which the sides differ."""


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
    left, right = (means.ms(side, side.sums.exposed_ns) for side in (means.reference, means.candidate))
    if abs(means.difference_ms) <= SAME * max(left, right):
        cause = f"The mean over all steps of exposed communication is the same ({_from_to(left, right)})"
        return f"{cause}{_hidden_alone(breakdowns)}.", None
    toggled = _toggled(means, breakdowns, configured, parallel)
    if toggled is not None:
        return toggled, max(breakdowns.part, key=_portion)
    cause, lead = _cause(means, breakdowns, late)
    parts = [_change(means, left, right), _configured(configured), f"{cause}.", _balance(means, breakdowns, computing)]
    return " ".join(filter(None, parts)), lead


def _hidden_alone(breakdowns: Breakdowns) -> str:
    """Return what explains another share of hidden communication where the exposed part is the same: there is more or
    less communication in all. Without numbers, as no table is shown where nothing differs.
    """
    communication, hidden = breakdowns.balance
    if abs(hidden.difference_ms) <= SAME * max(communication.reference_ms, communication.candidate_ms):
        return ""
    change = "less" if hidden.difference_ms > 0 else "more"
    return f"; there is {change} communication in all, and the difference is hidden communication"


def _toggled(means: Means, breakdowns: Breakdowns, configured: Sequence[Setting], parallel: str) -> str | None:
    """Return what overlap turned on or off did; None where it was not, or what is hidden did not change accordingly."""
    value = next((after for key, before, after in configured if key == _OVERLAP and before is not after), None)
    communication, hidden = breakdowns.balance
    if not isinstance(value, bool) or _portion(hidden) < _MOST or (hidden.difference_ms > 0) == value:
        return None
    kinds = {row.kind for row in breakdowns.kind if row.listed}
    buckets = parallel in BUCKETED and kinds == {"allreduce"}
    does = (_BUCKETS if buckets else _WAITED_FOR)[value]
    moved = f"a mean of {rough_ms(hidden.difference_ms)} a step"
    if (communication.difference_ms < 0) != value and abs(_portion(communication)) > NOTHING:
        what = f"{moved} {'more' if value else 'less'} is hidden"  # communication itself takes less (more) time
    else:
        what = f"{moved} that was {'exposed is hidden' if value else 'hidden is exposed'}"
    split = _split(breakdowns.part)
    if split:
        moves = "rises" if means.difference_ms > 0 else "falls"
        split = f". Mean exposed time {moves} by {rough_ms(means.difference_ms)}: {split}"
    return f"{_OVERLAP} {json_text(not value)} -> {json_text(value)}. {does}: {what}{split}."


def _split(rows: Sequence[AttributionRow]) -> str:
    """Return how much of the difference is transfer and how much waiting; nothing where a part went the other way."""
    shares = {row.part: _portion(row) for row in rows if row.difference_ms}
    if not shares or set(shares) - {TRANSFER, WAIT} or min(shares.values()) < NOTHING:
        return ""
    names = {TRANSFER: "transfer", WAIT: "waiting for the slower rank"}
    if len(shares) == 1:
        return f"all of it {names[next(iter(shares))]}"
    return f"{_percent(shares[TRANSFER])} transfer, {_percent(shares[WAIT])} {names[WAIT]}"


def _portion(row: AttributionRow) -> float:
    """Return the share of the whole difference; 0 where that is 0."""
    return row.share or 0.0


def _percent(share: float) -> str:
    return TEXT.percent(share, 0)


def _change(means: Means, left: float, right: float) -> str:
    """Return what changed: all hidden communication, where one side hides nothing; else the exposed one."""
    before, after = (means.ms(side, side.sums.hidden_ns) for side in (means.reference, means.candidate))
    whole = [means.ms(side, side.sums.comm_ns) for side in (means.reference, means.candidate)]
    if whole[1] and after <= NOTHING * whole[1] and before > SOME * whole[0]:
        return f"Nothing is hidden any more (mean {_from_to(before, after)} per step)."
    if whole[0] and before <= NOTHING * whole[0] and after > SOME * whole[1]:
        return f"Communication is hidden for the first time (mean {_from_to(before, after)} per step)."
    grew = "rose" if right > left else "fell"
    return f"Exposed communication {grew} by {rough_ms(right - left)} (mean {_from_to(left, right)} per step)."


def _from_to(left: float, right: float) -> str:
    return f"{rough_ms(left)} -> {rough_ms(right)}"


def _configured(changes: Sequence[tuple[str, object, object]]) -> str:
    if not changes:
        return ""
    shown = ", ".join(
        f"{key} {json_text(left)} -> {json_text(right)}" for key, left, right in changes[:_SHOWN_SETTINGS]
    )
    more = len(changes) - _SHOWN_SETTINGS
    return f"Configuration: {shown}{f' and {more} more' if more > 0 else ''}."


def _cause(means: Means, breakdowns: Breakdowns, late: Sequence[AttributionRow]) -> tuple[str, AttributionRow]:
    total = means.difference_ms
    change = "increase" if total > 0 else "decrease"
    waiting = [row for row in late if _portion(row) >= _MOST]
    if waiting:
        row = max(waiting, key=_portion)
        mine = [_matching(row, "group", "group_size"), lambda key: key.part == WAIT]
        return _share(row, change) + (_where(means, mine) if row.alone else ""), row
    row, chosen = _collective(breakdowns)
    block = max(_listed(breakdowns.block), key=_portion)
    if block.block is not None and _portion(block) >= _LEADS and _portion(row) < _MUCH * _portion(block):
        mine = [lambda key: key.block == block.block]
        return f"{_share(block, change)}{_part(means, mine)}", block
    mine = [chosen]
    return f"{_share(row, change)}{_part(means, mine)}{_where(means, mine)}", row


_Chosen = Callable[[ExposedKey], bool]


def _collective(breakdowns: Breakdowns) -> tuple[AttributionRow, _Chosen]:
    """Return the collective with the largest share, or its whole kind where several sizes share a cause and none makes
    up most of it.
    """
    one = max(_listed(breakdowns.collective), key=_portion)
    kind = max(_listed(breakdowns.kind), key=_portion)
    if _portion(kind) >= _MOST and (_portion(one) < 0.7 * _portion(kind) or one.kind != kind.kind):
        return kind, _matching(kind, "kind")
    return one, _matching(one, "kind", "group", "group_size", "bytes")


def _listed(rows: Sequence[AttributionRow]) -> list[AttributionRow]:
    return [row for row in rows if row.listed]


def _matching(row: AttributionRow, *names: str) -> _Chosen:
    fields = {"kind": "kind", "group": "group", "group_size": "size", "bytes": "bytes"}
    return lambda key: all(getattr(key, fields[name]) == getattr(row, name) for name in names)


def _differences(means: Means, chosen: Sequence[_Chosen], of: Callable[[ExposedKey], Any]) -> dict[Any, float]:
    """Return the difference of the mean over rank-steps of the chosen exposed time, by key."""
    sides: list[Counter[Any]] = [Counter(), Counter()]
    for side, side_totals in zip(sides, (means.reference, means.candidate), strict=True):
        for key, length in side_totals.exposed.items():
            if all(test(key) for test in chosen):
                side[of(key)] += length
    return {
        name: means.ms(means.candidate, sides[1][name]) - means.ms(means.reference, sides[0][name])
        for name in dict.fromkeys([*sides[0], *sides[1]])
    }


def _largest(differences: dict[Any, float], total: float) -> tuple[Any, float]:
    """Return the key whose difference contributes most in the direction of the total, and its share of all differences
    of the chosen exposed time.
    """
    whole = sum(differences.values())
    name = max(differences, key=lambda key: differences[key] * (1 if total > 0 else -1))
    return name, differences[name] / whole if whole else 0.0


def _part(means: Means, chosen: Sequence[_Chosen]) -> str:
    part, share = _largest(_differences(means, chosen, lambda key: key.part), means.difference_ms)
    if part == UNKNOWN_PART or share < _MOST:
        return "; whether that is waiting or transfer is unknown" if part == UNKNOWN_PART else ""
    sentence = {
        WAIT: "waiting for peers, not transfer",
        TRANSFER: "transfer, not waiting for peers",
        BUBBLE_PART: "bubbles of the pipeline: waiting for another stage",
    }[part]
    return f"; {'it' if share >= _NEARLY_ALL else 'most of it'} is {sentence}"


def _where(means: Means, chosen: Sequence[_Chosen]) -> str:
    total = means.difference_ms
    place, share = _largest(_differences(means, chosen, lambda key: Region(key.phase, key.block)), total)
    block, of_block = _largest(_differences(means, chosen, lambda key: key.block), total)
    phase, of_phase = _largest(_differences(means, chosen, lambda key: key.phase), total)
    if place.phase is None and share >= _MOST:
        return "; where it is exposed is unknown"
    if share >= _MOST:
        return f"; {_mostly(share)} exposed in {place_name(place)}"
    if block is not None and of_block >= _MOST:
        return f"; {_mostly(of_block)} exposed in passes of {block}"
    if phase is not None and of_phase >= _MOST:
        return f"; {_mostly(of_phase)} exposed in {phase}, spread over several blocks"
    return f"; the largest part exposed in {place_name(place)}"


def _balance(means: Means, breakdowns: Breakdowns, computing: Sequence[AttributionRow]) -> str:
    """Explain why less of equally long communication is hidden: is there less computation to hide behind?"""
    communication, hidden = breakdowns.balance
    if _portion(hidden) < _MOST:
        return ""
    lost = hidden.difference_ms > 0
    text = (
        f"Communication takes {_from_to(communication.reference_ms, communication.candidate_ms)} per step, and "
        f"{rough_ms(hidden.difference_ms)} {'less' if lost else 'more'} of it is hidden"
    )
    coincides = "it no longer coincides with communication" if lost else "more of it coincides with communication"
    before, after = means.reference.sums, means.candidate.sums
    left, right = means.ms(means.reference, before.compute_ns), means.ms(means.candidate, after.compute_ns)
    change = right - left
    if abs(change) < _LITTLE * abs(hidden.difference_ms):
        return f"{text}, although computation takes about as long ({_from_to(left, right)}): {coincides}."
    way = "longer" if change > 0 else "shorter"
    if (change > 0) == lost:  # more computing hides less, or less of it hides more
        return f"{text}, although computation is {rough_ms(change)} {way}: {coincides}."
    if abs(change) < abs(hidden.difference_ms):  # too little to explain it all
        return f"{text}, although computation is only {rough_ms(change)} {way}: {coincides}."
    text += f", as computation is {rough_ms(change)} {way}"
    rows = _listed(computing)
    row = max(rows, key=lambda row: row.difference_ms * (1 if change > 0 else -1), default=None)
    named = row is not None and row.difference_ms / change >= _MOST  # the record may name no block
    return f"{text}, most of that in {row.what}." if named and row is not None else f"{text}."


def _share(row: AttributionRow, change: str) -> str:
    """Return how much of the increase or decrease a row is, with both its values. Where other parts went the other way
    a share says little: then by how much it changed.
    """
    share, values = _portion(row), f", {_from_to(row.reference_ms, row.candidate_ms)}"
    if share > 2 - _ALL:
        grew, others = ("rose", "fell") if change == "increase" else ("fell", "rose")
        what = (
            row.what if isinstance(row.block, str) else first_upper(row.what)
        )  # the name of a module is as in the model
        return f"{what} {grew} by {rough_ms(row.difference_ms)}{values}, while others {others}"
    amount = "All" if share >= _ALL else "Nearly all" if share >= _ALMOST else _percent(share)
    return f"{amount} of the {change} is {row.what}{values}"


def _mostly(share: float) -> str:
    return "it is" if share >= _NEARLY_ALL else "most of it is"
