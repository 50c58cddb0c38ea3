"""What is decoded of a Kineto trace: of an event and its arguments, and of what surrounds the events (`metadata_of`:
where it ran, and the base of its times). Everything else is skipped without being decoded. What is kept of the events
of one kind are columns (`Rows`).

Types are wide where traces differ (thread ids are numbers or text), so that one odd value does not make a trace
unreadable.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from itertools import compress, count
from typing import Any, Final, TypeAlias, TypeVar, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load import microseconds
from aorta.analysis.load.interval_table import NULL
from aorta.errors import InputError
from aorta.timeline.arrays import Int64

Number: TypeAlias = int | float | str | None
Decoded = TypeVar("Decoded")


class _Timed(msgspec.Struct, gc=False):
    ph: str | None = None
    name: str | int | float | None = None
    ts: Number = None
    dur: Number = None
    pid: Number = None
    tid: Number = None
    args: msgspec.Raw = msgspec.Raw(b"null")


class _Digits(msgspec.Struct, gc=False):
    ph: str | None = None
    name: str | int | float | None = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"null")
    pid: Number = None
    tid: Number = None
    args: msgspec.Raw = msgspec.Raw(b"null")


class _Call(msgspec.Struct, gc=False):
    ph: str | None = None
    name: str | int | float | None = None
    ts: Number = None
    args: msgspec.Raw = msgspec.Raw(b"null")


class _DigitCall(msgspec.Struct, gc=False):
    ph: str | None = None
    name: str | int | float | None = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    args: msgspec.Raw = msgspec.Raw(b"null")


class Untimed(msgspec.Struct, gc=False):
    """The members of an operator that are read beside a device's rows."""

    ph: str | None = None
    name: str | int | float | None = None
    args: msgspec.Raw = msgspec.Raw(b"null")


class _Skipped(msgspec.Struct, gc=False):
    pass


class Event(_Timed, gc=False):
    """The members of an event that are read, with times as int or float64."""

    cat: str | None = None


class DigitEvent(_Digits, gc=False):
    """The same with the digits of its times preserved, for times that float64 cannot represent."""

    cat: str | None = None


PARAMETERS: Final = "record_param_comms"
"""The host's range that has the parameters of a collective."""
KERNELS: Final = frozenset({"kernel", "Kernel"})
COPIES: Final = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset", "gpu_memcpy_p2p"})
DEVICE: Final = KERNELS | COPIES
"""Categories of work on a device; old traces capitalise them."""
OPERATORS: Final = frozenset({"cpu_op", "Operator"})
HOST: Final = OPERATORS | {"user_annotation", "collective_comm"}
"""`gpu_user_annotation` is not among them: it is a copy, on the device's row, of a range of the host. It carries a
stream, but is no work (W13).
"""
CALLS: Final = frozenset({"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime"})
"""Calls of the host that launch kernels and copies, which have the same `correlation`."""
_OTHERS: Final = (
    *("ac2g", "fwdbwd", "gpu_user_annotation", "python_function", "cpu_instant_event", "overhead", "Trace"),
    *("cuda_sync", "cuda_profiler_range"),
    *("xpu_runtime", "xpu_driver", "mtia_runtime", "privateuse1_runtime", "privateuse1_driver"),
)
"""Categories that make up most of a trace and are never read. One that is missing here costs time, and nothing else."""


def _by_category(
    base: type[msgspec.Struct], call: type[msgspec.Struct], operator: type[msgspec.Struct]
) -> msgspec.json.Decoder[list[Any]]:
    read = [_of_category(category, base) for category in sorted((DEVICE | HOST) - OPERATORS)]
    read += [_of_category(category, operator) for category in sorted(OPERATORS)]
    read += [_of_category(category, call) for category in sorted(CALLS)]
    skipped = [_of_category(category, _Skipped) for category in _OTHERS]
    return msgspec.json.Decoder(list[Union[tuple(read + skipped)]])  # type: ignore[misc]  # noqa: UP007


