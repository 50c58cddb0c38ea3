"""SIGKILL at random moments, what is left of the run, and whether the next one starts: `python -m benchmarks.kills`.

Regime: small runs of two gloo ranks under the launcher of `aorta train --nproc_per_node`, all in one folder per target,
on this machine's CPU. In turn the launcher, one rank, both ranks, the watchdog, which makes the lines of the records, a
rank together with the watchdog, and all of them are killed, at a moment drawn from the life of the run (`--life-s`).
Afterwards

- 10 s later no process of the run is left (behind a killed watchdog: 10 s after the run, which has to end well);
- every line of every record can be read, but for the one that was being written, and its steps follow each other,
  once what is in the ring of a killed rank has been appended;
- the next run, in the same folder, trains from the newest checkpoint to its end (`--next-run-every N`: of N kills).

The last line of stdout is JSON: `kills` by target, `findings` (sentences; none is the result to have), `slowest_end_s`,
and `lost_steps`, the most that a rank had finished and its record did not have: a finding. The exit code is 1 with
findings.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from aorta.experiments.process import MARK
from aorta.records.progress import UnreadableProgress, progress_files, read_progress
from aorta.records.ring_record import salvage
from tests.rank_records import read_rank
from tests.runs import ROOT, SMALL, environment, job

TARGETS: Final = ("launcher", "rank", "ranks", "watchdog", "both", "all")
LIFE_S: Final = 6.0
"""From the start of the launcher on an idle machine to the end of the run."""
END_S: Final = 10.0
"""Within which all processes of a run have to end."""
_HANGS_S: Final = 300.0
_WORDS: Final = (
    *SMALL,
    *("training.device=cpu", "training.checkpoint_interval=5", "training.epochs=1000"),
    *("workload.model_dim=32", "workload.mlp_hidden_dim=64", "training.timeout_s=60"),
)


@dataclass
class Seen:
    """What `kill` has seen so far."""

    kills: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest_end_s: float = 0.0
    lost_steps: int = 0
    end_s: float = END_S


def main() -> int:
    """Run the benchmark; returns its exit code. Ctrl-C ends it with what it has seen."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition(":")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--life-s", type=float, default=LIFE_S, help="of a run on this machine; longer where it is busy"
    )
    parser.add_argument("--next-run-every", type=int, default=1, metavar="N", help="kills (default: %(default)s)")
    options = parser.parse_args()
    seen = Seen()
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        kill(Path(folder), options.count, options.seed, seen, options.life_s, next_run_every=options.next_run_every)
    sys.stdout.write(json.dumps({"seed": options.seed, **vars(seen)}) + "\n")
    return int(bool(seen.findings))


def kill(
    root: Path,
    count: int,
    seed: int,
    seen: Seen,
    life_s: float = LIFE_S,
    targets: Sequence[str] = TARGETS,
    next_run_every: int = 1,
) -> None:
    """Start `count` runs below `root`, and kill something of each; behind every `next_run_every`-th train on."""
    chance = random.Random(seed)
    for number in range(count):
        target = targets[number % len(targets)]
        after_s, rank = chance.uniform(0, life_s), chance.randrange(2)
        before = len(seen.findings)
        _kill_one(root / target, target, after_s, rank, seen)
        # Not of one target only: 6 targets, 7 kills between two next runs.
        if number % next_run_every == 0:
            _start_again(root / target, seen)
        for index in range(before, len(seen.findings)):
            seen.findings[index] = f"{number} ({target}, {after_s:.2f} s): {seen.findings[index]}"
            sys.stderr.write(f"{seen.findings[index]}\n")


