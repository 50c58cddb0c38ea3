"""How far what-if predictions are from what then happens: `python -m benchmarks.whatif_interventions FOLDER`.

Regime: launches on this machine's CPU, two gloo ranks with real computation on the emulated fabric, 34 steps, 4 of them
warm-up. Each regime of `whatif_plan` has a base, launched again between its interventions (base a b base c d base); a
prediction is made from the record of the base next to the intervention, and held to the record of the launch in which
the change was really made. Records stay in FOLDER: a second call goes on where the first was cut off, `--evaluate`
launches nothing, `--minutes` ends launching in time.

Beside it two naive answers from the same record, given the exact factor by which the network's times change and, for a
straggler, its lateness times the number of collectives:

    exposed scaled    exposed communication is scaled, everything else stays
    hidden kept       as many milliseconds of communication as before are hidden, the rest is exposed

Prints a table, and one JSON object last; exit 1 when a target is missed. `--write` keeps the figures for
docs/what-if.md (`python -m benchmarks.whatif_table`).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from aorta.analysis import whatif
from aorta.analysis.aggregate import LabelledRun, by_step
from aorta.analysis.load.records import load_run
from aorta.analysis.metrics import JOB_STEP
from aorta.config.schema import Algorithm, EmulatedFabric, Sharing
from aorta.errors import AortaError
from aorta.instrument.emulation.network import EmulatedNetwork
from aorta.records.reader import read_rank
from benchmarks.plans import say
from benchmarks.whatif_plan import APART, COMMON, MEASURED, RANKS, REGIMES, WORLD, Intervention, Regime
from tests.runs import job

DATA = Path(__file__).parent / "data" / "whatif_interventions.json"
DONE = "launched.json"
LARGE = 0.05
"""An effect of which the sign must be right."""
NAIVE = ("exposed scaled", "hidden kept")


@dataclass(frozen=True)
class Measured:
    """What a launch took, medians behind its warm-up, in milliseconds."""

    step_ms: float
    ratio: float
    comm_ms: float
    exposed_ms: float
    backend_limited: float
    collectives: tuple[tuple[str, int], ...]
    fabric: EmulatedFabric


@dataclass(frozen=True)
class Row:
    """One intervention: as it was, as it was predicted, and the naive answers. `refused`: there was no prediction."""

    regime: str
    family: str
    change: str
    base_ms: float
    real_ms: float
    real_ratio: float
    backend_limited: float
    naive_ms: dict[str, float]
    predicted_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    predicted_ratio: float | None = None
    refused: str | None = None

    @property
    def error(self) -> float:
        return math.inf if self.predicted_ms is None else abs(self.predicted_ms / self.real_ms - 1)

    @property
    def effect(self) -> float:
        return self.real_ms / self.base_ms - 1

    @property
    def sign_right(self) -> bool:
        return self.predicted_ms is not None and (self.predicted_ms > self.base_ms) == (self.real_ms > self.base_ms)

    @property
    def ratio_error(self) -> float:
        return math.inf if self.predicted_ratio is None else abs(self.predicted_ratio - self.real_ratio)

    @property
    def held(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low_ms is not None and self.high_ms is not None and self.low_ms <= self.real_ms <= self.high_ms

    def naive_error(self, name: str) -> float:
        return abs(self.naive_ms[name] / self.real_ms - 1)


def launch_all(folder: Path, regimes: Sequence[Regime], until_s: float) -> bool:
    """Make the launches that are missing; False when time was up before the last."""
    for regime in regimes:
        for name, intervention in regime.launches():
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
            sys.stderr.write(f"{regime.folder}/{name} ")
            sys.stderr.flush()
    return True


@cache
def measured(place: Path) -> Measured:
    """Read a launch, or the one record below its folder."""
    dataset = LabelledRun(place.name, load_run(place))
    medians = {
        name: float(np.nanmedian(by_step(dataset, name)[0]))
        for name in (JOB_STEP, "overlap_ratio", "comm_ms", "exposed_comm_ms")
    }
    steps = [step for rank in range(RANKS) for step in _steps(place, rank)]
    ends = [row.end_source for step in steps for row in step.collectives]
    return Measured(
        medians[JOB_STEP],
        medians["overlap_ratio"],
        medians["comm_ms"],
        medians["exposed_comm_ms"],
        sum(end != "emulated" for end in ends) / len(ends),
        tuple((row.kind, row.bytes) for row in steps[-1].collectives),
        _fabric(json.loads((place / "run.json").read_text())["config"]["fabric"]),
    )


def _steps(place: Path, rank: int) -> list[Any]:
    record = read_rank(place / f"rank_{rank}_metrics.jsonl")
    return [step for step in record.steps if not step.warmup and step.phase == "train"]


def _fabric(stated: dict[str, Any]) -> EmulatedFabric:
    values = {each.name: stated[each.name] for each in fields(EmulatedFabric) if each.name in stated}
    values |= {"algorithm": Algorithm(values["algorithm"]), "sharing": Sharing(values["sharing"])}
    return EmulatedFabric(**values)


def naive(base: Measured, real: Measured) -> dict[str, float]:
    """What the two rules of thumb say, told exactly by what factor the network's times change."""
    before, after = (
        sum(EmulatedNetwork(each.fabric, 0, RANKS, None).cost_ns(kind, size, range(RANKS), None)
            for kind, size in base.collectives)
        for each in (base, real)
    )  # fmt: skip
    factor, hidden_ms = after / before, base.comm_ms - base.exposed_ms
    late_ms = (real.fabric.straggler_ms - base.fabric.straggler_ms) * len(base.collectives)
    rest_ms = base.step_ms - base.exposed_ms + late_ms
    return {
        "exposed scaled": max(rest_ms + base.exposed_ms * factor, 0.0),
        "hidden kept": max(rest_ms + max(base.comm_ms * factor - hidden_ms, 0.0), 0.0),
    }


