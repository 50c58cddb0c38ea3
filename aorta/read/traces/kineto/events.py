"""What is decoded of a Kineto trace: its events, their times and arguments, and what surrounds them.

Types are wide where traces differ (thread ids are numbers or text), so that one odd value does not make a trace
unreadable. What an argument does not say is `NULL`. Everything but the members declared here is skipped without being
decoded. Must not: guess, or know what follows from an event.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import compress, count
from operator import attrgetter
from types import NoneType
from typing import Any, Final, TypeAlias, TypeVar, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import InputError
from aorta.read.frames import Numbered
from aorta.read.traces.chrome_json import MALFORMED, Exact, ns_of_values
from aorta.read.traces.interval_table import KIND_CODE, NULL, countable, kind_of, known_dtype
from aorta.timeline.arrays import Int64
from aorta.timeline.classes import KINDS

Number: TypeAlias = int | float | str | None
Event: TypeAlias = Any
"""An event of one of the decoders: its members are those of Chrome's format."""
Decoded = TypeVar("Decoded")
_NOTHING: Final = msgspec.Raw(b"null")

PARAMETERS: Final = "record_param_comms"
"""The host's range that has the parameters of a collective."""
COUNTED: Final = "cuda_profiler_range"
"""Category of what hardware counters were read over."""
COPIES: Final = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset", "gpu_memcpy_p2p"})
DEVICE: Final = COPIES | {"kernel", "Kernel"}
"""Categories of work on a device; old traces capitalise them."""
OPERATORS: Final = frozenset({"cpu_op", "Operator"})
HOST: Final = OPERATORS | {"user_annotation", "collective_comm"}
"""`gpu_user_annotation` is not among them: it is a copy, on the device's row, of a range of the host. It carries a
stream, but is no work (W13).
"""
FOREIGN_CALLS: Final = frozenset(
    {"xpu_runtime", "xpu_driver", "mtia_runtime", "privateuse1_runtime", "privateuse1_driver"}
)
"""Calls that use a device: where no row of it is read, it was not observed."""
CALLS: Final = FOREIGN_CALLS | {"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime"}
"""Calls of the host that launch kernels and copies, which have the same `correlation`."""


class Linked(msgspec.Struct, gc=False):
    """The arguments that tie a call, and any other event, to others."""

    external_id: Number = msgspec.field(default=None, name="External id")
    old_external_id: Number = msgspec.field(default=None, name="external id")
    correlation: Number = None


class Arguments(Linked, gc=False):
    """The arguments that are used of a kernel, a copy or `record_param_comms`."""

    device: Number = None
    stream: Number = None
    bytes: Number = None
    collective: str | None = msgspec.field(default=None, name="Collective name")
    elements_in: Number = msgspec.field(default=None, name="In msg nelems")
    elements_out: Number = msgspec.field(default=None, name="Out msg nelems")
    group_size: Number = msgspec.field(default=None, name="Group size")
    dtype: str | None = None
    group: Number = msgspec.field(default=None, name="Process Group Name")
    ranks: str | tuple[int, ...] | None = msgspec.field(default=None, name="Process Group Ranks")
    seq: Number = msgspec.field(default=None, name="Seq")
    graph: Number = msgspec.field(default=None, name="graph id")

    @property
    def silent(self) -> bool:
        """Whether it is a collective of one rank, or of nothing: NCCL runs no kernel of communication for it."""
        nothing = integer(self.elements_in) == integer(self.elements_out) == 0
        return countable(self.collective or "") and (nothing or integer(self.group_size) == 1)


class Inputs(msgspec.Struct, gc=False):
    """The arguments that are used of gloo's row: shapes and data types, as JSON."""

    dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input type")


_IRRELEVANT: Final = frozenset(
    {
        *("ac2g", "fwdbwd", "gpu_user_annotation", "python_function", "cpu_instant_event", "overhead", "Trace"),
        *("cuda_sync", "cuda_event", "graph_event_node", "graph_host_node"),  # waits, and marks of streams
    }
)
"""Categories that make up most of a trace, and of which nothing follows. Any that is not listed here is unknown."""
_REFUSALS: Final = 4
"""Number of pieces with unknown categories before these are no longer skipped; the first and the last piece of a trace
may hold such.
"""
_INEXACT: Final = re.compile("Expected `(int|float)` [<>]")


