"""Saves profiler windows off the training thread: export, compress, upload, and remove old files.

It takes one job per window; files appear whole or not at all, and `windows` lists what is where. Two threads at the
lowest priority, so that a slow upload does not delay the next window's file. Must not raise into training, block it,
leave half a trace, replace the reason of an error by its consequence, or remove a local file that has not reached its
destination. One thing the training thread does wait for: a profiler session that begins before the last trace is
exported would take the times from its kernels (`sessions`).
"""

from __future__ import annotations

import errno
import gzip
import logging
import os
import queue
import shutil
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aorta.profiling.memory_timeline import draw
from aorta.profiling.sessions import before_next_session
from aorta.profiling.upload import Destination, error_line
from aorta.records.files import whole_file

_log = logging.getLogger(__name__)
Kind = Literal["trace", "chrome", "memory", "snapshot"]
_LOWEST_PRIORITY = 19
_HALF = ".tmp"
"""What Kineto appends to the name of a trace that it has not finished."""
PART = ".part"
_TAIL_BYTES = 64
_PROBE = b" " * (1 << 16)
_CHUNK_BYTES = 1 << 20
_EXPORT_WAIT_S = 60.0
"""How long the next profiler session waits for the trace of the last one; afterwards that trace is given up."""


@dataclass(frozen=True)
class Moment:
    """Counts of finished steps when a window closed, and wall-clock seconds since the loop, the epoch and the step
    began. Samples and tokens are None if their number per step is not known.
    """

    epoch: int = 0
    batch: int = 0
    batch_in_epoch: int = 0
    sample: int | None = None
    sample_in_epoch: int | None = None
    token: int | None = None
    token_in_epoch: int | None = None
    total_wct: float = 0.0
    epoch_wct: float = 0.0
    batch_wct: float = 0.0


@dataclass(frozen=True)
class TraceWindow:
    """The content of one trace: kept steps `first_step` to `last_step` (0-based, inclusive; None: no complete step).

    `partial`: fewer steps than a cycle keeps, because the run resumed or ended inside it, or its epoch ended.
    """

    first_step: int | None
    last_step: int | None
    partial: bool
    moment: Moment

    @property
    def finished(self) -> int:
        """Number of steps finished when it closed."""
        return self.moment.batch


@dataclass
class SavedFile:
    """A file to be made of an exported trace, and its state.

    Attributes:
        path: on this disk, where it is once it is `on_disk`.
        remote: its name at `destination`.
        address: where it is after an upload.
        error: what went wrong.
    """

    kind: Kind
    path: Path
    destination: Destination | None = None
    remote: str = ""
    on_disk: bool = False
    bytes: int | None = None
    address: str | None = None
    error: str | None = None


@dataclass
class SavedWindow:
    window: TraceWindow
    files: Sequence[SavedFile]

    def removable(self) -> bool:
        """Ask the destination whether every file that was to be uploaded has a copy that outlives this process."""
        return all(
            file.destination is None or (file.address and file.destination.holds(file.path, file.remote))
            for file in self.files
            if file.on_disk
        )


@dataclass(frozen=True)
class Job:
    """One window: how its trace is exported (to a path, as JSON; None: it is not), and which files are made of it, the
    trace itself last. `categories` divides its memory, for the page.
    """

    window: TraceWindow
    export: Callable[[Path], Any] | None
    files: Sequence[SavedFile]
    categories: Callable[[], dict[str, Any]] = dict