@cache
def program(place: Path) -> whatif.Program:
    return whatif.read_program(place)


def row(folder: Path, regime: Regime, number: int, intervention: Intervention) -> Row | None:
    """Predict one intervention and hold it to its launch; None where a launch is missing."""
    real_place, base_place = (folder / regime.folder / name for name in (f"{number:02}", regime.base_of(number)))
    if not (real_place / DONE).exists() or not (base_place / DONE).exists():
        return None
    base, real = measured(base_place), measured(real_place)
    common = (regime.name, intervention.family, intervention.name, base.step_ms, real.step_ms, real.ratio)
    known = (*common, real.backend_limited, naive(base, real))
    try:
        found = whatif.predict(program(base_place), whatif.parse_changes(intervention.changes))
    except AortaError as refused:
        return Row(*known, refused=str(refused))
    step, ratio = found.job_step_ms, found.overlap_ratio
    return Row(*known, step.value, step.low, step.high, None if ratio is None else ratio.value)


def rows(folder: Path, regimes: Sequence[Regime]) -> Iterator[Row]:
    """Every intervention whose launches are there."""
    for regime in regimes:
        for number, intervention in enumerate(regime.interventions):
            found = row(folder, regime, number, intervention)
            if found is not None:
                yield found


def errors(chosen: Sequence[Row]) -> dict[str, Any]:
    """Median and 95th percentile of the errors of several interventions. Those that were refused are counted, and in no
    quantile.
    """
    made = [each for each in chosen if each.refused is None]
    large = [each for each in made if abs(each.effect) > LARGE]
    figures: dict[str, Any] = {"interventions": len(chosen), "refused": len(chosen) - len(made)}
    if not made:
        return figures
    figures |= {
        "median": _quantile([each.error for each in made], 50),
        "p95": _quantile([each.error for each in made], 95),
        "worst": max(each.error for each in made),
        "effects_above_5_percent": len(large),
        "sign_right": sum(each.sign_right for each in large),
        "ratio_median": _quantile([each.ratio_error for each in made], 50),
        "ratio_p95": _quantile([each.ratio_error for each in made], 95),
        "held_by_interval": sum(each.held for each in made),
    }
    for name in NAIVE:
        off = [each.naive_error(name) for each in made]
        figures[name] = {"median": _quantile(off, 50), "p95": _quantile(off, 95)}
    return figures


