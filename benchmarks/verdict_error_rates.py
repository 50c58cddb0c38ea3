"""How often a verdict is wrong, and what it can find: `python -m benchmarks.verdict_error_rates`.

Regime: seeded simulation, one process, no training. The functions that decide are the product's own.

    a_a        1,000 A/A plans for each of 4, 5 and 8 launches a side, drawn from the noise of 16 identical launches
               that were really made (`launch_noise.py`): different launches on the two sides, their steps drawn anew.
               Through everything the report does: medians, pools, U test, its interval, the sequence, minP, guard.
    power      plans with an injected effect on step time: 3 to 10 launches a side, launch-to-launch variation 0.5 to
               10 %, effect 2 to 50 %, 40 steps of 10 % noise (one value a step; normal).
    interval   how often the interval holds the true effect, and how often an effect as large as the margin is called
               `equivalent`.
    order      false regressions when the machine wanders during a plan (autocorrelation 0.9 from launch to launch), by
               the order of the launches; which orders `launch_order` takes for interleaved, and their worst.

Prints one JSON object last; exit 1 when a rate is above what it may be by more than chance (one in a thousand).
`--markdown` prints tables instead, of which docs/dev/verdicts.md has some; `--quick` makes a tenth of the plans.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy  # its parts are loaded where they are used

from aorta.analysis.compare.launch_comparison import judged
from aorta.analysis.compare.launch_set import AUTOCORRELATION, MOST, Launch, LaunchSet, drift_inflation
from aorta.analysis.compare.rank_tests import estimated, mann_whitney
from aorta.analysis.compare.run_comparison import pairs
from aorta.analysis.compare.verdict import Rules, decide
from aorta.documents.comparison import ComparedMetric, Effect
from aorta.documents.statistics import describe
from benchmarks.launch_noise import DATA

Floats = npt.NDArray[np.float64]
Recorded = Sequence[Mapping[str, Floats]]
RULES = Rules()
SEED = 6
STEPS = 40
STEP_NOISE = 0.10
LAUNCHES = range(3, 11)
VARIATIONS = (0.005, 0.01, 0.02, 0.05, 0.10)
EFFECTS = (0.02, 0.05, 0.10, 0.20, 0.50)
NOISES = ((0.02, 0.10), (0.005, 0.005), (0.005, 0.0005))
"""Launch-to-launch variation and noise of steps for `interval`: steps decide, both do, launches do."""
CHANCE = 0.999
WANDER, OWN_NOISE = 0.05, 0.005
"""Standard deviation of a machine's drift, and of a launch's own noise, both of 1, for `order`."""
ORDERS = 100


def recorded(path: Path = DATA) -> list[dict[str, Floats]]:
    """For each launch: metric -> values, shape (steps, ranks)."""
    launches = json.loads(path.read_text())["launches"]
    return [{name: np.array(values) for name, values in launch.items()} for launch in launches]


def a_a_plan(noise: Recorded, launches: int, generator: np.random.Generator) -> tuple[dict[str, ComparedMetric], str]:
    """The judged metrics of one plan in which nothing differs, and its verdict."""
    chosen = generator.permutation(len(noise))[: 2 * launches]
    halves = chosen[:launches], chosen[launches:]
    reference, candidate = (side_of([_again(noise[at], generator) for at in half]) for half in halves)
    metrics = pairs(reference.statistics, candidate.statistics)
    return metrics, judged(metrics, reference, candidate, RULES)[0]


def _again(launch: Mapping[str, Floats], generator: np.random.Generator) -> dict[str, Floats]:
    """The launch with its steps drawn anew: the same steps for all of its metrics."""
    count = min(map(len, launch.values()))
    steps = generator.integers(count, size=count)
    return {name: values[steps] for name, values in launch.items()}


def side_of(launches: Sequence[Mapping[str, Floats]]) -> LaunchSet:
    """A side whose launches have these values of every metric."""
    samples = [{name: describe(values.ravel()) for name, values in each.items()} for each in launches]
    made = (Launch(Path(), str(place), each, {}, ()) for place, each in enumerate(samples))
    return LaunchSet(Path(), tuple(made), [])


def a_a(noise: Recorded, launches: int, plans: int) -> dict[str, Any]:
    """Rates of false findings over A/A plans."""
    generator = np.random.default_rng([SEED, launches])
    counted = ("false_regressions", "false_improvements", "equivalent", "any_sequence", "any_secondary", "any_guard")
    counts = dict.fromkeys(counted, 0)
    for _ in range(plans):
        metrics, announced = a_a_plan(noise, launches, generator)
        found = {name: entry.verdict in ("regression", "improvement") for name, entry in metrics.items()}
        counts["false_regressions"] += announced == "regression"
        counts["false_improvements"] += announced == "improvement"
        counts["equivalent"] += announced == "equivalent"
        in_turn = [name for name, entry in metrics.items() if entry.test.role in ("primary", "sequence")]
        counts["any_sequence"] += any(found[name] for name in in_turn)
        counts["any_secondary"] += any(found[name] for name, entry in metrics.items() if entry.test.role == "secondary")
        counts["any_guard"] += any(found[name] for name, entry in metrics.items() if entry.test.role == "guard")
    secondaries = sum(entry.test.p_corrected is not None for entry in metrics.values())
    return {"launches": launches, "plans": plans, "secondaries": secondaries, **counts}


def medians(generator: np.random.Generator, plans: int, launches: int, variation: float) -> Floats:
    """Launch values of simulated plans round 1, shape (plans, launches)."""
    level = 1 + variation * generator.standard_normal((plans, launches, 1))
    steps = level * (1 + STEP_NOISE * generator.standard_normal((plans, launches, STEPS)))
    return np.asarray(np.median(steps, axis=2))


def found(reference: Floats, candidate: Floats) -> str:
    """The product's verdict on step times of two sides; without an interval it cannot be `equivalent`."""
    value = float(np.median(candidate) / np.median(reference) - 1)
    return verdict(Effect("quotient", value, None, None), reference, candidate)


