"""Decode one line of a record: of a step, rows as tuples, and what few readers use not yet.

    line = decode_line(text)
    if isinstance(line, StepLine):
        line.overlap["overlap_ratio"]       # decoded with the line
        decode_field(line, "coverage").seen  # decoded now

`StepLine` is made of `records.schema.Step`, field by field. A field without a default must be present, and all must be
JSON, or the line is refused. Must not accept a field that violates the schema: one that is decoded late raises when it
is read.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias, TypeVar, get_args

import msgspec

from aorta.records.schema import Anchor, Calibration, Footer, Header, Line, Step

Value = TypeVar("Value")
_ROWS: Final = ("collectives", "compute", "aux")
"""Read as tuples of the fields of their structs, which are built in half the time."""
_LATE: Final = frozenset(
    [
        *("per_stream_ms", "utilization", "concurrency", "coverage", "active_segments"),
        *("reasons", "device", "ranges", "gradient_order", "copies"),
    ]
)
"""Kept as JSON text: `coverage` and `reasons` are the same in most steps, the others are read of few."""
_FAILURES: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _row(struct: type[msgspec.Struct]) -> Any:
    return tuple[tuple(field.type for field in msgspec.structs.fields(struct))]  # type: ignore[misc]


def _reading_fields() -> list[tuple[str, Any, Any]]:
    found = []
    for field in msgspec.structs.fields(Step):
        type_, default = field.type, msgspec.NODEFAULT if field.required else field.default
        if default is msgspec.NODEFAULT and not field.required:
            default = msgspec.Raw(b"{}")  # of a dictionary
        if field.name in _LATE:
            type_, default = msgspec.Raw, msgspec.Raw(b"") if default is msgspec.UNSET else default
        elif field.name in _ROWS:
            type_ = list[_row(get_args(type_)[0])]  # type: ignore[misc]
        found.append((field.name, type_, default))
    return found


StepLine: Any = msgspec.defstruct(
    "StepLine", _reading_fields(), tag_field="record", tag="step", gc=False, module=__name__
)
"""A step as it is read. Fields in `_LATE` hold JSON text, empty where the line has none (`decode_field`)."""
_LATE_DECODERS: Final = {
    field.name: msgspec.json.Decoder(field.type) for field in msgspec.structs.fields(Step) if field.name in _LATE
}

ReadLine: TypeAlias = Any
"""`Header`, `StepLine`, `Anchor`, `Calibration` or `Footer`."""
_DECODER: Final[msgspec.json.Decoder[ReadLine]] = msgspec.json.Decoder(
    Header | StepLine | Anchor | Calibration | Footer
)
"""A union, so that a line without `record` is refused: with a single type, msgspec accepts a missing tag."""
_WHOLE_LINE: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(Header | Step | Anchor | Calibration | Footer)


def decode_line(text: bytes) -> ReadLine:
    """Decode one line of a record.

    Raises:
        ValueError: it is no line of the schema, or one of its numbers exceeds what a column holds.
    """
    return _decoded(_DECODER, text)


def decode_whole_line(text: bytes) -> Line:
    """Decode one line with every field of a step, as it was written.

    Raises:
        ValueError: it is no line of the schema.
    """
    return _decoded(_WHOLE_LINE, text)


def decode_field(line: Any, name: str) -> Any:
    """Decode a field of a `StepLine` that is kept as text; None where the line does not have it.

    Raises:
        ValueError: it violates the schema.
    """
    text = bytes(getattr(line, name))
    if not text:
        return None
    try:
        return _LATE_DECODERS[name].decode(text)
    except _FAILURES as error:
        raise _refusal(error, name) from error


def _decoded(decoder: msgspec.json.Decoder[Value], text: bytes) -> Value:
    try:
        return decoder.decode(text)
    except _FAILURES as error:
        raise _refusal(error) from error


def _refusal(error: Exception, name: str | None = None) -> ValueError:
    """Return the error for a line, or for its field `name`, in which msgspec's paths count from the field."""
    why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    if name is not None:
        message, at, path = why.rpartition(" - at `$")
        why = f"{message}{at}.{name}{path}" if at else f"{why} - at `$.{name}`"
    return ValueError(f"not a line of this schema ({why})")
