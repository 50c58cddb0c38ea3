"""The command `scripts/fuzz`: shares the time among the doors, keeps findings as files, and reports."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import pandas as pd

from tests.fuzzing.doors import DOORS, Door, warm
from tests.fuzzing.tree import read_tree, write_tree
from tests.fuzzing.worker import FINDING, CaseResult, drawn, load_seeds, opened, run

KEEP: Final = Path(__file__).resolve().parents[2] / "artifacts" / "fuzz"


def main(arguments: Sequence[str]) -> int:
    """Fuzz, or repeat one finding; returns the exit code."""
    options = parser().parse_args(arguments)
    warm()
    with tempfile.TemporaryDirectory(prefix="aorta-fuzz-", ignore_cleanup_errors=True) as scratch:
        if options.repeat:
            return _repeat(Path(options.repeat), Path(scratch))
        doors = [door for door in DOORS if not options.only or door.name in options.only]
        seed = secrets.randbits(32) if options.seed is None else options.seed
        _say(f"seed {seed}: {len(doors)} doors, {options.minutes:g} minutes, {options.jobs} processes")
        share_s = 60 * options.minutes * min(options.jobs, len(doors)) / len(doors)
        search = _Search(seed, share_s, Path(scratch), Path(options.keep))
        with ProcessPoolExecutor(options.jobs, get_context("fork")) as pool:
            rows = [row for part in pool.map(search, doors) for row in part]
    return _report(rows, seed)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class _Search:
    """Open cases of one door for `share_s` seconds; one case at least, however short the time."""

    seed: int
    share_s: float
    scratch: Path
    keep: Path

    def __call__(self, door: Door) -> list[dict[str, Any]]:
        """Return a row for each case."""
        rows: list[dict[str, Any]] = []
        place, following = self.scratch / door.name, 0
        seeds = load_seeds(door, place / "seeds")
        until = time.monotonic() + self.share_s
        while not rows or time.monotonic() < until:
            results = run(door, drawn(door, self.seed, count(following), seeds), place)
            for result in results:
                folder = self._kept(door, result, place) if result.outcome == FINDING else ""
                rows.append({"door": door.name, **vars(result), "folder": folder})
                following = result.number + 1
                if time.monotonic() >= until:
                    results.close()
        return rows

    def _kept(self, door: Door, result: CaseResult, place: Path) -> str:
        """Keep the files of a finding's case, with what repeats it; one case for each finding."""
        folder = self.keep / f"{door.name}-{hashlib.sha256(result.what.encode()).hexdigest()[:8]}"
        repeat = f"scripts/fuzz --repeat {folder}"
        _say(f"FINDING {door.name}: {result.what}\n  {repeat}")
        write_tree(read_tree(place / "case"), folder / "case")
        facts = {"door": door.name, "seed": self.seed, **vars(result), "repeat": repeat}
        traceback = facts.pop("detail")
        (folder / "finding.json").write_text(json.dumps(facts, indent=2) + "\n")
        (folder / "traceback.txt").write_text(str(traceback), errors="backslashreplace")
        return str(folder)


def _repeat(kept: Path, scratch: Path) -> int:
    """Open a kept case once more, and print what becomes of it."""
    name = json.loads((kept / "finding.json").read_text())["door"]
    (door,) = [door for door in DOORS if door.name == name]
    (result,) = opened(door, [read_tree(kept / "case")], scratch)
    _say(f"{door.name}: {result.outcome} {result.what}\n{result.detail}")
    _say(f"{result.seconds:.2f} s, {result.size_bytes >> 20} MiB")
    return int(result.outcome == FINDING)


def _report(rows: list[dict[str, Any]], seed: int) -> int:
    table = pd.DataFrame(rows)
    worst = table.groupby("door", sort=False)[["seconds", "size_bytes"]].max().add_prefix("worst_")
    doors = pd.crosstab(table["door"], table["outcome"]).join(worst)
    _say(doors.to_string())
    findings = table[table["outcome"] == FINDING]
    for door, what, folder in findings[["door", "what", "folder"]].drop_duplicates().itertuples(index=False):
        _say(f"finding: {door}: {what}\n  scripts/fuzz --repeat {folder}")
    if len(findings):
        _say(f"the same cases again: scripts/fuzz --seed {seed} --only {' '.join(sorted(set(findings['door'])))}")
    summary = {"seed": seed, "cases": len(table), "findings": len(findings), "doors": doors.to_dict("index")}
    _say(json.dumps(summary))
    return int(len(findings) > 0)


def parser() -> argparse.ArgumentParser:
    """The words that the command takes."""
    words = argparse.ArgumentParser(
        prog="scripts/fuzz",
        description="Files that nobody would write on purpose, given to every door that takes one. A finding is "
        "anything but an answer or an error of AORTA's own, more than 1 GiB, or more than 10 s.",
        epilog="The last line is one JSON object. Exit codes: 0 nothing found, 1 findings.",
    )
    words.add_argument("--minutes", type=float, default=2.0, metavar="N", help="wall-clock time; default: %(default)g")
    words.add_argument("--seed", type=int, metavar="S", help="default: another each time, printed")
    words.add_argument("--only", nargs="+", metavar="DOOR", choices=[door.name for door in DOORS], help="these doors")
    words.add_argument("--keep", default=str(KEEP), metavar="DIR", help="where findings go; default: artifacts/fuzz")
    words.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes; default: one a core"
    )
    words.add_argument("--repeat", metavar="DIR", help="one finding again, with its traceback")
    return words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
