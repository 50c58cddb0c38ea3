"""Collects the columns that matter from the events of a trace: device rows, parameters of collectives, step marks,
operators.

Memory grows with the rows that are kept, not with the trace, because they are kept as plain numbers and codes.
Selection is by category, never by an argument that an event happens to carry (W13). A trace holds millions of events,
so work is done per piece or per distinct name wherever possible, not per event. Must not: compute anything from an
interval.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence, Set
from itertools import compress, count
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load import microseconds
from aorta.analysis.load.gemm_shapes import GEMM_OPERATORS
from aorta.analysis.load.interval_table import NULL, Interner, IntervalClass
from aorta.analysis.load.kernel_classifier import NameClassifier
from aorta.analysis.load.kineto.engine_copies import SYMMETRIC, between_devices
from aorta.analysis.load.kineto.event_structs import (
    CALLS,
    COPIES,
    DEVICE,
    DIGIT_EVENTS,
    DIGIT_EVENTS_BY_CATEGORY,
    EVENTS,
    EVENTS_BY_CATEGORY,
    HOST,
    OPERATORS,
    Arguments,
    DigitEvent,
    Event,
    Number,
)
from aorta.analysis.load.kineto.kernel_links import KernelLinks, externals_of, idents, links_of
from aorta.analysis.load.step_markers import MARK
from aorta.timeline.arrays import Int64

PARAMETERS: Final = "record_param_comms"
_ROLES_BESIDE_DEVICE: Final = frozenset({"parameters", "mark"})
_ROLES: Final = _ROLES_BESIDE_DEVICE | {"label", "operator", "hook"}
_LABELS: Final = ("gloo:", "nccl:")
HOOKS: Final = ("FSDP::", "FullyShardedDataParallel.")
"""Ranges that FSDP2 and FSDP1 mark round their hooks. These run inside of autograd's operators, and what no operator
in them takes they stand waiting for a collective.
"""
_ARGUMENTS: Final = msgspec.json.Decoder(Arguments | None)
_REFUSALS: Final = 4
"""Number of pieces that may fail to decode by category before this is given up; the first and the last piece of a trace
may hold events of unknown categories.
"""
Piece: TypeAlias = "list[Event] | list[DigitEvent]"
_Times: TypeAlias = tuple[Int64, Int64, NDArray[np.bool_]]
"""Starts, lengths, and which rows have both."""


class Rows:
    """Rows of one kind, by column; times, ends included, in ns since the trace's base."""

    def __init__(self) -> None:
        self.starts: list[Int64] = []
        self.lengths: list[Int64] = []
        self.columns: dict[str, list[Int64]] = {}
        self.count = 0

    def add(self, start: Int64, length: Int64, **columns: Sequence[int] | Int64) -> None:
        """Append rows. Every call must pass the same columns."""
        self.starts.append(start)
        self.lengths.append(length)
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(np.asarray(values, np.int64))
        self.count += len(start)

    def clear(self) -> None:
        """Drop all rows."""
        self.starts, self.lengths, self.columns, self.count = [], [], {}, 0

    def __getitem__(self, name: str) -> Int64:
        parts = self.columns.get(name, [])
        if len(parts) > 1:
            parts[:] = [np.concatenate(parts)]
        return parts[0] if parts else np.zeros(0, np.int64)

    @property
    def start(self) -> Int64:
        """Return the start of every row."""
        return np.concatenate(self.starts) if self.starts else np.zeros(0, np.int64)

    @property
    def end(self) -> Int64:
        """Return the end of every row."""
        return self.start + (np.concatenate(self.lengths) if self.lengths else np.zeros(0, np.int64))


