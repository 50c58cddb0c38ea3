"""Reads the text of a Chrome trace: its event array piece by piece, and the members around it.

A trace is one JSON object with a list `traceEvents`, or that list alone (Trace Event Format, Google, 2016). The array
is cut between two events, so that memory does not grow with the trace. A cut is tried at the last `},{` of a block, and
is right if the piece decodes: `[piece]` is valid JSON only if the removed comma stood between two elements of the array
itself, whatever strings and nested values hold. So the layout of the file does not matter.

    with opened("trace.json.gz") as stream, reading("trace.json.gz"):
        trace = RawEvents(stream, "trace.json.gz")
        phases = Counter(bytes(event["ph"]) for event in trace.events())

Its times are microseconds with three decimals. As float64 a number below 2^43 us is off by less than 2^-11 us, so its
nanosecond is still the nearest integer. For times counted from 1970 float64 loses the fraction of a microsecond
(docs/dev/measuring.md, W14), so their digits are read instead. Whole columns are converted, to integer nanoseconds.

What is nearly JSON is read where that is asked for: bare words for numbers, lone backslashes and control characters are
mended, events that stay broken are dropped, and a text that ends early is read as far as it goes; `damage` says so.

Must not: know what an event means, accept a truncated file as complete without saying it, round to microseconds,
convert through float64 what it cannot represent, or judge a duration (`health` does).
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import InputError
from aorta.timeline.arrays import Int64

Piece = TypeVar("Piece")
Event: TypeAlias = dict[str, msgspec.Raw]
"""An event whose values are not decoded, so that unchanged values can be written back byte for byte."""

BLOCK: Final = 1 << 20
"""Bytes read at a time. The decoded events are several times as large, and should stay in a processor's cache."""
_FIRST_BLOCK: Final = 1 << 14
"""Bytes read at first, which mostly hold all that stands before the events."""
LIMIT: Final = 32 << 20
"""Most bytes buffered while searching for the next cut, or for the beginning or end of the array."""
_EVENTS: Final = "traceEvents"
CUT_OFF: Final = "cut off among its events"
"""How the damage begins of a text that ends early."""
_ARRAY: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_MORE_MEMBERS: Final = re.compile(rb',\s*"')
_BETWEEN: Final = re.compile(rb"\}\s*,\s*(?=\{)")
_TRUNCATED: Final = "Input data was truncated"
_TRAILING: Final = re.compile(r"trailing characters \(byte (\d+)\)")
_TRIES: Final = 32
_ADJACENT_TRIES: Final = 16
"""This many cuts are tried one after the other; then the distance doubles, as all may lie inside one event."""
_NEAR: Final = 1 << 14
"""Bytes before the end of a block in which cuts are searched first."""
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_CONTROL: Final = re.compile(rb"[\x00-\x1f]")
_BACKSLASH: Final = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_WORDS: Final = re.compile(rb"([:\[,]\s?)(?:N/A|[-+]?(?:inf(?:inity)?|nan)|undefined)(?=\s?[,}\]])", re.IGNORECASE)
_BETWEEN_EVENTS: Final = re.compile(rb'(?<=\})\s{0,9},\s{0,9}(?=\{\s{0,9}"(?:ph|name|cat|ts|pid|tid|dur|args|id|s)")')
_ARRAY_ENDS: Final = re.compile(rb'\}\s{0,9}\](?=\s{0,9}(?:,\s{0,9}"|\}\s{0,9}$|$))')
_OPEN, _CLOSE, _COMMA = b"[],"
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises of a text that is no JSON, or JSON of another shape."""
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_EVENTS: Final = msgspec.json.Decoder(list[Event])


class NoEventArray(InputError):
    """A complete JSON object that is not a trace."""


class EventArray(Generic[Piece]):
    """The event array of one trace, read once.

    Args:
        stream: the inflated text. Everything before the events is read at once.
        decode: decodes a JSON list of events. It may keep references into the text until the next piece is requested.
        origin: names the trace in errors.
        tolerant: whether text that is nearly JSON is read.

    Attributes:
        damage: what was mended or is missing, and where.
        head, tail: undecoded members of the outer object before the events, and behind them once they are read.

    Raises:
        InputError: it is no trace (`NoEventArray`: but JSON), or what stands before the events is broken.
    """

    def __init__(
        self,
        stream: io.BufferedReader,
        decode: Callable[[bytes | memoryview], Piece],
        origin: str,
        tolerant: bool = False,
    ) -> None:
        self._stream, self._decode, self._origin, self._tolerant = stream, decode, origin, tolerant
        self.damage: Counter[str] = Counter()
        self._read = self._events = 0
        self.head: dict[str, msgspec.Raw] = {}
        self.tail: dict[str, msgspec.Raw] = {}
        self._in_object = True
        self._first = self._begin()

    def pieces(self) -> Iterator[Piece]:
        """Yield the array piece by piece, decoded, in the order of the file.

        Raises:
            InputError: the trace is cut off, malformed, or has an event of a wrong type; names the position.
        """
        rest: bytes | memoryview = self._first
        while True:
            # A new buffer for each piece, because decoded values still point into the last one. It begins with "[".
            buffer = bytearray(1 + len(rest) + max(BLOCK, len(rest)))
            view = memoryview(buffer)  # a slice of a bytearray is set by way of a copy, one of a view is not
            buffer[0] = _OPEN
            view[1 : 1 + len(rest)] = rest
            got = self._fill(view[1 + len(rest) :])
            self._read += got
            size = 1 + len(rest) + got
            rest = view[1:size]
            if not got:
                yield self._last(bytes(view[:size]))
                return
            for cut in _places_to_cut(buffer, size):
                kept, buffer[cut] = buffer[cut], _CLOSE
                try:
                    piece = self._decode(view[: cut + 1])
                except MALFORMED as error:
                    buffer[cut] = kept
                    if str(error) == _TRUNCATED:
                        continue  # the comma stood inside an event
                    if _TRAILING.search(str(error)):  # the array ended before this cut
                        behind = bytearray()
                        while self._more(behind):
                            if len(behind) > LIMIT:
                                why = f"more than {LIMIT >> 20} MiB behind the events: this is no trace"
                                raise InputError(f"{self._origin}: {why}") from error
                        yield self._last(bytes(view[:size]) + bytes(behind))
                        return
                    if not self._tolerant:
                        raise self._broken(error, size) from error
                    piece = self._mended(bytes(view[:cut]) + b"]", error)
                rest = view[(cut if kept == _COMMA else buffer.index(b",", cut)) + 1 : size]
                # The piece keeps its closing bracket while the caller has it: it may decode it again for exact digits.
                self._events += 1
                yield piece
                break
            if len(rest) > LIMIT:
                raise InputError(
                    f"{self._origin}: {len(rest) >> 20} MiB without a place between two events; this is no trace that "
                    "can be read in bounded memory"
                )

    def _begin(self) -> bytes:
        """Read up to the events. Returns the part of the events that was read along with it."""
        text = bytearray()
        while not text.strip() and len(text) <= LIMIT and self._more(text):
            text = text.removeprefix(_BYTE_ORDER_MARK)
        start = text.lstrip()[:1]
        if start == b"[":
            self._in_object = False
            return bytes(text[text.index(b"[") + 1 :])
        if not start and len(text) > LIMIT:
            raise self._no_array(bytes(text))
        if not start:
            raise InputError(f'{self._origin}: cut off: it is empty; expected a Chrome trace, with "{_EVENTS}"')
        if start != b"{":
            raise InputError(f'{self._origin}: expected {{ or [ at the beginning of a Chrome trace, with "{_EVENTS}"')
        seen = tries = 0
        while True:
            for match in _ARRAY.finditer(text, seen):
                head = self._object(bytes(text[: match.end()]) + b"]}")
                if head is not None and bytes(head.pop(_EVENTS, b"")) == b"[]":
                    self.head = head
                    return bytes(text[match.end() :])
                seen, tries = match.end(), tries + 1
                if tries > _TRIES:
                    raise InputError(f'{self._origin}: "{_EVENTS}" stands {tries} times in it; a trace has one')
            if len(text) > LIMIT or not self._more(text):
                raise self._no_array(bytes(text))

    def _more(self, text: bytearray) -> bool:
        block = bytearray(min(BLOCK, max(_FIRST_BLOCK, len(text))))
        got = self._fill(memoryview(block))
        self._read += got
        text += block[:got]
        return bool(got)

    def _no_array(self, text: bytes) -> InputError:
        if len(text) > LIMIT:
            return InputError(f'{self._origin}: no "{_EVENTS}" in its first {self._read} bytes: no Chrome trace')
        try:
            members = _MEMBERS.decode(text)
        except MALFORMED as error:
            if str(error) == _TRUNCATED:
                return InputError(f'{self._origin}: cut off before its "{_EVENTS}", after {self._read} bytes')
            return InputError(
                f'{self._origin}: no "{_EVENTS}" array in {self._read} bytes, or what stands before it is not JSON '
                f"({_reason(error)}); expected a Chrome trace"
            )
        if _EVENTS in members:
            return InputError(f'{self._origin}: its "{_EVENTS}" is no list: expected [')
        return NoEventArray(f'{self._origin}: not a trace: it has no "{_EVENTS}"')

    def _last(self, text: bytes) -> Piece:
        """Decode the rest of the array, and the members behind it to the end of the file."""
        try:
            try:
                piece, end = self._decode(text), len(text)
            except msgspec.DecodeError as error:
                match = _TRAILING.search(str(error))
                if match is None:
                    raise
                end = text.rindex(b"]", 0, int(match[1]) - 1) + 1  # bytes are counted from 1
                piece = self._decode(memoryview(text)[:end])
        except MALFORMED as error:
            if not self._tolerant:
                raise self._broken(error, len(text)) from error
            ends = [match.end() for match in _ARRAY_ENDS.finditer(text)]
            end = ends[-1] if ends else len(text)
            piece = self._mended(text[:end] if ends else text.rstrip(b", \r\n\t") + b"]", error)
        behind = text[end:].strip()
        if self._in_object:
            if not behind:
                self._refuse(f"cut off behind its events, after {self._read} bytes (inflated)")
            tail = None
            if behind == b"}" or _MORE_MEMBERS.match(behind):
                tail = self._object(b"{" + behind.removeprefix(b","))
            if tail is None or _EVENTS in tail:
                self._refuse("what follows the events is not JSON: the file is cut off or damaged")
            self.tail = tail or {}
        elif behind:
            self._refuse("more text behind the list of events: the file is damaged")
        return piece

    def _fill(self, view: memoryview) -> int:
        filled = 0
        while filled < len(view):
            try:
                got = self._stream.readinto1(view[filled:])
            except EOFError as error:
                if not self._tolerant:
                    raise
                self.damage[f"its gzip stream ends early: {error}"] = 1
                break
            if not got:
                break
            filled += got
        return filled

    def _refuse(self, why: str) -> None:
        """Refuse the text, or where it may be nearly JSON, note why it should be."""
        if not self._tolerant:
            raise InputError(f"{self._origin}: {why}")
        self.damage[why] += 1

    def _mended(self, text: bytes, error: Exception) -> Piece:
        """Decode a list of events that is not JSON: mended as a whole, else event by event without the broken ones. An
        `InputError` where nothing of it can be read, nor was anything before it.
        """
        cut = f"{CUT_OFF}, after {self._read} bytes (inflated): later events are missing"
        damage = cut if str(error) == _TRUNCATED else f"text that is not JSON was mended ({_reason(error)})"
        for change in (bytes, _as_json):
            with suppress(*MALFORMED):
                piece = self._decode(change(text))
                self.damage[damage] += 1
                self._events += 1
                return piece
        events = good = _BETWEEN_EVENTS.split(_as_json(text).strip()[1:-1])
        pieces: list[Piece] = []
        while not pieces:  # once more, where one of the events made the decoder stricter
            candidates, good = good, []
            for event in candidates:
                with suppress(*MALFORMED):
                    self._decode(b"[%b]" % event)
                    good.append(event)
            with suppress(*MALFORMED):
                pieces.append(self._decode(b"[%b]" % b",".join(good)))
        if not good and not self._events:
            raise self._broken(error, len(text)) from error
        self._events += len(good)
        where = f"within the last {len(text)} of the first {self._read} bytes (inflated)"
        damage = cut if str(error) == _TRUNCATED else f"events that are not JSON are left out, {where}"
        self.damage[damage] += len(events) - len(good)
        return pieces[0]

    def _object(self, text: bytes) -> dict[str, msgspec.Raw] | None:
        try:
            return _MEMBERS.decode(text)
        except MALFORMED:
            return None

    def _broken(self, error: Exception, pending: int) -> InputError:
        where = f"within the last {pending} of the first {self._read} bytes (inflated)"
        if str(error) == _TRUNCATED:
            return InputError(f"{self._origin}: ends in the middle of an event: the file is cut off; write it again")
        return InputError(f"{self._origin}: not a trace event: {_reason(error)}, {where}")


class RawEvents(EventArray[list[Event]]):
    """The events of one trace one at a time, with undecoded values; arguments and errors as `EventArray`. `count`:
    number of events before the one yielded last.
    """

    def __init__(self, stream: io.BufferedReader, origin: str) -> None:
        def decode(text: bytes | memoryview) -> list[Event]:
            events = _RAW_EVENTS.decode(text)
            str(text, "utf-8")  # undecoded values are written back unchecked, so they must be valid UTF-8
            return events

        super().__init__(stream, decode, origin)
        self.count = 0
        self._check(self.head)

    def events(self) -> Iterator[Event]:
        """Yield every event, in the order of the file; errors as `pieces`."""
        for piece in self.pieces():
            for event in piece:
                yield event
                self.count += 1
        self._check(self.tail)

    def _check(self, members: dict[str, msgspec.Raw]) -> None:
        for name, value in members.items():
            try:
                str(value, "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{self._origin}: its {name} is {_reason(error)}") from error


def _as_json(text: bytes) -> bytes:
    """Return text with what is often wrong in it mended: control characters, lone backslashes, words for numbers, bytes
    that are not UTF-8.
    """
    text = _CONTROL.sub(b" ", text)
    text = _BACKSLASH.sub(lambda match: match[0] if match[1] else rb"\\", text)
    return _WORDS.sub(rb"\1null", text).decode("utf-8", "replace").encode()


def _places_to_cut(text: bytearray, size: int) -> Iterator[int]:
    """Yield the indices just behind the `}` of a `},{` before `size`: the last ones first, then ever farther apart."""
    near = [match.start() + 1 for match in _BETWEEN.finditer(text, max(size - _NEAR, 0), size)][-_ADJACENT_TRIES:]
    yield from reversed(near)
    cuts = [match.start() + 1 for match in _BETWEEN.finditer(text, 0, size)]
    for tries in range(_ADJACENT_TRIES):
        if (before := len(near) + 2**tries) <= len(cuts):
            yield cuts[-before]


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte {error.object[error.start]:#04x}"
    return str(error)


LARGEST_NS: Final = 2**62
"""146 years after the clock's zero, which no clock shows. The difference of two later instants would not fit into 64
bits, nor would their sum with a base.
"""
_EXACT_BELOW_US: Final = 2.0**43
_LARGEST_US: Final = LARGEST_NS // 1000
Exact: TypeAlias = (
    Annotated[int, msgspec.Meta(gt=-_LARGEST_US, lt=_LARGEST_US)]
    | Annotated[float, msgspec.Meta(gt=-_EXACT_BELOW_US, lt=_EXACT_BELOW_US)]
    | str
    | None
)
"""The microseconds of which decoding loses no digit; msgspec refuses all others."""
_DECIMALS: Final = 3
_EXACT: Final = msgspec.json.Decoder(list[Exact])
_WHOLE_NS: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(gt=-LARGEST_NS, lt=LARGEST_NS)]])


def ns_of_values(values: Sequence[Any]) -> tuple[Int64, NDArray[np.bool_]]:
    """Convert decoded JSON values (`Exact`) or their texts (`msgspec.Raw`) to nanoseconds. Returned are the times, and
    which values are numbers that a clock can show; the time is 0 where not.
    """
    return ns_of_texts(values) if values and isinstance(values[0], msgspec.Raw) else ns_of_numbers(values)


def ns_of_numbers(values: Sequence[Exact]) -> tuple[Int64, NDArray[np.bool_]]:
    """Convert decoded JSON numbers; returns as `ns_of_values`."""
    kinds = set(map(type, values))
    known = np.ones(len(values), bool)
    if not kinds <= {int, float}:
        known = np.array([isinstance(value, int | float) for value in values], bool)
        values = [value if isinstance(value, int | float) else 0 for value in values]
    if float not in kinds:
        return np.array(values, np.int64) * 1000, known
    numbers = np.array(values, np.float64)
    whole = np.floor(numbers)
    return whole.astype(np.int64) * 1000 + np.rint((numbers - whole) * 1000).astype(np.int64), known


def ns_of_texts(texts: Sequence[bytes | msgspec.Raw]) -> tuple[Int64, NDArray[np.bool_]]:
    """Convert the texts of JSON values; returns as `ns_of_values`."""
    plain = list(map(bytes, texts))
    joined = b"[%b]" % b",".join(plain)
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return ns_of_numbers(_EXACT.decode(joined))
    if joined.count(b".") == len(plain) and all(text[-4:-3] == b"." for text in plain):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):  # three decimals: without the point these are ns
            return np.array(_WHOLE_NS.decode(joined.replace(b".", b"")), np.int64), np.ones(len(plain), bool)
    values = [value if (value := ns_of_text(text)) is not None and abs(value) < LARGEST_NS else None for text in plain]
    known = np.array([value is not None for value in values], bool)
    return np.array([value or 0 for value in values], np.int64), known


def ns_of_text(text: bytes) -> int | None:
    """Return the nanoseconds of the text of a JSON number, also beyond `LARGEST_NS`; half a nanosecond rounds to even.
    None where it is no number, or has more than 19 digits before the point.
    """
    whole, _, decimals = text.partition(b".")
    if len(whole) < 17 and len(decimals) <= _DECIMALS and decimals.isdigit() == bool(decimals):
        digits = whole[1:] if whole[:1] == b"-" else whole
        if digits.isdigit():
            size = int(digits) * 1000 + int(decimals.ljust(_DECIMALS, b"0"))
            return -size if whole[:1] == b"-" else size
    try:
        exact = Decimal(text.decode())
        if not exact.is_finite() or exact.adjusted() > 18:
            return None
        return int((exact * 1000).to_integral_value())
    except (InvalidOperation, UnicodeDecodeError, ValueError):
        return None


def ns_of_value(text: bytes) -> int:
    """Return the nanoseconds of the text of a `ts` or `dur`, with or without quotes.

    Raises:
        ValueError: it is not a number of microseconds.
    """
    parsed = ns_of_text(text.strip(b'"'))
    if parsed is None:
        raise ValueError(f"{text[:40]!r} is not a number of microseconds")
    return parsed


def ns_as_text(value_ns: int) -> bytes:
    """Return microseconds with three decimals, as Kineto writes them."""
    whole, part = divmod(abs(value_ns), 1000)
    return b"%s%d.%03d" % (b"-" if value_ns < 0 else b"", whole, part)
