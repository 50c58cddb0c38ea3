"""Defines the frames into which every source is read before anything is computed: steps, collectives, spans.

A frame has columns of equal length, each a numpy array whose dtype and unit are declared once, below. What is not
declared is refused. A reader makes the frames of one rank; `join` puts those of all ranks under one another, by
rank, then step, and every metric, comparison and picture reads them and never asks what the source was.

    steps.metrics["exposed_comm_ms"]            # float64, one element a step, NaN where it is null
    collectives.end_ns - collectives.start_ns
    collectives.step                            # the row of `steps` each belongs to

Words are codes into a table of the frame. What a source does not state is None (or `NO_TIME`, `UNKNOWN`, NaN inside a
column). `Groups` groups rows by equal keys with one sort:

    by = Groups(group, seq)
    by.reduce(np.add, length_ns)          # one value a group
    length_ns - by.reduce(np.minimum, length_ns)[by.of_row]

Must not: hold a Python object a row, invent a value, or load pandas (processes that only read load this).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from aorta.documents.metrics import MADE_OF_OTHERS
from aorta.records.schema import Coverage, Phase
from aorta.timeline.classes import KINDS

Ints: TypeAlias = npt.NDArray[np.int64]
Codes: TypeAlias = npt.NDArray[Any]
"""Integers of fewer bits: rows of another frame, or words of a table."""
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Rows: TypeAlias = slice | npt.NDArray[Any]

NO_TIME: Final = -(2**63)
"""In a column of times: not observed."""
UNKNOWN: Final = -1
"""In a column of codes, identifiers or sizes: the source does not say."""
UNNUMBERED: Final = -2
"""-2 and below: the source does not number the collective, which matches no other rank's."""
LOSSES: Final = ("loss", "lr", "grad_norm")
"""Numbers of a step that the record has beside its metrics: columns of `Steps` and of `aorta.analysis.steps`."""
KIND_METRICS: Final = frozenset(
    name for kind in KINDS for name in (f"{kind}_ms", f"compute_{kind}_ms", f"exposed_{kind}_ms")
)
KINDS_KNOWN: Final = ("comm_ms", "allreduce_ms")
"""Where one of these is null, so is a kind that a step does not mention; the second is present in every step."""
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
"""Phases of a run."""


def column(dtype: npt.DTypeLike, unit: str = "", **default: Any) -> Any:
    """Declare a column of a frame, with its unit; with `default=None` one that a frame may lack."""
    return field(metadata={"dtype": np.dtype(dtype), "unit": unit}, **default)


_DECLARED: Final[dict[type, dict[str, np.dtype[Any]]]] = {}


