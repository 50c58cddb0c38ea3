"""Events of a trace -> the columns that matter: device rows, collectives' parameters, step marks, host operators.

Enters: decoded pieces of the event array. Leaves: lists of plain numbers and codes, which grow with the rows that are
kept, not with the trace. Selection is by category, never by an argument that an event happens to carry (W13). Must not:
compute anything from an interval.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from aorta.analysis.traces.kineto.copies import SYMMETRIC, between_devices
from aorta.analysis.traces.kineto.structs import Arguments, DigitEvent, Event, Number
from aorta.analysis.traces.kineto.times import from_digits, from_floats, imprecise, usable
from aorta.analysis.traces.names import NameClassifier
from aorta.analysis.traces.steps import MARK
from aorta.analysis.traces.table import NULL, Class, Interner
from aorta.timeline.arrays import Int64

KERNEL: Final = frozenset({"kernel", "Kernel"})
COPIES: Final = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset", "gpu_memcpy_p2p"})
DEVICE: Final = KERNEL | COPIES
"""Categories of work on a device; old traces wrote them with capitals."""
OPERATOR: Final = frozenset({"cpu_op", "Operator"})
HOST: Final = OPERATOR | {"user_annotation", "collective_comm"}
PARAMETERS: Final = "record_param_comms"
_WANTED: Final = DEVICE | HOST
"""`gpu_user_annotation` is not among them: a copy, on the device's row, of a range of the host. It carries a stream,
and is no work (W13).
"""
_ROLES_BESIDE_DEVICE: Final = frozenset({"parameters", "mark"})
_ROLES: Final = _ROLES_BESIDE_DEVICE | {"label", "operator"}
_LABELS: Final = ("gloo:", "nccl:")


_FAST: Final = msgspec.json.Decoder(list[Event])
_EXACT: Final = msgspec.json.Decoder(list[DigitEvent])
_ARGUMENTS: Final = msgspec.json.Decoder(Arguments | None)
Piece: TypeAlias = "list[Event] | list[DigitEvent]"


class Rows:
    """Rows of one kind, by column; times in ns since the trace's base, their ends included."""

    def __init__(self) -> None:
        self.starts: list[Int64] = []
        self.lengths: list[Int64] = []
        self.columns: dict[str, array[int]] = {}

    def add(self, start: Int64, length: Int64, **columns: list[int]) -> None:
        """Append rows; the columns are the same in every call."""
        self.starts.append(start)
        self.lengths.append(length)
        for name, values in columns.items():
            self.columns.setdefault(name, array("q")).extend(values)

    def clear(self) -> None:
        """Forget everything."""
        self.starts, self.lengths, self.columns = [], [], {}

    def __getitem__(self, name: str) -> Int64:
        return np.frombuffer(self.columns[name], np.int64) if name in self.columns else np.zeros(0, np.int64)

    @property
    def start(self) -> Int64:
        """Start of every row."""
        return np.concatenate(self.starts) if self.starts else np.zeros(0, np.int64)

    @property
    def end(self) -> Int64:
        """End of every row."""
        return self.start + (np.concatenate(self.lengths) if self.lengths else np.zeros(0, np.int64))