def _of_category(category: str, base: type[msgspec.Struct]) -> type[msgspec.Struct]:
    name, constants = f"{base.__name__}_{category}", {"cat": category}
    return msgspec.defstruct(name, [], bases=(base,), namespace=constants, tag_field="cat", tag=category, gc=False)


DIGIT_EVENTS: Final = msgspec.json.Decoder(list[DigitEvent])
_WHOLE: Final[dict[bool, msgspec.json.Decoder[Any]]] = {False: msgspec.json.Decoder(list[Event]), True: DIGIT_EVENTS}
_BY_CATEGORY: Final = {
    (False, False): _by_category(_Timed, _Call, Untimed),
    (False, True): _by_category(_Timed, _Call, _Timed),
    (True, False): _by_category(_Digits, _DigitCall, Untimed),
    (True, True): _by_category(_Digits, _DigitCall, _Digits),
}
"""Decode the same events faster, by whether digits are preserved and whether operators have times: events of other
categories are skipped without being decoded. These decoders refuse an unknown category, and an event without one.
"""
_REFUSALS: Final = 4
"""Number of pieces that may fail to decode by category before this is given up; the first and the last piece of a trace
may hold events of unknown categories.
"""
Piece: TypeAlias = "list[Event] | list[DigitEvent]"
Times: TypeAlias = tuple[Int64, Int64, NDArray[np.bool_]]
"""Starts, lengths, and which events have both."""


class EventDecoder:
    """Decodes pieces of the event array, by category where that is possible.

    Attributes:
        exact: whether the digits of times are preserved, because float64 loses some of this trace.
    """

    def __init__(self) -> None:
        self.exact = False
        self._refused = 0

    def decode(self, text: bytes | memoryview, timed_operators: bool = True) -> Piece:
        """Decode one piece. Without `timed_operators` an operator may lack everything but its name and arguments."""
        if self._refused < _REFUSALS:
            try:
                return _BY_CATEGORY[self.exact, timed_operators].decode(text)
            except msgspec.ValidationError:
                self._refused += 1
        events: Piece = _WHOLE[self.exact].decode(text)
        return events

    def instants(self, values: Sequence[Any]) -> tuple[Int64, NDArray[np.bool_]] | None:
        """Return nanoseconds, and which of them are known; None where decoding lost digits of one."""
        return microseconds.of_texts(values) if self.exact else microseconds.of_numbers(values)

    def times(self, events: Sequence[Any]) -> Times | None:
        """Return times of events; None where decoding lost digits of one."""
        begun = self.instants([event.ts for event in events])
        lasted = self.instants([event.dur for event in events])
        if begun is None or lasted is None:
            return None
        return begun[0], lasted[0], begun[1] & lasted[1]


def chosen(events: Sequence[Any], values: Sequence[Any], wanted: Set[Any]) -> list[Any]:
    """Return the events whose value is wanted. No Python is run for each of them: a trace has millions."""
    return list(compress(events, map(wanted.__contains__, values))) if wanted else []


def where(values: Sequence[Any], wanted: Set[Any]) -> list[int]:
    """Return the indices of the values that are wanted."""
    return list(compress(count(), map(wanted.__contains__, values))) if wanted else []


def usable(events: list[Any], times: Times, counters: Counter[str]) -> tuple[list[Any], Int64, Int64]:
    """Return the events with usable times, with their starts and lengths in ns. The others are counted (W16)."""
    start, length, known = times
    backwards = known & (length < 0)
    counters["without_times"] += int((~known).sum())
    counters["negative_duration"] += int(backwards.sum())
    keep = known & ~backwards
    if not keep.all():
        events = list(compress(events, keep.tolist()))
        start, length = start[keep], length[keep]
    return events, start, length


