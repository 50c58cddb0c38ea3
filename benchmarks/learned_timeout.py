"""How often the watchdog's learned timeout raises a false alarm, and how long a hang must last for it to be noticed.

    python -m benchmarks.learned_timeout --steps 5000

Simulated: step times are drawn at random, a step has `SIGNS` signs of progress at equal distances behind its pause, and
`Patience` looks four times a second, as in the watchdog. An alarm is false where the training goes on. A stop is missed
where the timeout of that moment is longer; every step's end is such a moment. Standard output has one JSON object a
training: steps, pauses of 10 s and more, false alarms, the timeout's quantiles, and for stops of so many seconds the
share that is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from aorta.autopsy.watchdog import LEARNING_STEPS, POLL_S, Patience
from aorta.records.progress import ProgressState

SIGNS: Final = 8
WARMUP_STEPS: Final = 5
PAUSE_S: Final = 10.0
STOPS_S: Final = (13, 30, 60, 120, 600)

Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
"""From a number of steps to the seconds of work of each, and of the pause before it."""


def around(mean_s: float, sigma: float) -> Draw:
    """Lognormal step times with this median."""
    return lambda random, steps: (mean_s * random.lognormal(0, sigma, steps), np.zeros(steps))


def paused(every: int, low_s: float, high_s: float, *, regular: bool) -> Draw:
    """Steps of 0.3 s, with pauses that nobody announced: every so many steps, or as often at random."""

    def draw(random: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray]:
        number = np.arange(steps)
        stops = number % every == every // 2 if regular else random.random(steps) < 1 / every
        return 0.3 * random.lognormal(0, 0.1, steps), stops * random.uniform(low_s, high_s, steps)

    return draw


def changed(before_s: float, after_s: float) -> Draw:
    """Another pace from the middle on."""

    def draw(random: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray]:
        pace_s = np.where(np.arange(steps) < steps // 2, before_s, after_s)
        return pace_s * random.lognormal(0, 0.1, steps), np.zeros(steps)

    return draw


def one_pause(random: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps of 0.3 s, and one pause of 7 s early on."""
    return 0.3 * random.lognormal(0, 0.1, steps), 7.0 * (np.arange(steps) == steps // 10)


def straggling(random: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Every twentieth step is five times as long, in one piece."""
    late = np.arange(steps) % 20 == 19
    return 1.05 * random.lognormal(0, 0.05, steps), 4.2 * late


def heavy(random: np.random.Generator, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Pauses with a heavy tail before every step: Pareto, with an infinite variance."""
    return 0.3 * random.lognormal(0, 0.1, steps), 0.1 * random.pareto(1.5, steps)


TRAININGS: Final[dict[str, Draw]] = {
    "steady 0.3 s": around(0.3, 0.05),
    "steady 30 s": around(30, 0.05),
    "uneven 1 s": around(1, 0.5),
    "a straggler in every 20th step": straggling,
    "one pause of 7 s": one_pause,
    "15 to 25 s after every 200 steps": paused(200, 15, 25, regular=True),
    "15 to 25 s, once in 200 steps": paused(200, 15, 25, regular=False),
    "10 to 60 s, once in 2,000 steps": paused(2000, 10, 60, regular=False),
    "heavy tail": heavy,
    "from 1 s to 12 s": changed(1, 12),
    "from 12 s to 1 s": changed(12, 1),
}


def signs(work_s: np.ndarray, pause_s: np.ndarray) -> np.ndarray:
    """Return when there are signs of progress, in seconds; the last of each `SIGNS` ends a step."""
    gaps_s = np.repeat(work_s[:, None] / SIGNS, SIGNS, axis=1)
    gaps_s[:, 0] += pause_s
    return np.cumsum(gaps_s.ravel())


def looks(signs_s: np.ndarray) -> Iterator[tuple[float, int]]:
    """Yield looks that can matter, with how many signs there were: the first after a sign, and the last before the
    next.
    """
    first = np.floor(signs_s / POLL_S) + 1
    last = np.floor(np.append(signs_s[1:], signs_s[-1] + POLL_S) / POLL_S)
    for count, (begin, end) in enumerate(zip(first, last, strict=True), start=1):
        for look in sorted({begin, end}):
            if begin <= look <= end:
                yield look * POLL_S, count


def simulate(draw: Draw, steps: int, seed: int) -> dict[str, Any]:
    """One training; returns its false alarms, and what would have been missed."""
    random = np.random.default_rng(seed)
    work_s, pause_s = draw(random, steps)
    signs_s = signs(work_s, pause_s)
    patience, alarms, limits_s, alarmed = Patience(None, 600.0, WARMUP_STEPS), 0, list[float](), 0
    for now_s, count in looks(signs_s):
        done, at_ns = count // SIGNS, int(signs_s[count - 1] * 1e9)
        states = {0: ProgressState(done, "forward", at_ns, done, at_ns, None)}
        if patience.overdue(states, int(now_s * 1e9)) and alarmed != count:
            alarms, alarmed = alarms + 1, count
        if count % SIGNS == 0 and done >= WARMUP_STEPS + LEARNING_STEPS:
            limits_s.append(patience.timeout_s(states))
    found = np.array(limits_s)
    return {
        "steps": steps,
        "pauses": int(np.count_nonzero(pause_s >= PAUSE_S)),
        "false_alarms": alarms,
        "timeout_s": {str(q): round(float(np.quantile(found, q)), 1) for q in (0.5, 0.95, 1.0)},
        "missed": {str(stop_s): round(float(np.mean(found >= stop_s)), 4) for stop_s in STOPS_S},
    }


def main() -> int:
    """Simulate every training."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5000, help="of each training (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, draw in TRAININGS.items():
        sys.stdout.write(json.dumps({"training": name, **simulate(draw, options.steps, options.seed)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
