"""What the benchmarks share: launches, palindromic plans, intervals, and the one JSON object they print last."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aorta.instrument.native.build import compiled
from tests.runs import ROOT, environment

RESAMPLES = 5_000
"""Bootstrap resamples: the ends of a 95 % interval then move by less than a hundredth of its width."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The words every benchmark understands."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="a smaller plan, to see that it works")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # set by `launch`: where rank 0 answers
    return parser


def choose_tap(parser: argparse.ArgumentParser) -> None:
    """The word for a benchmark of what the compiled tap changes."""
    parser.add_argument("--python", action="store_true", help="without the compiled part, though it is built")


def tap_words(words: Any) -> list[str]:
    """For the ranks."""
    return ["--python"] if words.python else []


def interceptor(words: Any) -> str:
    """What times collectives here, in words."""
    return compiled(torch.device("cpu"), wanted=not words.python, emulated=False)[1]


def launch(module: str, ranks: int, *words: str, timeout_s: float = 1800, checkout: Path = ROOT) -> Any:
    """Run `python -m <module> --worker FILE WORDS` of a checkout on `ranks` processes; returns the JSON rank 0 wrote to
    FILE.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        done = subprocess.run(
            [*launcher, "--module", module, "--worker", str(answer), *words],
            cwd=checkout,
            env=environment(PYTHONPATH=str(checkout)),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{module} {' '.join(words)}: exit {done.returncode}\n{done.stderr[-4000:]}")
        return json.loads(answer.read_text())


def median_ratio(pairs: Sequence[Sequence[tuple[float, float]]], seed: int = 0) -> dict[str, Any]:
    """Median of b / a over pairs, with a 95 % percentile interval from a hierarchical bootstrap.

    Args:
        pairs: for each launch its (a, b); launches are resampled, then the pairs inside each (docs/dev/measuring.md,
        5).
    """
    generator = np.random.default_rng(seed)
    ratios = [np.array([b / a for a, b in launch_pairs]) for launch_pairs in pairs]
    medians = []
    for _ in range(RESAMPLES):
        chosen = generator.integers(len(ratios), size=len(ratios))
        drawn = [generator.choice(ratios[i], size=len(ratios[i])) for i in chosen]
        medians.append(float(np.median(np.concatenate(drawn))))
    low, high = np.percentile(medians, [2.5, 97.5])
    return {
        "median": float(np.median(np.concatenate(ratios))),
        "low": float(low),
        "high": float(high),
        "launches": len(ratios),
        "pairs": sum(map(len, ratios)),
    }


def spread_us(samples_ns: Sequence[float]) -> dict[str, float]:
    """Median and quartiles in microseconds."""
    low, middle, high = statistics.quantiles(samples_ns, n=4)
    return {"median": middle / 1e3, "q1": low / 1e3, "q3": high / 1e3}


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    return {
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def say(benchmark: str, figures: dict[str, Any], targets: dict[str, bool]) -> int:
    """Print the JSON object; 0 when every target is met, else 1. Without targets `met` is null, and it is 0."""
    met = all(targets.values()) if targets else None
    print(json.dumps({"benchmark": benchmark, **figures, "targets": targets, "met": met, "machine": machine()}))  # noqa: T201
    return 1 if met is False else 0


def run(parser: argparse.ArgumentParser, measure: Callable[[Any], int], work: Callable[[Any], Any]) -> int:
    """Be the launcher or, where `launch` started this process, a rank: `work` returns what rank 0 answers."""
    words = parser.parse_args()
    if words.worker is None:
        return measure(words)
    answer = work(words)
    if os.environ["RANK"] == "0":
        words.worker.write_text(json.dumps(answer))
    return 0