def verdict(effect: Effect, reference: Floats, candidate: Floats) -> str:
    p, launches = mann_whitney(reference, candidate), (len(reference), len(candidate))
    return decide(effect, p, better="lower", launches=launches, alpha=RULES.alpha, margin=RULES.margin)[0]


def power(plans: int) -> list[dict[str, float]]:
    """Share of plans that find the injected regression."""
    rows = []
    for launches in LAUNCHES:
        for variation in VARIATIONS:
            generator = np.random.default_rng([SEED, launches, int(variation * 1000)])
            left, right = (medians(generator, plans, launches, variation) for _ in range(2))
            for size in EFFECTS:
                hits = sum(found(a, b) == "regression" for a, b in zip(left, right * (1 + size), strict=True))
                rows.append({"launches": launches, "variation": variation, "effect": size, "power": hits / plans})
    return rows


def interval(launches: int, plans: int, variation: float, noise: float) -> dict[str, float]:
    """Coverage of the interval, and how often an effect of exactly the margin is called equivalent."""
    generator = np.random.default_rng([SEED, 95, launches])
    held = equivalent = 0
    for _ in range(plans):
        sides = []
        for size in (0.0, RULES.margin):
            level = (1 + size) * (1 + variation * generator.standard_normal((launches, 1)))
            values = level * (1 + noise * generator.standard_normal((launches, STEPS)))
            sides.append(np.median(values, axis=1))
        reference, candidate = sides
        seen = estimated("quotient", reference, candidate, mann_whitney(reference, candidate), RULES.alpha)
        assert seen.low is not None
        assert seen.high is not None
        held += seen.low <= RULES.margin <= seen.high
        equivalent += verdict(seen, reference, candidate) == "equivalent"
    rates = {"coverage": held / plans, "equivalent_at_the_margin": equivalent / plans}
    return {"launches": launches, "variation": variation, "step_noise": noise, "plans": plans, **rates}


def wandering(generator: np.random.Generator, plans: int, launches: int) -> Floats:
    """Launch values of machines that wander round 1: a stationary first-order autoregression of `WANDER`, and noise of
    the launch's own. Shape (plans, launches).
    """
    drift = generator.standard_normal((plans, launches))
    for at in range(1, launches):
        drift[:, at] = AUTOCORRELATION * drift[:, at - 1] + np.sqrt(1 - AUTOCORRELATION**2) * drift[:, at]
    return np.asarray((1 + WANDER * drift) * (1 + OWN_NOISE * generator.standard_normal((plans, launches))))