def _kill_one(folder: Path, target: str, after_s: float, rank: int, seen: Seen) -> None:
    mark = secrets.token_hex(8)
    words = [*_WORDS, "training.max_steps=150", f"training.output_dir={folder}"]
    launcher = [sys.executable, "-m", "aorta.distributed.torchrun", "--standalone", "--nproc_per_node", "2"]
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w") as output:
        run = subprocess.Popen(
            [*launcher, str(ROOT / "train.py"), *words],
            env=environment(PYTHONPATH=str(ROOT)) | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            time.sleep(after_s)
            victims = _victims(target, run, rank, mark)
            for process in victims:
                with suppress(psutil.Error):
                    process.kill()
            if victims:
                seen.kills[target] += 1
            killed_s = time.monotonic()
            if target == "watchdog":
                code = run.wait(_HANGS_S)
                killed_s = time.monotonic()
                if code:
                    seen.findings.append(f"the run ended with {code} without its watchdog: {_end(log)}")
            left = _left(mark, killed_s + seen.end_s)
            seen.slowest_end_s = max(seen.slowest_end_s, time.monotonic() - killed_s)
            for process in left:
                seen.findings.append(f"{process} is left after {seen.end_s:g} s")
        finally:
            for process in _of(mark):
                with suppress(psutil.Error):
                    process.kill()
            code = run.wait()
    if code < 0 and target not in ("launcher", "all"):
        seen.findings.append(f"the launcher was ended by signal {-code}")
    _read(folder, seen)


def _victims(target: str, run: subprocess.Popen[bytes], rank: int, mark: str) -> list[psutil.Process]:
    """Return the processes that are to die; none where they have ended, or have not begun after `_HANGS_S`."""
    if target == "launcher":
        return [psutil.Process(run.pid)] if run.poll() is None else []
    until = time.monotonic() + _HANGS_S
    while run.poll() is None and time.monotonic() < until:
        found: dict[str, psutil.Process] = {}
        for process in _of(mark):
            with suppress(psutil.Error):
                watches = "aorta.autopsy.watchdog" in process.cmdline()
                found["watchdog" if watches else process.environ().get("RANK", "launcher")] = process
        wanted = {
            "rank": [str(rank)],
            "ranks": ["0", "1"],
            "watchdog": ["watchdog"],
            "both": ["watchdog", str(rank)],
            "all": ["launcher", "watchdog", "0", "1"],
        }[target]
        if all(name in found for name in wanted):
            return [found[name] for name in wanted]
        time.sleep(0.1)
    return []


def _of(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _left(mark: str, until: float) -> list[psutil.Process]:
    while (left := _of(mark)) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def _read(folder: Path, seen: Seen) -> None:
    """Look at every record of the folder, and at what the ranks themselves say they have finished."""
    finished: dict[int, int] = {}
    for path in progress_files(folder):
        with path.open("rb") as ring:
            fcntl.flock(ring, fcntl.LOCK_EX)  # a process that ends is not listed any more before it drops its locks
    problems: list[str] = []
    salvage(folder, problems)
    for path in progress_files(folder):
        with suppress(OSError, UnreadableProgress):
            progress = read_progress(path)
            finished[progress.facts.rank] = progress.state.steps_done
    for path in sorted([*folder.glob("rank_*.jsonl"), *folder.glob("history/*/rank_*.jsonl")]):
        if not path.stat().st_size:
            continue
        try:
            record = read_rank(path)
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            if b"\n" in path.read_bytes():
                seen.findings.append(f"{path}: {type(error).__name__}: {error}")
            continue
        lines = path.read_bytes().count(b"\n")
        bad = [problem for problem in record.problems if f":{lines + 1}:" not in problem]
        steps = [step.global_step for step in record.steps]
        if bad or steps != list(range(record.header.start_step, record.header.start_step + len(steps))):
            seen.findings.append(f"{path}: {bad or steps}")
        if path.parent == folder and record.footer is None and record.header.rank in finished:
            lost = finished[record.header.rank] - len(steps)
            seen.lost_steps = max(seen.lost_steps, lost)
            if lost > 0:
                seen.findings.append(f"{path}: {lost} finished steps are not in it: {problems}")


def _start_again(folder: Path, seen: Seen) -> None:
    """Train on from the newest checkpoint: it is readable, and the folder is free."""
    kept = [int(path.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*") if path.suffix == ""]
    begin = max(kept, default=0)
    words = (f"training.output_dir={folder}", f"training.start_step={begin}", f"training.max_steps={begin + 2}")
    done = job(*_WORDS, *words, "watchdog.timeout_s=0")
    if done.returncode:
        seen.findings.append(f"the next run from step {begin} ended with {done.returncode}: {done.stderr[-400:]}")


def _end(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-3:])


if __name__ == "__main__":
    sys.exit(main())
