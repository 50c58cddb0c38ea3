"""How far what-if predictions are from what then happens: the table of measured errors in docs/dev/what-if-model.md.

    python -m benchmarks.whatif_interventions FOLDER --rounds 3 --into docs/dev/what-if-model.md

Regime: launches on this machine's CPU, two gloo ranks with real computation on the emulated fabric, 30 steps, 4 of them
warm-up. Each of the `REGIMES` has a base, launched again between its interventions (base a b base c d base);
predictions are made from the records of the base before and behind an intervention, and their mean, which a drift of
the machine moves less than either, is held to the record of the launch in which the change was really made. With
`--rounds 2` everything is launched twice, and means are held to means. Records stay in FOLDER: a second call goes on
where the first was cut off, `--minutes 0` launches nothing.

Prints the table, and one JSON object last; exit 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aorta import whatif
from aorta.analysis.aggregate import LabelledRun, metrics_of
from aorta.documents.metrics import JOB_STEP
from aorta.read.record import load_run
from benchmarks.plans import say
from tests.runs import job

RANKS = 2
STEPS, WARMUP = 30, 4
COMMON = (
    "training.device=cpu",
    f"training.max_steps={STEPS}",
    f"telemetry.warmup_steps={WARMUP}",
    "training.log_interval=1000",
    "fabric=emulated",
    "fabric.inter_latency_us=50",
)
SMALL_US = 2500.0
"""Latency of the base where many collectives are small: gloo itself takes up to that long for them, and a network that
is faster than the backend is none that a replay could know.
"""
MEASURED = ("faster", "slower", "one kind", "straggler", "straggler and network")
"""Families that the targets of median and 95th percentile are about."""
FREE, WORLD = "free", "world"


@dataclass(frozen=True)
class Intervention:
    """One change: `words` of train.py make it, `changes` ask for it."""

    family: str
    words: tuple[str, ...]
    changes: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(self.changes)


@dataclass(frozen=True)
class Regime:
    """A base and what is changed in it. Later words win, so an intervention's stand behind the base's."""

    name: str
    words: tuple[str, ...]
    interventions: tuple[Intervention, ...]

    @property
    def folder(self) -> str:
        """Its name as that of a folder, without what Hydra would take for a list."""
        return self.name.replace(",", "").replace(" ", "-")

    def launches(self, rounds: int) -> Iterator[tuple[str, Intervention | None]]:
        """Folder and intervention (None: the base) of each launch, in order: base a b base c d base, and again."""
        for number, intervention in enumerate(self.interventions * rounds):
            if number % 2 == 0:
                yield _base(number // 2), None
            yield f"{number:02}", intervention
        yield _base(number // 2 + 1), None

    def launches_of(self, intervention: int, rounds: int) -> Iterator[tuple[str, tuple[str, str]]]:
        """Each launch of an intervention, with those of the base before and behind it."""
        for number in range(intervention, rounds * len(self.interventions), len(self.interventions)):
            yield f"{number:02}", (_base(number // 2), _base(number // 2 + 1))


def _base(number: int) -> str:
    return f"base{number:02}"


def bandwidths(base: float, *factors: float) -> tuple[Intervention, ...]:
    return tuple(
        Intervention("faster" if factor > 1 else "slower", (_gb(base * factor),), (f"network.bandwidth=x{factor:g}",))
        for factor in factors
    )


def latencies(base: float, *microseconds: float) -> tuple[Intervention, ...]:
    return tuple(
        Intervention("slower" if us > base else "faster", (_us(us),), (f"network.latency={us:g}",))
        for us in microseconds
    )


def slow(factor: float, change: str, *words: str) -> Intervention:
    """Some collectives take `factor` times as long."""
    return Intervention("one kind", (f"fabric.slow_factor={factor:g}", *words), (f"{change}=x{1 / factor:.6g}",))


def stragglers(rank: int, *ms: float, was_ms: float = 0.0) -> tuple[Intervention, ...]:
    return tuple(
        Intervention("straggler", _straggler(rank, each), (f"rank.{rank}.late_ms={each - was_ms:g}",)) for each in ms
    )


def together(*several: tuple[Intervention, ...]) -> Intervention:
    words = tuple(word for (one,) in several for word in one.words)
    return Intervention("straggler and network", words, tuple(each for (one,) in several for each in one.changes))


def free(base: float) -> Intervention:
    """As fast as the emulation goes: what is left is the backend's own time."""
    return Intervention(FREE, (_gb(base * 1e6), _us(0)), ("comm=free",))


