"""Names of trace files, and writing them, whole or not at all: exports, compresses, and says why where it fails.

A name is made of the writing process and the steps in a trace; `naming` and `compression` are independent. Step numbers
are 0-based everywhere in AORTA, but a name follows the tool that its pattern comes from: `step_<N>` and `{batch}` count
finished steps, `iter<a>_<b>` is 1-based and inclusive. The trace itself holds `first_step` and `last_step`, 0-based.

torch's exporter reports no error: on a full disk it leaves half a trace beside the name that was asked for, and
returns. Must not leave that half, replace the reason by its consequence, or delete a source before its compressed file
exists under its name.
"""

from __future__ import annotations

import errno
import gzip
import math
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from aorta.config.schema import Naming
from aorta.config.templates import fill
from aorta.records.files import whole_file

_HALF = ".tmp"
"""What Kineto appends to the name of a trace that it has not finished."""
_TAIL_BYTES = 64
_PROBE = b" " * (1 << 16)
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def export(write: Callable[[Path], Any], target: Path) -> None:
    """Have `write` write a trace, as JSON, to `target`.

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
            raise _reason(half if half.exists() else target, target)
    except BaseException:
        for path in (half, target):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def error_line(error: BaseException) -> str:
    """Return an error in one line; where there was no room, with what to do."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        text += "; make room there, or choose another folder for traces"
    return text


def _reason(written: Path, target: Path) -> OSError:
    """Return why a trace is not whole: found by writing on where the exporter stopped, since it does not say."""
    try:
        with written.open("ab", buffering=0) as stream:
            stream.write(_PROBE)
            os.fsync(stream.fileno())
            if stream.write(_PROBE) < len(_PROBE):  # a full disk may take a part, and refuse the next byte
                stream.write(_PROBE)
    except OSError as error:
        return OSError(error.errno, error.strerror, str(target))
    return OSError(errno.EIO, "torch.profiler left no whole trace, and the disk takes more", str(target))


PART = ".part"
_CHUNK_BYTES = 1 << 20


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


STEP_BASE = 0


@dataclass(frozen=True)
class TracePlace:
    """The writing process. `coordinate` is its position in the device mesh, size-1 dimensions included; None for a
    single process. `dimensions` are the mesh's names for them, where it has names.
    """

    run_name: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    host: str = "localhost"
    pid: int = 0
    coordinate: tuple[int, ...] | None = None
    dimensions: tuple[str, ...] = ()

    def variables(self) -> dict[str, Any]:
        names = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Moment:
    """Counts of finished steps when a window closed, and wall-clock seconds since the loop, the epoch and the step
    began. Samples and tokens are None where nobody said how many a step has.
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
class Counters:
    """Converts finished steps to epochs, samples (over all ranks) and tokens; None where that is not known."""

    steps_per_epoch: int | None = None
    samples_per_step: int | None = None
    tokens_per_sample: int | None = None

    def at(self, finished: int) -> Moment:
        epoch, batch = (0, finished)
        if self.steps_per_epoch and finished:
            epoch, batch = divmod(finished - 1, self.steps_per_epoch)
            batch += 1
        sample, sample_in_epoch = _product(finished, self.samples_per_step), _product(batch, self.samples_per_step)
        return Moment(
            epoch,
            finished,
            batch,
            sample,
            sample_in_epoch,
            _product(sample, self.tokens_per_sample),
            _product(sample_in_epoch, self.tokens_per_sample),
        )


def _product(count: int | None, each: int | None) -> int | None:
    return None if count is None or each is None else count * each


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


def coordinate_of(rank: int, shape: Sequence[int], world_size: int) -> tuple[int, ...] | None:
    """Return the position of `rank` in a mesh that ranks fill in row-major order; None for a single process.

    An empty shape is a mesh of one dimension over all ranks.
    """
    sizes = tuple(shape) or (world_size,)
    if math.prod(sizes) == 1 and world_size == 1:
        return None
    if math.prod(sizes) == 1:
        sizes = (world_size,)  # ranks are independent: only the rank number distinguishes them
    place: list[int] = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        place.insert(0, index)
    return tuple(place)


def trace_path(naming: Naming, place: TracePlace, window: TraceWindow, filename: str) -> PurePosixPath:
    """Return the path of an uncompressed trace below the trace folder."""
    match naming:
        case Naming.mesh:
            where = "-".join(map(str, place.coordinate)) if place.coordinate else ""
            name = f"rank-{place.rank}-coord-{where}-trace.json" if where else "trace.json"
            return PurePosixPath(f"step_{window.finished}", name)
        case Naming.rank_iter:
            first = window.finished if window.first_step is None else window.first_step + 1
            last = window.finished if window.last_step is None else window.last_step + 1
            return PurePosixPath(f"rank{place.rank}_iter{first}_{last}.json")
        case Naming.template:
            return PurePosixPath(fill(filename, template_values(place, window.moment)))
        case Naming.tensorboard:
            name = f"{place.host}_{place.pid}.{time.time_ns()}.pt.trace.json"
            return PurePosixPath(f"rank{place.rank}", name)


def snapshot_name(place: TracePlace, tag: str) -> str:
    """Name a memory snapshot: `oom-rank-3-dp1-tp1.snapshot.pickle`; `coord-1-1` where the mesh has no names."""
    where = ""
    if place.coordinate and len(place.dimensions) == len(place.coordinate):
        where = "".join(f"-{name}{index}" for name, index in zip(place.dimensions, place.coordinate, strict=True))
    elif place.coordinate:
        where = "-coord-" + "-".join(map(str, place.coordinate))
    return f"{tag}-rank-{place.rank}{where}.snapshot.pickle"


def template_values(place: TracePlace, moment: Moment) -> Mapping[str, Any]:
    """Return the variables available in file templates; those of the moment that are not known are left out."""
    known = {name: value for name in Moment.__dataclass_fields__ if (value := getattr(moment, name)) is not None}
    return place.variables() | known


def compressed(path: PurePosixPath, compression: str) -> PurePosixPath:
    """Return the name with the suffix of its compression, unless it already has it."""
    name = path.name
    if compression == "gz" and not name.endswith(".gz"):
        name += ".gz"
    elif compression == "tar.gz" and not name.endswith(".tar.gz"):
        name = name.removesuffix(".gz").removesuffix(".json") + ".tar.gz"
    return path.with_name(name)


def chrome_name(trace_filename: str, window: TraceWindow, *, only_one: bool) -> str:
    """Name the Chrome trace, with `_step<N>` (finished steps) unless the run has a single window of one step."""
    if only_one:
        return trace_filename
    stem, dot, suffixes = trace_filename.partition(".")
    return f"{stem}_step{window.finished}{dot}{suffixes}"