class Rows:
    """Rows of one kind, by column; times, ends included, in ns since the trace's base.

    Args:
        names: of the columns beside times; each is an attribute.
    """

    def __init__(self, *names: str) -> None:
        self._starts: list[Int64] = []
        self._lengths: list[Int64] = []
        self._columns: dict[str, list[Int64]] = {name: [] for name in names}
        self.count = 0

    def add(self, start: Int64, length: Int64, **columns: Sequence[int] | Int64) -> None:
        """Append rows. A column that is left out must be left out of every call."""
        self._starts.append(start)
        self._lengths.append(length)
        for name, values in columns.items():
            self._columns[name].append(np.asarray(values, np.int64))
        self.count += len(start)

    def forget(self, name: str) -> None:
        """Make a column unknown in every row."""
        self._columns[name] = [np.full(self.count, NULL, np.int64)]

    def __getattr__(self, name: str) -> Int64:
        parts = self.__dict__.get("_columns", {}).get(name)
        if parts is None:
            raise AttributeError(name)
        return _joined(parts)

    @property
    def start(self) -> Int64:
        """Return the start of every row."""
        return _joined(self._starts)

    @property
    def end(self) -> Int64:
        """Return the end of every row."""
        return _joined(self._starts) + _joined(self._lengths)


def _joined(parts: list[Int64]) -> Int64:
    if len(parts) > 1:
        parts[:] = [np.concatenate(parts)]
    return parts[0] if parts else np.zeros(0, np.int64)


class Arguments(msgspec.Struct, gc=False):
    """The arguments that are used of a kernel, a copy, `record_param_comms` or a gloo row."""

    external: Number = msgspec.field(default=None, name="External id")
    external_old: Number = msgspec.field(default=None, name="external id")
    device: Number = None
    stream: Number = None
    bytes: Number = None
    collective: str | None = msgspec.field(default=None, name="Collective name")
    elements_in: Number = msgspec.field(default=None, name="In msg nelems")
    elements_out: Number = msgspec.field(default=None, name="Out msg nelems")
    group_size: Number = msgspec.field(default=None, name="Group size")
    dtype: str | None = None
    group: Number = msgspec.field(default=None, name="Process Group Name")
    ranks: str | list[int] | None = msgspec.field(default=None, name="Process Group Ranks")
    seq: Number = msgspec.field(default=None, name="Seq")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="Input type")


_ARGUMENTS: Final = msgspec.json.Decoder(list[Arguments | None])
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_DIGITS: Final = re.compile(r"\d{1,18}")
_LAST_DIGITS: Final = re.compile(r"(?<!\d)\d{1,9}$")
LARGEST: Final = 2**63
DEVICES: Final = 2**31
"""Larger numbers do not fit into the interval table."""


def arguments_of(texts: Sequence[msgspec.Raw | bytes]) -> list[Arguments]:
    """Decode sets of arguments; empty where they have an unexpected shape."""
    return decoded(_ARGUMENTS, texts, Arguments())


def decoded(
    decoder: msgspec.json.Decoder[Any], texts: Sequence[msgspec.Raw | bytes], nothing: Decoded
) -> list[Decoded]:
    """Decode all texts at once, which is several times as fast; one by one where that fails.

    Args:
        decoder: of a list of what a text holds, or null.
        nothing: in place of texts that are null or malformed.
    """
    try:
        return [each or nothing for each in decoder.decode(b"[%b]" % b",".join(texts))]
    except _MALFORMED:
        return [nothing] if len(texts) == 1 else [decoded(decoder, [text], nothing)[0] for text in texts]


def integer(value: Number) -> int:
    """Return an integer, also from text ("stream 7"); `NULL` for anything else, or beyond 63 bits."""
    if type(value) is int:
        return value if -LARGEST < value < LARGEST else NULL
    if isinstance(value, str):
        digits = _DIGITS.search(value)
        value = int(digits[0]) if digits else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if value is not None and abs(value) < LARGEST else NULL


