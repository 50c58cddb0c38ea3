"""The command `scripts/fuzz`: shares the time among the doors, keeps findings as files, and reports."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.fuzzing.doors import DOORS, Door, warm
from tests.fuzzing.tree import remove
from tests.fuzzing.worker import ANSWER, FINDING, CaseResult, again, cases, load_seeds

ROOT: Final = Path(__file__).resolve().parents[2]
KEEP: Final = ROOT / "artifacts" / "fuzz"
_TURN_S: Final = 20.0
"""A door's turn, times its share, where there is time for several rounds."""
_BATCH: Final = 500
"""Cases of one process: a fresh one now and then keeps memory as it is on a first case."""


@dataclass
class Count:
    """What became of the cases of one door."""

    cases: int = 0
    answers: int = 0
    refusals: int = 0
    findings: int = 0
    worst_seconds: float = 0.0
    worst_bytes: int = 0
    distinct: dict[str, str] = field(default_factory=dict)
    """What was found -> the folder where its first case is kept."""

    def add(self, result: CaseResult) -> None:
        """Count one case."""
        self.cases += 1
        self.answers += result.outcome == ANSWER
        self.findings += result.outcome == FINDING
        self.refusals = self.cases - self.answers - self.findings
        self.worst_seconds = max(self.worst_seconds, result.seconds)
        self.worst_bytes = max(self.worst_bytes, result.size_bytes)

    def join(self, other: Count) -> None:
        """Add what another process counted."""
        for name in ("cases", "answers", "refusals", "findings"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst_seconds = max(self.worst_seconds, other.worst_seconds)
        self.worst_bytes = max(self.worst_bytes, other.worst_bytes)
        self.distinct = other.distinct | self.distinct


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


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
        began = time.monotonic()
        counts = _fuzz(doors, seed, options, Path(scratch), began + 60 * options.minutes)
        return _report(counts, seed, options, time.monotonic() - began)


def _fuzz(doors: list[Door], seed: int, options: argparse.Namespace, scratch: Path, until: float) -> dict[str, Count]:
    """Run in `options.jobs` processes; each takes every so many-th case of each door, in another order of doors."""
    for door in doors:
        load_seeds(door, scratch / "seeds" / door.name)
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        jobs = [(doors, seed, job, options, scratch, until) for job in range(options.jobs)]
        first, *others = pool.starmap(_job, jobs, chunksize=1)
    for counts in others:
        for name, count in counts.items():
            first[name].join(count)
    return first


def _job(
    doors: list[Door], seed: int, job: int, options: argparse.Namespace, scratch: Path, until: float
) -> dict[str, Count]:
    """One process's part: rounds over the doors, until the time is over; one case of each door in any case."""
    counts = {door.name: Count() for door in doors}
    following = dict.fromkeys(counts, 0)
    shift = job * len(doors) // options.jobs
    order = doors[shift:] + doors[:shift]
    total = sum(door.share for door in doors)
    while (left := until - time.monotonic()) > 0.5 or not all(following.values()):
        turn = min(_TURN_S, left / total)
        for door in order:
            seeds = load_seeds(door, scratch / "seeds" / door.name)
            ends = min(until, time.monotonic() + turn * door.share)
            while time.monotonic() < ends or not following[door.name]:
                first = following[door.name] * options.jobs + job
                numbers = range(first, first + _BATCH * options.jobs, options.jobs)
                place = scratch / f"job{job}"
                for result in (found := cases(door, seed, numbers, seeds, place)):
                    following[door.name] += 1
                    counts[door.name].add(result)
                    if result.outcome == FINDING:
                        _keep(door, seed, result, place, Path(options.keep), counts[door.name].distinct)
                    if time.monotonic() >= ends:
                        found.close()
                        break
    return counts


def _keep(door: Door, seed: int, result: CaseResult, place: Path, keep: Path, distinct: dict[str, str]) -> None:
    """Keep the files of the first case of each finding, with what repeats it."""
    if result.what in distinct:
        return
    folder = keep / f"{door.name}-{hashlib.sha256(result.what.encode()).hexdigest()[:8]}"
    distinct[result.what] = str(folder)
    repeat = f"scripts/fuzz --repeat {folder}"
    _say(f"FINDING {door.name}: {result.what}\n  {repeat}")
    remove(folder)
    folder.mkdir(parents=True)
    shutil.move(str(place / "case"), str(folder / "case"))
    facts: dict[str, Any] = {"door": door.name, "seed": seed, "number": result.number, "from": result.seed_name}
    facts |= {"changes": result.changes, "what": result.what, "repeat": repeat}
    (folder / "finding.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "traceback.txt").write_text(result.detail, errors="backslashreplace")


def _repeat(kept: Path, scratch: Path) -> int:
    """Open a kept case once more, and print what becomes of it."""
    facts = json.loads((kept / "finding.json").read_text())
    (door,) = [door for door in DOORS if door.name == facts["door"]]
    result = again(door, kept / "case", scratch / "again")
    _say(f"{door.name}: {result.outcome} {result.what}\n{result.detail}")
    _say(f"{result.seconds:.2f} s, {result.size_bytes >> 20} MiB")
    return int(result.outcome == FINDING)


def _report(counts: dict[str, Count], seed: int, options: argparse.Namespace, seconds: float) -> int:
    _say(f"{'door':14} {'cases':>8} {'answers':>8} {'refusals':>8} {'findings':>8} {'worst s':>8} {'worst MiB':>9}")
    for name, count in counts.items():
        numbers = (count.cases, count.answers, count.refusals, count.findings)
        _say(
            f"{name:14} {' '.join(f'{number:8d}' for number in numbers)} {count.worst_seconds:8.2f} "
            f"{count.worst_bytes / 2**20:9.0f}"
        )
    found = {name: count.distinct for name, count in counts.items() if count.distinct}
    for name, distinct in found.items():
        for what, folder in distinct.items():
            _say(f"finding: {name}: {what}\n  scripts/fuzz --repeat {folder}")
    total = sum(count.findings for count in counts.values())
    if total:
        _say(f"{total} findings; the same cases again: scripts/fuzz --seed {seed} --only {' '.join(found)}")
    summary = {
        "seed": seed,
        "minutes": round(seconds / 60, 2),
        "processes": options.jobs,
        "cases": sum(count.cases for count in counts.values()),
        "findings": total,
        "doors": {name: vars(count) for name, count in counts.items()},
    }
    _say(json.dumps(summary))
    return int(total > 0)


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