def worlds(seed: int, *ranks: int) -> tuple[Intervention, ...]:
    """Larger worlds with another law than the predictor's: jitter, and everything a tenth slower, as one slow node
    makes a ring.
    """
    law = ("fabric.jitter=0.2", "fabric.slow_factor=1.1")
    return tuple(
        Intervention(WORLD, (f"fabric.emulated_world_size={each}", f"fabric.seed={number}", *law), (f"ranks={each}",))
        for number, each in enumerate(ranks, start=seed)
    )


def _gb(gb_per_s: float) -> str:
    return f"fabric.inter_bandwidth_gb_per_s={gb_per_s:.6g}"


def _us(microseconds: float) -> str:
    return f"fabric.inter_latency_us={microseconds:g}"


def _straggler(rank: int, ms: float) -> tuple[str, ...]:
    return (f"fabric.straggler_rank={rank if ms else 'null'}", f"fabric.straggler_ms={ms:g}")


REGIMES = (
    Regime(
        "ddp, mostly hidden",
        ("parallel=ddp", _gb(0.07)),
        (
            *bandwidths(0.07, 2, 0.5, 0.7, 0.35),
            *latencies(50, 3000),
            *stragglers(1, 5),
            *stragglers(0, 15),
            together(stragglers(0, 8), bandwidths(0.07, 0.5)),
            slow(2.5, "comm", "fabric.slow_kind=allreduce"),
            free(0.07),
        ),
    ),
    Regime(
        "ddp, exposed",
        ("parallel=ddp", _gb(0.03)),
        (
            *bandwidths(0.03, 3, 1.5, 0.7, 2),
            *latencies(50, 2500),
            *stragglers(1, 10),
            slow(1.6, "comm.bytes.750000-", "fabric.slow_min_bytes=750000"),
        ),
    ),
    Regime(
        "ddp, straggler",
        ("parallel=ddp", _gb(0.06), *_straggler(1, 8)),
        (
            *bandwidths(0.06, 0.5, 3),
            *latencies(50, 4000),
            *stragglers(1, 0, 3, 16, was_ms=8),
            together(stragglers(1, 0, was_ms=8), bandwidths(0.06, 0.5)),
            together(stragglers(1, 2, was_ms=8), bandwidths(0.06, 2)),
        ),
    ),
    Regime(
        "fsdp",
        ("parallel=fsdp", _gb(0.035), _us(SMALL_US)),
        (
            *bandwidths(0.035, 3, 1.6, 0.7, 2),
            *latencies(SMALL_US, 4500),
            *stragglers(1, 3),
            together(stragglers(0, 2), bandwidths(0.035, 2)),
            slow(1.8, "comm.kind.allgather", "fabric.slow_kind=allgather"),
            slow(2, "comm.kind.reducescatter", "fabric.slow_kind=reducescatter"),
            free(0.035),
        ),
    ),
    Regime(
        "fsdp, straggler",
        ("parallel=fsdp", _gb(0.05), _us(SMALL_US), *_straggler(0, 4)),
        (
            *bandwidths(0.05, 0.6, 2),
            *stragglers(0, 0, 8, 2, was_ms=4),
            together(stragglers(0, 0, was_ms=4), bandwidths(0.05, 0.6)),
        ),
    ),
    Regime(
        "tp",
        ("parallel=tp", _gb(0.04), _us(SMALL_US)),
        (
            *bandwidths(0.04, 2, 0.5, 0.7, 0.4),
            *latencies(SMALL_US, 4500, 1700, 3500),
            *stragglers(1, 2),
            *stragglers(0, 4),
            together(stragglers(1, 1), bandwidths(0.04, 0.6)),
        ),
    ),
    Regime("ddp, larger worlds", ("parallel=ddp", _gb(0.07), _us(20)), worlds(1, 8, 64, 512)),
    Regime("fsdp, larger worlds", ("parallel=fsdp", _gb(0.07), _us(20)), worlds(4, 8, 64, 512)),
)
DONE = "launched.json"
BEGIN, END = "<!-- measured errors: begin -->", "<!-- measured errors: end -->"
LARGE = 0.05
"""An effect of which the sign must be right."""