class EventColumns:
    """Accepts the pieces of a trace one after the other and keeps what matters of each."""

    def __init__(self, classifier: NameClassifier, host_work: bool) -> None:
        self.classifier = classifier
        self.host_work = host_work
        self.exact = False
        self.names = Interner()
        self.classes = array("b")
        self.device, self.operators, self.labels, self.marks = Rows(), Rows(), Rows(), Rows()
        self.mark_kinds = Interner()
        self.links = KernelLinks()
        self._parameter_texts: list[bytes] = []
        self.linked: dict[int, Arguments] = {}
        self.copies: dict[int, Arguments | int] = {}
        """Copies between devices, in the form `engine_copies.launched_by_collectives` expects."""
        self.symmetric = False
        self.label_arguments: dict[int, Arguments] = {}
        self.operator_arguments: dict[int, Arguments] = {}
        self.counters: Counter[str] = Counter()
        self._of_host_work: Counter[str] = Counter()
        self.events = 0
        self.fractions = False
        self._roles: dict[Any, str] = {}
        self._text: bytes | memoryview = b""
        self._refused = 0

    def decode(self, text: bytes | memoryview) -> Piece:
        """Decode one piece of the event array, by category where that is possible."""
        self._text = text
        if self._refused < _REFUSALS:
            try:
                return (DIGIT_EVENTS_BY_CATEGORY if self.exact else EVENTS_BY_CATEGORY).decode(text)
            except msgspec.ValidationError:
                self._refused += 1
        return (DIGIT_EVENTS if self.exact else EVENTS).decode(text)

    def take(self, events: Piece) -> None:
        """Keep what matters of the piece that was decoded last."""
        categories = [event.cat for event in events]
        work, host, calls = (_complete(events, categories, wanted) for wanted in (DEVICE, HOST, CALLS))
        if work and self.host_work:
            self._forget_host_work()
        by_role = self._by_role(work, host)
        marks, labels = by_role["mark"], by_role["label"]
        operators = [event for event in by_role["operator"] if event.cat in OPERATORS] + by_role["hook"]
        begun = self._instants([call.ts for call in calls])
        times = [each for rows in (work, marks, operators, labels) if (each := self._times(rows)) is not None]
        if len(times) < 4 or begun is None:  # decode again with digits; earlier pieces lost none
            self.exact = True
            self.take(self.decode(self._text))
            return
        self.events += len(events)
        self._parameter_texts += [bytes(event.args) for event in by_role["parameters"]]
        if work:
            self._device_rows(*self._usable(work, times[0]))
        if marks:
            self._mark_rows(*self._usable(marks, times[1]))
        before = self.counters.copy()
        if operators:
            self._operator_rows(*self._usable(operators, times[2]))
        if labels:
            self._label_rows(*self._usable(labels, times[3]))
        if calls:
            self.links.add_calls(calls, *begun)
        self.links.add_products(by_role["product"])
        if self.host_work:
            self._of_host_work += self.counters - before

    def _by_role(self, work: list[Any], host: list[Any]) -> dict[str, list[Any]]:
        """Group the host's events by what they are used for; unused events are left out."""
        roles, wanted = self._roles, _ROLES if self.host_work else _ROLES_BESIDE_DEVICE
        names_of = [event.name for event in host]
        names = set(names_of)
        for name in (names | {event.name for event in work}) - roles.keys():
            roles[name] = _role(name)
            self.symmetric = self.symmetric or (isinstance(name, str) and name.startswith(SYMMETRIC))
        read = {name for name in names if roles[name] in wanted}
        found: dict[str, list[Any]] = {role: [] for role in (*_ROLES, "product")}
        products = [host[at] for at in _where(names_of, GEMM_OPERATORS & names)]
        found["product"] = [event for event in products if event.cat in OPERATORS]
        for role in {roles[name] for name in read}:
            found[role] = _chosen(host, names_of, {name for name in read if roles[name] == role})
        return found

    def _forget_host_work(self) -> None:
        """Drop the host's work when the first work on a device appears: it is not needed then, and no name is in use
        yet.
        """
        self.host_work = False
        self.operators.clear()
        self.labels.clear()
        self.operator_arguments.clear()
        self.label_arguments.clear()
        self.names, self.classes = Interner(), array("b")
        self.counters.subtract(self._of_host_work)
        self._of_host_work.clear()

    def _device_rows(self, events: list[Any], start: Int64, length: Int64) -> None:
        first = self.device.count
        code_of = {name: self._name(name) for name in dict.fromkeys([event.name for event in events])}
        names = [code_of[event.name] for event in events]
        of_name, copy, compute, comm = (
            self.classes,
            int(IntervalClass.COPY),
            int(IntervalClass.COMPUTE),
            int(IntervalClass.COMM),
        )
        classes = [
            copy if event.cat in COPIES and of_name[code] != comm else of_name[code]
            for event, code in zip(events, names, strict=True)
        ]
        texts = [bytes(event.args) for event in events]
        links = links_of(texts)
        sizes = [NULL] * len(events)
        linked = [cls == copy or b"xternal id" in text for cls, text in zip(classes, texts, strict=True)]
        self.counters["kernels_unlinked"] += linked.count(False)
        told = [
            at
            for at, (cls, text) in enumerate(zip(classes, texts, strict=True))
            if cls != compute or b'"Collective name"' in text
        ]
        for at in told:
            arguments = _arguments(texts[at])
            if classes[at] == copy:
                sizes[at] = max(integer(arguments.bytes), NULL)
                if between_devices(str(events[at].name)):
                    self.copies[first + at] = arguments if arguments.collective is not None else external_id(arguments)
            elif arguments.collective is not None or classes[at] == comm:
                classes[at] = comm  # its host operator identifies it, whatever its name
                self.linked[first + at] = arguments
        devices, streams = [event.pid for event in events], [event.tid for event in events]
        if not (_plain(devices) and _plain(streams)):
            devices, streams = _integers(devices), _integers(streams)
            for at in (at for at, pair in enumerate(zip(devices, streams, strict=True)) if NULL in pair):
                arguments = _arguments(texts[at])
                devices[at] = integer(arguments.device) if devices[at] == NULL else devices[at]
                streams[at] = integer(arguments.stream) if streams[at] == NULL else streams[at]
        self.device.add(
            start,
            length,
            name=names,
            device=devices,
            stream=streams,
            bytes=sizes,
            cls=classes,
            origin=externals_of(links),
            correlation=idents([each.correlation for each in links]),
        )

    def parameters(self) -> dict[int, Arguments]:
        """Arguments of `record_param_comms`, by the id that they share with the kernels they launched."""
        found: dict[int, Arguments] = {}
        for text in self._parameter_texts:
            arguments = _arguments(text)
            external = integer(arguments.external)
            if external != NULL and arguments.collective is not None:
                found.setdefault(external, arguments)
        return found

    def _mark_rows(self, events: list[Any], start: Int64, length: Int64) -> None:
        found = [match for event in events if (match := MARK.match(event.name))]
        self.marks.add(
            start,
            length,
            kind=[self.mark_kinds(match["kind"]) for match in found],
            step=[int(match["step"]) for match in found],
        )

    def _operator_rows(self, events: list[Any], start: Int64, length: Int64) -> None:
        names = [event.name for event in events]
        distinct = set(names)
        calls = {name for name in distinct if name.startswith("c10d::")}
        for at in _where(names, calls):
            self.operator_arguments[self.operators.count + at] = _arguments(events[at].args)
        products = _where(names, GEMM_OPERATORS & distinct)
        origin = np.full(len(events), NULL, np.int64)
        origin[products] = externals_of(links_of([events[at].args for at in products]))
        self._host_rows(self.operators, events, start, length, origin=origin)

    def _label_rows(self, events: list[Any], start: Int64, length: Int64) -> None:
        first = self.labels.count
        for at, event in enumerate(events, start=first):
            self.label_arguments[at] = _arguments(event.args)
        self._host_rows(self.labels, events, start, length)

    def _host_rows(self, rows: Rows, events: list[Any], start: Int64, length: Int64, **columns: Int64) -> None:
        names = [event.name for event in events]
        code_of = {name: self._name(name) for name in dict.fromkeys(names)}
        rows.add(
            start,
            length,
            name=list(map(code_of.__getitem__, names)),
            thread=_integers([event.tid for event in events]),
            **columns,
        )

    def _times(self, events: list[Any]) -> _Times | None:
        """Times of events; None where decoding lost digits of one."""
        begun = self._instants([event.ts for event in events])
        lasted = self._instants([event.dur for event in events])
        if begun is None or lasted is None:
            return None
        return begun[0], lasted[0], begun[1] & lasted[1]

    def _instants(self, values: list[Any]) -> tuple[Int64, NDArray[np.bool_]] | None:
        """Nanoseconds, and which of them are known; None where decoding lost digits of one."""
        return microseconds.of_texts(values) if self.exact else microseconds.of_numbers(values)

    def _usable(self, events: list[Any], times: _Times) -> tuple[list[Any], Int64, Int64]:
        """The events with usable times, with their starts and lengths in ns. The others are counted (W16)."""
        start, length, known = times
        backwards = known & (length < 0)
        self.fractions = self.fractions or bool(((start % 1000 != 0) | (length % 1000 != 0))[known].any())
        self.counters["without_times"] += int((~known).sum())
        self.counters["negative_duration"] += int(backwards.sum())
        keep = known & ~backwards
        if not keep.all():
            events = [event for event, kept in zip(events, keep.tolist(), strict=True) if kept]
            start, length = start[keep], length[keep]
        return events, start, length

    def _name(self, name: Any) -> int:
        text = name if isinstance(name, str) else "" if name is None else str(name)
        code = self.names(text)
        if code == len(self.classes):
            self.classes.append(int(self.classifier.class_of(text)))
        return code