def _decoder(kind: str, time: Any) -> msgspec.json.Decoder[list[Any]]:
    """Return a decoder of pieces whose `ts` and `dur` have the type `time`. The kind `whole` decodes all events; the
    others only what is read of each category, several times as fast, and refuse an unknown category; `untimed` leaves
    out the times of operators too.
    """
    nothing = _NOTHING if time is msgspec.Raw else None
    named = [("ph", str | None, None), ("name", Number, None)]
    lasting = [*named, ("ts", time, nothing), ("dur", time, nothing)]
    timed = [*lasting, ("pid", Number, None), ("tid", Number, None)]
    raw = ("args", msgspec.Raw, _NOTHING)
    if kind == "whole":
        structs = [msgspec.defstruct("Event", [("cat", str | None, None), *timed, raw], gc=False)]
    else:
        members = {category: [*timed, ("args", Arguments | None, None)] for category in DEVICE}
        members |= {category: [*lasting, ("args", Linked | None, None)] for category in CALLS}
        members |= {category: [*timed, raw] for category in HOST}
        members |= {category: [*named, raw] for category in OPERATORS if kind == "untimed"}
        members |= {COUNTED: timed} | {category: [] for category in _IRRELEVANT}
        structs = [
            msgspec.defstruct(f"Event_{cat}", fields, namespace={"cat": cat}, tag_field="cat", tag=cat, gc=False)
            for cat, fields in sorted(members.items())
        ]
    return msgspec.json.Decoder(list[Union[tuple(structs)]])  # type: ignore[misc]  # noqa: UP007


_DECODERS: Final = {
    (kind, digits): _decoder(kind, msgspec.Raw if digits else Exact)
    for kind in ("untimed", "timed", "whole")
    for digits in (False, True)
}


class EventDecoder:
    """Decodes pieces of the event array. From the first time on that float64 would change, times keep their digits.

    Attributes:
        operators: `untimed` as long as the name and arguments of operators suffice, else `timed`.
    """

    def __init__(self) -> None:
        self.operators = "untimed"
        self._digits = False
        self._refused = 0

    def __call__(self, text: bytes | memoryview) -> list[Event]:
        if self._refused < _REFUSALS:
            try:
                return _DECODERS[self.operators, self._digits].decode(text)
            except msgspec.ValidationError:
                self._refused += 1
        try:
            return _DECODERS["whole", self._digits].decode(text)
        except msgspec.ValidationError as error:
            if self._digits or not _INEXACT.search(str(error)):
                raise
        self._digits, self._refused = True, 0
        return self(text)

    def with_operators(self, text: bytes | memoryview, counters: Counter[str]) -> list[Event]:
        """Return the events of a piece again, from now on with the times of operators; impossible ones are counted."""
        self.operators = "timed"
        try:
            return self(text)
        except msgspec.ValidationError:
            events = []
            for event in msgspec.json.decode(text, type=list[msgspec.Raw]):
                try:
                    events += self(b"[%b]" % event)
                except msgspec.ValidationError:
                    counters["without_times"] += 1
            return events


_LASTING: Final = frozenset("XB")
_BEGUN: Final = frozenset("XBb")
"""Phases of events that began, those whose end is another event too, which is not looked for."""


def by_category(events: Iterable[Event]) -> tuple[list[Event], list[Event], dict[Any, list[Event]], list[Event]]:
    """Return the events of devices and of the host's calls, without an end too; of the host by their names, and of
    categories that no account knows, those with one (`ph` X).
    """
    work, calls, unknown = list[Event](), list[Event](), list[Event]()
    host = defaultdict[Any, list[Event]](list)
    for event in events:
        category = event.cat
        if category in _IRRELEVANT:
            continue
        if category in DEVICE or category in CALLS:
            if event.ph in _BEGUN:
                (work if category in DEVICE else calls).append(event)
        elif category in HOST:
            if event.ph in _LASTING:
                host[event.name].append(event)
        elif event.ph == "X":
            unknown.append(event)
    return work, calls, host, unknown


def times_of(events: Sequence[Event], counters: Counter[str]) -> tuple[NDArray[np.bool_], Int64, Int64]:
    """Return which events have usable times, and starts and ends in ns. The others are counted (W16)."""
    start, begins = ns_of_values([event.ts for event in events])
    length, lasts = ns_of_values([event.dur for event in events])
    known = begins & lasts
    keep = known & (length >= 0)
    counters["without_times"] += int((~known).sum())
    counters["negative_duration"] += int((known & ~keep).sum())
    return keep, start, start + length


def with_times(events: list[Event], counters: Counter[str]) -> tuple[list[Event], Int64, Int64]:
    """Return the events with usable times, their starts and their ends."""
    keep, start, end = times_of(events, counters)
    return (events, start, end) if keep.all() else (list(compress(events, keep.tolist())), start[keep], end[keep])


