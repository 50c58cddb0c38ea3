"""Reads the first AORTA's `rank_<rank>_metrics.jsonl` (2025) into a `Trace`.

A line is an iteration: `rank`, `world_size`, `epoch`, `step`, `global_step`, `loss`, `grad_norm`, `lr`, on AMD devices
`rocm_smi_output` and its like, and `profile` with `total_ms`, `ranges` (stream, tag, `start_ms`, `end_ms` from the
iteration's start, as floats), `markers` and `overlap`. What it could not measure is null:

- It ended a collective's range when the collective had been *issued* (W1), and saw only calls from Python, none of
  DDP's or FSDP's. So every metric that rests on communication is null; the ranges stay in the table.
- Its compute ranges span whole passes, including waits for collectives (W6): `compute_ms` is an upper bound.
- It wrote no absolute time. Iterations are laid end to end, so nothing between two of them can be seen.

Its own `overlap` loses time where ranges of one stream nest (W7), and counts idle time only between ranges (W9), so
metrics are measured again from the ranges. What its users knew as the ratio stands beside them under a name of its own
(`overlap_ratio_as_recorded_2025`). Must not: use that `overlap` for anything else.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict
from typing import IO, Annotated, Final, TypeAlias

import msgspec
import numpy as np

from aorta.analysis.load.interval_table import (
    KIND_CODE,
    NULL,
    Interner,
    IntervalClass,
    ReportedSteps,
    Trace,
    intervals,
    windows,
)
from aorta.analysis.load.kernel_classifier import kind_of
from aorta.analysis.metrics import RECORDED_2025
from aorta.analysis.tables import LOSSES
from aorta.errors import InputError
from aorta.records.device_values import read_words
from aorta.records.schema import DeviceSample

FORMAT: Final = "aorta-2025"
UNSEEN: Final = (
    "the first AORTA recorded when a collective was issued, not when it ended (W1), and saw none of DDP's or FSDP's"
)
_NOTES: Final = (
    UNSEEN,
    "compute ranges of the first AORTA span whole passes, waits included (W6): compute_ms is an upper bound",
    "no absolute times: iterations are laid end to end, and this source cannot be aligned with another one",
    f"{RECORDED_2025} is the ratio that the first AORTA wrote, of launch times (W1): shown, never compared",
)
_NO_RATIO: Final = "the iteration has no overlap, or no time of computation, of the first AORTA's own"
_LONGEST_LINE: Final = 256 << 20
_LONGEST_MS: Final = 30 * 24 * 3_600_000.0
"""30 days: longer than any iteration, and far below what 64-bit nanoseconds hold."""
_RESOLUTION_NS: Final = 500
"""`Event.elapsed_time` of CUDA and HIP resolves about 0.5 us (CUDA Runtime API, event management)."""
Int: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Ms: TypeAlias = Annotated[float, msgspec.Meta(ge=-_LONGEST_MS, le=_LONGEST_MS)]
Value: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""Any diverged 32-bit value fits; a sum of a hundred million of them is finite."""


class _Metadata(msgspec.Struct, gc=False):
    function: str = ""


class _Range(msgspec.Struct, gc=False):
    stream: str
    start_ms: Ms
    end_ms: Ms
    tag: str = ""
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _Overlap(msgspec.Struct, gc=False):
    per_stream_ms: dict[str, Ms | None] = {}
    overlap_ms: dict[str, Ms | None] = {}


class _Profile(msgspec.Struct, gc=False):
    total_ms: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_MS)]
    ranges: list[_Range]
    overlap: _Overlap | None = None


class _Line(msgspec.Struct, gc=False):
    rank: Int
    global_step: Int
    profile: _Profile
    world_size: Int | None = None
    epoch: Int | None = None
    step: Int | None = None
    loss: Value | None = None
    lr: Value | None = None
    grad_norm: Value | None = None
    rocm_smi_output: str | None = None
    rocm_smi_exit_code: int | None = None
    rocm_smi_stderr: str | None = None
    rocm_smi_error: str | None = None


_DECODER: Final = msgspec.json.Decoder(_Line)