class Identifiers:
    """Gives devices, streams and threads numbers: ids are opaque keys, whatever their text or size.

    A number below `limit` is its own. Others get the number that their text ends in ("stream 7", "[TP00-PP01] 1") where
    no other id has it, else the next free one. Until `numbers` is asked, when all are known, they have negative codes.
    """

    def __init__(self, limit: int = LARGEST) -> None:
        self._limit = limit
        self._used: set[int] = set()
        self._codes: dict[Number | tuple[Number, ...], int] = {}

    def codes(self, values: Sequence[Any]) -> list[int]:
        """Return a number, or a code below `NULL`, of each id; `NULL` of None."""
        of = {value: self._code(value) for value in dict.fromkeys(values)}
        return list(map(of.__getitem__, values))

    def numbers(self, codes: Int64) -> Int64:
        """Return the numbers of codes."""
        table = np.array([self._number(value) for value in self._codes], np.int64)
        return np.where(codes < NULL, table[np.maximum(NULL - 1 - codes, 0)] if len(table) else codes, codes)

    def names(self) -> dict[int, str]:
        """Return the numbers that ids did not have themselves, with their text."""
        return {number: str(value) for value in self._codes if str(number := self._number(value)) != str(value)}

    def _code(self, value: Number | tuple[Number, ...]) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or value == NULL:
            return NULL
        if type(value) is int and 0 <= value < self._limit:
            self._used.add(value)
            return value
        return NULL - 1 - self._codes.setdefault(value, len(self._codes))

    def _number(self, value: Number | tuple[Number, ...]) -> int:
        known = self._assigned.get(value)
        return known if known is not None else NULL

    @cached_property
    def _assigned(self) -> dict[Number | tuple[Number, ...], int]:
        used, found = set(self._used), {}
        free = count()
        for value in self._codes:
            ends = _LAST_DIGITS.search(value) if isinstance(value, str) else None
            number = int(ends[0]) if ends else NULL
            if number == NULL or number in used or number >= self._limit:
                number = next(each for each in free if each not in used)
            used.add(number)
            found[value] = number
        return found


class DistributedInfo(msgspec.Struct):
    """What torch writes when `torch.distributed` is initialised at the time of the export."""

    backend: str | None = None
    rank: int | None = None
    world_size: int | None = None
    pg_config: object = None


class Metadata(msgspec.Struct):
    """The members that are used; None where a trace does not have one."""

    distributed: DistributedInfo | None = msgspec.field(default=None, name="distributedInfo")
    devices: list[dict[str, object]] | None = msgspec.field(default=None, name="deviceProperties")
    base_ns: int | None = msgspec.field(default=None, name="baseTimeNanoseconds")
    host: str | None = msgspec.field(default=None, name="host_name")
    cupti: int | str | float | None = msgspec.field(default=None, name="cupti_version")
    cuda: int | str | float | None = msgspec.field(default=None, name="cuda_runtime_version")
    roctracer: int | str | float | None = msgspec.field(default=None, name="roctracer_version")
    rocprofiler: int | str | float | None = msgspec.field(default=None, name="rocprofiler-sdk_version")
    hip: int | str | float | None = msgspec.field(default=None, name="hip_runtime_version")
    partial: object = None
    """AORTA's own: true where the loop ended inside the window."""


_METADATA: Final = msgspec.json.Decoder(Metadata)


def metadata_of(head: Mapping[str, msgspec.Raw], tail: Mapping[str, msgspec.Raw], place: str) -> Metadata:
    """Decode the members before the events, completed by those behind them.

    Args:
        head: members of the outer object before the events.
        tail: members behind the events.
        place: names the trace in errors.

    Raises:
        InputError: a member has an impossible type.
    """
    try:
        before, after = (_METADATA.decode(msgspec.json.encode(members)) for members in (head, tail))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{place}: what stands beside its traceEvents cannot be used: {error}") from error
    stated = {name: value for name in Metadata.__struct_fields__ if (value := getattr(before, name)) is not None}
    return msgspec.structs.replace(after, **stated)