class Saver:
    """The two threads of one rank, started by the first job.

    Args:
        keep: number of newest windows that stay on this disk, -1 for all.
        overwrite: replace files of the same name.

    Attributes:
        windows: what has been saved so far.
        given_up: a caller has waited for the time allowed; there is no second wait.
    """

    def __init__(self, keep: int = -1, *, overwrite: bool = False) -> None:
        self.windows: list[SavedWindow] = []
        self.given_up = False
        self._keep, self._overwrite = keep, overwrite
        self._lock = threading.Condition()
        self._pending = 0
        self._filling: set[Path] = set()
        self._foreign: Path | None = None
        self._here: list[SavedWindow] = []
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._uploads: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> None:
        """Save a window. Until its trace is exported, the next profiler session of this process waits."""
        exported, overtaken = threading.Event(), threading.Event()

        def wait() -> None:
            if not exported.wait(_EXPORT_WAIT_S):
                overtaken.set()

        forget = before_next_session(wait)

        def trace_exported() -> None:
            exported.set()
            forget()

        self.call(lambda: self._save(job, trace_exported, overtaken))

    def call(self, work: Callable[[], None]) -> None:
        """Run `work` after everything submitted before; its exceptions are logged."""
        self._put(self._jobs, work)

    @contextmanager
    def filling(self, folder: Path) -> Iterator[None]:
        """Keep `folder` while other code writes a file in it, even if deleting an old window empties it."""
        with self._lock:
            self._foreign = folder
        try:
            yield
        finally:
            with self._lock:
                self._foreign = None

    @property
    def pending(self) -> int:
        """Number of unfinished jobs."""
        with self._lock:
            return self._pending

    def drain(self, limit_s: float) -> bool:
        """Wait until nothing is pending, at most `limit_s`; returns whether everything was done."""
        with self._lock:
            return self._lock.wait_for(lambda: self._pending == 0, timeout=limit_s)

    def kept(self) -> list[SavedWindow]:
        """Return the windows with a file on this disk, newest last."""
        with self._lock:
            return [saved for saved in self._here if any(file.on_disk for file in saved.files)]

    def _put(self, where: queue.SimpleQueue[Callable[[], None]], work: Callable[[], None]) -> None:
        with self._lock:
            self._pending += 1
            if not self._threads:
                for name, source in (("aorta-traces", self._jobs), ("aorta-uploads", self._uploads)):
                    # Daemon threads: a server that never answers must not keep a finished run alive.
                    thread = threading.Thread(target=self._work, args=(source,), name=name, daemon=True)
                    self._threads.append(thread)
                    thread.start()
        where.put(work)

    def _work(self, source: queue.SimpleQueue[Callable[[], None]]) -> None:
        with suppress(AttributeError, OSError):  # on Linux each thread has its own priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while True:
            work = source.get()
            try:
                work()
            except Exception:  # noqa: BLE001  a thread that ends would leave work pending for ever; it is logged
                _log.exception("profiling: saving traces failed inside AORTA")
            finally:
                del work  # it holds a window's events
                with self._lock:
                    self._pending -= 1
                    self._lock.notify_all()

    def _save(self, job: Job, trace_exported: Callable[[], None], overtaken: threading.Event) -> None:
        begin = time.perf_counter()
        saved = SavedWindow(job.window, job.files)
        trace = job.files[-1].path
        raw = trace.with_name(trace.name + ".json" + PART)
        try:
            try:
                # The other thread removes uploaded files and the folders this leaves empty, except those being filled.
                with self._lock:
                    self._filling = {raw.parent, *(file.path.parent for file in job.files)}
                    raw.parent.mkdir(parents=True, exist_ok=True)
                if job.export is not None:
                    export(job.export, raw)
            finally:
                trace_exported()
            if overtaken.is_set():
                raw.unlink(missing_ok=True)
                raise TimeoutError(f"not exported within {_EXPORT_WAIT_S:.0f} s, when the next window began")
        except Exception as error:  # noqa: BLE001  losing one trace must not lose the next; it is logged
            for file in job.files:
                if file.kind == "snapshot":
                    self._make(file, raw, job)  # the allocator wrote it, and it is there
                else:
                    file.error = error_line(error)
            first, last = job.window.first_step, job.window.last_step
            steps = "a window without a complete step" if first is None else f"steps {first} to {last}"
            _log.error("profiling: the trace of %s could not be saved as %s: %s", steps, trace, error_line(error))
        else:
            for file in job.files:
                self._make(file, raw, job)
            if job.files[-1].error and raw.exists():
                # It could not be compressed: the trace is kept under its bare JSON name.
                name = trace.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".json") + ".json"
                job.files[-1].path = raw.replace(free_name(trace.with_name(name)))
                job.files[-1].on_disk = True
            raw.unlink(missing_ok=True)
            _log.info("Finished dumping profiler traces in %.2f seconds", time.perf_counter() - begin)
        with self._lock:
            self._filling = set()
            self.windows.append(saved)
            self._here.append(saved)
        self._put(self._uploads, lambda: self._deliver(saved))

    def _make(self, file: SavedFile, raw: Path, job: Job) -> None:
        try:
            if file.kind != "snapshot":
                file.path = file.path if self._overwrite else free_name(file.path)
                file.path.parent.mkdir(parents=True, exist_ok=True)
                if file.kind == "memory":
                    categories: dict[str, Any] = {}
                    try:
                        categories = job.categories()
                    except Exception as error:  # noqa: BLE001  the page is of use without; it is logged
                        _log.warning("profiling: memory is not divided into categories: %s", error_line(error))
                    draw(raw, file.path, categories)
                elif file.kind == "trace" and file.path.suffix != ".gz":
                    raw.replace(file.path)
                else:
                    pack(raw, file.path)
            file.bytes, file.on_disk = file.path.stat().st_size, True
        except Exception as error:  # noqa: BLE001  one file of several; it is logged and recorded
            file.error = error_line(error)
            _log.error("profiling: %s could not be written: %s", file.path, file.error)

    def _deliver(self, saved: SavedWindow) -> None:
        """Upload a window, and remove the oldest ones down to `keep`; one that has not reached its destination stays,
        and counts.
        """
        for file in saved.files:
            if file.destination is None or not file.on_disk or file.error:
                continue
            try:
                file.address = file.destination.put(file.path, file.remote)
                _log.info("profiling: uploaded %s to %s", file.path, file.address)
            except Exception as error:  # noqa: BLE001  the file is still here; it is logged and recorded
                file.error = error_line(error)
                _log.error("profiling: %s could not be uploaded and stays here: %s", file.path, file.error)
        if self._keep < 0:
            return
        with self._lock:
            surplus = self._here[: max(len(self._here) - self._keep, 0)]
        going = [old for old in surplus if old.removable()]  # without the lock: it asks a server
        with self._lock:
            self._here = [old for old in self._here if old not in going]
        for file in (file for old in going for file in old.files if file.on_disk):
            try:
                file.path.unlink()
                file.on_disk = False
                with self._lock:
                    if file.path.parent not in (*self._filling, self._foreign):
                        file.path.parent.rmdir()
            except OSError as error:
                if file.on_disk:
                    _log.warning("profiling: %s could not be removed: %s", file.path, error)


