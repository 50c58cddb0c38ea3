"""How many metrics are tested together, and how often that goes wrong: `python -m benchmarks.many_metrics`.

Regime: seeded simulation, one process, no training. Plans of 4, 5 and 8 launches a side, of normal launches that vary
by 2 %, in eight metrics: the three of the sequence (exposed_comm_ms, overlap_ratio, compute_stall_ms) and five others.
All metrics of a launch are correlated (0, 0.5 or 0.9), and its step time is the same throughout. Three truths: nothing
differs; exposed_comm_ms alone does; the first two of the sequence and two of the five others do, by four standard
deviations. Every verdict is the product's own (`judge`, `intervals`, `mann_whitney`).

    false_sequence     share of plans with a false finding (p at the level used) in the sequence; at most alpha
    false_others       the same among the five others; at most alpha
    false_either       the same in any of them: two families, each at alpha
    false_holm         the same of all seven metrics behind the primary one by Holm's correction
    power, power_holm  of each metric that differs: share of plans that find it
    undecidable        share of plans in which the five others are `not tested`, as these launches could never decide
    contradictions     verdicts that their own interval denies; must be 0

Prints one JSON object last; exit 1 when a rate is above what it may be by more than chance (one in a thousand), or with
a contradiction. `--markdown` prints a table instead; `--plans` says how many of each
setting.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from aorta.analysis.compare.rank_tests import POWER, mann_whitney
from aorta.analysis.compare.run_comparison import pairs
from aorta.analysis.compare.verdict import GUARD, NOT_TESTED, SEQUENCE, Rules, add_intervals, judge
from aorta.documents.comparison import ComparedMetric, Effect, EffectKind, Interval, LaunchTest, Power
from aorta.documents.metrics import metric_named
from aorta.documents.statistics import describe
from benchmarks.verdict_error_rates import at_most, rows_of

Floats = npt.NDArray[np.float64]
Plan = Mapping[str, tuple[Floats, Floats]]
RULES: Final = Rules()
SEED: Final = 1979
PLANS: Final = 10_000
SIZES: Final = (4, 5, 8)
CORRELATIONS: Final = (0.0, 0.5, 0.9)
VARIATION: Final = 0.02
"""Standard deviation between launches; of the value itself, which is 1."""
SHIFT: Final = 4 * VARIATION
OTHERS: Final = (
    "exposed_share",
    "idle_ms",
    "exposed_allreduce_ms",
    "exposed_allgather_ms",
    "exposed_reducescatter_ms",
)
NAMES: Final = (*SEQUENCE, *OTHERS)
TRUTHS: Final[Mapping[str, tuple[str, ...]]] = {
    "nothing": (),
    "exposed": SEQUENCE[:1],
    "several": (*SEQUENCE[:2], *OTHERS[1:3]),
}


def plan(generator: np.random.Generator, launches: int, correlation: float, differing: tuple[str, ...]) -> Plan:
    """Launch values of both sides; what differs got worse in the candidate."""
    shared = generator.standard_normal((2, launches, 1))
    own = generator.standard_normal((2, launches, len(NAMES)))
    values = 1 + VARIATION * (np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * own)
    for place, name in enumerate(NAMES):
        if name in differing:
            values[1, :, place] += SHIFT * (-1 if metric_named(name).better == "higher" else 1)
    return {name: (values[0, :, place], values[1, :, place]) for place, name in enumerate(NAMES)}


def judged(values: Plan) -> dict[str, ComparedMetric]:
    """The entries of these metrics in a comparison, with their verdicts."""
    left, right = ({name: describe(sides[place]) for name, sides in values.items()} for place in (0, 1))
    entries = pairs(left, right)
    no_interval, no_power = Interval(None, None), Power(POWER, None, None, None, None)
    for name, sides in values.items():
        kind: EffectKind = "difference" if entries[name].unit == "ratio" else "quotient"
        test = entries[name].test = LaunchTest(
            role=RULES.role(name),
            p=mann_whitney(*sides),
            margin=RULES.margin,
            effect=Effect(kind, None, None, None),
            difference_interval=no_interval,
            interval_level=None,
            launch_sd=None,
            power=no_power,
        )
        add_intervals(test, *sides, RULES.alpha)
    # Step time is shorter in every launch, so that it withholds nothing.
    step = replace(entries[RULES.primary].test, role="guard", p=1.0, effect=Effect("quotient", -0.1, -0.1, -0.1))
    judge(entries | {GUARD: replace(entries[RULES.primary], test=step)}, RULES, values)
    return entries


def is_finding(entry: ComparedMetric) -> bool:
    """Whether the test of a metric finds a difference, whatever its size."""
    p = entry.test.p if entry.test.p_corrected is None else entry.test.p_corrected
    return entry.verdict != NOT_TESTED and p is not None and p <= RULES.alpha


def contradicts(entry: ComparedMetric) -> bool:
    """Whether a metric's own interval denies its verdict."""
    if entry.verdict == NOT_TESTED:
        return False  # nothing is said of it
    effect, margin = entry.test.effect, entry.test.margin
    low, high, value = effect.low, effect.high, effect.value
    assert low is not None
    assert high is not None
    assert value is not None
    apart, within = not low <= 0 <= high, -margin <= low <= high <= margin
    decided = entry.verdict in ("regression", "improvement")
    return bool(
        not low <= value <= high
        or apart != is_finding(entry)
        or (decided and not apart)
        or (entry.verdict == "equivalent" and not within)
        or (entry.verdict == "inconclusive" and (within or (apart and abs(value) > margin)))
    )


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction (Scandinavian Journal of Statistics 6, 1979), for comparison."""
    corrected, least = {}, 0.0
    for place, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[name]))
        corrected[name] = least
    return corrected


def setting(launches: int, correlation: float, truth: str, plans: int) -> dict[str, Any]:
    """All figures of one setting."""
    differing = TRUTHS[truth]
    generator = np.random.default_rng([SEED, launches, int(10 * correlation), len(differing)])
    counts: Counter[str] = Counter()
    power, power_holm = Counter(dict.fromkeys(differing, 0)), Counter(dict.fromkeys(differing, 0))
    for _ in range(plans):
        entries = judged(plan(generator, launches, correlation, differing))
        found = {name for name, entry in entries.items() if is_finding(entry)}
        p_values = {name: p for name in NAMES[1:] if (p := entries[name].test.p) is not None}
        by_holm = {name for name, p in holm(p_values).items() if p <= 0.05}
        by_holm |= {RULES.primary} & found
        wrong = found - set(differing)
        counts["false_sequence"] += bool(wrong & set(SEQUENCE))
        counts["false_others"] += bool(wrong & set(OTHERS))
        counts["false_either"] += bool(wrong)
        counts["false_holm"] += bool(by_holm - set(differing) - {RULES.primary})
        counts["undecidable"] += all(entries[name].verdict == NOT_TESTED for name in OTHERS)
        counts["contradictions"] += sum(map(contradicts, entries.values()))
        power.update(found & set(differing))
        power_holm.update(by_holm & set(differing))
    rates = ("false_sequence", "false_others", "false_either", "false_holm", "undecidable")
    return {
        "launches": launches,
        "correlation": correlation,
        "truth": truth,
        "plans": plans,
        **{name: counts[name] / plans for name in rates},
        "contradictions": counts["contradictions"],
        "power": {name: power[name] / plans for name in differing},
        "power_holm": {name: power_holm[name] / plans for name in differing},
    }


def targets_of(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """What must hold, of all settings together."""
    families = ("false_sequence", "false_others")
    kept = {
        name: all(at_most(round(row[name] * row["plans"]), row["plans"], RULES.alpha) for row in rows)
        for name in families
    }
    return kept | {"no_contradiction": not any(row["contradictions"] for row in rows)}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One line a setting; power of each metric that differs, and Holm's in parentheses."""
    lines, rates = [], ("false_sequence", "false_others", "false_either", "false_holm")
    for row in rows:
        shares = {name: f"{100 * row[name]:.1f} %" for name in rates}
        powers = [
            f"{name} {100 * row['power'][name]:.0f} % ({100 * row['power_holm'][name]:.0f} %)" for name in row["power"]
        ]
        lines.append(
            {
                "launches": f"{row['launches']} v {row['launches']}",
                "correlation": f"{row['correlation']:g}",
                "differs": row["truth"],
                **shares,
                "not decidable": f"{100 * row['undecidable']:.0f} %",
                "contradictions": row["contradictions"],
                "power (Holm)": ", ".join(powers) or "-",
            }
        )
    return rows_of(lines)


def main() -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--plans", type=int, default=PLANS, help="of each setting")
    parser.add_argument("--markdown", action="store_true", help="as a table")
    words = parser.parse_args()
    rows = [
        setting(launches, correlation, truth, words.plans)
        for launches in SIZES
        for correlation in CORRELATIONS
        for truth in TRUTHS
    ]
    targets = targets_of(rows)
    if words.markdown:
        print("\n".join(table(rows)))  # noqa: T201
    print(  # noqa: T201
        json.dumps({"benchmark": "many_metrics", "settings": rows, "targets": targets, "met": all(targets.values())})
    )
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
