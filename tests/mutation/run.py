"""Runs the tests of each mutant against a copy of the tree that holds it, and says which mutants survive.

    scripts/mutants                       # all of them
    scripts/mutants --only stragg         # those whose module or name has it; a regular expression
    scripts/mutants --workers 4 --limit 60
    scripts/mutants --device                   # those of the device path instead (tests/device_path/run_mutants.py)

Each worker has a copy of the working tree in a temporary folder; the tests run in a fork of this process, which has
loaded numpy, pandas, pytest and hypothesis but nothing of AORTA. A mutant is killed when a test fails or takes longer
than the limit; one that cannot be imported, or whose tests do not run, is a mistake in the list. Exit code: 0 when
every mutant that is not named equivalent is killed; 1 when one survives; 2 when one, or the code as it is, cannot be
tested. Must not: change the checkout.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Final, Literal

from tests.device_path.run_mutants import main as on_device
from tests.mutation.mutant import ROOT, CheckedMutant
from tests.mutation.rules import MUTANTS

WARM: Final = ("numpy", "pandas", "msgspec", "hypothesis", "pytest", "_pytest.assertion.rewrite", "yaml")
"""Loaded before forking, so that a mutant costs little more than its tests."""
PYTEST: Final = ("-q", "--no-header", "--tb=short", "-p", "no:cacheprovider")
PASSED, FAILED, OTHER = 10, 11, 12
"""Exit codes of the processes that run tests; any other is that of a process that came to no end."""
Ending = Literal["killed", "took too long", "survived", "not tested"]


@dataclass
class Work:
    """A mutant, or the code as it is, whose tests run in `process`, in one of the copies."""

    mutant: CheckedMutant | None
    process: ForkProcess
    copy: Path
    begun_s: float


def main(words: Sequence[str] | None = None) -> int:
    """Run the chosen mutants; the exit code."""
    told = _arguments(words)
    if told.device:
        return on_device(told.only, told.limit)
    chosen, workers, limit_s = told.chosen, told.workers, told.limit
    for name in WARM:
        importlib.import_module(name)
    endings: dict[CheckedMutant, Ending] = {}
    with _copies(workers) as copies:
        begun_s = time.monotonic()
        if not _code_as_it_is_passes(chosen, copies[0]):
            _say("the tests fail on the code as it is: nothing can be said of mutants")
            return 2
        for mutant, ending, seconds in _endings(chosen, copies, limit_s):
            endings[mutant] = ending
            _say(f"[{len(endings)}/{len(chosen)}] {seconds:5.1f} s  {ending:13}  {mutant.module}: {mutant.name}")
    return _report(endings, time.monotonic() - begun_s)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description="Are the tests able to fail?")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression that MODULE: NAME holds")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="mutants at a time")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="time for the tests of one mutant")
    parser.add_argument("--device", action="store_true", help="those of the device path, one at a time, FILE: NAME")
    told = parser.parse_args(words)
    told.chosen = [mutant for mutant in MUTANTS if re.search(told.only, f"{mutant.module}: {mutant.name}")]
    if not told.chosen and not told.device:
        parser.error(f"--only {told.only}: no mutant's module or name has it")
    if told.workers < 1:
        parser.error(f"--workers {told.workers}: at least 1")
    return told


@contextmanager
def _copies(count: int) -> Iterator[list[Path]]:
    """Folders with the files of the working tree that Git would keep."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    files = [Path(name.decode()) for name in listed.stdout.split(b"\0") if name]
    with tempfile.TemporaryDirectory(prefix="aorta-mutants-") as folder:
        copies = [Path(folder, str(number)) for number in range(count)]
        for copy in copies:
            for file in files:
                if (ROOT / file).is_file() or (ROOT / file).is_symlink():
                    (copy / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / file, copy / file, follow_symlinks=False)
        yield copies


def _code_as_it_is_passes(chosen: Sequence[CheckedMutant], copy: Path) -> bool:
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    work = _start(None, tests, copy)
    work.process.join()
    return work.process.exitcode == PASSED


