"""A summary as a person reads it in a terminal: health first, then numbers, then the verdict.

Lines have at most 100 columns, paths aside. Must not compute a number, or show a ratio without its denominator.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.cautions import cautions
from aorta.analysis.devices import device_line, device_notes
from aorta.analysis.formatting import TEXT, p_value
from aorta.analysis.metrics import metric_named
from aorta.analysis.stall_cutoffs import cutoff_line
from aorta.analysis.straggler import sentences

WIDTH: Final = 100
_NAME: Final = 38
_SHOWN_COLLECTIVES: Final = 10
_SHOWN_DIFFERENCES: Final = 12
_SHOWN_LEFT_OUT: Final = 6
_DENOMINATOR: Final = {
    "overlap_ratio": "hidden/comm",
    "overlap_over_compute": "hidden/compute",
    "exposed_share": "exposed/step",
    "overlap_efficiency": "saved/min(Tc,Tm)",
    "compute_slowdown": "added/isolated",
}
_HEAD: Final = ("reference", "candidate", "difference", "ratio", "direction")
_JUDGED_HEAD: Final = ("reference", "candidate", "effect", "p", "role", "verdict")
_JUDGED: Final = (
    " over launches; effect: the difference of a ratio, the change in percent of others; p: exact Mann-Whitney over "
    "launches, of a secondary metric after Holm; intervals are in summary.json"
)
_ROLES: Final = {"guard": "safeguard"}
_POOLED: Final = "  as ratio of sums over steps"


def headline_block(comparison: Mapping[str, Any]) -> str:
    """The verdict in words: what a reader sees first."""
    return _wrap([comparison["headline"]])


def health_block(dataset: LabelledRun, entry: Mapping[str, Any]) -> str:
    """Where a dataset came from, what it rests on, and everything wrong with it."""
    source, steps, health = entry["source"], entry["steps"], dataset.run.health
    read = f"{len(health.ranks_read)} of {health.world_size} ranks read" if health.world_size else "ranks unknown"
    lines = [
        f"{dataset.label}: {source['path']}",
        f"  run {source['run_id']}, platform {source['platform']}, parallel {source['parallel']}, instrument "
        f"{'/'.join(health.instrument_modes)}, {read}",
        f"  {steps['rank_steps_used']} rank-steps used (one per step and rank; {steps['global_steps_used']} global "
        f"steps), {steps['rank_steps_left_out_as_warmup']} left out as warm-up",
    ]
    lines += _set_lines(entry) if "launches" in entry else []
    if steps["isolated_rank_steps"]:
        counts = ", ".join(f"{count} {phase}" for phase, count in steps["isolated_rank_steps"].items())
        lines.append(f"  isolated baselines: {counts} steps, in no metric but the two that rest on them")
    facts = (device_line(entry["devices"]), cutoff_line(entry))
    lines += [f"  {fact}" for fact in facts if fact is not None]
    if "reason" in entry:
        lines.append(f"  ! nothing to measure: {entry['reason']}")
    found = (
        *health.notes(),
        *cautions(entry),
        *device_notes(entry["devices"]),
        *sentences(entry.get("stragglers", ())),
    )
    lines += [f"  ! {note}" for note in found]
    return _wrap(lines)


def _set_lines(entry: Mapping[str, Any]) -> list[str]:
    """How many launches stand behind a dataset, and which do not count."""
    left_out = entry["left_out"]
    where = f"{entry['launches']} in {entry['launch_set']}"
    lines = [f"  this is {entry['representative_rule']}, of {where}: pictures and details are of this launch alone"]
    if left_out:
        lines.append(f"  ! {len(left_out)} of {entry['launches'] + len(left_out)} launches left out:")
        lines += [f"  !   {launch['path']}: {launch['reason']}" for launch in left_out[:_SHOWN_LEFT_OUT]]
        lines += _left_over(len(left_out), _SHOWN_LEFT_OUT, "launches")
    return lines


def dataset_table(label: str, entry: Mapping[str, Any]) -> str:
    """Every metric of one dataset over its rank-steps."""
    metrics = entry.get("metrics", {})
    rows = [_columns(label, ["median", "p5", "p95", "mean", "rank spread"])]
    zeros = [name for name, values in metrics.items() if values["min"] == values["max"] == values["nulls"] == 0]
    for name, values in metrics.items():
        if values["median"] is None or name in zeros:
            continue
        unit = metric_named(name).unit
        cells = [TEXT.number(values[key], unit) for key in ("median", "p5", "p95", "mean")]
        spread = values.get("rank_spread")
        rows.append(_columns(_titled(name), [*cells, "-" if spread is None else TEXT.number(spread, unit)]))
        if values.get("ratio_of_sums") is not None:
            rows.append(_columns(_POOLED, [TEXT.number(values["ratio_of_sums"], "ratio")]))
    rows += _zeros(zeros, "0 throughout") + _collective_rows(entry.get("collectives", ()))
    return "\n".join([*rows, *_nulls({name: values["reason"] for name, values in metrics.items()})])


def comparison_table(comparison: Mapping[str, Any]) -> str:
    """Reference against candidate: warnings, every metric, differences of the manifests, the verdict."""
    lines = [f"!! {warning}" for warning in comparison["warnings"]]
    judged = "primary" in comparison
    head = f"reference = {comparison['reference']}, candidate = {comparison['candidate']}: medians"
    head += _JUDGED if judged else "; better and worse name the direction of a difference, not tested for significance"
    lines = _wrap([*lines, head]).splitlines()
    lines.append(_judged_columns("", _JUDGED_HEAD) if judged else _columns("", _HEAD))
    nulls: dict[str, str | None] = {}
    zeros = []
    for name, pair in comparison["metrics"].items():
        if pair["reference"] is None and pair["candidate"] is None:
            nulls[name] = pair["judgement_reason"]
            continue
        if pair["reference"] == pair["candidate"] == 0:
            zeros.append(name)
            continue
        if judged:
            lines.append(_judged_row(_titled(name), pair))
            continue
        lines.append(_pair_row(_titled(name), pair, pair["unit"], pair["judgement"]))
        if "ratio_of_sums" in pair:
            lines.append(_pair_row(_POOLED, pair["ratio_of_sums"], "ratio", ""))
    shown = comparison["collectives"][:_SHOWN_COLLECTIVES]
    if judged and shown:
        lines.append(_columns("collectives of the launches shown", _HEAD))
    for title, row in zip(_collective_names(comparison["collectives"]), shown, strict=False):
        for name in ("transfer_ms", "wait_ms", "busbw_gb_per_s"):
            pair = row[name]
            if pair["reference"] is not None or pair["candidate"] is not None:
                lines.append(_pair_row(f"{title} {name}", pair, pair["unit"], pair["judgement"]))
    lines += _left_over(len(comparison["collectives"]), len(shown), "collectives")
    unshared = comparison["collectives_on_one_side"]
    if any(unshared.values()):
        counts = f"{unshared['reference']} of the reference, {unshared['candidate']} of the candidate"
        lines.append(f"  collectives (kind, group, size, bytes) that the other side does not have: {counts}")
    lines += _zeros(zeros, "median 0 on both sides") + _nulls(nulls)
    differences = comparison["manifest_differences"]
    for difference in differences[:_SHOWN_DIFFERENCES]:
        values = f"{difference['reference']!r} -> {difference['candidate']!r}"
        lines += _wrap([f"  differs: {difference['key']}: {values}"]).splitlines()
    lines += _left_over(len(differences), _SHOWN_DIFFERENCES, "differences")
    where = comparison.get("attribution", {}).get("sentence")
    found = [f"where: {where}"] if where else []
    return "\n".join([*lines, _wrap([*found, f"verdict: {comparison['verdict']}: {comparison['verdict_reason']}"])])


def files_block(written: Iterable[str], not_drawn: Mapping[str, str]) -> str:
    """Where each file is, and which pictures there are none of."""
    return "\n".join([*written, *(_wrap([f"not drawn: {name}: {reason}"]) for name, reason in not_drawn.items())])


def _collective_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [_columns("collectives", ["transfer ms", "wait ms", "algbw GB/s", "busbw GB/s", "count"])]
    for title, row in zip(_collective_names(rows), rows[:_SHOWN_COLLECTIVES], strict=False):
        cells = [
            TEXT.number(row[name]["median"], metric_named(name).unit)
            for name in ("transfer_ms", "wait_ms", "algbw_gb_per_s", "busbw_gb_per_s")
        ]
        lines.append(_columns(title, [*cells, str(row["collectives"])]))
    reasons = {f"{row['kind']}: {row['transfer_ms']['reason']}" for row in rows if row["transfer_ms"]["reason"]}
    lines += _left_over(len(rows), _SHOWN_COLLECTIVES, "collectives")
    notes = [f"  no transfer time of {reason}" for reason in sorted(reasons)]
    bounds = sorted(
        {row["kind"] for row in rows if row["transfer_is_upper_bound"] and not row["transfer_ms"]["reason"]}
    )
    notes += [f"  {kind}: some ends are those of the caller's wait; its transfer is an upper bound" for kind in bounds]
    return lines + _wrap(notes).splitlines()


def _collective_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Kind, size and number of ranks; with exact bytes and the group too where these are the same in several rows."""
    names = [f"{row['kind']} {TEXT.size(row['bytes'])} n={row['group_size'] or '?'}" for row in rows]
    counts = Counter(names)
    return [
        name
        if counts[name] == 1
        else f"{row['kind']} {row['bytes']} B n={row['group_size'] or '?'} group {row['group']}"
        for name, row in zip(names, rows, strict=True)
    ]


