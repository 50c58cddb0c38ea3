"""Collects the columns that matter from the events of a trace: device rows, parameters of collectives, step marks; the
work of the host only where no device has rows (`host_operators.HostWork`).

Memory grows with the rows that are kept, not with the trace, because they are kept as plain numbers and codes.
Selection is by category, never by an argument that an event happens to carry (W13). A trace holds millions of events,
so work is done per piece or per distinct name wherever possible, not per event. Must not: compute anything from an
interval.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from aorta.analysis.load.interval_table import NULL, Interner, IntervalClass
from aorta.analysis.load.kernel_classifier import MARK, NameClassifier
from aorta.analysis.load.kernels import GEMM_OPERATORS
from aorta.analysis.load.kineto.event_structs import (
    CALLS,
    COPIES,
    DEVICE,
    DEVICES,
    HOST,
    OPERATORS,
    PARAMETERS,
    Arguments,
    EventDecoder,
    Identifiers,
    Piece,
    Rows,
    Untimed,
    arguments_of,
    chosen,
    integer,
    usable,
)
from aorta.analysis.load.kineto.host_operators import HostWork
from aorta.analysis.load.kineto.kernel_links import (
    SYMMETRIC,
    KernelLinks,
    Links,
    between_devices,
    externals_of,
    idents,
    links_of,
)
from aorta.timeline.arrays import Int64
from aorta.timeline.kernel_names import launches_communication

_COPY, _COMPUTE, _COMM = int(IntervalClass.COPY), int(IntervalClass.COMPUTE), int(IntervalClass.COMM)


class EventColumns:
    """Accepts the pieces of a trace one after the other and keeps what matters of each.

    Attributes:
        device: rows of devices: codes of names and classes, and what ties them to the host.
        marks: of steps.
        host: the work of the host; None once there is work on a device.
        linked: row -> arguments of communication.
        copies: copies between devices, in the form `kernel_links.launched_by_collectives` expects.
        symmetric: whether symmetric memory was used.
        devices, streams: what their ids are numbered by.
        issued: `External id` of each operator or range that issues communication -> its name.
    """

    def __init__(self, classifier: NameClassifier) -> None:
        self.classifier = classifier
        self.names = Interner()
        self.classes = array("b")
        self.device = Rows("name", "device", "stream", "bytes", "cls", "origin", "correlation")
        self.marks = Rows("kind", "step")
        self.mark_kinds = Interner()
        self.links = KernelLinks()
        self.linked: dict[int, Arguments] = {}
        self.copies: dict[int, Arguments | int] = {}
        self.symmetric = False
        self.issued: dict[int, str] = {}
        self.devices, self.streams = Identifiers(DEVICES), Identifiers()
        self.counters: Counter[str] = Counter()
        self.events = 0
        self._decoder = EventDecoder()
        self.host: HostWork | None = HostWork(self._decoder)
        self._parameter_texts: list[bytes] = []
        self._roles: dict[Any, str] = {}
        self._text: bytes | memoryview = b""

    def decode(self, text: bytes | memoryview) -> Piece:
        """Decode one piece of the event array."""
        self._text = text
        return self._decoder.decode(text, timed_operators=self.host is not None and self.host.at_once)

    def take(self, events: Piece) -> None:
        """Keep what matters of the piece that was decoded last."""
        categories = [event.cat for event in events]
        work, host, calls = (_complete(events, categories, wanted) for wanted in (DEVICE, HOST, CALLS))
        parameters, marks, products, issuing = self._by_role(work, host)
        if any(isinstance(mark, Untimed) for mark in marks):  # old traces have them among the operators
            self.take(self._decoder.decode(self._text))
            return
        begun = self._decoder.instants([call.ts for call in calls])
        of_work, of_marks = self._decoder.times(work), self._decoder.times(marks)
        if begun is None or of_work is None or of_marks is None:  # earlier pieces lost no digits
            self._decoder.exact = True
            self.take(self.decode(self._text))
            return
        self.events += len(events)
        self._parameter_texts += [bytes(event.args) for event in parameters]
        if work:
            self.host = None
            self._device_rows(*usable(work, of_work, self.counters))
        if marks:
            self._mark_rows(*usable(marks, of_marks, self.counters))
        if calls:
            self.links.add_calls(calls, *begun)
        self.links.add_products(products)
        idents_of = externals_of(links_of([event.args for event in issuing])).tolist()
        self.issued.update(zip(idents_of, [event.name for event in issuing], strict=True))
        self.issued.pop(NULL, None)
        if self.host is not None:
            self.host.add(self._text, events)

    def _by_role(self, work: list[Any], host: list[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Return the host's events that are used beside a device's rows: parameters of collectives, marks of steps,
        matrix products, and operators and ranges that issue communication.
        """
        roles = self._roles
        names_of = [event.name for event in host]
        names = set(names_of)
        for name in (names | {event.name for event in work}) - roles.keys():
            roles[name] = _role(name)
            self.symmetric = self.symmetric or (isinstance(name, str) and name.startswith(SYMMETRIC))
        parameters, marks, products, issuing = (
            chosen(host, names_of, {name for name in names if roles[name] == role})
            for role in ("parameters", "mark", "product", "issuing")
        )
        return parameters, marks, [event for event in products if event.cat in OPERATORS], [*parameters, *issuing]

    def _device_rows(self, events: list[Any], start: Int64, length: Int64) -> None:
        first = self.device.count
        names = [event.name for event in events]
        code_of = {name: self._name(name) for name in dict.fromkeys(names)}
        codes = np.array(list(map(code_of.__getitem__, names)), np.int64)
        classes = np.frombuffer(self.classes, np.int8)[codes].astype(np.int64)
        copies = np.array([event.cat in COPIES for event in events], bool)
        classes[copies & (classes != _COMM)] = _COPY
        links = links_of([event.args for event in events])
        sizes = np.full(len(events), NULL, np.int64)
        self.counters["kernels_unlinked"] += int(((classes != _COPY) & ~_has_operator(links)).sum())
        detailed = self._with_arguments(events, classes)
        for at, arguments in zip(detailed, arguments_of([events[at].args for at in detailed]), strict=True):
            if classes[at] == _COPY:
                sizes[at] = max(integer(arguments.bytes), NULL)
                if between_devices(str(names[at])):
                    self.copies[first + at] = arguments if arguments.collective is not None else external_id(arguments)
            elif arguments.collective is not None or classes[at] == _COMM:
                classes[at] = _COMM  # its host operator identifies it, whatever its name
                self.linked[first + at] = arguments
        devices, streams = [event.pid for event in events], [event.tid for event in events]
        missing = None in devices or None in streams
        unknown = [at for at, pair in enumerate(zip(devices, streams, strict=True)) if missing and None in pair]
        for at, arguments in zip(unknown, arguments_of([events[at].args for at in unknown]), strict=True):
            devices[at] = arguments.device if devices[at] is None else devices[at]
            streams[at] = arguments.stream if streams[at] is None else streams[at]
        self.device.add(
            start,
            length,
            name=codes,
            device=self.devices.codes(devices),
            stream=self.streams.codes(streams),
            bytes=sizes,
            cls=classes,
            origin=externals_of(links),
            correlation=idents([each.correlation for each in links]),
        )

    def _with_arguments(self, events: list[Any], classes: Int64) -> list[int]:
        """Return the rows whose arguments say more than what they are linked to: all but those of computation, and of
        those the collectives by other names.
        """
        computes = (classes == _COMPUTE).tolist()
        return [
            at
            for at, (compute, event) in enumerate(zip(computes, events, strict=True))
            if not compute or b'"Collective name"' in bytes(event.args)
        ]

    def parameters(self) -> dict[int, Arguments]:
        """Return the arguments of `record_param_comms`, by the id that they share with the kernels they launched."""
        found: dict[int, Arguments] = {}
        for arguments in arguments_of(self._parameter_texts):
            external = integer(arguments.external)
            if external != NULL and arguments.collective is not None:
                found.setdefault(external, arguments)
        return found

    def unlink(self) -> bool:
        """Drop what ties rows to the host where the trace was merged of processes, whose ids of calls and operators
        are the same; return whether it was, by what stands in brackets before the ids of its devices.
        """
        if len({name.partition("]")[0] for name in self.devices.names().values() if name.startswith("[")}) <= 1:
            return False
        for name in ("origin", "correlation"):
            self.device.forget(name)
        self._parameter_texts.clear()
        self.issued.clear()
        return True

    def _mark_rows(self, events: list[Any], start: Int64, length: Int64) -> None:
        found = [match for event in events if (match := MARK.match(event.name))]
        self.marks.add(
            start,
            length,
            kind=[self.mark_kinds(match["kind"]) for match in found],
            step=[int(match["step"]) for match in found],
        )

    def _name(self, name: Any) -> int:
        text = name if isinstance(name, str) else "" if name is None else str(name)
        code = self.names(text)
        if code == len(self.classes):
            self.classes.append(int(self.classifier.class_of(text)))
        return code


def _complete(events: Piece, categories: Sequence[str | None], wanted: Set[str]) -> list[Any]:
    """Return the complete events (`ph` X) of some categories."""
    return [event for event in chosen(events, categories, wanted) if event.ph == "X"]


def _role(name: object) -> str:
    """Return what an event of the host is used for beside a device's rows; empty if it is unused."""
    if not isinstance(name, str):
        return ""
    if name == PARAMETERS:
        return "parameters"
    if name in GEMM_OPERATORS:
        return "product"
    if launches_communication(name):
        return "issuing"
    return "mark" if MARK.match(name) else ""


def _has_operator(links: list[Links]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which rows name a host operator, whatever its id is."""
    return np.array([each.external is not None or each.external_old is not None for each in links], bool)


def external_id(arguments: Arguments) -> int:
    """Return the id that a row on a device shares with the host operator that launched it, or `NULL`."""
    return integer(arguments.external if arguments.external is not None else arguments.external_old)