class EventColumns:
    """Takes pieces one after the other and keeps what matters of each."""

    def __init__(self, classifier: NameClassifier, host_work: bool) -> None:
        self.classifier = classifier
        self.host_work = host_work
        self.exact = False
        self.names = Interner()
        self.classes = array("b")
        self.device, self.operators, self.labels, self.marks = Rows(), Rows(), Rows(), Rows()
        self.mark_kinds = Interner()
        self._parameter_texts: list[bytes] = []
        self.linked: dict[int, Arguments] = {}
        self.copies: dict[int, Arguments | int] = {}
        """Copies between devices, as `copies.launched_by_collectives` takes them."""
        self.symmetric = False
        self.label_arguments: dict[int, Arguments] = {}
        self.operator_arguments: dict[int, Arguments] = {}
        self.counters: Counter[str] = Counter()
        self._of_host_work: Counter[str] = Counter()
        self.events = 0
        self.fractions = False
        self._roles: dict[Any, str] = {}
        self._text: bytes | memoryview = b""

    def decode(self, text: bytes | memoryview) -> Piece:
        """Decode one piece."""
        self._text = text
        return (_EXACT if self.exact else _FAST).decode(text)

    def take(self, events: Piece) -> None:
        """Keep what matters of the piece that was decoded last."""
        kept = [event for event in events if event.cat in _WANTED and event.ph == "X"]
        work = [event for event in kept if event.cat in DEVICE]
        if work and self.host_work:
            self._forget_host_work()
        roles = self._roles
        for name in {event.name for event in kept} - roles.keys():
            roles[name] = _role(name)
            self.symmetric = self.symmetric or (isinstance(name, str) and name.startswith(SYMMETRIC))
        wanted = _ROLES if self.host_work else _ROLES_BESIDE_DEVICE
        host = [event for event in kept if roles[event.name] in wanted and event.cat in HOST]
        if not self.exact and (any(map(imprecise, work)) or any(map(imprecise, host))):
            self.exact = True
            self.take(self.decode(self._text))
            return
        self.events += len(events)
        if work:
            self._device_rows(work)
        if host:
            self._host_rows(host)

    def _forget_host_work(self) -> None:
        """On the first work on a device: nothing of the host's is asked for any more, and no name is used yet."""
        self.host_work = False
        self.operators.clear()
        self.labels.clear()
        self.operator_arguments.clear()
        self.label_arguments.clear()
        self.names, self.classes = Interner(), array("b")
        self.counters.subtract(self._of_host_work)
        self._of_host_work.clear()

    def _device_rows(self, events: list[Any]) -> None:
        events, start, length = self._times(events)
        first = len(self.device["name"])
        code_of = {name: self._name(name) for name in {event.name for event in events}}
        names = [code_of[event.name] for event in events]
        devices, streams = [event.pid for event in events], [event.tid for event in events]
        sizes = [NULL] * len(events)
        of_name, copy, compute, comm = self.classes, int(Class.COPY), int(Class.COMPUTE), int(Class.COMM)
        classes = [
            copy if event.cat in COPIES and of_name[code] != comm else of_name[code]
            for event, code in zip(events, names, strict=True)
        ]
        texts = [bytes(event.args) for event in events]
        for at, (cls, text) in enumerate(zip(classes, texts, strict=True)):
            if b"xternal id" not in text and cls != copy:
                self.counters["kernels_unlinked"] += 1
            if cls == compute and b'"Collective name"' not in text:
                continue
            arguments = _arguments(text)
            if cls == copy:
                sizes[at] = max(integer(arguments.bytes), NULL)
                if between_devices(str(events[at].name)):
                    self.copies[first + at] = arguments if arguments.collective is not None else external_id(arguments)
            elif arguments.collective is not None or cls == comm:
                classes[at] = comm  # its host operator says so, whatever its name
                self.linked[first + at] = arguments
        if not all(map(_plain, devices)) or not all(map(_plain, streams)):
            for at, text in enumerate(texts):
                arguments = _arguments(text)
                devices[at] = next(filter(_known, map(integer, (devices[at], arguments.device))), NULL)
                streams[at] = next(filter(_known, map(integer, (streams[at], arguments.stream))), NULL)
        self.device.add(start, length, name=names, device=devices, stream=streams, bytes=sizes, cls=classes)

    def parameters(self) -> dict[int, Arguments]:
        """Arguments of `record_param_comms`, by the id that they share with the kernels they launched."""
        found: dict[int, Arguments] = {}
        for text in self._parameter_texts:
            arguments = _arguments(text)
            external = integer(arguments.external)
            if external != NULL and arguments.collective is not None:
                found.setdefault(external, arguments)
        return found

    def _host_rows(self, events: list[Any]) -> None:
        by_role: dict[str, list[Any]] = {"parameters": [], "mark": [], "operator": [], "label": []}
        for event in events:
            by_role[self._roles[event.name]].append(event)
        self._parameter_texts += [bytes(event.args) for event in by_role["parameters"]]
        if by_role["mark"]:
            self._mark_rows(by_role["mark"])
        operators = [event for event in by_role["operator"] if event.cat in OPERATOR]
        before = self.counters.copy()
        if operators:
            self._operator_rows(operators)
        if by_role["label"]:
            self._label_rows(by_role["label"])
        if self.host_work:
            self._of_host_work += self.counters - before

    def _mark_rows(self, events: list[Any]) -> None:
        events, start, length = self._times(events)
        found = [match for event in events if (match := MARK.match(event.name))]
        self.marks.add(
            start,
            length,
            kind=[self.mark_kinds(match["kind"]) for match in found],
            step=[int(match["step"]) for match in found],
        )

    def _operator_rows(self, events: list[Any]) -> None:
        events, start, length = self._times(events)
        first = len(self.operators["name"])
        for at, event in enumerate(events, start=first):
            if event.name.startswith("c10d::"):
                self.operator_arguments[at] = _arguments(event.args)
        self.operators.add(
            start,
            length,
            name=[self._name(event.name) for event in events],
            thread=[integer(event.tid) for event in events],
        )

    def _label_rows(self, events: list[Any]) -> None:
        events, start, length = self._times(events)
        first = len(self.labels["name"])
        for at, event in enumerate(events, start=first):
            self.label_arguments[at] = _arguments(event.args)
        self.labels.add(
            start,
            length,
            name=[self._name(event.name) for event in events],
            thread=[integer(event.tid) for event in events],
        )

    def _times(self, events: list[Any]) -> tuple[list[Any], Int64, Int64]:
        """The events whose times can be used, their starts and lengths in ns. The others are counted (W16)."""
        if self.exact:
            read = [(event, from_digits(bytes(event.ts)), from_digits(bytes(event.dur))) for event in events]
            exact = [row for row in read if row[1] is not None and row[2] is not None]
            self.counters["without_times"] += len(read) - len(exact)
            events = [row[0] for row in exact]
            start = np.array([row[1] for row in exact], np.int64)
            length = np.array([row[2] for row in exact], np.int64)
        else:
            good = [event for event in events if usable(event.ts) and usable(event.dur)]
            self.counters["without_times"] += len(events) - len(good)
            events = good
            start = from_floats([event.ts for event in events])
            length = from_floats([event.dur for event in events])
        self.fractions = self.fractions or bool((start % 1000).any()) or bool((length % 1000).any())
        backwards = length < 0
        if backwards.any():
            self.counters["negative_duration"] += int(backwards.sum())
            keep = ~backwards
            events = [event for event, kept in zip(events, keep.tolist(), strict=True) if kept]
            start, length = start[keep], length[keep]
        return events, start, length

    def _name(self, name: Any) -> int:
        text = name if isinstance(name, str) else "" if name is None else str(name)
        code = self.names(text)
        if code == len(self.classes):
            self.classes.append(int(self.classifier.class_of(text)))
        return code