def declared(frame: type[Frame]) -> dict[str, np.dtype[Any]]:
    """Return the declared columns of a type of frames: name -> dtype."""
    if frame not in _DECLARED:
        _DECLARED[frame] = {
            field_.name: field_.metadata["dtype"] for field_ in fields(frame) if "dtype" in field_.metadata
        }
    return _DECLARED[frame]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Columns of equal length.

    Raises:
        TypeError: a column is not declared, or one that has to be there is missing.
        ValueError: the columns differ in length, or a value does not fit the declared dtype.
    """

    def __post_init__(self) -> None:
        lengths = {}
        for name, dtype in declared(type(self)).items():
            values = getattr(self, name)
            if values is None:
                continue
            if values.dtype != dtype:
                if len(values) and not np.array_equal(converted := values.astype(dtype), values):
                    raise ValueError(
                        f"{type(self).__name__}.{name}: {values.dtype} does not fit {dtype} ({converted[0]})"
                    )
                object.__setattr__(self, name, values.astype(dtype))
            lengths[name] = len(values)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{type(self).__name__}: columns of different lengths: {lengths}")

    def __len__(self) -> int:
        return len(getattr(self, next(iter(declared(type(self))))))

    def take(self, rows: Rows) -> Self:
        """Return some rows: a view for a slice, a copy for indices or a mask."""
        columns = {name: values[rows] for name in declared(type(self)) if (values := getattr(self, name)) is not None}
        return replace(self, **columns)


def of_unused_kind(witnesses: Sequence[Floats]) -> Floats:
    """Return milliseconds of a kind that steps do not mention: 0, because it was not used; NaN where one of
    `witnesses`, the columns of `KINDS_KNOWN` that there are, is null.
    """
    return np.where(np.isnan(witnesses).any(axis=0), np.nan, 0.0)


def metric_columns(
    count: int, alike: Iterable[tuple[Sequence[str], Ints, Floats]], least: Mapping[str, Floats]
) -> dict[str, Floats]:
    """Return metric -> a value of each of `count` steps, NaN where it is null.

    Args:
        alike: steps that mention the same metrics: which metrics, which steps, and their values, a row a step.
        least: metric -> at least what it is in each step, where it is null as its bounds are apart: then all
            collectives were seen, and kinds that were not used are 0 all the same.
    """
    alike = list(alike)
    names = dict.fromkeys(name for names, *_ in alike for name in names)
    table = {name: np.full(count, np.nan) for name in names}
    for metrics, indices, values in alike:
        for column, name in zip(values.T, metrics, strict=True):
            table[name][indices] = column
        if "comm_ms" in metrics:
            seen = []
            for witness in (name for name in KINDS_KNOWN if name in metrics):
                known = table[witness][indices]
                seen.append(np.where(np.isnan(known), least[witness][indices], known) if witness in least else known)
            for name in names.keys() & KIND_METRICS - set(metrics):
                table[name][indices] = of_unused_kind(seen)
    return table


@dataclass(frozen=True, kw_only=True)
class Steps(Frame):
    """Steps by rank, then `global_step`, each once. Those of the isolated baselines stand in a frame of their own, in
    the order in which they ran.

    Attributes:
        start_mono_ns, end_mono_ns: on the rank's own clock.
        t_start_ns, t_end_ns: on the clock that ranks share; for a trace the same as the two above.
        epoch, step: None where the source does not have them.
        phase: index into `PHASES`.
        by_kernels: measured by the profiler's kernels (a calibration).
        drawn: as one of how many steps it was drawn to be observed, 1 where each is; 0 where it was not drawn: it was
            passed over, or observed for another reason (`instrument.every`).
        used: whether aggregates are made of it: after warm-up, drawn, and not slowed by the profiler of a calibration;
            where a rank has no other steps, those of the calibration.
        reason: index into `reasons`, each of which says why metrics of a step are null.
        coverage: index into `coverages`; `UNKNOWN` where the source does not count what was issued.
        losses: name -> value.
        metrics: name -> milliseconds or a ratio, NaN where it is null. A kind of collective that a step does not
            mention was not used in it and is 0, unless kinds are null (`column`).
        bounds: name -> at least and at most, of the steps in which the host set the pace and the metric is null; NaN in
            the others. Without an entry where it never is.
    """

    global_step: Ints = column(np.int64)
    warmup: Bools = column(np.bool_)
    start_mono_ns: Ints = column(np.int64, "ns")
    end_mono_ns: Ints = column(np.int64, "ns")
    t_start_ns: Ints = column(np.int64, "ns")
    t_end_ns: Ints = column(np.int64, "ns")
    reason: Codes = column(np.int32)
    coverage: Codes = column(np.int32, default=None)
    phase: npt.NDArray[np.int8] = column(np.int8, default=None)
    by_kernels: Bools = column(np.bool_, default=None)
    drawn: Ints = column(np.int64, default=None)
    used: Bools = column(np.bool_, default=None)
    epoch: Ints | None = column(np.int64, default=None)
    step: Ints | None = column(np.int64, default=None)
    reasons: tuple[Mapping[str, str], ...] = ()
    coverages: tuple[Coverage, ...] = ()
    losses: Mapping[str, Floats] = field(default_factory=dict)
    metrics: Mapping[str, Floats] = field(default_factory=dict)
    bounds: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("coverage", UNKNOWN), ("phase", 0), ("by_kernels", False), ("drawn", 1)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.full(len(self.global_step), value, declared(Steps)[name]))
        missing: Any = self.used
        if missing is None:
            timed = self.timed
            # `auto` observes each step before it chooses: of its blocks alone the steps are alike likely.
            observed = timed & (self.drawn > 0) & (self.drawn == self.drawn.max(initial=0))
            object.__setattr__(self, "used", observed if observed.any() else timed)
        super().__post_init__()

    def take(self, rows: Rows) -> Self:
        """Return some rows, with all that belongs to them."""
        return replace(
            super().take(rows),
            losses={name: values[rows] for name, values in self.losses.items()},
            metrics={name: values[rows] for name, values in self.metrics.items()},
            bounds={name: (low[rows], high[rows]) for name, (low, high) in self.bounds.items()},
        )

    @property
    def timed(self) -> Bools:
        """Whether its length is one of training: what `used` says, of the steps that were passed over as well."""
        if self.used is not None and (self.drawn == 1).all():
            return self.used
        own: Bools = ~self.warmup & ~self.by_kernels
        return own if own.any() else ~self.warmup

    @property
    def sampled(self) -> bool:
        """Whether steps were passed over."""
        return bool((self.drawn[~self.warmup] != 1).any())

    @property
    def length_ns(self) -> Ints:
        """Duration of each step."""
        return self.end_mono_ns - self.start_mono_ns

    def column(self, name: str) -> Floats:
        """Return a metric or a loss; all NaN where no step has it. A kind that was never used is 0 where kinds are
        known; a metric that is made of others is computed.
        """
        for table in (self.metrics, self.losses):
            if name in table:
                return table[name]
        if (made := MADE_OF_OTHERS.get(name)) is not None and made.formula is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = made.formula(*map(self.column, made.parts))
            return np.where(np.isfinite(values), values, np.nan)
        if name in KIND_METRICS and "comm_ms" in self.metrics:
            return of_unused_kind([self._seen(witness) for witness in KINDS_KNOWN if witness in self.metrics])
        return np.full(len(self), np.nan)

    def ends(self, name: str) -> tuple[Floats, Floats]:
        """Return at least and at most of a metric; NaN where nothing is left open."""
        bounds = self.bounds.get(name)
        return (np.full(len(self), np.nan), np.full(len(self), np.nan)) if bounds is None else bounds

    def _seen(self, name: str) -> Floats:
        """Return a metric, and at least what it is where marks leave it open: all collectives were seen there, too."""
        by_marks = np.array(
            [reasons.get(name, "").startswith("host-bound") for reasons in self.reasons] or [False], bool
        )
        return np.where(by_marks[self.reason], self.ends(name)[0], self.metrics[name])


@dataclass(frozen=True, kw_only=True)
class InSteps(Frame):
    """Rows that belong to steps, by `step`, the row of the `Steps` beside them."""

    step: Codes = column(np.int32)

    def rows_of(self, first: int, last: int) -> slice:
        """Return the rows of the steps `first` to `last` (exclusive)."""
        low, high = np.searchsorted(self.step, [first, last])
        return slice(int(low), int(high))

    def of_step(self, step: int) -> Self:
        """Return what belongs to one step."""
        return self.take(self.rows_of(step, step + 1))


class CollectiveName(NamedTuple):
    """Facts that many collectives share: what it is, and how its end was observed. Few of them differ in a run, so rows
    hold an index. `bytes` is `UNKNOWN` where the source does not say.
    """

    kind: str
    group: str
    bytes: int
    dtype: str | None
    end_source: str | None


@dataclass(frozen=True, kw_only=True)
class Collectives(InSteps):
    """Collectives by rank, then step, then order of issue.

    Attributes:
        name: index into `names`.
        seq: sequence number in its group, the same on all ranks; `UNNUMBERED` and below where the source does not
            number it.
        issue_ns, start_ns, end_ns: from the start of its step on this rank; `NO_TIME` where it was not observed.
        backend_end_ns: the backend's own end of those that the emulated fabric ended, otherwise `NO_TIME`; None where
            the source never has it.
    """

    name: Codes = column(np.int32)
    seq: Ints = column(np.int64)
    issue_ns: Ints = column(np.int64, "ns")
    start_ns: Ints = column(np.int64, "ns")
    end_ns: Ints = column(np.int64, "ns")
    backend_end_ns: Ints | None = column(np.int64, "ns", default=None)
    names: tuple[CollectiveName, ...] = ()

    @property
    def timed(self) -> Bools:
        """Whether both start and end were seen."""
        both_seen: Bools = (self.start_ns != NO_TIME) & (self.end_ns != NO_TIME)
        return both_seen


class Lane(IntEnum):
    """What a span is: a pass of a block; work outside the blocks; a stall of what computes, or one in which the backend
    took a collective over; a bubble of a pipeline; a wait for a collective; a copy from the device to the host, and
    any other; a range that the loop named (`recording.range`) on the thread that trains.
    """

    COMPUTE = 0
    AUX = 1
    STALL = 2
    HAND_OVER = 3
    BUBBLE = 4
    WAIT = 5
    COPY_TO_HOST = 6
    COPY = 7
    RANGE = 8


class Region(NamedTuple):
    """A region of a step: a pass (`forward`, `backward`) of a block, or work outside the blocks (`optimizer`, `clip`,
    `data`), where `block` is None. Both are None where the source does not say.
    """

    phase: str | None
    block: str | None


NOWHERE: Final = Region(None, None)
COPY_TO_HOST: Final = "copy to the host"
"""Name of the spans of `Lane.COPY_TO_HOST`."""


class SpanName(NamedTuple):
    """What a span is of. `lane` is the name of its `Lane` in small letters; `name` is the block, the work, the range,
    or the group waited for; `phase` the pass of a block.
    """

    lane: str
    name: str
    phase: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.phase}".strip()

    @property
    def region(self) -> Region:
        """Where in its step it is, of computation or other work; `NOWHERE` in a trace, which has no blocks."""
        if not self.name and not self.phase:
            return NOWHERE
        return Region(self.phase, self.name) if self.lane == "compute" else Region(self.name, None)


@dataclass(frozen=True, kw_only=True)
class Spans(InSteps):
    """What ran when inside the steps of one rank, by step; within it in the order of `Lane`, then of the source.

    Attributes:
        name: index into `names`.
        start_ns, end_ns: from the start of the step.
        ref: sequence number of the collective waited for; `UNKNOWN` without one.
        waits_known: for each step, whether the source tells who waited for what.
    """

    lane: npt.NDArray[np.int8] = column(np.int8)
    name: Codes = column(np.int32)
    start_ns: Ints = column(np.int64, "ns")
    end_ns: Ints = column(np.int64, "ns")
    ref: Ints = column(np.int64)
    names: tuple[SpanName, ...] = ()
    waits_known: Bools | None = None

    def of_lanes(self, *lanes: Lane) -> Self:
        """Return the spans of some lanes."""
        return self.take(np.isin(self.lane, lanes))


class Numbered(dict[Any, int]):
    """Numbers distinct keys in order of appearance."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class SpanRows:
    """Collects spans into a frame, lane by lane."""

    def __init__(self) -> None:
        self._names = Numbered()
        self._parts: list[tuple[npt.NDArray[Any], ...]] = []

    def add(
        self,
        lane: Lane,
        step: npt.NDArray[Any],
        names: Iterable[tuple[str, str, str]] | SpanName,
        start_ns: Sequence[int] | Ints,
        end_ns: Sequence[int] | Ints,
        ref: Sequence[int] | Ints | None = None,
    ) -> None:
        """Add rows; `names` are the fields of `SpanName` of each, or the name of all."""
        if not len(step):
            return
        if isinstance(names, SpanName):
            name = np.full(len(step), self._names[names])
        else:
            name = np.fromiter(map(self._names.__getitem__, names), np.int32, len(step))
        refs = np.full(len(step), UNKNOWN) if ref is None else np.array(ref, np.int64)
        self._parts.append(
            (step, np.full(len(step), lane, np.int8), name, np.asarray(start_ns), np.asarray(end_ns), refs)
        )

    def frame(self, waits_known: Bools | None = None) -> Spans:
        """Return the frame."""
        columns = [np.concatenate(parts) for parts in zip(*self._parts, strict=True)] or [np.empty(0, np.int64)] * 6
        order = np.lexsort((columns[1], columns[0]))
        return Spans(
            **{name: values[order] for name, values in zip(declared(Spans), columns, strict=True)},
            names=tuple(SpanName(*name) for name in self._names),
            waits_known=waits_known,
        )


