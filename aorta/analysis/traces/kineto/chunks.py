"""The bytes of a Chrome trace -> pieces of its event array, each a JSON list of its own, and what stands around it.

A trace is one JSON object; decoded at once it needs its whole text and an object per event. Here the event array is
cut between two events, so that memory does not grow with the trace. The cut is tried at the last `},{` of a block, and
is right if the piece decodes: `[piece]` is valid JSON only if the comma left out stands between two elements of the
array itself, whatever strings and nested values hold. So the layout of the file does not matter.

Enters: an inflated stream. Leaves: decoded pieces in order, and the metadata. Must not: know what an event means.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import msgspec

from aorta.errors import InputError

Piece = TypeVar("Piece")

BLOCK: Final = 4 << 20
LIMIT: Final = 128 << 20
"""Most bytes kept while the next place to cut, or the array's beginning or end, is looked for."""
_ARRAY: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN: Final = re.compile(rb"\}\s*,\s*$")
_TRUNCATED: Final = "Input data was truncated"
_TRAILING: Final = re.compile(r"trailing characters \(byte (\d+)\)")
_TRIES: Final = 64
_OPEN, _CLOSE, _COMMA = b"[],"


class DistributedInfo(msgspec.Struct):
    """What torch writes when `torch.distributed` is initialised at export."""

    backend: str | None = None
    rank: int | None = None
    world_size: int | None = None
    pg_config: object = None


class Metadata(msgspec.Struct):
    """What stands beside the events, as far as it is used. `None` where it does not."""

    distributed: DistributedInfo | None = msgspec.field(default=None, name="distributedInfo")
    devices: list[dict[str, object]] | None = msgspec.field(default=None, name="deviceProperties")
    base_ns: int | None = msgspec.field(default=None, name="baseTimeNanoseconds")
    host: str | None = msgspec.field(default=None, name="host_name")
    cupti: int | str | float | None = msgspec.field(default=None, name="cupti_version")
    cuda: int | str | float | None = msgspec.field(default=None, name="cuda_runtime_version")
    roctracer: int | str | float | None = msgspec.field(default=None, name="roctracer_version")
    rocprofiler: int | str | float | None = msgspec.field(default=None, name="rocprofiler-sdk_version")
    hip: int | str | float | None = msgspec.field(default=None, name="hip_runtime_version")

    def __or__(self, other: Metadata) -> Metadata:
        """These facts, and the other's where these are silent."""
        kept = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}
        return msgspec.structs.replace(other, **kept)


class _WithEvents(Metadata):
    events: list[object] | None = msgspec.field(default=None, name="traceEvents")


_METADATA: Final = msgspec.json.Decoder(_WithEvents)