def _role(name: object) -> str:
    """What an event of the host is read for; empty for none."""
    if not isinstance(name, str):
        return ""
    if name == PARAMETERS:
        return "parameters"
    if MARK.match(name):
        return "mark"
    return "label" if name.startswith(_LABELS) else "operator"


def _plain(number: Number) -> bool:
    return type(number) is int and NULL <= number < _LARGEST


def _known(number: int) -> bool:
    return number != NULL


def _arguments(raw: msgspec.Raw | bytes) -> Arguments:
    """Arguments, or none where they are of a shape that cannot be used."""
    try:
        return _ARGUMENTS.decode(raw) or _NOTHING
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _NOTHING


def external_id(arguments: Arguments) -> int:
    """What a row on a device shares with the operator of the host that launched it, or `NULL`."""
    return integer(arguments.external if arguments.external is not None else arguments.external_old)


def integer(value: Number) -> int:
    """A whole number, also as text ("stream 7"); `NULL` for anything else, or beyond 63 bits."""
    if isinstance(value, str):
        digits = _DIGITS.search(value)
        value = int(digits[0]) if digits else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if value is not None and abs(value) < 2**63 else NULL


_DIGITS: Final = re.compile(r"\d{1,18}")
_NOTHING: Final = Arguments()
_LARGEST: Final = 2**63
