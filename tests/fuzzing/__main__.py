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
_TURN_S: Final = 20.0
"""A door's turn, where there is time for several rounds."""


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
        for door in doors:
            load_seeds(door, Path(scratch, "seeds", door.name))
        search = _Search(doors, seed, options.jobs, Path(scratch), Path(options.keep))
        until = time.monotonic() + 60 * options.minutes
        with ProcessPoolExecutor(options.jobs, get_context("fork")) as pool:
            rows = [row for part in pool.map(search.job, range(options.jobs), [until] * options.jobs) for row in part]
    return _report(rows, seed)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class _Search:
    doors: list[Door]
    seed: int
    jobs: int
    scratch: Path
    keep: Path

    def job(self, job: int, until: float) -> list[dict[str, Any]]:
        """One process's part: every so many-th case of each door, in rounds until the time is over. Each door has a
        case, however short the time.
        """
        rows: list[dict[str, Any]] = []
        place = self.scratch / f"job{job}"
        shift = job * len(self.doors) // self.jobs
        following = {door.name: job for door in self.doors}
        while not rows or time.monotonic() < until - 0.5:
            turn = min(_TURN_S, (until - time.monotonic()) / len(self.doors))
            for door in self.doors[shift:] + self.doors[:shift]:
                ends = min(until, time.monotonic() + turn)
                seeds = load_seeds(door, self.scratch / "seeds" / door.name)
                cases = drawn(door, self.seed, count(following[door.name], self.jobs), seeds)
                for result in (results := run(door, cases, place)):
                    folder = self._kept(door, result, place) if result.outcome == FINDING else ""
                    rows.append({"door": door.name, **vars(result), "folder": folder})
                    following[door.name] = result.number + self.jobs
                    if time.monotonic() >= ends:
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
