"""The breakdown of a difference as one sentence that an engineer can act on.

Must not form a number that no row holds, but shares within a cause; or call a difference large or small (that is the
comparison's verdict).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from aorta.analysis.attribution.breakdown import Means
from aorta.analysis.attribution.keys import TRANSFER, UNKNOWN_PART, WAIT, ExposedKey, Region
from aorta.analysis.attribution.part_names import collective_name, place_name
from aorta.analysis.formatting import rough_ms, rough_percent

SAME: Final = 0.01
"""Means of exposed communication that differ by less than this fraction of the larger one are called the same."""
_MOST: Final = 0.5
_LEADS, _MUCH = 0.6, 0.85
"""A block leads the sentence if it has the first fraction of the difference and no collective the second of that."""
_LITTLE: Final = 0.25
"""A change of compute time below this fraction of the communication that is no longer hidden does not explain it."""
_SHOWN_COLLECTIVES: Final = 3
_LEAST_SHARE: Final = 0.05


def sentence(
    means: Means, found: dict[str, list[dict[str, Any]]], late: Sequence[dict[str, Any]]
) -> tuple[str, dict[str, Any] | None]:
    """Name the cause that makes up most of the difference, whether it is waiting or transfer, and where it is exposed.

    Returns:
        The sentence, and the row of that cause; None where there is nothing to attribute.
    """
    left, right = (means.ms(side, side.sums.exposed_ns) for side in (means.reference, means.candidate))
    total = means.difference_ms
    if abs(total) <= SAME * max(left, right):
        return (
            f"Exposed communication per rank-step is the same within {rough_percent(SAME)}: {rough_ms(left)} in the "
            f"reference, {rough_ms(right)} in the candidate; there is nothing to attribute."
        ), None
    more = f"the {rough_ms(total)} {'more' if total > 0 else 'less'} exposed communication per rank-step"
    waiting = [row for row in late if (row["share"] or 0) >= _MOST]
    if waiting:
        row = max(waiting, key=lambda row: row["share"])
        lateness = row["late_ms"]["candidate" if total > 0 else "reference"]
        by = f", late by {rough_ms(lateness)} in each collective" if lateness is not None else ""
        mine = [_matching(row, "group", "group_size"), lambda key: key.part == WAIT]
        where = _where(means, mine) if row["alone"] else ""
        return f"{_share(row)} of {more} is {row['what']}{by}{where}.{_balance(means, found)}", row
    row, chosen = _collective(found)
    block = max(_listed(found["block"]), key=lambda row: row["share"] or 0)
    if block["block"] is not None and block["share"] >= _LEADS and row["share"] < _MUCH * block["share"]:
        mine = [lambda key: key.block == block["block"]]
        text = f"{_share(block)} of {more} lies in {block['what']}{_of_what(means, mine)}"
        return f"{text}{_part(means, mine)}.{_balance(means, found)}", block
    mine = [chosen]
    text = f"{_share(row)} of {more} is {row['what']}{_part(means, mine)}{_where(means, mine)}"
    return f"{text}.{_balance(means, found)}", row


_Chosen = Callable[[ExposedKey], bool]


def _collective(found: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, Any], _Chosen]:
    """The collective with the largest share, or its whole kind where several sizes share a cause and none makes up most
    of it.
    """
    one = max(_listed(found["collective"]), key=lambda row: row["share"] or 0)
    kind = max(_listed(found["kind"]), key=lambda row: row["share"] or 0)
    if kind["share"] >= _MOST and (one["share"] < 0.7 * kind["share"] or one.get("kind") != kind["kind"]):
        sizes = sum(row["kind"] == kind["kind"] and (row["share"] or 0) > 0 for row in _listed(found["collective"]))
        return kind | {"what": f"{kind['what']} of {sizes} sizes"}, _matching(kind, "kind")
    return one, _matching(one, "kind", "group", "group_size", "bytes")


def _of_what(means: Means, chosen: Sequence[_Chosen]) -> str:
    """The collectives that make up a block's difference, the largest first."""
    total = means.difference_ms
    names = _differences(means, chosen, collective_name)
    shown = sorted((name for name in names if names[name] / total >= _LEAST_SHARE), key=lambda name: -abs(names[name]))
    parts = [f"{name} {rough_percent(names[name] / total)}" for name in shown[:_SHOWN_COLLECTIVES]]
    return f": {', '.join(parts)}" if parts else ""