def _quantile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def figures_of(found: Sequence[Row], bases: Sequence[Measured]) -> dict[str, Any]:
    """All that is said of a set of interventions."""
    families = {name: [each for each in found if each.family == name] for name in (*MEASURED, *APART, WORLD)}
    spread = {
        "launches": len(bases),
        "backend_limited": float(np.mean([each.backend_limited for each in bases])) if bases else None,
    }
    return {
        "all": errors([each for each in found if each.family in MEASURED]),
        "apart": errors([each for each in found if each.family in APART]),
        "families": {name: errors(chosen) for name, chosen in families.items() if chosen},
        "bases": spread,
        "rows": [asdict(each) for each in found],
    }


def targets(figures: dict[str, Any]) -> dict[str, bool]:
    """What must hold (docs/what-if.md)."""
    everything, apart, worlds = figures["all"], figures["apart"], figures["families"].get(WORLD, {})
    held = {"at least 50 interventions": everything["interventions"] + apart["interventions"] >= 50}
    if "median" in everything:
        held |= {
            "median at most 3 %": everything["median"] <= 0.03,
            "95th percentile at most 8 %": everything["p95"] <= 0.08,
            "every sign of an effect above 5 %": everything["sign_right"] == everything["effects_above_5_percent"],
            "ratio within 0.02 at the median": everything["ratio_median"] <= 0.02,
        }
    if "median" in apart:
        held["free, buckets, overlap, prefetch: median at most 10 %"] = apart["median"] <= 0.10
    if "median" in worlds:
        made = worlds["interventions"] - worlds["refused"]
        held["larger worlds: held by the stated interval in 95 %"] = worlds["held_by_interval"] >= 0.95 * made
    limited = figures["bases"]["backend_limited"]
    if limited is not None:
        held["backend the limit in less than 5 % of the bases' collectives"] = limited < 0.05
    return held


def table(found: Sequence[Row]) -> str:
    """One line an intervention."""
    head = (
        f"{'regime':20} {'change':52} {'base':>8} {'real':>8} {'said':>8} {'error':>7} {'naive':>7} {'naive':>7} ratio"
    )
    lines = [head]
    for each in found:
        said = f"{'refused':>8} {'':7}" if each.predicted_ms is None else f"{each.predicted_ms:8.2f} {each.error:7.1%}"
        thumb = " ".join(f"{each.naive_error(name):7.1%}" for name in NAIVE)
        ratio = "" if each.predicted_ratio is None else f"{each.predicted_ratio - each.real_ratio:+.3f}"
        times = f"{each.base_ms:8.2f} {each.real_ms:8.2f}"
        lines.append(f"{each.regime:20} {each.change:52} {times} {said} {thumb} {ratio} {each.refused or ''}")
    return "\n".join(lines)


def main() -> int:
    """Launch what is missing, and evaluate what is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="where records are, or will be")
    parser.add_argument("--evaluate", action="store_true", help="launch nothing")
    parser.add_argument("--minutes", type=float, default=math.inf, help="launch no longer than this")
    parser.add_argument(
        "--regime", action="append", default=[], metavar="TEXT", help="only regimes with this in a name"
    )
    parser.add_argument("--write", action="store_true", help=f"keep the figures in benchmarks/data/{DATA.name}")
    words = parser.parse_args()
    regimes = [each for each in REGIMES if not words.regime or any(text in each.name for text in words.regime)]
    begun_s = time.monotonic()
    complete = words.evaluate or launch_all(words.folder, regimes, begun_s + words.minutes * 60)
    found = list(rows(words.folder, regimes))
    places = {
        words.folder / each.folder / name for each in regimes for name, change in each.launches() if change is None
    }
    figures = figures_of(found, [measured(place) for place in sorted(places) if (place / DONE).exists()])
    figures["complete"] = complete
    if words.write:
        DATA.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(found))  # noqa: T201
    return say("whatif_interventions", figures, targets(figures))


if __name__ == "__main__":
    sys.exit(main())
