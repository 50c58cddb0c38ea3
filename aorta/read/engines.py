"""Runs a function on many files: in this process, in a pool of processes, or on a running Dask cluster.

    for result in Local().map(read_tables, paths):
        ...                                     # a result, or the `InputError` that reading that file raised

Results come in the order of the inputs, with few inputs in progress at a time. Must not: start a scheduler, or let one
bad file end the others (an `InputError` is a result).
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from aorta.errors import InputError, ToolMissing
from aorta.installation import install_command


class Readable(Protocol):
    """An input of a map, such as a `Path`: on a disk, and pickled for another process."""

    def stat(self) -> os.stat_result:
        """Return how much there is to read; an `OSError` where that is unknown."""

    def absolute(self) -> Readable:
        """Return the same with absolute paths, for workers with another working directory."""


Item = TypeVar("Item", bound=Readable)
Result = TypeVar("Result")
WORTH_A_POOL_BYTES: Final = 64 * 1024 * 1024
"""Below this, starting processes (0.3 s each, `benchmarks/jsonl_scale.py`) takes longer than reading."""
_AHEAD: Final = 2
"""Files submitted per process: one being read and one waiting, so that no process is idle."""
_CONNECT: Final = "10s"


@dataclass(frozen=True)
class Local:
    """Runs on this machine, in `jobs` processes (by default one per core); without a pool for one job or little to
    read.

    Processes are spawned, so a script that reads a large run from its top level needs `if __name__ == "__main__":`.
    """

    jobs: int | None = None

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result | InputError]:
        """Yield `function(item)`, or the `InputError` it raised, for each item, in order.

        Raises:
            InputError: the processes could not be started, or one was killed.
        """
        jobs = min(self.jobs or cores(), len(items))
        if jobs <= 1 or (self.jobs is None and sum(map(_size_of, items)) < WORTH_A_POOL_BYTES):
            yield from (_tried(function, item) for item in items)
            return
        pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
        try:
            yield from _bounded(lambda item: pool.submit(_tried, function, item), items, _AHEAD * jobs)
        except BrokenProcessPool as error:
            raise InputError(
                "a process that was reading ended: killed (out of memory?), or it could not start because this script "
                'has no `if __name__ == "__main__":`. Read with fewer processes: --jobs 1, or jobs=1'
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class Dask:
    """Runs on a Dask cluster whose workers have AORTA installed and see the files under the same paths."""

    scheduler: str

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result | InputError]:
        """Do as `Local.map`.

        Raises:
            ToolMissing: `distributed` is not installed.
            InputError: no scheduler answers, it has no workers, or a task could not run there.
        """
        try:
            import distributed
        except ImportError as error:
            raise ToolMissing(f"--scheduler needs the package distributed: {install_command('dask')}") from error
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
            absolute = [item.absolute() for item in items]
            try:
                yield from _bounded(
                    lambda item: client.submit(_tried, function, item, pure=False), absolute, _AHEAD * threads
                )
            except Exception as error:
                raise InputError(
                    f"the Dask cluster at {self.scheduler} could not read a file: {type(error).__name__}: {error}. Its "
                    "workers need this AORTA installed, and the same paths"
                ) from error


Engine: TypeAlias = Local | Dask


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[], object]]:
    """Show a progress bar on a terminal, nothing elsewhere. Call what is yielded once per file."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit="file", delay=0.5, leave=False) as bar:
        yield bar.update


def _size_of(item: Readable) -> int:
    try:
        return item.stat().st_size
    except OSError:  # reading it will say why
        return 0


def _bounded(submit: Callable[[Any], Any], items: Sequence[Any], limit: int) -> Iterator[Any]:
    """Yield results in order, with at most `limit` submitted at a time: a result that waits takes memory."""
    waiting: deque[Future[Any]] = deque()
    for item in items:
        if len(waiting) >= limit:
            yield waiting.popleft().result()
        waiting.append(submit(item))
    while waiting:
        yield waiting.popleft().result()


def _tried(function: Callable[[Item], Result], item: Item) -> Result | InputError:
    try:
        return function(item)
    except InputError as error:
        # A copy has no traceback and no cause, just as if it came from another process: the frames they keep alive hold
        # the reader's buffers, and whoever raises this result from a frame that holds it makes a cycle of all of it.
        return copy(error)
