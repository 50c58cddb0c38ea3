"""How a command of AORTA ends: an error is one line on stderr and an exit code, never a traceback.

    @command()
    def main(arguments: Sequence[str]) -> int:
        options = parser().parse_args(arguments)  # argparse itself ends with 0 or 2
        ...                                       # raise InputError, GateFailed, ...: `errors` has their exit codes
        return EXIT_OK

An error that several ranks of a node meet is said once, with the ranks that met it:

    error (all 2 ranks): training.device=cuda: torch sees no CUDA or HIP device; ...
    error (rank 3): ValueError: ...; the traceback is in its log file

The ranks of one launcher on one node meet in a folder of temporary files, since most such errors come before there is a
process group; a rank that cannot meet the others speaks for itself. Must not let a command lose its exit code or its
journal over text that nobody can read (whoever started it may have closed the terminal meanwhile), or catch an error
that AORTA did not raise on purpose.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec

from aorta.errors import SIGNAL_EXIT_BASE, AortaError, PeerFailed, ToolMissing
from aorta.installation import what_to_install
from aorta.terminal_style import style_of

GRACE_S: Final = 2.0
"""How long the rank that speaks waits for others with the same error; torchrun ends them soon after it has left."""
_SPEAKER_S: Final = 2 * GRACE_S
"""A speaker that has said nothing for so long has died, and another rank speaks."""
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
        rank, world, here = (
            int(environment.get(name, without))
            for name, without in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))
        )
    except ValueError:
        here = 1
    if here < 2:
        say("", message)
        return
    text = re.sub(rf"^rank {rank}[:,]? ", "", message)
    key = hashlib.sha256((_OF_A_PEER if of_a_peer else text).encode()).hexdigest()[:16]
    with _until_asked_to_end() as asked:
        try:
            folder = _meeting_folder(environment)
            (folder / f"{key}-rank-{rank}").touch()
        except OSError:
            say(f"rank {rank}", text)
            return
        if not _is_speaker(folder, key, rank, asked):
            return
        _waited(lambda: len(_ranks(folder, "*", "rank") | _ranks(folder, "*", "said")) >= here, GRACE_S, asked)
        met = {rank, *_ranks(folder, key, "rank")}
        try:
            say(name_ranks(sorted(met), world), text)
        finally:
            _mark_said(folder, key, met)


def _is_speaker(folder: Path, key: str, rank: int, asked: Sequence[int]) -> bool:
    """Return whether this rank is the one to speak; it is not where another one has named it, or is about to."""
    mine, speaker = folder / f"{key}-rank-{rank}", folder / f"{key}-speaker"
    while True:
        try:
            speaker.touch(exist_ok=False)
            return True
        except (FileExistsError, FileNotFoundError):  # another rank's; or the folder is gone, and with it `mine`
            ended = _waited(lambda: not speaker.exists(), _SPEAKER_S, asked)
        except OSError:
            return True
        with suppress(OSError):  # it has spoken meanwhile
            old = ended != "done" and time.time() - speaker.stat().st_mtime >= _SPEAKER_S
            if ended == "asked" and not old:
                return False  # it is asked to end too, and names this rank by the file left here
            if old:
                speaker.unlink()  # it has died
        if not mine.exists():  # named
            _leave(folder)
            return False


def _ranks(folder: Path, key: str, state: str) -> set[int]:
    """Return the ranks that met an error and are still to be named (`rank`), or have been (`said`)."""
    return {int(path.name.rpartition("-")[2]) for path in _files(folder, f"{key}-{state}-*")}


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return files of the meeting; none where the last rank has just taken the folder away."""
    try:
        return list(folder.glob(pattern))
    except FileNotFoundError:  # between two looks of `glob`
        return []


def _mark_said(folder: Path, key: str, ranks: Iterable[int]) -> None:
    """Tell ranks that wait that they have been named; others count them on."""
    for rank in ranks:
        with suppress(OSError):
            (folder / f"{key}-rank-{rank}").rename(folder / f"{key}-said-{rank}")
    with suppress(OSError):
        (folder / f"{key}-speaker").unlink()
    _leave(folder)


def _meeting_folder(environment: Mapping[str, str]) -> Path:
    """Return a folder for the ranks that one launcher process has started, in this attempt, for this user alone.

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


def _waited(done: Callable[[], bool], limit_s: float, asked: Sequence[int]) -> Literal["done", "late", "asked"]:
    """Wait until `done`, the limit, or a request to end, after which there is time to speak; which of them it was."""
    end = time.monotonic() + limit_s
    while not done():
        if asked:
            return "asked"
        if time.monotonic() >= end:
            return "late"
        time.sleep(_POLL_S)
    return "done"


@contextmanager
def _until_asked_to_end() -> Iterator[list[int]]:
    """Yield a list that SIGTERM, which torchrun sends when another rank has ended, puts itself into."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before: Any = signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # None: not set from Python


def name_ranks(ranks: Sequence[int], world: int | None = None) -> str:
    """Return ascending ranks in words: `all 4 ranks` (of `world`), `rank 3`, `ranks 0-2, 5`."""
    if len(ranks) == world:
        return f"all {world} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {number_ranges(ranks)}"


def number_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers with runs of them in short: `0-3, 7`."""
    runs = [[number for _, number in group] for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _leave(folder: Path) -> None:
    """Remove the folder on the last rank: nobody waits to be named."""
    if _ranks(folder, "*", "rank"):
        return
    for path in _files(folder, "*-said-*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


_Arguments = ParamSpec("_Arguments")


def command(speaker: str = "error") -> Callable[[Callable[_Arguments, int]], Callable[_Arguments, int]]:
    """Make a function a command: an `AortaError` that it raises becomes the line `error: ...` and its exit code.

    Args:
        speaker: what stands before the message.
    """

    def decorate(main: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
        @wraps(main)
        def ended(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> int:
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be UTF-8
            try:
                return main(*arguments, **named)
            except AortaError as error:
                say_once(str(error), partial(_say, speaker), of_a_peer=isinstance(error, PeerFailed))
                return error.exit_code
            except ModuleNotFoundError as missing:
                advice = what_to_install(missing.name)
                if advice is None:
                    raise
                say_once(advice, partial(_say, speaker))
                return ToolMissing.exit_code
            except KeyboardInterrupt:
                to_stderr("interrupted")
                return SIGNAL_EXIT_BASE + signal.SIGINT

        return ended

    return decorate


def _say(speaker: str, ranks: str, message: str) -> None:
    """Write an error, and which ranks had it where there are several."""
    who = f"{speaker} ({ranks}):" if ranks else f"{speaker}:"
    to_stderr(f"{style_of(sys.stderr).error(who)} {message}")


def to_stderr(line: str) -> None:
    """Write a line to stderr."""
    with tolerate_closed_terminal():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def shown_path(path: Path) -> str:
    """Return a path as a person in the current directory would write it: relative below it, otherwise as it is."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else str(path)


def to_stdout(line: str) -> None:
    """Write a line to stdout."""
    with tolerate_closed_terminal():
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


@contextmanager
def tolerate_closed_terminal() -> Iterator[None]:
    """Wrap writing to stdout or stderr: where that fails (EIO: the terminal is closed), the text is lost, no more."""
    try:
        yield
    except OSError:
        # What is left in a buffer would fail again when the interpreter ends, which then ends with 120.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                with suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, stream.fileno())
                    os.close(nowhere)


def rounded_time(seconds: float) -> str:
    """Return how long something takes, for people: seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