class Cached(dict[Any, Decoded]):
    """Values that are computed once for each key. No Python is run for a key that is known."""

    def __init__(self, make: Callable[[Any], Decoded]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Decoded:
        value = self[key] = self._make(key)
        return value

    def of(self, keys: Iterable[Hashable]) -> list[Decoded]:
        return list(map(self.__getitem__, keys))


_ARGUMENTS: Final = msgspec.json.Decoder(list[Arguments | None])
_INPUTS: Final = msgspec.json.Decoder(list[Inputs | None])


def arguments_of(events: Sequence[Event]) -> list[Arguments]:
    """Decode the arguments of events; empty where they have an unexpected shape."""
    if events and isinstance(events[0].args, msgspec.Raw):
        return _decoded(_ARGUMENTS, [event.args for event in events], Arguments())
    return [event.args or Arguments() for event in events]


def inputs_of(events: Sequence[Event]) -> list[Inputs]:
    """Decode shapes and data types of gloo's rows; empty where the arguments have an unexpected shape."""
    return _decoded(_INPUTS, [event.args for event in events], Inputs())


def _decoded(decoder: msgspec.json.Decoder[Any], texts: Sequence[msgspec.Raw], nothing: Decoded) -> list[Decoded]:
    """Decode all texts at once, which is several times as fast; one by one where that fails."""
    try:
        return [arguments or nothing for arguments in decoder.decode(b"[%b]" % b",".join(texts))]
    except MALFORMED:
        return [nothing] if len(texts) == 1 else [_decoded(decoder, [text], nothing)[0] for text in texts]


def externals_of(arguments: Iterable[Linked]) -> list[Number]:
    """Return the ids that rows on a device share with the host operators that launched them."""
    return [new if (new := argument.external_id) is not None else argument.old_external_id for argument in arguments]


def idents(values: Sequence[Number]) -> Int64:
    """Return the ids among values of any type, `NULL` for those that are none."""
    try:
        if set(map(type, values)) <= {int, NoneType}:
            ids = np.array([NULL if value is None else value for value in values], np.int64)
            return np.where(ids >= 0, ids, NULL)
    except OverflowError:
        pass  # beyond 63 bits: one by one
    return np.array([max(_whole(value), NULL) for value in values], np.int64)


def _whole(value: Number) -> int:
    """Return a number, also from digits alone or a float without a fraction; `NULL` for anything else."""
    if isinstance(value, str):
        value = int(value) if _DIGITS.fullmatch(value) else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if type(value) is int and abs(value) < LARGEST else NULL


_DIGITS: Final = re.compile(r"\d{1,18}")
_LAST_DIGITS: Final = re.compile(r"(?<!\d)\d{1,9}$")
LARGEST: Final = 2**63
LARGEST_DEVICE: Final = 2**31
"""Larger numbers do not fit into the interval table."""


def integer(value: Number) -> int:
    """Return an integer, also from text ("stream 7"); `NULL` for anything else, or beyond 63 bits."""
    digits = _DIGITS.search(value) if isinstance(value, str) else None
    return _whole(digits[0] if digits else value)


class Identifiers:
    """Gives devices, streams and threads numbers: ids are opaque keys, whatever their text or size.

    A number below `limit` is its own. Others get the number that their text ends in ("stream 7", "[TP00-PP01] 1") where
    no other id has it, else the next free one. Ids have codes until all are known.
    """

    def __init__(self, limit: int = LARGEST) -> None:
        self._limit = limit
        self._codes = Numbered()

    def codes(self, values: Iterable[Hashable]) -> Int64:
        return np.array(list(map(self._codes.__getitem__, values)), np.int64)

    def numbers(self) -> tuple[Int64, dict[int, str]]:
        """Return the number of each code (`NULL` of None and -1), and the text of the ids that got another number."""
        numbers: dict[Any, int] = {None: NULL}
        others = []
        for value in self._codes:
            whole = _whole(value)  # 7, 7.0 and "7" are one id
            if NULL <= whole < self._limit and (whole != NULL or value == NULL):
                numbers[value] = whole
            elif value is not None:
                others.append(value)
        used, free = set(numbers.values()), count()
        for value in others:
            digits = _LAST_DIGITS.search(value) if isinstance(value, str) else None
            number = int(digits[0]) if digits else NULL
            if number in used or not 0 <= number < self._limit:
                number = next(candidate for candidate in free if candidate not in used)
            used.add(number)
            numbers[value] = number
        table = np.array([numbers[value] for value in self._codes], np.int64)
        return table, {numbers[value]: str(value) for value in others if str(numbers[value]) != str(value)}


_OF_ONE_KERNEL: Final = {KIND_CODE[kind] for kind in ("allreduce", "allgather", "reducescatter")}
"""Kinds that are never run as kernels of one another."""
LARGEST_BYTES: Final = 2**60
_SAID: Final = attrgetter("collective", "group", "group_size", "ranks", "dtype", "elements_in", "elements_out")


class CollectiveColumns:
    """What is known of the collectives of a trace: columns over all its rows, `NULL` where nothing is known."""

    def __init__(self, rows: int) -> None:
        self.kind, self.group, self.seq, self.bytes, self.dtype = (np.full(rows, NULL, np.int64) for _ in range(5))
        self.groups, self.dtypes = Numbered(), Numbered()
        self.group_ranks: dict[str, tuple[int, ...]] = {}

    def describe(self, arguments: Mapping[int, Arguments]) -> None:
        """Fill in the rows that have arguments. A collective's arguments are the same in every step except for the
        sequence number, so everything else is computed once per distinct set.
        """
        rows = np.fromiter(arguments, np.int64, len(arguments))
        known = Cached(self._interpreted)
        kinds = self.kind[rows].tolist()
        described = known.of(zip(kinds, map(_SAID, arguments.values()), strict=True))
        if described:
            self.kind[rows], self.group[rows], self.dtype[rows], self.bytes[rows] = zip(*described, strict=True)
            self.seq[rows] = [max(integer(argument.seq), NULL) for argument in arguments.values()]

    def _interpreted(self, fields: tuple[int, tuple[Any, ...]]) -> tuple[int, int, int, int]:
        """Return kind, code of the group, code of the data type, and bytes; each `NULL` where the arguments do not
        say. What they say of the group is kept.
        """
        kind_of_kernel, (collective, group, group_size, ranks, dtype_name, elements_in, elements_out) = fields
        kind = kind_of(collective or "")
        if kind == NULL or kind_of_kernel == NULL or not {kind, kind_of_kernel} <= _OF_ONE_KERNEL:
            kind = kind if kind != NULL else kind_of_kernel
        elif kind != kind_of_kernel:
            kind = NULL  # its name and its arguments contradict each other
        code, size = NULL, integer(group_size)
        if group is not None:
            name = str(group)
            code = self.groups[name]
            if name not in self.group_ranks and (members := group_ranks(ranks)):
                self.group_ranks[name] = members
        dtype, width = known_dtype(dtype_name)
        moved = NULL
        if kind != NULL and width is not None:
            moved = full_array(KINDS[kind], integer(elements_in), integer(elements_out), size) * width
        moved = moved if 0 <= moved < LARGEST_BYTES else NULL
        return kind, code, self.dtypes[dtype] if dtype is not None else NULL, moved


def full_array(kind: str, elements_in: int, elements_out: int, group_size: int) -> int:
    """Return the number of elements of the full array, or `NULL` (docs/dev/measuring.md, section 1: the reduced tensor,
    the gathered output, the scattered input; for all-to-all one rank's send buffer).
    """
    match kind:
        case "barrier":
            return 0
        case "broadcast" | "send" | "recv":
            return max(elements_in, elements_out)
        case "gather" | "scatter":  # one rank's part of it
            part = elements_in if kind == "gather" else elements_out
            return part * group_size if part >= 0 and group_size > 0 else NULL
    return elements_out if kind == "allgather" else elements_in


def group_ranks(ranks: object) -> tuple[int, ...]:
    """Return the ranks of `[0, 1]`, given as a list or as text; empty where they are abbreviated ("[0, 1, ..., 7]")."""
    if isinstance(ranks, list | tuple):
        return tuple(rank for rank in ranks if isinstance(rank, int))
    try:
        return tuple(msgspec.json.decode(ranks, type=list[int])) if isinstance(ranks, str) else ()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ()


class DistributedInfo(msgspec.Struct):
    """What torch writes when `torch.distributed` is initialised at the time of the export."""

    backend: str | None = None
    rank: int | None = None
    world_size: int | None = None
    pg_config: object = None


class Metadata(msgspec.Struct):
    """The members beside the events that are used; None where a trace does not have one. `partial` is AORTA's own: true
    where the loop ended inside the window.
    """

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
    warnings: list[object] | None = msgspec.field(default=None, name="WARNING")

    @property
    def platform(self) -> str | None:
        """What the device is of, where the trace says it."""
        if any(value is not None for value in (self.roctracer, self.rocprofiler, self.hip)):
            return "rocm"
        if any(value is not None for value in (self.cupti, self.cuda)):
            return "cuda"
        names = " ".join(str(device.get("name", "")) for device in self.devices or ())
        return "rocm" if "AMD" in names or "gfx" in names else "cuda" if "NVIDIA" in names or "Tesla" in names else None


def metadata_of(head: Mapping[str, msgspec.Raw], tail: Mapping[str, msgspec.Raw], origin: str) -> Metadata:
    """Decode the members of the outer object before (`head`) and behind the events; those before them count first. A
    member of an impossible type is an `InputError` that names `origin`, the trace.
    """
    try:
        return msgspec.json.decode(msgspec.json.encode({**tail, **head}), type=Metadata)
    except MALFORMED as error:
        raise InputError(f"{origin}: what stands beside its traceEvents cannot be used: {error}") from error