class Row(NamedTuple):
    """One intervention: step times in milliseconds and ratios as they were, as they became, and as predicted."""

    regime: str
    family: str
    change: str
    base_ms: float
    real_ms: float
    real_ratio: float
    predicted_ms: float
    low_ms: float
    high_ms: float
    predicted_ratio: float


def launch_all(folder: Path, rounds: int, until_s: float) -> bool:
    """Make the launches that are missing; False when time was up before the last."""
    for regime in REGIMES:
        for name, intervention in regime.launches(rounds):
            place = folder / regime.folder / name
            words = [*COMMON, *regime.words, *(intervention.words if intervention else ())]
            if (place / DONE).exists() and json.loads((place / DONE).read_text()) == words:
                continue
            if time.monotonic() > until_s:
                return False
            shutil.rmtree(place, ignore_errors=True)
            done = job(*words, f"training.output_dir={place}", ranks=RANKS)
            if done.returncode:
                raise RuntimeError(f"{place}: exit {done.returncode}\n{done.stderr[-4000:]}")
            (place / DONE).write_text(json.dumps(words))
    return True


@cache
def measured(place: Path) -> tuple[float, float]:
    """Return the median step time in milliseconds and overlap ratio of a launch."""
    dataset = LabelledRun(place.name, load_run(place))
    metrics = metrics_of(dataset)
    step_ms, ratio = metrics[JOB_STEP].median, metrics["overlap_ratio"].median
    assert step_ms is not None
    assert ratio is not None
    return step_ms, ratio


@cache
def program(place: Path) -> whatif.RunProgram:
    return whatif.read_program(place)


def rows(folder: Path, regimes: Sequence[Regime], rounds: int) -> Iterator[Row]:
    """Predict every intervention whose launches are there, from the bases before and behind each of them."""
    for regime in regimes:
        root = folder / regime.folder
        for number, intervention in enumerate(regime.interventions):
            launches = list(regime.launches_of(number, rounds))
            made = [root / name for name, _ in launches]
            bases = [root / base for _, around in launches for base in around]
            if not all((place / DONE).exists() for place in (*made, *bases)):
                continue
            changes = whatif.parse_changes(intervention.changes)
            found = [whatif.predict(program(base), changes) for base in bases]
            ratios = [each.overlap_ratio.value for each in found if each.overlap_ratio is not None]
            values = (
                [measured(base)[0] for base in bases],
                [measured(launch)[0] for launch in made],
                [measured(launch)[1] for launch in made],
                *([getattr(each.launch_ms, end) for each in found] for end in ("value", "low", "high")),
                ratios,
            )
            yield Row(regime.name, intervention.family, intervention.name, *(float(np.mean(each)) for each in values))


