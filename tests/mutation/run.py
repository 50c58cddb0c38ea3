"""Runs the tests of a module against a copy of the tree that holds a mutant of it, and says which go unnoticed.

    scripts/mutants                                          # 100 of all, drawn with a new seed
    scripts/mutants --sample 40 --seed 7 --only 'analysis/(stats|compare)'
    scripts/mutants --sample 0 --only timeline/intervals     # every one of a module
    scripts/mutants --device --only 'device.hpp'             # of the device path, on the simulated device

Python mutants are generated (`operators`), those of the interceptor's C++ are `tests/device_path/native_mutants.py`,
switched at run time in one build. A mutant is noticed when a test fails, cannot be collected or takes too long. An
unnoticed one is printed as a diff: either a test is missing, or the change is equivalent, which somebody has to decide.
The last line is one JSON object. Exit code: 0 when every mutant was noticed, 1 when one was not, 2 when one could not
be tested, as its tests fail on the code as it is. Must not: change the checkout.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Final

from tests.device_path.native_mutants import NATIVE_MUTANTS, NativeMutant
from tests.mutation import operators
from tests.mutation.operators import Mutant

PYTEST: Final = ("-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider")
WITH_LAUNCHES: Final = "not alone and not gpu and not simulated and not slow"
WITHOUT_LAUNCHES: Final = f"{WITH_LAUNCHES} and not dist"
"""Which tests of a module run: those that start several processes only where there are no others."""
DEVICE_PATH: Final = r"aorta\.instrument\.(device_\w+|event_clock|timed_work|step_\w+|native\.native_\w+)"
"""Modules that `tests/device_path` holds to the simulated device."""
NOTHING_RAN: Final = 5
"""pytest's exit code when no test was chosen."""
NUMBER: Final = "AORTA_MUTANT"
"""The variable that says which of the compiled mutants is in force."""


@dataclass(frozen=True)
class Suite:
    """Tests that belong to a module, and with which variables they run. `marks`: those that are tried, in turn."""

    tests: tuple[str, ...]
    marks: tuple[str, ...] = (WITHOUT_LAUNCHES, WITH_LAUNCHES)
    variables: tuple[tuple[str, str], ...] = ()


@dataclass
class Account:
    """How many mutants were noticed, and which were not."""

    noticed: int = 0
    unnoticed: list[str] = field(default_factory=list)
    not_tested: list[str] = field(default_factory=list)


def main(words: Sequence[str] | None = None) -> int:
    """Run the mutants that were drawn; the exit code."""
    options = _options(words)
    population = [mutant for mutant in _population(options.device) if re.search(options.only, mutant.name)]
    if not population:
        sys.stderr.write(f"mutants: --only {options.only}: no mutant's file or operator has it\n")
        return 2
    chosen = _drawn(population, options.sample, options.seed)
    began_s = time.monotonic()
    _say(f"{len(chosen)} of {len(population)} mutants, seed {options.seed}")
    with _copies(options.workers) as copies:
        account = _run(chosen, copies, options.limit, device=options.device)
    total = account.noticed + len(account.unnoticed)
    answer = {
        "seed": options.seed,
        "population": len(population),
        "run": total,
        "noticed": account.noticed,
        "share": account.noticed / total if total else None,
        "unnoticed": account.unnoticed,
        "not_tested": account.not_tested,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    _say(json.dumps(answer))
    return 2 if account.not_tested else 1 if account.unnoticed else 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description="Are the tests able to fail?")
    parser.add_argument("--sample", type=int, default=100, metavar="N", help="how many are drawn; 0: all (default 100)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of the draw; a new one is printed")
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression for FILE:LINE: OPERATOR")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="mutants at a time")
    parser.add_argument(
        "--limit", type=float, default=30.0, metavar="SECONDS", help="beyond twice the time without a mutant (30)"
    )
    parser.add_argument("--device", action="store_true", help="those of the device path, C++ too, simulated")
    options = parser.parse_args(words)
    if options.workers < 1 or options.sample < 0:
        parser.error(f"--workers {options.workers} --sample {options.sample}: at least one worker, no negative sample")
    return options