def read_aorta_2025(stream: IO[bytes], path: str) -> Trace:
    """Read one rank.

    Raises:
        InputError: a line does not have this format; names file and line. A last line that was cut off when its process
            ended is left out, with a note.
    """
    rows, steps = array("q"), array("q")
    names, streams = Interner(), Interner()
    ranks: set[int] = set()
    worlds: set[int] = set()
    notes = list(_NOTES)
    stated = _ReportedColumns()
    known: set[int] = set()
    beyond = base = number = repeated = 0
    while text := stream.readline(_LONGEST_LINE):
        number += 1
        if not text.strip():
            continue
        if not text.endswith(b"\n") and number > 1:
            notes.append(f"{path}:{number}: cut off in mid-line; ignored")
            break
        line = _decoded(path, number, text)
        ranks.add(line.rank)
        if line.global_step in known:
            repeated += 1
            continue
        known.add(line.global_step)
        worlds.update(() if line.world_size is None else (line.world_size,))
        total = _ns(line.profile.total_ms)
        stated.add(line, base, base + total)
        for each in line.profile.ranges:
            start, end = _ns(each.start_ms), _ns(each.end_ms)
            inside = (min(max(start, 0), total), min(max(end, 0), total))
            beyond += inside != (start, end)
            cls, kind = _meaning(each)
            ends = (base + inside[0], base + inside[1])
            rows.extend((*ends, streams(each.stream), cls, kind, names(each.tag), line.global_step))
        steps.extend((line.global_step, base, base + total))
        base += total
    if len(ranks) != 1:
        raise InputError(
            f"{path}: lines of {len(ranks)} ranks; one file holds one rank" if ranks else f"{path}: no iterations in it"
        )
    (rank,) = ranks
    if repeated:
        notes.append(f"{path}: {repeated} iteration(s) repeat a global step; the first of each is used")
    if beyond:
        notes.append(f"{path}: {beyond} range(s) reach beyond their iteration; cut off there")
    start_ns, end_ns, stream_codes, cls_codes, kinds, name_codes, step = np.array(rows, np.int64).reshape(-1, 7).T
    return Trace(
        path=path,
        format=FORMAT,
        clock="unknown",
        intervals=intervals(
            start_ns=start_ns,
            end_ns=end_ns,
            rank=rank,
            stream=stream_codes,
            cls=cls_codes,
            kind=kinds,
            name=name_codes,
            step=step,
            names=names.strings,
        ),
        windows=windows(rank, *np.array(steps, np.int64).reshape(-1, 3).T),
        ranks=(rank,),
        world_size=worlds.pop() if len(worlds) == 1 else None,
        backend="nccl",
        notes=tuple(notes),
        copies_observed=False,
        unseen=UNSEEN,
        end_source="launch",
        aux_observed=True,
        stated=stated.columns(),
    )


class _ReportedColumns:
    """Collects what each iteration reports of itself."""

    def __init__(self) -> None:
        self._rows: list[tuple[float | None, ...]] = []
        self._samples: list[tuple[DeviceSample, str | None]] = []

    def add(self, line: _Line, start_ns: int, end_ns: int) -> None:
        """Add one iteration, laid out from `start_ns` to `end_ns`."""
        losses = (getattr(line, name) for name in LOSSES)
        self._rows.append((line.epoch, line.step, _recorded_ratio(line.profile.overlap), *losses))
        if line.rocm_smi_output is not None or line.rocm_smi_error is not None:
            self._samples.append(_sample(line, start_ns, end_ns))

    def columns(self) -> ReportedSteps:
        """Return the columns of everything added."""
        epoch, step, ratio, *losses = np.array(self._rows, np.float64).reshape(-1, 3 + len(LOSSES)).T
        return ReportedSteps(
            epoch=None if np.isnan(epoch).any() else epoch.astype(np.int64),
            step=None if np.isnan(step).any() else step.astype(np.int64),
            losses=dict(zip(LOSSES, losses, strict=True)),
            metrics={RECORDED_2025: ratio},
            why_null={RECORDED_2025: _NO_RATIO},
            samples=tuple(self._samples),
            samples_from="rocm-smi",
        )


def _recorded_ratio(overlap: _Overlap | None) -> float | None:
    """Return what the first AORTA's report called the overlap ratio, for one iteration: communication that coincides
    with computation, over computation. Null where the computation is shorter than what its events resolve.
    """
    hidden = None if overlap is None else overlap.overlap_ms.get("compute_comm")
    compute = None if overlap is None else overlap.per_stream_ms.get("compute")
    if hidden is None or not compute or compute < _RESOLUTION_NS / 1e6:
        return None
    return hidden / compute


def _sample(line: _Line, start_ns: int, end_ns: int) -> tuple[DeviceSample, str | None]:
    """Return what rocm-smi printed in one iteration. It has no time of its own, so it stands for the whole iteration;
    where it lists several cards, the one of the rank's number is the rank's if there are as many ranks (one node).
    """
    values, reason = read_words(
        line.rocm_smi_output or "",
        line.rank,
        line.world_size,
        exit_code=line.rocm_smi_exit_code or 0,
        stderr=line.rocm_smi_stderr or "",
        error=line.rocm_smi_error,
    )
    return DeviceSample(start_ns, end_ns, **asdict(values)), reason


def _decoded(path: str, number: int, text: bytes) -> _Line:
    if len(text) == _LONGEST_LINE:
        raise InputError(f"{path}:{number}: a line of more than {_LONGEST_LINE} bytes: no record of AORTA")
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}:{number}: not an iteration of the first AORTA: {error}") from error


def _meaning(each: _Range) -> tuple[int, int]:
    """Return the class and kind of a range. All-gathers ran on the stream `aux`; the name of their function identifies
    them (W8).
    """
    if each.stream == "compute":
        return IntervalClass.COMPUTE, NULL
    kind = KIND_CODE.get(each.stream, NULL)
    if kind == NULL and each.metadata.function:
        kind = kind_of(each.metadata.function)
    return (IntervalClass.AUX, NULL) if kind == NULL else (IntervalClass.COMM, kind)


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1_000_000)