class EventPieces(Generic[Piece]):
    """Iterates over the decoded pieces of one trace; `metadata` holds everything beside them once it has ended."""

    def __init__(self, stream: io.BufferedReader, decode: Callable[[bytes | memoryview], Piece], place: str) -> None:
        self._stream, self._decode, self._place = stream, decode, place
        self._read = 0
        self.metadata: Metadata = Metadata()

    def begin(self) -> bytes:
        """Read up to the events; afterwards `metadata` holds what stands before them. Returns the first event bytes.

        Raises:
            InputError: there is no event array.
        """
        text = self._stream.read(BLOCK)
        self._read += len(text)
        if text.lstrip()[:1] == b"[":  # the array alone: also a Chrome trace
            return text[text.index(b"[") + 1 :]
        seen = 0
        while True:
            for match in _ARRAY.finditer(text, seen):
                found = self._facts(text[: match.end()] + b"]}")
                if found is not None:
                    self.metadata = found
                    return text[match.end() :]
                seen = match.end()
            block = self._stream.read(BLOCK) if len(text) < LIMIT else b""
            self._read += len(block)
            if not block:
                raise InputError(
                    f'{self._place}: no "traceEvents" array in {self._read} bytes, or what stands before it is not '
                    "JSON; expected a Kineto (Chrome) trace"
                )
            text += block

    def pieces(self, text: bytes) -> Iterator[Piece]:
        """Every piece of the array, the first bytes of which are `text`.

        Raises:
            InputError: the trace is cut off, malformed, or has an event of a wrong type; says where.
        """
        rest: bytes | memoryview = text
        while True:
            # A buffer for each piece, as what was decoded still points into the last one. It begins with "[".
            buffer = bytearray(1 + len(rest) + BLOCK)
            buffer[0] = _OPEN
            buffer[1 : 1 + len(rest)] = rest
            got = self._stream.readinto(memoryview(buffer)[1 + len(rest) :])
            self._read += got
            body = memoryview(buffer)[: 1 + len(rest) + got]
            if not got:
                yield from self._last(bytes(body))
                return
            rest = body[1:]
            at = len(body)
            for _ in range(_TRIES):
                at = _boundary(buffer, at)
                if at < 0:
                    break
                kept, buffer[at] = buffer[at], _CLOSE
                try:
                    piece = self._decode(body[: at + 1])
                except msgspec.DecodeError as error:
                    buffer[at] = kept
                    if str(error) == _TRUNCATED:
                        continue  # the comma stood inside an event
                    if _TRAILING.search(str(error)):
                        break  # the array ended before it
                    raise self._broken(error, len(body)) from error
                except (RecursionError, UnicodeDecodeError) as error:
                    raise self._broken(error, len(body)) from error
                rest = body[(at if kept == _COMMA else buffer.index(b",", at)) + 1 :]
                # The piece keeps its end while it is out: it may be decoded again, for times float64 cannot hold.
                yield piece
                break
            if len(rest) > LIMIT:
                raise InputError(
                    f"{self._place}: {len(rest) >> 20} MiB without a place between two events; this is no trace that "
                    "can be read in bounded memory"
                )

    def _last(self, body: bytes) -> Iterator[Piece]:
        """The rest of the array, after "[", and what follows it."""
        try:
            try:
                piece, end = self._decode(body), len(body)
            except msgspec.DecodeError as error:
                match = _TRAILING.search(str(error))
                if match is None:
                    raise
                end = _end_of_array(body, int(match[1]))
                piece = self._decode(body[:end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._broken(error, len(body)) from error
        rest = body[end:].strip()
        if rest:
            after = self._facts(b'{"traceEvents":[]' + rest)
            if after is None:
                raise InputError(f"{self._place}: what follows the events is not JSON: the file is cut off or damaged")
            self.metadata |= after
        yield piece

    def _facts(self, text: bytes) -> Metadata | None:
        try:
            found = _METADATA.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if found.events != []:
            return None
        return Metadata(**{name: getattr(found, name) for name in Metadata.__struct_fields__})

    def _broken(self, error: Exception, pending: int) -> InputError:
        where = f"within the last {pending} of the first {self._read} bytes (inflated)"
        if isinstance(error, RecursionError):
            return InputError(f"{self._place}: nested too deeply {where}")
        if isinstance(error, UnicodeDecodeError):
            return InputError(f"{self._place}: not UTF-8: byte {error.object[error.start]:#04x} {where}")
        if str(error) == _TRUNCATED:
            return InputError(f"{self._place}: ends in the middle of an event: the file is cut off; write it again")
        return InputError(f"{self._place}: not a trace event: {error}, {where}")


def _boundary(text: bytearray, before: int) -> int:
    """Index just after the `}` of the last `},{` whose `{` lies before `before`; -1 if there is none."""
    for _ in range(1 << 16):
        before = text.rfind(b"{", 0, before)
        if before < 0:
            return -1
        match = _BETWEEN.search(text, max(before - 256, 0), before)
        if match is not None:
            return match.start() + 1
    return -1


def _end_of_array(body: bytes, reported: int) -> int:
    """Index after the array's `]`. `reported` is the place, from 1, of the first byte that is too many."""
    return body.rindex(b"]", 0, reported - 1) + 1