def _chosen(events: Sequence[Any], values: Sequence[Any], wanted: Set[Any]) -> list[Any]:
    """The events whose value is wanted. No Python is run for each of them: a trace has millions."""
    return list(compress(events, map(wanted.__contains__, values)))


def _where(values: Sequence[Any], wanted: Set[Any]) -> list[int]:
    """The indices of the values that are wanted."""
    return list(compress(count(), map(wanted.__contains__, values))) if wanted else []


def _complete(events: Piece, categories: Sequence[str | None], wanted: Set[str]) -> list[Any]:
    """The complete events (`ph` X) of some categories."""
    return [event for event in _chosen(events, categories, wanted) if event.ph == "X"]


def _role(name: object) -> str:
    """What an event of the host is used for; empty if it is unused."""
    if not isinstance(name, str):
        return ""
    if name == PARAMETERS:
        return "parameters"
    if MARK.match(name):
        return "mark"
    if name.startswith(HOOKS):
        return "hook"
    return "label" if name.startswith(_LABELS) else "operator"


def _plain(numbers: list[Any]) -> bool:
    return not numbers or (set(map(type, numbers)) == {int} and min(numbers) >= NULL and max(numbers) < _LARGEST)


def _integers(values: list[Any]) -> list[int]:
    of = {value: integer(value) for value in set(values)}
    return list(map(of.__getitem__, values))


def _arguments(raw: msgspec.Raw | bytes) -> Arguments:
    """Decode arguments; empty where they have an unexpected shape."""
    try:
        return _ARGUMENTS.decode(raw) or _NOTHING
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _NOTHING


def external_id(arguments: Arguments) -> int:
    """The id that a row on a device shares with the host operator that launched it, or `NULL`."""
    return integer(arguments.external if arguments.external is not None else arguments.external_old)


def integer(value: Number) -> int:
    """An integer, also from text ("stream 7"); `NULL` for anything else, or beyond 63 bits."""
    if type(value) is int:
        return value if -_LARGEST < value < _LARGEST else NULL
    if isinstance(value, str):
        digits = _DIGITS.search(value)
        value = int(digits[0]) if digits else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if value is not None and abs(value) < 2**63 else NULL


_DIGITS: Final = re.compile(r"\d{1,18}")
_NOTHING: Final = Arguments()
_LARGEST: Final = 2**63