@dataclass(frozen=True, kw_only=True)
class Exposed(Frame):
    """Exposed communication in pieces, of the steps that aggregates use: which collective, and where in its step.

    Attributes:
        row: of the `Collectives` beside it.
        region: index into `regions`.
        order: number of the collective among those of its step, kind and group.
        from_ns, to_ns: after the start of the collective.
        bubble: in a bubble of a pipeline.
    """

    row: Codes = column(np.int32)
    region: Codes = column(np.int32)
    order: npt.NDArray[np.int16] = column(np.int16)
    from_ns: Ints = column(np.int64, "ns")
    to_ns: Ints = column(np.int64, "ns")
    bubble: Bools = column(np.bool_)
    regions: tuple[Region, ...] = ()


_MAX: Final = np.iinfo(np.int64).max


class Groups:
    """Rows whose keys are all equal form a group; groups are in the order of their keys, rows of one in theirs.

    Args:
        keys: columns of integers, the most significant first.

    Attributes:
        order: indices of rows, group by group; group `i` begins at `order[starts[i]]`.
        starts, sizes: of each group.
        first: the first row of each group.
    """

    def __init__(self, *keys: npt.NDArray[Any]) -> None:
        key = joined(keys)
        self.order = np.argsort(key, kind="stable")
        key = key[self.order]
        self.starts = np.flatnonzero(np.append(True, key[1:] != key[:-1])[: len(key)])
        self.sizes = np.diff(self.starts, append=len(key))
        self.first = self.order[self.starts]

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def number(self) -> Ints:
        """The group of each row, in the order of `order`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @cached_property
    def of_row(self) -> Ints:
        """The group of each row."""
        return self._by_row(self.number)

    @cached_property
    def position(self) -> Ints:
        """The place of each row in its group, from 0."""
        return self._by_row(np.arange(len(self.order)) - self.starts[self.number])

    def _by_row(self, values: Ints) -> Ints:
        by_row = np.empty(len(self.order), np.int64)
        by_row[self.order] = values
        return by_row

    @property
    def rows(self) -> list[Ints]:
        """The rows of each group."""
        return self.parts(np.arange(len(self.order)))

    def reduce(self, operation: np.ufunc, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Reduce the values of each group to one."""
        return operation.reduceat(values[self.order], self.starts) if len(self) else values[:0]

    def distinct(self, values: npt.NDArray[Any]) -> Ints:
        """Return how many different values each group has; the rows of one must be in the order of their values."""
        fresh = np.append(True, np.diff(values[self.order]) != 0)[: len(self.order)]
        fresh[self.starts] = True
        return np.add.reduceat(fresh.astype(np.int64), self.starts) if len(self) else self.starts

    def parts(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the values of each group."""
        return np.split(values[self.order], self.starts[1:]) if len(self) else []


def joined(parts: tuple[npt.NDArray[Any], ...]) -> Ints:
    """Return one number per row that is equal exactly where all parts are equal, and ordered as they are: the parts as
    digits, compacted where they would overflow.
    """
    key, span = np.zeros(len(parts[0]), np.int64), 1
    if not len(key):
        return key
    for part in parts:
        low = int(part.min())
        digits, width = part.astype(np.int64) - low, int(part.max()) - low + 1
        if width > _MAX:
            _, digits = np.unique(part, return_inverse=True)
            width = int(digits.max()) + 1
        if span * width > _MAX:
            _, key = np.unique(key, return_inverse=True)
            span = int(key.max()) + 1
        if span * width > _MAX:
            _, digits = np.unique(digits, return_inverse=True)
            width = int(digits.max()) + 1
        key, span = key * width + digits, span * width
    return key
