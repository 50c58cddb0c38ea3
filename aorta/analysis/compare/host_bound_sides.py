"""What can be said of two sides where the host set the pace of one: bounds against bounds, and the lead of both hosts.

A metric of a host-bound launch may have bounds in place of a value (`aorta.analysis.host_bound`). They decide where
they lie apart in all launches, and nothing otherwise. Must not: show an end of bounds as a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from statistics import median
from typing import Any

from aorta.analysis.compare.verdict import NOT_TESTED, Word, too_few
from aorta.analysis.compare.verdict_rules import Rules
from aorta.analysis.formatting import TEXT, p_value
from aorta.analysis.host_bound import LEAD


def bounded_pair(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, Any] | None:
    """`bounds` of a metric of a comparison; None where neither side has bounds, or one is not known at all.

    Args:
        reference, candidate: entries of an aggregate, with `median` or `bounds`; of launches also `extremes`, the
            lowest and the highest that any launch can have, and `launches`.

    Returns:
        At least and at most of each side (a value is both); over all pairs of launches the least and the greatest
        `difference`, candidate minus reference, and `change`, that as a part of the reference; and how many launches
        there are.
    """
    sides = {"reference": reference, "candidate": candidate}
    if not any(side.get("bounds") for side in sides.values()):
        return None
    ends = {name: _ends(side) for name, side in sides.items()}
    if any(found is None for found in ends.values()):
        return None
    known = {name: found for name, found in ends.items() if found is not None}
    (low, high), (from_, to) = (
        sides[name].get("extremes") or (known[name]["at_least"], known[name]["at_most"]) for name in sides
    )
    return {
        **known,
        "difference": {"low": from_ - high, "high": to - low},
        "change": {"low": from_ / high - 1 if high else None, "high": to / low - 1 if low else None},
        "launches": {name: side.get("launches", 1) for name, side in sides.items()},
    }


def _ends(side: Mapping[str, Any]) -> dict[str, float] | None:
    if side.get("bounds"):
        return dict(side["bounds"])
    return None if side["median"] is None else {"at_least": side["median"], "at_most": side["median"]}


def bounded_verdict(entry: Mapping[str, Any], rules: Rules) -> tuple[Word | None, str]:
    """The verdict of a metric of which a side has bounds alone: that of the primary metric where the bounds lie apart
    in all launches, or all together within the margin; otherwise none.
    """
    found, unit = entry["bounds"], entry["unit"]
    kind = "difference" if unit == "ratio" else "quotient"
    effect = found["difference" if unit == "ratio" else "change"]
    sides = " against ".join(TEXT.bounds(found[side], unit, fewer=1) for side in ("candidate", "reference"))
    why = f"host-bound, {sides} in the reference"
    if entry["role"] != "primary" or entry["better"] is None:
        return None, f"{NOT_TESTED}: {why}"
    counts = found["launches"]["reference"], found["launches"]["candidate"]
    lacking = too_few(counts, rules.alpha)
    if lacking is not None:
        return NOT_TESTED, f"{why}; {lacking}"
    low, high, margin = effect["low"], effect["high"], entry["margin"]
    if low is None or high is None:
        return None, f"{NOT_TESTED}: {why}; a bound is 0, and there is no part of that"
    if -margin <= low <= high <= margin:
        return "equivalent", f"{why}: within the margin of {margin:g} in all launches, whatever they are between"
    if not (low > margin or high < -margin):
        return None, f"{NOT_TESTED}: {why}: the bounds do not lie apart by more than the margin of {margin:g}"
    good = (low > 0) == (entry["better"] == "higher")
    p = 2 / comb(
        sum(counts), counts[0]
    )  # of the exact Mann-Whitney test where every value of a side is above the other's
    least = TEXT.effect(low if low > 0 else high, kind)
    told = f"{why}: apart in all launches, by {least} or more (p = {p_value(p)})"
    return "improvement" if good else "regression", told


def difference_in_lead(
    reference: Sequence[Mapping[str, Any] | None], candidate: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any] | None:
    """Which side is host-bound, by how much each host is ahead, and the sentence that says so; None where both are,
    neither is, or it is not known of one.

    Args:
        reference, candidate: `pace` of each launch of a side. A side is host-bound where most of its launches are.
    """
    sides = {"reference": reference, "candidate": candidate}
    bound = {name: _host_bound(launches) for name, launches in sides.items()}
    if None in bound.values() or bound["reference"] == bound["candidate"]:
        return None
    side, other = ("candidate", "reference") if bound["candidate"] else ("reference", "candidate")
    leads = {
        name: median(pace[LEAD] for pace in launches if pace and pace[LEAD] is not None)
        for name, launches in sides.items()
    }
    own, against = (TEXT.quantity(leads[name], "ms") for name in (side, other))
    return {
        "side": side,
        LEAD: leads,
        "sentence": (
            f"the {side} is host-bound: its host is {own} ahead of the device (median), that of the {other} {against}. "
            "What differs first is how fast the host launches, and not how well communication hides."
        ),
    }


def _host_bound(launches: Sequence[Mapping[str, Any] | None]) -> bool | None:
    known = [pace["host_bound"] for pace in launches if pace is not None and pace["host_bound"] is not None]
    return sum(known) * 2 > len(known) if known else None