def false_regressions(values: Floats, of_candidate: npt.NDArray[np.bool_]) -> float:
    """Share of plans in which nothing differs that the rule calls a regression."""
    return sum(found(row[~of_candidate], row[of_candidate]) == "regression" for row in values) / len(values)


def order(launches: int, plans: int) -> dict[str, float]:
    """False regressions on machines that wander, by order; and of `ORDERS` random orders, by what the product says of
    them.
    """
    generator = np.random.default_rng([SEED, 9, launches])
    sides = np.repeat([False, True], launches)
    values = wandering(generator, plans, 2 * launches)
    apart = np.concatenate([wandering(generator, plans, launches) for _ in range(2)], axis=1)
    rates = {
        "launches": launches,
        "a_b_b_a": false_regressions(values, np.resize([False, True, True, False], 2 * launches)),
        "a_then_b": false_regressions(values, sides),
        "two_machines": false_regressions(apart, sides),
    }
    accepted: list[float] = []
    refused: list[float] = []
    for _ in range(ORDERS):
        drawn = generator.permutation(sides)
        taken = drift_inflation(np.arange(2 * launches), drawn) <= MOST
        (accepted if taken else refused).append(false_regressions(values, drawn))
    return rates | {
        "random_orders_accepted": len(accepted) / ORDERS,
        "accepted_mean": float(np.mean(accepted)),
        "accepted_worst": max(accepted),
        "refused_mean": float(np.mean(refused)),
        "refused_worst": max(refused),
    }


def at_most(count: int, plans: int, rate: float) -> bool:
    """Whether so many in so many may be the work of chance at that rate."""
    return bool(count <= scipy.stats.binom.ppf(CHANCE, plans, rate))


def figures(part: int) -> tuple[dict[str, Any], dict[str, bool]]:
    """All figures and the targets; `part`: plans are divided by it."""
    noise = recorded()
    rates = [a_a(noise, launches, 1000 // part) for launches in (4, 5, 8)]
    made = {
        "a_a": rates,
        "power": power(1000 // part),
        "interval": [interval(launches, 500 // part, *noises) for noises in NOISES for launches in (4, 5, 8, 10)],
        "order": [order(launches, 2000 // part) for launches in (4, 5, 8)],
    }
    targets = {}
    for row in made["order"]:
        sides = f"{row['launches']:g}_against_{row['launches']:g}"
        targets[f"orders_taken_for_interleaved_{sides}"] = row["accepted_mean"] <= RULES.alpha / 2
    for row in rates:
        sides, plans = f"{row['launches']}_against_{row['launches']}", row["plans"]
        for name, rate in (
            ("false_regressions", 0.05),  # of step time or of the primary metric, at alpha / 2 each
            ("false_improvements", 0.05),
            ("any_sequence", 0.05),
            ("any_secondary", 0.05),
        ):
            targets[f"{name}_{sides}"] = at_most(row[name], plans, rate)
    return made, targets


def power_rows(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """A table: a row for each variation and effect, a column for each number of launches."""
    lines = [
        "| launches vary by | effect | " + " | ".join(f"{n} v {n}" for n in LAUNCHES) + " |",
        "|---|---|" + "---|" * len(LAUNCHES),
    ]
    by = {(row["launches"], row["variation"], row["effect"]): row["power"] for row in rows}
    for variation in VARIATIONS:
        for size in EFFECTS:
            cells = " | ".join(f"{by[launches, variation, size]:.0%}".replace("%", " %") for launches in LAUNCHES)
            lines.append(f"| {variation * 100:g} % | {size * 100:g} % | {cells} |")
    return lines


def rows_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows with equal keys as a table."""
    lines = ["| " + " | ".join(name.replace("_", " ") for name in rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return lines + [
        "| " + " | ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()) + " |"
        for row in rows
    ]


def main() -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the plans")
    parser.add_argument("--markdown", action="store_true", help="as tables")
    words = parser.parse_args()
    made, targets = figures(10 if words.quick else 1)
    if words.markdown:
        tables: dict[str, Callable[[], list[str]]] = {name: partial(rows_of, rows) for name, rows in made.items()}
        tables["power"] = partial(power_rows, made["power"])
        print("\n\n".join("\n".join([name, "", *table()]) for name, table in tables.items()))  # noqa: T201
    else:
        rates = {"benchmark": "verdict_error_rates", **made, "targets": targets, "met": all(targets.values())}
        print(json.dumps(rates))  # noqa: T201
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