def _endings(
    chosen: Sequence[CheckedMutant], copies: Sequence[Path], limit_s: float
) -> Iterator[tuple[CheckedMutant, Ending, float]]:
    """How each mutant ended, and after how many seconds, in the order in which they end."""
    left, free, running = list(reversed(chosen)), list(copies), list[Work]()
    while left or running:
        while left and free:
            mutant = left.pop()
            copy = free.pop()
            (copy / mutant.file).write_text(mutant.source())
            running.append(_start(mutant, mutant.tests, copy))
        first_s = min(work.begun_s for work in running)
        wait([work.process.sentinel for work in running], max(0.0, first_s + limit_s - time.monotonic()))
        for work in list(running):
            seconds = time.monotonic() - work.begun_s
            if work.process.is_alive() and seconds < limit_s:
                continue
            assert work.mutant is not None
            late = work.process.is_alive()
            _end(work.process)
            shutil.copy2(work.mutant.path, work.copy / work.mutant.file)
            running.remove(work)
            free.append(work.copy)
            yield work.mutant, "took too long" if late else _ending(work.process.exitcode), seconds


def _ending(code: int | None) -> Ending:
    return "survived" if code == PASSED else "killed" if code == FAILED else "not tested"


def _start(mutant: CheckedMutant | None, tests: Sequence[str], copy: Path) -> Work:
    process = multiprocessing.get_context("fork").Process(target=_test, args=(mutant, list(tests), copy))
    process.start()
    return Work(mutant, process, copy, time.monotonic())


def _end(process: ForkProcess) -> None:
    """The process and what it started, which is in its process group."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _test(mutant: CheckedMutant | None, tests: list[str], copy: Path) -> None:
    """In a process of its own, which it ends with `PASSED`, `FAILED` or `OTHER`."""
    import pytest

    os.setpgid(0, 0)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "HYPOTHESIS_PROFILE": "mutants", "OMP_NUM_THREADS": "1"}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # one short run has no use for them
    for name in [name for name in sys.modules if name.partition(".")[0] in ("aorta", "tests")]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(place for place in sys.path if Path(place or ".").resolve() != ROOT)]
    importlib.invalidate_caches()
    if mutant is None:
        stop_at = ["--maxfail=5"]
    else:
        stop_at = ["-x"]
        # Byte code of the code as it is, which the first run left, stays good for every module but this one.
        sys.dont_write_bytecode = True
        Path(importlib.util.cache_from_source(mutant.file)).unlink(missing_ok=True)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
    found = pytest.main([*PYTEST, *stop_at, *tests])
    os._exit({pytest.ExitCode.OK: PASSED, pytest.ExitCode.TESTS_FAILED: FAILED}.get(found, OTHER))


def _report(endings: dict[CheckedMutant, Ending], seconds: float) -> int:
    """Print the share and the names; the exit code."""
    wanted = [mutant for mutant in endings if mutant.equivalent is None]
    killed = [mutant for mutant in wanted if endings[mutant] in ("killed", "took too long")]
    of_note: list[tuple[str, list[CheckedMutant]]] = [
        ("survived", [mutant for mutant in wanted if endings[mutant] == "survived"]),
        ("NOT TESTED (does not import, or its tests do not run)", [m for m in endings if endings[m] == "not tested"]),
        ("named equivalent, yet killed", [m for m in endings if m.equivalent is not None and endings[m] == "killed"]),
    ]
    for what, mutants in of_note:
        for mutant in mutants:
            _say(f"{what}: {mutant.module}: {mutant.name}  ({', '.join(mutant.tests)})")
    share = f" ({len(killed) / len(wanted):.1%})" if wanted else ""
    others = f"{len(endings) - len(wanted)} more are named equivalent"
    _say(f"{len(killed)} of {len(wanted)} mutants killed{share} in {seconds:.0f} s; {others}")
    survived, untested, not_equivalent = (mutants for _, mutants in of_note)
    return 2 if untested else 1 if survived or not_equivalent else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
