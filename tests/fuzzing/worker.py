"""Runs the cases of one door in a forked process with limits, and says what became of each.

    for result in cases(door, seed, range(0, 100), folder):   # one `CaseResult` a case, the process's death included
        ...

The process is forked from one that has loaded everything (`doors.warm`), so a case costs what reading costs. Time is
processor time, because a shared machine is slow without anybody's fault; what waits for ever is found by the wall
clock. Must not: go on in a process that was found at fault.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Final, TypeAlias

from aorta.errors import AortaError, GateFailed, Inconclusive, RunIncomplete
from tests.fuzzing.doors import Door
from tests.fuzzing.mutations import mutated
from tests.fuzzing.tree import Tree, read_tree, remove, write_tree

LIMIT_S: Final = 10.0
LIMIT_BYTES: Final = 1 << 30
_IDLE_S: Final = 5.0
"""A case that has used no processor time and slept for as long is taken to wait for ever."""
_HEADROOM_BYTES: Final = 512 << 20
"""Address space beyond `LIMIT_BYTES`: a case is measured by what it touches; this protects the machine."""
ANSWER, REFUSAL, FINDING = "answer", "refusal", "finding"
_ANSWERS: Final = (0, GateFailed.exit_code, Inconclusive.exit_code, RunIncomplete.exit_code)
"""Exit codes of commands that read what they were given."""

Make: TypeAlias = Callable[[int], tuple[str, Tree | None, list[str]]]
"""Number of a case -> its seed, files and changes; None for the files: they lie in `place/kept`."""


@dataclass(frozen=True)
class CaseResult:
    """What became of one case. `what` tells findings apart: the exception and its place, or the limit."""

    number: int
    outcome: str
    seconds: float = 0.0
    size_bytes: int = 0
    seed_name: str = ""
    changes: tuple[str, ...] = ()
    what: str = ""
    detail: str = ""


def load_seeds(door: Door, folder: Path) -> dict[str, Tree]:
    """The seeds of a door, made in a process of their own, which may load anything.

    Raises:
        RuntimeError: they could not be made.
    """
    if not folder.exists():
        folder.mkdir(parents=True)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    door.seeds(folder)
                status = 0
            except BaseException:  # noqa: BLE001 - the parent raises
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitpid(pid, 0)[1]:
            raise RuntimeError(f"the seeds of {door.name} could not be made")
    return {seed.name: read_tree(seed) for seed in sorted(folder.iterdir())}


def case_of(door: Door, seed: int, number: int, seeds: dict[str, Tree]) -> tuple[str, Tree, list[str]]:
    """The seed, files and changes of a case: always the same for the same numbers."""
    random = Random(f"{seed}/{door.name}/{number}")
    name = random.choice(sorted(seeds))
    tree, told = mutated(random, seeds[name])
    return name, tree, told


def cases(door: Door, seed: int, numbers: range, seeds: dict[str, Tree], place: Path) -> Iterator[CaseResult]:
    """Run cases until the process is at fault or `numbers` ends. Files of the last case stay in `place/case`."""
    yield from _forked(door, numbers, place, lambda number: case_of(door, seed, number, seeds))


def again(door: Door, kept: Path, place: Path) -> CaseResult:
    """One kept case once more."""
    place.mkdir(parents=True, exist_ok=True)
    shutil.copytree(kept, place / "kept", symlinks=True, copy_function=_copy)
    return next(_forked(door, range(1), place, lambda _number: ("kept", None, [])))


def opened(door: Door, trees: Sequence[Tree], place: Path) -> Iterator[CaseResult]:
    """Some trees, given to a door one after the other, until the first finding."""
    return _forked(door, range(len(trees)), place, lambda number: ("given", trees[number], []))


def _copy(source: str, target: str) -> object:
    if not Path(source).is_file() and not Path(source).is_symlink():
        return os.mkfifo(target)
    return shutil.copy2(source, target, follow_symlinks=False)


def _forked(door: Door, numbers: range, place: Path, make: Make) -> Iterator[CaseResult]:
    place.mkdir(parents=True, exist_ok=True)
    log = place / "log"
    reads, writes = os.pipe()
    gc.freeze()
    pid = os.fork()
    if not pid:
        os.close(reads)
        try:
            _child(door, numbers, place, make, writes, log)
        except BaseException:  # noqa: BLE001 - the parent raises it
            log.write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    os.close(writes)
    begun: CaseResult | None = None
    try:
        lines = _Lines(reads, pid)
        while line := lines.next():
            result = CaseResult(**json.loads(line))
            if result.outcome == "begun":
                begun = result
                continue
            begun = None
            yield result
        if line is None:
            os.kill(pid, signal.SIGABRT)  # faulthandler writes where it stands
            time.sleep(0.2)
    finally:
        os.close(reads)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    said = log.read_text(errors="replace") if log.exists() else ""
    if begun is not None:
        how = {signal.SIGPROF: f"more than {LIMIT_S:.0f} s", signal.SIGABRT: "waits for ever"}
        ended = how.get(os.WTERMSIG(status), f"killed by signal {os.WTERMSIG(status)}") if status & 127 else "exit"
        yield replace(begun, outcome=FINDING, what=f"{ended}{_last_place(said)}", detail=said[-5000:])
    elif status and not os.WIFSIGNALED(status):
        raise RuntimeError(f"{door.name}: the fuzzer itself failed:\n{said}")


class _Lines:
    """Lines that a process writes to a pipe."""

    def __init__(self, reads: int, pid: int) -> None:
        self._reads, self._pid, self._data = reads, pid, b""

    def next(self) -> bytes | None:
        """The next line; empty at the end, None if the process waits for ever."""
        idle_s, before = 0.0, None
        while b"\n" not in self._data:
            if select.select([self._reads], [], [], 1.0)[0]:
                data = os.read(self._reads, 1 << 16)
                if not data:
                    return b""
                self._data += data
                continue
            used = _used(self._pid)
            idle_s, before = (idle_s + 1 if used is not None and used == before else 0.0), used
            if idle_s >= _IDLE_S:
                return None
        line, _, self._data = self._data.partition(b"\n")
        return line


def _used(pid: int) -> tuple[str, ...] | None:
    """Processor time of a process that sleeps, as /proc/PID/stat has it (proc(5)); None while it is not asleep."""
    facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return tuple(facts[11:13]) if facts[0] == "S" else None


def _child(door: Door, numbers: range, place: Path, make: Make, writes: int, log: Path) -> None:
    logged = log.open("w")
    faulthandler.enable(logged)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    faulthandler.register(signal.SIGPROF, logged, all_threads=False, chain=True)
    with Path(os.devnull).open("r+b", buffering=0) as null:
        os.dup2(null.fileno(), 0)
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    os.environ["COLUMNS"] = "80"
    if door.torch:
        import tests.fuzzing.checkpointed  # noqa: F401 - before anything is measured
    limit = _status("VmSize") + LIMIT_BYTES + _HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in numbers:
        name, tree, changes = make(number)
        case, out = place / "case", place / "out"
        for folder in (case, out):
            remove(folder)
        if tree is None:
            (place / "kept").rename(case)
        else:
            write_tree(tree, case)
        out.mkdir()
        _tell(writes, begun := CaseResult(number, "begun", 0.0, 0, name, tuple(changes)))
        result = _one(door, case, out, begun)
        _tell(writes, result)
        if result.outcome == FINDING:
            return  # its files stay, and whatever it broke in this process is gone with it


def _tell(writes: int, result: CaseResult) -> None:
    data = json.dumps(asdict(result)).encode() + b"\n"
    while data:
        data = data[os.write(writes, data) :]


def _one(door: Door, case: Path, out: Path, begun: CaseResult) -> CaseResult:
    """Open one case, with the clock and the memory watched."""
    before, around = _listing(case), set(case.parent.iterdir())
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory counts from here (proc(5))
    base, began, had_torch = _status("VmRSS"), time.process_time(), "torch" in sys.modules
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    what = detail = ""
    code: int | None = None
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
    if outcome != FINDING:
        what = _broken_rule(door, seconds, size, before == _listing(case), around == set(case.parent.iterdir()))
        what = what or ("it loaded torch" if "torch" in sys.modules and not (had_torch or door.torch) else "")
        outcome = FINDING if what else outcome
    return replace(begun, outcome=outcome, seconds=seconds, size_bytes=size, what=what, detail=detail)


def _broken_rule(door: Door, seconds: float, size: int, same: bool, inside: bool) -> str:
    if size > LIMIT_BYTES:
        return f"more than {LIMIT_BYTES >> 20} MiB"
    if seconds > LIMIT_S:
        return f"more than {LIMIT_S:.0f} s"
    if not same and not door.in_place:
        return "it changed its input"
    if not inside:
        return "it wrote outside its output folder"
    return ""


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
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def _innermost(error: BaseException) -> str:
    """The deepest place in AORTA that the error passed: findings with the same one are one finding."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/aorta/" in frame.filename]
    return f" at {_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _last_place(said: str) -> str:
    """The same, in what faulthandler wrote."""
    places = [line.strip() for line in said.splitlines() if "/aorta/" in line]
    return f" at {_short(places[0].split(chr(34))[1])}" if places and '"' in places[0] else ""


def _short(path: str) -> str:
    return "aorta/" + path.rpartition("/aorta/")[2]
