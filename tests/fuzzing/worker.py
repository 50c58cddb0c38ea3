"""Runs the cases of one door in a forked process with limits, and says what became of each.

    for result in opened(door, trees, folder):   # one `CaseResult` a case, the process's death included
        ...

The process is forked from one that has loaded everything (`doors.warm`), so a case costs what reading costs. Time is
processor time, because a shared machine is slow without anybody's fault; the wall clock finds only what waits for ever.
Must not: go on in a process that was found at fault.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

from aorta.errors import AortaError, GateFailed, Inconclusive, RunIncomplete
from tests.fuzzing.doors import Door
from tests.fuzzing.mutations import mutated
from tests.fuzzing.tree import Tree, read_tree, write_tree

LIMIT_S: Final = 10.0
LIMIT_BYTES: Final = 1 << 30
WAIT_S: Final = 120.0
"""A case that says nothing for so long is taken to wait for ever."""
_HEADROOM_BYTES: Final = 512 << 20
"""Address space beyond `LIMIT_BYTES`: a case is measured by what it touches; this protects the machine."""
ANSWER, REFUSAL, FINDING = "answer", "refusal", "finding"
_ANSWERS: Final = (0, GateFailed.exit_code, Inconclusive.exit_code, RunIncomplete.exit_code)
"""Exit codes of commands that read what they were given."""
_FORK: Final = get_context("fork")


@dataclass(frozen=True)
class CaseResult:
    """What became of one case. `what` tells findings apart: the exception and its place, or the limit."""

    number: int
    changes: tuple[str, ...]
    outcome: str = ""
    seconds: float = 0.0
    size_bytes: int = 0
    what: str = ""
    detail: str = ""


Case: TypeAlias = tuple[int, tuple[str, ...], Tree]
"""Its number, what was changed, and its files."""


def load_seeds(door: Door, folder: Path) -> dict[str, Tree]:
    """Make the seeds of a door below a new folder, in a process of its own, which may load anything.

    Raises:
        RuntimeError: they could not be made.
    """
    folder.mkdir(parents=True)
    process = _FORK.Process(target=door.seeds, args=(folder,))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the seeds of {door.name} could not be made")
    return {seed.name: read_tree(seed) for seed in sorted(folder.iterdir())}


def drawn(door: Door, seed: int, numbers: Iterable[int], seeds: dict[str, Tree]) -> Iterator[Case]:
    """The cases of these numbers: always the same for the same seed."""
    for number in numbers:
        random = Random(f"{seed}/{door.name}/{number}")
        name = random.choice(sorted(seeds))
        tree, changes = mutated(random, seeds[name])
        yield number, (f"seed {name}", *changes), tree


def opened(door: Door, trees: Iterable[Tree], place: Path) -> Iterator[CaseResult]:
    """Some trees, given to a door one after the other, until the first finding."""
    return run(door, ((number, (), tree) for number, tree in enumerate(trees)), place)


def run(door: Door, cases: Iterable[Case], place: Path) -> Iterator[CaseResult]:
    """Open cases until the process is at fault or there are no more. Files of the last one stay in `place/case`."""
    place.mkdir(parents=True, exist_ok=True)
    log = place / "log"
    receives, sends = _FORK.Pipe(duplex=False)
    gc.freeze()
    process = _FORK.Process(target=_child, args=(door, cases, place, sends, log))
    process.start()
    sends.close()
    under_way: CaseResult | None = None
    try:
        while receives.poll(WAIT_S):
            result = receives.recv()
            under_way = None if result.outcome else result
            if result.outcome:
                yield result
        else:
            os.kill(process.pid or 0, signal.SIGABRT)  # faulthandler writes where it stands
            process.join()
    except EOFError:
        process.join()
    finally:
        receives.close()
        if process.exitcode is None:
            process.kill()
            process.join()
    said = log.read_text(errors="replace") if log.exists() else ""
    if under_way is not None:
        how = {-signal.SIGPROF: f"more than {LIMIT_S:.0f} s", -signal.SIGABRT: "waits for ever"}
        ended = how.get(process.exitcode or 0, f"ended with {process.exitcode}")
        places = [_short(line.split('"')[1]) for line in said.splitlines() if "/aorta/" in line and '"' in line]
        what = f"{ended} at {places[0]}" if places else ended
        yield replace(under_way, outcome=FINDING, what=what, detail=said[-5000:])
    elif process.exitcode:
        raise RuntimeError(f"{door.name}: the fuzzer itself failed:\n{said}")


def _child(door: Door, cases: Iterable[Case], place: Path, sends: Connection, log: Path) -> None:
    logged = log.open("w")
    faulthandler.enable(logged)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    faulthandler.register(signal.SIGPROF, logged, all_threads=False, chain=True)
    with Path(os.devnull).open("r+b", buffering=0) as null:
        for number, file in enumerate((null, null, logged)):
            os.dup2(file.fileno(), number)
    os.environ["COLUMNS"] = "80"
    if door.torch:
        import tests.fuzzing.checkpointed  # noqa: F401 - before anything is measured
    limit = _status("VmSize") + LIMIT_BYTES + _HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, changes, tree in cases:
        write_tree(tree, place / "case")
        write_tree({}, place / "out")
        begun = CaseResult(number, changes)
        sends.send(begun)
        result = _one(door, place / "case", place / "out", begun)
        sends.send(result)
        if result.outcome == FINDING:
            return  # its files stay, and whatever it broke in this process is gone with it


def _one(door: Door, case: Path, out: Path, begun: CaseResult) -> CaseResult:
    """Open one case, with the clock and the memory watched."""
    before, around = _listing(case), set(case.parent.iterdir())
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory counts from here (proc(5))
    base, began, had_torch = _status("VmRSS"), time.process_time(), "torch" in sys.modules
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    what = detail = ""
    try:
        os.chdir(out)
        with _quiet():
            code = door.open(case, out)
        outcome = ANSWER if code is None or code in _ANSWERS else REFUSAL
    except AortaError:
        outcome = REFUSAL
    except SystemExit as end:  # argparse
        outcome = ANSWER if end.code in (0, None) else REFUSAL
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        outcome, what, detail = FINDING, f"{type(error).__name__}{_innermost(error)}", traceback.format_exc()[-8000:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds, size = time.process_time() - began, max(0, _status("VmHWM") - base)
    rules = {
        f"more than {LIMIT_BYTES >> 20} MiB": size > LIMIT_BYTES,
        f"more than {LIMIT_S:.0f} s": seconds > LIMIT_S,
        "it changed its input": not door.in_place and before != _listing(case),
        "it wrote outside its output folder": around != set(case.parent.iterdir()),
        "it loaded torch": "torch" in sys.modules and not (had_torch or door.torch),
    }
    broken = [rule for rule, is_broken in rules.items() if is_broken]
    if outcome != FINDING and broken:
        outcome, what = FINDING, broken[0]
    return replace(begun, outcome=outcome, seconds=seconds, size_bytes=size, what=what, detail=detail)


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    """Every entry with its size and time; links are not followed."""
    found = []
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            facts = path.lstat()
            found.append((str(path), facts.st_size, facts.st_mtime_ns if name in files else 0))
    return sorted(found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """stdout and stderr as a terminal has them: what cannot be encoded fails there, and not on stderr."""
    with Path(os.devnull).open("wb") as null:
        out = io.TextIOWrapper(null, encoding="utf-8", errors="strict")
        err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
            out.flush()


def _status(key: str) -> int:
    """A value of /proc/self/status, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def _innermost(error: BaseException) -> str:
    """The deepest place in AORTA that the error passed: findings with the same one are one finding."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/aorta/" in frame.filename]
    return f" at {_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _short(path: str) -> str:
    return "aorta/" + path.rpartition("/aorta/")[2]
