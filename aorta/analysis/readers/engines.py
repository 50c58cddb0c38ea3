"""Where the per-file map runs: here, in a pool of processes, or on a Dask cluster that is already there.

Enters: a function of one path, and paths. Leaves: its results in the order of the paths, few of them under way at a
time. Must not: start a scheduler, or let one bad file end the others (an `InputError` is a result).
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from aorta.errors import InputError, ToolMissing

Result = TypeVar("Result")
WORTH_A_POOL_BYTES: Final = 64 * 1024 * 1024
"""Below this, starting processes (0.3 s each, `benchmarks/jsonl_scale.py`) takes longer than reading."""
_AHEAD: Final = 2
"""Files under way for each process: one that is read and one that waits, so that none is idle."""
_CONNECT: Final = "10s"


class Engine(Protocol):
    """How a map runs: yields `function(path)`, or the `InputError` it raised, for each path, in order."""

    def map(self, function: Callable[[Path], Result], paths: Sequence[Path]) -> Iterator[Result | InputError]:
        """Run `function` on every path."""


@dataclass(frozen=True)
class Local:
    """This machine. `jobs` processes, by default one a core; one alone, or little to read: no pool at all.

    Processes are spawned, so a script that reads a large run from its top level needs `if __name__ == "__main__":`.
    """

    jobs: int | None = None

    def map(self, function: Callable[[Path], Result], paths: Sequence[Path]) -> Iterator[Result | InputError]:
        """Run `function` on every path.

        Raises:
            InputError: the processes could not be started, or one was killed.
        """
        jobs = min(self.jobs or cores(), len(paths))
        if jobs <= 1 or (self.jobs is None and sum(map(_size, paths)) < WORTH_A_POOL_BYTES):
            yield from (_tried(function, path) for path in paths)
            return
        pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
        try:
            yield from _bounded(lambda path: pool.submit(_tried, function, path), paths, _AHEAD * jobs)
        except BrokenProcessPool as error:
            raise InputError(
                "a process that was reading ended: killed (out of memory?), or it could not start because this script "
                'has no `if __name__ == "__main__":`. Read with fewer processes: --jobs 1, or jobs=1'
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class Dask:
    """A cluster whose workers have AORTA installed and see the files under the same paths."""

    scheduler: str

    def map(self, function: Callable[[Path], Result], paths: Sequence[Path]) -> Iterator[Result | InputError]:
        """Run `function` on every path.

        Raises:
            ToolMissing: `distributed` is not installed.
            InputError: no scheduler answers, it has no workers, or a task could not run there.
        """
        try:
            import distributed
        except ImportError as error:
            raise ToolMissing('--engine dask needs the package distributed: pip install "aorta-bench[dask]"') from error
        try:
            client = distributed.Client(self.scheduler, timeout=_CONNECT, set_as_default=False)
        except (OSError, ValueError) as error:
            raise InputError(
                f"no Dask scheduler answers at {self.scheduler!r} ({error or type(error).__name__}); start one with "
                "`dask scheduler`, workers with `dask worker`, and give the address it prints"
            ) from error
        with client:
            threads = sum(client.nthreads().values())
            if not threads:
                raise InputError(
                    f"the Dask scheduler at {self.scheduler} has no workers: start some with `dask worker`"
                )
            tasks = (path.absolute() for path in paths)
            try:
                yield from _bounded(
                    lambda path: client.submit(_tried, function, path, pure=False), list(tasks), _AHEAD * threads
                )
            except InputError:
                raise
            except Exception as error:
                raise InputError(
                    f"the Dask cluster at {self.scheduler} could not read a file: {type(error).__name__}: {error}. Its "
                    "workers need this AORTA installed, and the same paths"
                ) from error


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[], object]]:
    """A bar on a terminal, nothing elsewhere; call what is yielded once a file."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit="file", delay=0.5, leave=False) as bar:
        yield bar.update


def _bounded(submit: Callable[[Path], Any], paths: Sequence[Path], limit: int) -> Iterator[Any]:
    """Results in order, at most `limit` under way: a result that waits for its turn takes memory."""
    waiting: deque[Future[Any]] = deque()
    for path in paths:
        if len(waiting) >= limit:
            yield waiting.popleft().result()
        waiting.append(submit(path))
    while waiting:
        yield waiting.popleft().result()


def _tried(function: Callable[[Path], Result], path: Path) -> Result | InputError:
    try:
        return function(path)
    except InputError as error:
        return error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading it says why