def _population(device: bool) -> Iterator[Mutant | NativeMutant]:
    for path in sorted((operators.ROOT / "aorta").rglob("*.py")):
        module = ".".join(path.relative_to(operators.ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not device or re.fullmatch(DEVICE_PATH, module):
            yield from operators.mutants(module)
    if device:
        yield from NATIVE_MUTANTS


def _drawn(population: list[Mutant | NativeMutant], count: int, seed: int) -> list[Mutant | NativeMutant]:
    """The same for the same population, count and seed."""
    return random.Random(seed).sample(population, min(count or len(population), len(population)))


def _run(chosen: Sequence[Mutant | NativeMutant], copies: Sequence[Path], limit_s: float, *, device: bool) -> Account:
    """Run every mutant's tests, first without it."""
    account, free = Account(), queue.SimpleQueue[Path]()
    for copy in copies:
        free.put(copy)
    suites = {mutant: _on_device(mutant) if device else tests_of(mutant.module) for mutant in chosen}
    with ThreadPoolExecutor(len(copies)) as pool:
        unique = sorted(set(suites.values()), key=str)
        as_it_is = dict(zip(unique, pool.map(lambda suite: _without_mutant(suite, free), unique), strict=True))
        running = {}
        for mutant, suite in suites.items():
            marks, seconds = as_it_is[suite]
            if marks is None:
                account.not_tested.append(mutant.name)
                _say(f"{mutant.name}: its tests fail on the code as it is: {' '.join(suite.tests)}")
            else:
                suite = replace(suite, marks=(marks,))
                running[pool.submit(_noticed, mutant, suite, free, 2 * seconds + limit_s)] = mutant
        for number, ended in enumerate(as_completed(running), 1):
            mutant, (noticed, seconds) = running[ended], ended.result()
            _say(f"[{number}/{len(running)}] {seconds:5.1f} s  {'noticed' if noticed else 'UNNOTICED'}  {mutant.name}")
            account.noticed += noticed
            if not noticed:
                account.unnoticed.append(mutant.name)
                _say(mutant.diff())
    return account


@cache
def tests_of(module: str) -> Suite:
    """The tests of a module: those that import it, then the others of the folder that mirrors its package."""
    folder = operators.ROOT.joinpath("tests", *module.split(".")[1:-1])
    while not folder.is_dir():
        folder = folder.parent
    named = [path for path, names in _imports().items() if module in names]
    files = [*named, *(path for path in sorted(folder.glob("test_*.py")) if path not in named)]
    if not files:
        files = sorted(folder.rglob("test_*.py"))
    return Suite(tuple(str(path.relative_to(operators.ROOT)) for path in files))


@cache
def _imports() -> dict[Path, frozenset[str]]:
    """The dotted names that each file of tests imports, and of the packages they are in."""
    found = {}
    for path in sorted((operators.ROOT / "tests").rglob("test_*.py")):
        names = set[str]()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found[path] = frozenset(names)
    return found


def _on_device(mutant: Mutant | NativeMutant) -> Suite:
    """What holds the device path, on the simulated device; a compiled mutant is named by a variable."""
    variables = [("AORTA_SIMULATED_DEVICE", "virtual"), ("AORTA_STOP_WHEN_WRONG", "1")]
    if isinstance(mutant, NativeMutant):
        variables.append(("XDG_CACHE_HOME", _compiled()))
    return Suite(("tests/device_path/test_rules.py",), ("simulated",), tuple(variables))


@cache
def _compiled() -> str:
    """The folder of the library with all mutants of C++."""
    from tests.device_path.switched import build

    return str(build())


@contextmanager
def _copies(count: int) -> Iterator[list[Path]]:
    """Folders with the files of the working tree that Git would keep."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=operators.ROOT,
        check=True,
        capture_output=True,
    )
    with tempfile.TemporaryDirectory(prefix="aorta-mutants-") as folder:
        copies = [Path(folder, str(number)) for number in range(count)]
        for name in filter(None, listed.stdout.decode().split("\0")):
            if os.path.lexists(operators.ROOT / name):
                (copies[0] / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(operators.ROOT / name, copies[0] / name, follow_symlinks=False)
        for copy in copies[1:]:
            shutil.copytree(copies[0], copy, symlinks=True)
        yield copies


def _without_mutant(suite: Suite, free: queue.SimpleQueue[Path]) -> tuple[str | None, float]:
    """The first marks that a test has, and how long those take on the code as it is; no marks where they fail."""
    copy = free.get()
    try:
        for marks in suite.marks:
            began_s = time.monotonic()
            code = _pytest(replace(suite, marks=(marks,)), copy, None)
            if code != NOTHING_RAN:
                return None if code else marks, time.monotonic() - began_s
        return None, 0.0
    finally:
        free.put(copy)


def _noticed(
    mutant: Mutant | NativeMutant, suite: Suite, free: queue.SimpleQueue[Path], limit_s: float
) -> tuple[bool, float]:
    """Whether a test fails, or the limit is passed; and after how long."""
    copy, began_s = free.get(), time.monotonic()
    try:
        if isinstance(mutant, NativeMutant):
            code = _pytest(suite, copy, limit_s, **{NUMBER: str(NATIVE_MUTANTS.index(mutant) + 1)})
        else:
            (copy / mutant.file).write_text(mutant.source())
            code = _pytest(suite, copy, limit_s)
            shutil.copy2(operators.ROOT / mutant.file, copy / mutant.file)
        return code != 0, time.monotonic() - began_s
    finally:
        free.put(copy)


def _pytest(suite: Suite, copy: Path, limit_s: float | None, **variables: str) -> int | None:
    """pytest's exit code; None where it took too long. Byte code is kept of the code as it is, which has no limit."""
    own = {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "" if limit_s is None else "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HYPOTHESIS_PROFILE": "mutants",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *PYTEST, "-m", suite.marks[0], *suite.tests],
        cwd=copy,
        env=os.environ | own | dict(suite.variables) | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what it starts ends with it
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
