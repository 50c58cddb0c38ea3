"""How far what-if predictions are from what then happens: `python -m benchmarks.whatif_interventions FOLDER`.

Regime: launches on this machine's CPU, two gloo ranks with real computation on the emulated fabric, 30 steps, 4 of them
warm-up. Each regime of `whatif_plan` has a base, launched again between its interventions (base a b base c d base);
predictions are made from the records of the base before and behind an intervention, and their mean, which a drift of
the machine moves less than either, is held to the record of the launch in which the change was really made. With
`--rounds 2` everything is launched twice, and means are held to means. Records stay in FOLDER: a second call goes on
where the first was cut off, `--evaluate` launches nothing, `--minutes` ends launching in time.

Beside it two naive answers from the same record, given the exact factor by which the network's times change and, for a
straggler, its lateness times the number of collectives:

    exposed scaled    exposed communication is scaled, everything else stays
    hidden kept       as many milliseconds of communication as before are hidden, the rest is exposed

Prints a table, and one JSON object last; exit 1 when a target is missed. `--write` keeps the figures, from
which `python -m benchmarks.whatif_table` makes the tables of docs/dev/what-if-model.md.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
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
from benchmarks.plans import say
from benchmarks.whatif_plan import COMMON, RANKS, REGIMES, Regime
from benchmarks.whatif_table import DATA, Row, figures_of, quantile, table, targets
from tests.rank_records import read_rank
from tests.runs import job

DONE = "launched.json"


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


def launch_all(folder: Path, regimes: Sequence[Regime], rounds: int, until_s: float) -> bool:
    """Make the launches that are missing; False when time was up before the last."""
    for regime in regimes:
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
def program(place: Path) -> whatif.RunProgram:
    return whatif.read_program(place)


def row(folder: Path, regime: Regime, number: int, rounds: int) -> Row | None:
    """Predict an intervention from the bases before and behind each of its launches, and hold the mean of all to the
    mean of those launches; None where a launch is missing.
    """
    intervention, root = regime.interventions[number], folder / regime.folder
    launches = [(root / name, [root / base for base in bases]) for name, bases in regime.launches_of(number, rounds)]
    if not all((place / DONE).exists() for made, bases in launches for place in (made, *bases)):
        return None
    places = [base for _, bases in launches for base in bases]
    real = [measured(made) for made, _ in launches]
    base_ms = _mean([measured(place).step_ms for place in places])
    told = [naive(measured(base), measured(made)) for made, bases in launches for base in bases]
    naive_ms = {name: _mean([each[name] for each in told]) for name in told[0]}
    real_ms, real_ratio = _mean([each.step_ms for each in real]), _mean([each.ratio for each in real])
    common = (regime.name, intervention.family, intervention.name, base_ms, real_ms, real_ratio)
    known = (*common, _mean([each.backend_limited for each in real]), naive_ms)
    try:
        found = [whatif.predict(program(place), whatif.parse_changes(intervention.changes)) for place in places]
    except AortaError as refused:
        return Row(*known, refused=str(refused))
    ratios = [each.overlap_ratio.value for each in found if each.overlap_ratio is not None]
    return Row(
        *known,
        predicted_ms=_mean([each.launch_ms.value for each in found]),
        low_ms=_mean([each.launch_ms.low for each in found]),
        high_ms=_mean([each.launch_ms.high for each in found]),
        predicted_ratio=_mean(ratios) if len(ratios) == len(found) else None,
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def rows(folder: Path, regimes: Sequence[Regime], rounds: int) -> Iterator[Row]:
    """Every intervention whose launches are there."""
    for regime in regimes:
        for number in range(len(regime.interventions)):
            found = row(folder, regime, number, rounds)
            if found is not None:
                yield found


def noise(folder: Path, regimes: Sequence[Regime], rounds: int) -> dict[str, Any]:
    """The launches of the bases: how far a step time is from that of the launch of the same base before it, which no
    prediction could tell, and for which part of their collectives the backend was the limit.
    """
    apart, limited = [], []
    for regime in regimes:
        places = [folder / regime.folder / name for name, change in regime.launches(rounds) if change is None]
        bases = [measured(place) for place in places if (place / DONE).exists()]
        limited += [base.backend_limited for base in bases]
        apart += [abs(after.step_ms / before.step_ms - 1) for before, after in pairwise(bases)]
    if not apart:
        return {"launches": len(limited)}
    quantiles = {"step_median": quantile(apart, 50), "step_p95": quantile(apart, 95)}
    return {"launches": len(limited), **quantiles, "backend_limited": float(np.mean(limited))}


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
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="launches of each change (default 1)")
    words = parser.parse_args()
    regimes = [each for each in REGIMES if not words.regime or any(text in each.name for text in words.regime)]
    begun_s = time.monotonic()
    complete = words.evaluate or launch_all(words.folder, regimes, words.rounds, begun_s + words.minutes * 60)
    found = list(rows(words.folder, regimes, words.rounds))
    figures = figures_of(found, noise(words.folder, regimes, words.rounds))
    figures |= {"complete": complete, "rounds": words.rounds}
    if words.write:
        DATA.write_text(json.dumps(figures) + "\n")
    print(table(found))  # noqa: T201
    return say("whatif_interventions", figures, targets(figures))


if __name__ == "__main__":
    sys.exit(main())