def _listed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "others" not in row]


def _matching(row: dict[str, Any], *names: str) -> _Chosen:
    fields = {"kind": "kind", "group": "group", "group_size": "size", "bytes": "bytes"}
    return lambda key: all(getattr(key, fields[name]) == row[name] for name in names)


def _differences(means: Means, chosen: Sequence[_Chosen], of: Callable[[ExposedKey], Any]) -> dict[Any, float]:
    """Difference per rank-step of the chosen exposed time, by key."""
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
    """The key whose difference contributes most in the direction of the total, and its share of all differences of the
    chosen exposed time.
    """
    whole = sum(differences.values())
    name = max(differences, key=lambda key: differences[key] * (1 if total > 0 else -1))
    return name, differences[name] / whole if whole else 0.0


def _part(means: Means, chosen: Sequence[_Chosen]) -> str:
    part, share = _largest(_differences(means, chosen, lambda key: key.part), means.difference_ms)
    if part == UNKNOWN_PART or share < _MOST:
        return "; whether that is waiting or transfer is not known" if part == UNKNOWN_PART else ""
    said = {WAIT: "waiting for peers, not transfer", TRANSFER: "transfer, not waiting for peers"}[part]
    return f"; {'it' if share >= 0.95 else f'{rough_percent(share)} of it'} is {said}"


def _where(means: Means, chosen: Sequence[_Chosen]) -> str:
    total = means.difference_ms
    place, share = _largest(_differences(means, chosen, lambda key: Region(key.phase, key.block)), total)
    block, of_block = _largest(_differences(means, chosen, lambda key: key.block), total)
    phase, of_phase = _largest(_differences(means, chosen, lambda key: key.phase), total)
    if place.phase is None and share >= _MOST:
        return "; where it is exposed is not told"
    if share >= _MOST:
        return f"; {_mostly(share)} exposed in {place_name(place)}"
    if block is not None and of_block >= _MOST:
        return f"; {_mostly(of_block)} exposed in passes of {block}"
    if phase is not None and of_phase >= _MOST:
        blocks = sum(
            value * total > 0
            for value in _differences(means, [*chosen, lambda key: key.phase == phase], lambda key: key.block).values()
        )
        return f"; {_mostly(of_phase)} exposed in {phase}, spread over {blocks} blocks"
    return f"; the largest part ({rough_percent(share)}) exposed in {place_name(place)}"


def _balance(means: Means, found: dict[str, list[dict[str, Any]]]) -> str:
    """Explain why less of equally long communication is hidden: is there less computation to hide behind?"""
    communication, hidden = found["balance"]
    if (hidden["share"] or 0) < _MOST:
        return ""
    less = "less" if hidden["difference_ms"] > 0 else "more"
    text = (
        f" Time in communication is {rough_ms(communication['reference_ms'])} in the reference, "
        f"{rough_ms(communication['candidate_ms'])} in the candidate: {rough_ms(hidden['difference_ms'])} {less} of "
        "it is hidden"
    )
    before, after = means.reference.sums, means.candidate.sums
    left, right = means.ms(means.reference, before.compute_ns), means.ms(means.candidate, after.compute_ns)
    change = right - left
    if abs(change) < _LITTLE * abs(hidden["difference_ms"]):
        text += f", while computing takes {rough_ms(left)} and {rough_ms(right)}"
        return f"{text}: it runs at another time, not longer."
    change_said = f"computing is {rough_ms(change)} {'longer' if change > 0 else 'shorter'}"
    if (change > 0) == (hidden["difference_ms"] > 0):  # more computing hides less, or less of it hides more
        return f"{text}, though {change_said}: it runs at another time."
    text += f", as {change_said}"
    rows = _listed(found["computing"])
    if not rows:  # the record names no block
        return f"{text}."
    row = max(rows, key=lambda row: row["difference_ms"] * (1 if change > 0 else -1))
    return (
        f"{text}, most of that in "
        f"{row['what']} ({rough_ms(row['reference_ms'])} in the reference, {rough_ms(row['candidate_ms'])} in the "
        "candidate)."
    )


def _share(row: dict[str, Any]) -> str:
    share = row["share"]
    return rough_percent(share) if share <= 1.005 else f"More than all ({rough_percent(share)})"


def _mostly(share: float) -> str:
    return "it is" if share >= 0.95 else f"{rough_percent(share)} of it is"
