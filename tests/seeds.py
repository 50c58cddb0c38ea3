"""The pure property tests with seeds that nobody chose: rounds of them until the time is up.

    python -m tests.seeds --seconds 60     # at least one round, each with a new seed
    python -m tests.seeds --seed 12345     # one round with that seed, to repeat a failure

The gate's profile draws the same examples every time and so never finds what it did not find on its first day. A
failing round prints its seed, and how to repeat it. Exit code: 0, or pytest's. Must not: measure time, or leave out a
pure test that has properties (`tests/pure.py` says which are pure).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.pure import ROOT, files

PROFILE: Final = "seeds"
NOTHING_FOUND: Final = 5
"""pytest's exit code where no test is left."""


def main(words: Sequence[str] | None = None) -> int:
    """Rounds until the time is up or one fails; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.seeds", description="Property tests with new seeds.")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no round after so long")
    parser.add_argument("--seed", type=int, help="one round with this seed")
    told = parser.parse_args(words)
    chosen = [path for path in files() if "hypothesis" in path.read_text()]
    if told.seed is not None:
        return _round(chosen, told.seed)
    begun_s, rounds, longest_s = time.monotonic(), 0, 0.0
    while not rounds or time.monotonic() - begun_s + longest_s < told.seconds:
        round_s, seed = time.monotonic(), random.SystemRandom().randrange(2**32)
        if code := _round(chosen, seed):
            return code
        rounds, longest_s = rounds + 1, max(longest_s, time.monotonic() - round_s)
    _say(f"{rounds} round(s) of the property tests of {len(chosen)} files, each with a new seed: nothing found")
    return 0


def _round(chosen: Sequence[Path], seed: int) -> int:
    names = [str(path.relative_to(ROOT)) for path in chosen]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-q", "-m", "hypothesis", f"--hypothesis-seed={seed}", *names],
        cwd=ROOT,
        env={**os.environ, "HYPOTHESIS_PROFILE": PROFILE},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        _say(f"{ran.stdout}{ran.stderr}")
        what = "no property test was found" if ran.returncode == NOTHING_FOUND else "the property tests failed"
        _say(f"{what} with seed {seed}; once more: python -m tests.seeds --seed {seed}")
    return ran.returncode


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