def export(write: Callable[[Path], Any], target: Path) -> None:
    """Have `write` write a trace, as JSON, to `target`.

    torch's exporter reports no error: on a full disk it leaves half a trace beside the name that was asked for, and
    returns. So the reason is found by writing on where it stopped.

    Raises:
        OSError: it could not; with the reason of the disk (full, over quota, ...) where it gives one. Nothing is left.
    """
    half = target.with_name(target.name + _HALF)
    try:
        write(target)
        end = b""
        with suppress(FileNotFoundError), target.open("rb") as stream:
            stream.seek(max(target.stat().st_size - _TAIL_BYTES, 0))
            end = stream.read().rstrip()
        if not end.endswith(b"}"):
            try:
                with (half if half.exists() else target).open("ab", buffering=0) as probed:
                    probed.write(_PROBE)
                    os.fsync(probed.fileno())
                    if probed.write(_PROBE) < len(_PROBE):  # a full disk may take a part, and refuse the next byte
                        probed.write(_PROBE)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(target)) from None
            raise OSError(errno.EIO, "torch.profiler left no whole trace, and the disk is not full", str(target))
    except BaseException:
        for path in (half, target):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def pack(source: Path, target: Path) -> None:
    """Write `source` to `target`, compressed as its suffix says. `source` stays.

    `.tar.gz` holds one regular file with the archive's bare name and `.json`, `.gz` the bytes alone.

    Raises:
        OSError: it cannot be written; `target` is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as part:
        if target.name.endswith(".tar.gz"):
            with tarfile.open(part, "w:gz") as archive, source.open("rb") as content:
                info = tarfile.TarInfo(target.name.removesuffix(".tar.gz") + ".json")
                info.size, info.mtime, info.mode = source.stat().st_size, int(source.stat().st_mtime), 0o644
                archive.addfile(info, content)
        else:
            with source.open("rb") as plain, gzip.open(part, "wb") if target.suffix == ".gz" else part.open("wb") as to:
                shutil.copyfileobj(plain, to, _CHUNK_BYTES)


def free_name(target: Path) -> Path:
    """Return `target`, or the same with `-2`, `-3`, ... before its suffixes if it exists."""
    stem, dot, suffixes = target.name.partition(".")
    candidate, number = target, 1
    while candidate.exists():
        number += 1
        candidate = target.with_name(f"{stem}-{number}{dot}{suffixes}")
    return candidate
