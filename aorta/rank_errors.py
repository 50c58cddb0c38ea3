"""An error that several ranks of a node meet is said once, with the ranks that met it.

    error (all 2 ranks): training.device=cuda: torch sees no CUDA or HIP device; ...
    error (rank 3): ValueError: ...; the traceback is in its log file

The ranks of one launcher on one node meet in a folder of temporary files, since most such errors come before there is a
process group. Must not lose a message: a rank that cannot meet the others speaks for itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, Final

GRACE_S: Final = 2.0
"""How long the rank that speaks waits for others with the same error; torchrun ends them soon after it has left."""
_POLL_S: Final = 0.02
_OF_A_PEER: Final = "a failed peer"
"""Stands for errors that only say, each in its own words, that another rank has failed."""


def say_once(
    message: str,
    say: Callable[[str, str], None],
    *,
    of_a_peer: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Call `say` with the ranks that met an error (empty where the node has one rank) and the message; not at all where
    another rank of the node says it.

    Args:
        of_a_peer: the error was met because another rank failed; one rank of the node says so for all.
    """
    try:
        rank, world, here = (int(environment.get(name, 1)) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    except ValueError:
        here = 1
    if here < 2:
        say("", message)
        return
    text = re.sub(rf"^rank {rank}[:,]? ", "", message)
    key = hashlib.sha256((_OF_A_PEER if of_a_peer else text).encode()).hexdigest()[:16]
    mine = f"{key}-rank-{rank}"
    try:
        folder = _meeting_folder(environment)
        (folder / mine).touch()
    except OSError:
        say(f"rank {rank}", text)
        return
    speaker = folder / f"{key}-speaker"
    try:
        speaker.touch(exist_ok=False)
    except OSError:
        if _waited(lambda: not speaker.exists(), 2 * GRACE_S):
            _leave(folder, mine)
            return
    _waited(lambda: len(list(folder.glob("*-rank-*"))) >= here, GRACE_S)
    met = [int(path.name.rpartition("-")[2]) for path in folder.glob(f"{key}-rank-*")]
    try:
        say(_named(sorted({rank, *met}), world), text)
    finally:
        _leave(folder, speaker.name, mine)


def _meeting_folder(environment: Mapping[str, str]) -> Path:
    """A folder for the ranks that one launcher process has started, in this attempt, for this user alone.

    Raises:
        OSError: it cannot be made, or belongs to somebody else.
    """
    words = [str(os.getppid()), *(environment.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"))]
    folder = Path(tempfile.gettempdir(), f"aorta-errors-{os.getuid()}-{'-'.join(words)}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def _waited(done: Callable[[], bool], limit_s: float) -> bool:
    """Wait until `done`, the limit, or a request to end, after which there is time to speak; whether it is done."""
    end = time.monotonic() + limit_s
    with _until_asked_to_end() as asked:
        while not (finished := done()) and time.monotonic() < end and not asked:
            time.sleep(_POLL_S)
    return finished


@contextmanager
def _until_asked_to_end() -> Iterator[list[int]]:
    """A list that SIGTERM, which torchrun sends when another rank has ended, puts itself into."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before: Any = signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


def _named(ranks: Sequence[int], world: int) -> str:
    """`all 4 ranks`, `rank 3`, `ranks 0-2, 5`."""
    if len(ranks) == world:
        return f"all {world} ranks"
    runs = []
    for _, found in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in found]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"


def _leave(folder: Path, *names: str) -> None:
    """Take files away, and the folder with its last one."""
    for name in names:
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