def errors(chosen: Sequence[Row]) -> dict[str, Any]:
    """Summarize the errors of several interventions."""
    if not chosen:
        return {"made": 0}
    base, real, ratio, said, low, high, said_ratio = np.array([row[3:] for row in chosen]).T
    off, large = np.abs(said / real - 1), np.abs(real / base - 1) > LARGE
    return {
        "made": len(chosen),
        "median": float(np.median(off)),
        "p95": float(np.percentile(off, 95)),
        "large": int(large.sum()),
        "sign_right": int((large & ((said > base) == (real > base))).sum()),
        "ratio_median": float(np.median(np.abs(said_ratio - ratio))),
        "held": int(((low <= real) & (real <= high)).sum()),
    }


def figures_of(folder: Path, found: Sequence[Row], rounds: int) -> dict[str, Any]:
    """Return all that is said of the interventions, and how far launches of one base are apart."""
    families = {"network and stragglers": MEASURED} | {name: (name,) for name in (*MEASURED, FREE, WORLD)}
    apart = []
    for regime in REGIMES:
        bases = [folder / regime.folder / name for name, change in regime.launches(rounds) if change is None]
        times = [measured(place)[0] for place in bases if (place / DONE).exists()]
        apart += [abs(after / before - 1) for before, after in pairwise(times)]
    return {
        "families": {name: errors([each for each in found if each.family in own]) for name, own in families.items()},
        "bases": {"pairs": len(apart), "apart": [float(np.percentile(apart or [0.0], at)) for at in (50, 95)]},
        "rows": [each._asdict() for each in found],
        "rounds": rounds,
    }


def targets(figures: dict[str, Any]) -> dict[str, bool]:
    if len(figures["rows"]) < sum(len(regime.interventions) for regime in REGIMES):
        return {"every intervention": False}
    network, worlds = (figures["families"][name] for name in ("network and stragglers", WORLD))
    return {
        "median at most 3 %": network["median"] <= 0.03,
        "95th percentile at most 8 %": network["p95"] <= 0.08,
        "every sign of an effect above 5 %": network["sign_right"] == network["large"],
        "ratio within 0.02 at the median": network["ratio_median"] <= 0.02,
        "larger worlds: held by the stated interval in 95 %": worlds["held"] >= 0.95 * worlds["made"],
    }


def markdown(figures: dict[str, Any]) -> str:
    """Return the table of docs/dev/what-if-model.md."""
    lines = [
        "| change | made | median error | 95 % | sign right | ratio, median | interval held |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, each in figures["families"].items():
        if each["made"]:
            signs, held = f"{each['sign_right']} of {each['large']}", f"{each['held']} of {each['made']}"
            off = f"{100 * each['median']:.1f} % | {100 * each['p95']:.1f} % | {signs} | {each['ratio_median']:.3f}"
            lines.append(f"| {name} | {each['made']} | {off} | {held} |")
    median, p95 = (f"{100 * each:.1f} %" for each in figures["bases"]["apart"])
    lines += [
        "",
        f"Two launches of the same base, one after the other, are {median} apart at the median and {p95} at the",
    ]
    lines.append(f"95th percentile ({figures['bases']['pairs']} pairs): so much does the machine alone move a launch.")
    return "\n".join(lines)


def main() -> int:
    """Launch what is missing, and evaluate what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where records are, or will be")
    parser.add_argument("--minutes", type=float, default=math.inf, help="launch no longer than this")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="launches of each change (default 1)")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="a page with the table between its two marks")
    words = parser.parse_args()
    launch_all(words.folder, words.rounds, time.monotonic() + words.minutes * 60)
    found = list(rows(words.folder, REGIMES, words.rounds))
    figures = figures_of(words.folder, found, words.rounds)
    if words.into is not None:
        before, _, rest = words.into.read_text().partition(BEGIN)
        words.into.write_text(f"{before}{BEGIN}\n{markdown(figures)}\n{END}{rest.partition(END)[2]}")
    print(markdown(figures))  # noqa: T201
    return say("whatif_interventions", figures, targets(figures))


if __name__ == "__main__":
    sys.exit(main())
