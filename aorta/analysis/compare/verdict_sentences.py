"""States the verdict of a comparison in sentences that an engineer can act on.

Must not say a number that is not in the summary, or a ratio without its denominator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aorta.analysis.compare.verdict import NOT_COMPARABLE
from aorta.analysis.compare.verdict_rules import GUARD
from aorta.analysis.formatting import TEXT, p_value, significant
from aorta.analysis.metrics import metric_named

_SAID: Final = {
    "overlap_ratio": "hides {amount} of its communication (overlap_ratio, hidden / comm)",
    "exposed_share": "exposes communication for {amount} of its step (exposed_share, exposed / step)",
    "overlap_efficiency": "saves {amount} of what overlap could save (overlap_efficiency)",
    "compute_slowdown": "adds {amount} to its computing time by overlap (compute_slowdown, added / isolated)",
}


def headline(comparison: Mapping[str, Any]) -> str:
    """The verdict, the effect with its interval, p, the launches, step time, and what could have been found."""
    primary = comparison["metrics"].get(comparison["primary"])
    parts = [short_headline(comparison)]
    if primary is None or primary["effect"]["value"] is None:
        return parts[0]
    in_time = comparison["verdict"] != NOT_COMPARABLE
    if comparison["primary"] != GUARD:
        parts.append(_step_time(comparison["metrics"].get(GUARD), in_time=in_time))
    if in_time:
        parts.append(_could(primary, comparison))
    return " ".join(parts)


def short_headline(comparison: Mapping[str, Any]) -> str:
    """The verdict, the effect with its interval, p, the launches; and why, where nothing was decided."""
    word = comparison["verdict"].upper()
    primary = comparison["metrics"].get(comparison["primary"])
    host = comparison.get("host_bound")
    lead = "" if host is None else f"the {host['side']} is host-bound, and the other is not; "
    if primary is None or primary["effect"]["value"] is None:
        return f"{word}: {lead}{comparison['verdict_reason']}."
    counts = primary["launches"]
    said = (
        f"{word}: {lead or 'the candidate '}{_effect(comparison['primary'], primary, of_hosts=host is not None)}; "
        f"{_p(primary)}, "
        f"{counts['reference']} against {counts['candidate']} launches."
    )
    decided = comparison["verdict"] in ("regression", "improvement")
    return said if decided else f"{said} Why: {comparison['verdict_reason']}."


def _effect(name: str, entry: Mapping[str, Any], *, of_hosts: bool = False) -> str:
    """The effect in words; between a host-bound side and one that is not, the two values alone."""
    effect = entry["effect"]
    interval = _interval(effect)
    if of_hosts:
        unit = metric_named(name).unit
        return (
            f"{name}: {TEXT.quantity(entry['reference'], unit)} -> {TEXT.quantity(entry['candidate'], unit)}{interval}"
        )
    if effect["kind"] == "quotient":
        value = effect["value"]
        change = _percent(value, "more", "less") + f" {name}"
        numbers = f"{significant(entry['reference'])} -> {significant(entry['candidate'])} {metric_named(name).unit}"
        return f"has {change} ({numbers}{interval})"
    value = effect["value"]
    points = TEXT.points(abs(value))
    amount = "as much" if points == TEXT.points(0) else f"{points} {'more' if value > 0 else 'less'}"
    said = _SAID.get(name, f"has {{amount}} of {name}").format(amount=amount)
    return f"{said}: {_ratio(entry['reference'])} -> {_ratio(entry['candidate'])}{interval}"


def _interval(effect: Mapping[str, Any]) -> str:
    if effect["low"] is None:
        return ""
    return (
        f", 95 % interval {TEXT.effect(effect['low'], effect['kind'])} to {TEXT.effect(effect['high'], effect['kind'])}"
    )


def _percent(value: float, more: str, less: str) -> str:
    share = TEXT.percent(abs(value))
    return "the same" if share == TEXT.percent(0) else f"{share} {more if value > 0 else less}"


def _ratio(value: float) -> str:
    return TEXT.number(value, "ratio", fewer=1)


def _p(entry: Mapping[str, Any]) -> str:
    return "p unknown" if entry["p"] is None else f"p = {p_value(entry['p'])}"


def _step_time(guard: Mapping[str, Any] | None, *, in_time: bool) -> str:
    if guard is None or guard["effect"]["value"] is None:
        why = "not in the record" if guard is None else guard["verdict_reason"]
        return f"Step time: unknown ({why})."
    effect = guard["effect"]
    change = _percent(effect["value"], "longer", "shorter")
    verdict = f": {guard['verdict']}" if guard["verdict"] is not None else f"; not judged: {guard['verdict_reason']}"
    if not in_time:
        verdict = ""  # the reason stands beside the primary metric
    numbers = (
        f"{significant(guard['reference'])} -> {significant(guard['candidate'])} ms{_interval(effect)}; {_p(guard)}"
    )
    if in_time and guard["verdict"] == "inconclusive":
        return f"Step time: no difference was shown ({numbers})."
    return f"Step time: {change} ({numbers}){verdict}."


def _could(primary: Mapping[str, Any], comparison: Mapping[str, Any]) -> str:
    found, effect = primary["detectable"], primary["effect"]
    if found["effect"] is None:
        said = f"What could have been found is not known: {found['reason']}."
    else:
        size = TEXT.effect(found["effect"], effect["kind"]).lstrip("+")
        power = TEXT.percent(found["power"], 0)
        said = f"The smallest effect these launches could have found, with {power} power: {size}."
    if comparison["verdict"] == "inconclusive" and primary["p"] > comparison["alpha"]:
        wanted = max(abs(effect["value"]), primary["margin"])
        needed = primary["launches_needed"]
        count = primary["launches_needed_reason"] if needed is None else f"{needed} launches per side"
        said += f" To find {TEXT.effect(wanted, effect['kind']).lstrip('+')} with that power: {count}."
    return said