def _pair_row(title: str, pair: Mapping[str, Any], unit: str, judgement: str) -> str:
    values = [TEXT.number(pair[key], unit) for key in ("reference", "candidate", "difference")]
    return _columns(title, [*values, TEXT.number(pair["quotient"], "ratio"), judgement])


def _judged_row(title: str, pair: Mapping[str, Any]) -> str:
    p = pair["p"] if pair["p_corrected"] is None else pair["p_corrected"]
    shown = "-" if pair["verdict"] is None else p_value(p, unknown="-")
    values = [TEXT.number(pair[key], pair["unit"]) for key in ("reference", "candidate")]
    effect = TEXT.effect(pair["effect"]["value"], pair["effect"]["kind"])
    return _judged_columns(
        title, [*values, effect, shown, _ROLES.get(pair["role"], pair["role"]), pair["verdict"] or "-"]
    )


def _judged_columns(title: str, cells: Sequence[str]) -> str:
    widths = (10, 11, 9, 8, 10, 13)
    padded = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{_fitted(title)}{''.join(padded)}".rstrip()


def _titled(name: str) -> str:
    return f"{name} ({_DENOMINATOR[name]})" if name in _DENOMINATOR else name


def _columns(title: str, cells: Sequence[str]) -> str:
    return (_fitted(title) + "".join(f"{cell:>12}" for cell in cells)).rstrip()


def _fitted(title: str) -> str:
    """A title in its column; one that is too long stands on a line of its own, since its end may be what tells it from
    another.
    """
    return f"{title:<{_NAME}}" if len(title) <= _NAME else f"{title}\n{'':<{_NAME}}"


def _nulls(reasons: Mapping[str, str | None]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            by_reason.setdefault(reason, []).append(name)
    return _wrap([f"  not available: {', '.join(names)}: {reason}" for reason, names in by_reason.items()]).splitlines()


def _zeros(names: Sequence[str], what: str) -> list[str]:
    return _wrap([f"  {what}: {', '.join(names)}"]).splitlines() if names else []


def _left_over(total: int, shown: int, what: str) -> list[str]:
    return [f"  and {total - shown} more {what}, all in summary.json"] if total > shown else []


def _wrap(lines: Sequence[str]) -> str:
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
