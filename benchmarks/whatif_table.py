"""What `whatif_interventions` says of its interventions: figures, targets, and the tables of docs/dev/what-if-model.md.

    python -m benchmarks.whatif_table                        # prints them, from the figures that `--write` kept
    python -m benchmarks.whatif_table --into docs/dev/what-if-model.md   # puts them between the page's two marks

Must not predict or launch anything.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.whatif_plan import APART, MEASURED, WORLD

DATA = Path(__file__).parent / "data" / "whatif_interventions.json"
BEGIN, END = "<!-- measured errors: begin -->", "<!-- measured errors: end -->"
LARGE = 0.05
"""An effect of which the sign must be right."""
NAIVE = ("exposed scaled", "hidden kept")


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
        "median": quantile([each.error for each in made], 50),
        "p95": quantile([each.error for each in made], 95),
        "worst": max(each.error for each in made),
        "effects_above_5_percent": len(large),
        "sign_right": sum(each.sign_right for each in large),
        "ratio_median": quantile([each.ratio_error for each in made], 50),
        "ratio_p95": quantile([each.ratio_error for each in made], 95),
        "held_by_interval": sum(each.held for each in made),
    }
    for name in NAIVE:
        off = [each.naive_error(name) for each in made]
        figures[name] = {"median": quantile(off, 50), "p95": quantile(off, 95)}
    return figures


def quantile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def figures_of(found: Sequence[Row], bases: dict[str, Any]) -> dict[str, Any]:
    """All that is said of a set of interventions."""
    families = {name: [each for each in found if each.family == name] for name in (*MEASURED, *APART, WORLD)}
    return {
        "all": errors([each for each in found if each.family in MEASURED]),
        "apart": errors([each for each in found if each.family in APART]),
        "families": {name: errors(chosen) for name, chosen in families.items() if chosen},
        "bases": bases,
        "rows": [asdict(each) for each in found],
    }


def targets(figures: dict[str, Any]) -> dict[str, bool]:
    """What must hold (docs/dev/what-if-model.md)."""
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
    limited = figures["bases"].get("backend_limited")
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


def markdown(figures: dict[str, Any]) -> str:
    """The section of docs/dev/what-if-model.md."""
    head = (
        "| change | made | refused | median error | 95 % | sign right | ratio, median | interval held | "
        "exposed scaled | hidden kept |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    whole = {"network and stragglers": figures["all"], "free, buckets, overlap, prefetch": figures["apart"]}
    lines = [_line(f"**{name}**", each) for name, each in whole.items()]
    lines += [_line(name, each) for name, each in figures["families"].items()]
    bases, missed = figures["bases"], [name for name, met in targets(figures).items() if not met]
    noise = (
        f"Two launches of the same base, one after the other, are {_percent(bases['step_median'])} apart at the median "
        f"and {_percent(bases['step_p95'])} at the 95th percentile ({bases['launches']} launches): so much does "
        f"the machine alone move a launch. The backend was the limit in {_percent(bases['backend_limited'])} of their "
        "collectives."
    )
    verdict = "All targets are met." if not missed else f"Missed: {'; '.join(missed)}."
    return "\n".join([head, *lines, "", noise, verdict])


def _line(name: str, each: dict[str, Any]) -> str:
    if "median" not in each:
        return f"| {name} | 0 | {each['refused']} | | | | | | | |"
    made = each["interventions"] - each["refused"]
    naive = " | ".join(f"{_percent(each[rule]['median'])}, {_percent(each[rule]['p95'])}" for rule in NAIVE)
    signs = f"{each['sign_right']} of {each['effects_above_5_percent']}"
    errors = f"{_percent(each['median'])} | {_percent(each['p95'])} | {signs} | {each['ratio_median']:.3f}"
    return f"| {name} | {made} | {each['refused']} | {errors} | {each['held_by_interval']} of {made} | {naive} |"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def placed(page: str, section: str) -> str:
    """A page with the section between its two marks.

    Raises:
        ValueError: the marks are not there.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{section}\n{END}{after}"


def main() -> int:
    """Print the section, or put it into a page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--into", type=Path, metavar="PAGE", help="a page with the two marks")
    words = parser.parse_args()
    section = markdown(json.loads(DATA.read_text()))
    if words.into is None:
        print(section)  # noqa: T201
    else:
        words.into.write_text(placed(words.into.read_text(), section))
    return 0


if __name__ == "__main__":
    sys.exit(main())
