"""Decode one line of a record; of a step, only the fields that every reader uses.

    line = decode_line(text)
    if isinstance(line, StepLine):
        line.overlap["overlap_ratio"]       # decoded with the line
        [row.end_ns for row in line.waits]  # decoded now

Each field of `records.schema.Step` without a default must be present, and all must be JSON, or the line is refused.
Must not accept a field that violates the schema: one that is decoded late raises when it is first read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, TypeAlias, TypeVar, overload

import msgspec

from aorta.records.schema import (
    ActiveSegment,
    Anchor,
    AuxRange,
    BucketReady,
    Calibration,
    Collective,
    ComputeRange,
    Copy,
    Coverage,
    DeviceSample,
    Footer,
    Gradient,
    Header,
    Integer,
    Line,
    MeasuredBy,
    Phase,
    Stall,
    Step,
    UserRange,
    Wait,
)

Value = TypeVar("Value")
Milliseconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""Also used for ratios. 1e15 ms are 30,000 years; sums of a billion such values are exact enough and finite."""
Loss: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""Any diverged 32-bit value fits; a sum of a hundred million of them is finite."""

if TYPE_CHECKING:
    CollectiveRow: TypeAlias = tuple[Any, ...]
else:
    CollectiveRow = tuple[tuple(field.type for field in msgspec.structs.fields(Collective))]
"""The fields of `Collective`, in its order. A tuple is built in half the time of a struct."""

_FAILURES: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ABSENT: Final = msgspec.Raw(b"")


class DecodedLate(Generic[Value]):
    """Attribute of `StepLine` that decodes the JSON text kept in the field `<name>_json`, each time it is read.

    Args:
        type_: of the value.
        absent: makes the value of a field that the line does not have.

    Raises:
        ValueError: on reading the attribute: the text is not of the type.
    """

    def __init__(self, type_: Any, absent: Callable[[], Value] | None = None) -> None:
        self._decoder: msgspec.json.Decoder[Value] = msgspec.json.Decoder(type_)
        self._absent = absent

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name, self._field = name, f"{name}_json"

    @overload
    def __get__(self, line: None, owner: type) -> DecodedLate[Value]: ...

    @overload
    def __get__(self, line: StepLine, owner: type) -> Value: ...

    def __get__(self, line: StepLine | None, owner: type) -> DecodedLate[Value] | Value:
        if line is None:
            return self
        text = bytes(getattr(line, self._field))
        if not text and self._absent is not None:
            return self._absent()
        try:
            return self._decoder.decode(text)
        except _FAILURES as error:
            raise _refusal(error, self._name) from error


class StepLine(msgspec.Struct, tag_field="record", tag="step", gc=False):
    """`records.schema.Step` as it is read; a test holds the two together. Fields that end in `_json` hold JSON text."""

    rank: Integer
    world_size: Integer
    epoch: Integer
    step: Integer
    global_step: Integer
    warmup: bool
    loss: Loss | None
    lr: Loss | None
    grad_norm: Loss | None
    start_mono_ns: Integer
    end_mono_ns: Integer
    t_start_ns: Integer
    t_end_ns: Integer
    per_stream_ms_json: msgspec.Raw = msgspec.field(name="per_stream_ms")
    overlap: dict[str, Milliseconds | None]
    utilization_json: msgspec.Raw = msgspec.field(name="utilization")
    concurrency_json: msgspec.Raw = msgspec.field(name="concurrency")
    coverage_json: msgspec.Raw = msgspec.field(name="coverage")
    active_segments_json: msgspec.Raw = msgspec.field(name="active_segments")
    collective_rows: list[CollectiveRow] = msgspec.field(name="collectives")
    compute_json: msgspec.Raw = msgspec.field(name="compute")
    stalls_json: msgspec.Raw = msgspec.field(name="stalls")
    aux_json: msgspec.Raw = msgspec.field(name="aux")
    phase: Phase = "train"
    reasons_json: msgspec.Raw = msgspec.field(name="reasons", default=msgspec.Raw(b"{}"))
    device_json: msgspec.Raw = msgspec.field(name="device", default=_ABSENT)
    ranges_json: msgspec.Raw = msgspec.field(name="ranges", default=_ABSENT)
    waits_json: msgspec.Raw = msgspec.field(name="waits", default=_ABSENT)
    ready_json: msgspec.Raw = msgspec.field(name="ready", default=_ABSENT)
    gradient_order_json: msgspec.Raw = msgspec.field(name="gradient_order", default=_ABSENT)
    copies_json: msgspec.Raw = msgspec.field(name="copies", default=_ABSENT)
    bounds: dict[str, tuple[Milliseconds, Milliseconds]] | None = None
    measured_by: MeasuredBy | None = None
    rocm_smi_t_ns: Integer | None = None
    rocm_smi_output: str = ""
    rocm_smi_exit_code: Integer = 0
    rocm_smi_stderr: str = ""
    rocm_smi_error: str | None = None

    per_stream_ms = DecodedLate[dict[str, float | None]](dict[str, float | None])
    utilization = DecodedLate[dict[str, float | None]](dict[str, float | None])
    concurrency = DecodedLate[dict[str, float | None]](dict[str, float | None])
    coverage = DecodedLate[Coverage](Coverage)
    active_segments = DecodedLate[list[ActiveSegment]](list[ActiveSegment])
    compute = DecodedLate[list[ComputeRange]](list[ComputeRange])
    stalls = DecodedLate[list[Stall]](list[Stall])
    aux = DecodedLate[list[AuxRange]](list[AuxRange])
    reasons = DecodedLate[dict[str, str]](dict[str, str])
    device = DecodedLate[list[DeviceSample]](list[DeviceSample], list)
    ranges = DecodedLate[list[UserRange]](list[UserRange], list)
    waits = DecodedLate[list[Wait] | None](list[Wait], lambda: None)
    ready = DecodedLate[list[BucketReady]](list[BucketReady], list)
    gradient_order = DecodedLate[list[Gradient]](list[Gradient], list)
    copies = DecodedLate[list[Copy] | None](list[Copy], lambda: None)

    @property
    def collectives(self) -> list[Collective]:
        """The collectives of the step, in order of issue."""
        return [Collective(*row) for row in self.collective_rows]

    def open_bounds(self) -> dict[str, tuple[float, float]]:
        """Return the bounds of the metrics that the marks of the step leave open, the null ones.

        Raises:
            ValueError: the least value of a metric is more than the greatest.
        """
        found = {name: ends for name, ends in (self.bounds or {}).items() if self.overlap.get(name, 0.0) is None}
        for name, (low, high) in found.items():
            if low > high:
                raise ValueError(f"{name} is at least {low:g} and at most {high:g} in its bounds")
        return found


class StepSpansLine(msgspec.Struct, tag_field="record", tag="step", gc=False):
    """What ran when in a step, and nothing else of its line. Rows are tuples as in `CollectiveRow`."""

    global_step: Integer
    overlap: dict[str, Milliseconds | None]
    compute: list[tuple[str, str, Integer, Integer]]
    stalls: list[Stall]
    aux: list[tuple[str, Integer, Integer]]


ReadLine: TypeAlias = Header | StepLine | Anchor | Calibration | Footer
_DECODER: Final[msgspec.json.Decoder[ReadLine]] = msgspec.json.Decoder(
    Header | StepLine | Anchor | Calibration | Footer
)
"""A union, so that a line without `record` is refused: with a single type, msgspec accepts a missing tag."""
_SPANS: Final[msgspec.json.Decoder[StepSpansLine]] = msgspec.json.Decoder(StepSpansLine)
_WHOLE_LINE: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(Header | Step | Anchor | Calibration | Footer)


def decode_line(text: bytes) -> ReadLine:
    """Decode one line of a record.

    Raises:
        ValueError: it is no line of the schema, or one of its numbers exceeds what a column holds.
    """
    return _decoded(_DECODER, text)


def decode_spans(text: bytes) -> StepSpansLine:
    """Decode what ran when in a step.

    Raises:
        ValueError: it is no step of the schema.
    """
    return _decoded(_SPANS, text)


def decode_whole_line(text: bytes) -> Line:
    """Decode one line with every field of a step, in any number that a writer may write.

    Raises:
        ValueError: it is no line of the schema.
    """
    return _decoded(_WHOLE_LINE, text)


def _decoded(decoder: msgspec.json.Decoder[Value], text: bytes) -> Value:
    try:
        return decoder.decode(text)
    except _FAILURES as error:
        raise _refusal(error) from error


def _refusal(error: Exception, name: str | None = None) -> ValueError:
    """Return the error for a line, or for its field `name`, in which msgspec's paths count from the field."""
    why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return ValueError(f"not a line of this schema ({why if name is None else _within(why, name)})")


def _within(why: str, name: str) -> str:
    message, at, path = why.rpartition(" - at `$")
    return f"{message}{at}.{name}{path}" if at else f"{why} - at `$.{name}`"
