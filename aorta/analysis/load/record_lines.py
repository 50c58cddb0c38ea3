"""Decodes the lines of a record for the report: all fields are required and must be JSON, but only those used are
built.

Takes the text of one line and gives a `LeanStep`. Of the fields kept as `Raw`, coverage and reasons are decoded by
`Decoded`, each distinct text once; segments and ranges must be present, and their types are checked when a picture
reads them. Must not: accept a step that violates the schema in a field that the report uses.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Final, Generic, TypeAlias, TypeVar

import msgspec

from aorta.analysis.step_intervals import StepContents, contents_of
from aorta.records.reader import decode_line
from aorta.records.schema import (
    Anchor,
    AuxRange,
    BucketReady,
    Calibration,
    ComputeRange,
    CounterValue,
    DeviceSample,
    EndSource,
    ExpertTokens,
    Footer,
    Gradient,
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

CollectiveRow: TypeAlias = tuple[
    str, str, Integer, Integer, str | None, Integer, Integer | None, Integer | None, EndSource | None, Integer | None
]
"""`records.schema.Collective`, in its order. A tuple is half the time of a struct to build and to turn over. Rows of
older records are shorter: `decode` reads those steps as whole ones."""


class LeanStep(msgspec.Struct, tag_field="record", tag="step", gc=False):
    """`records.schema.Step`; a test holds the two together."""

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
    per_stream_ms: msgspec.Raw
    overlap: dict[str, Milliseconds | None]
    utilization: msgspec.Raw
    concurrency: msgspec.Raw
    coverage: msgspec.Raw
    active_segments: msgspec.Raw
    collectives: list[CollectiveRow]
    compute: msgspec.Raw
    stalls: msgspec.Raw
    aux: msgspec.Raw
    phase: Phase = "train"
    reasons: msgspec.Raw = msgspec.Raw(b"{}")
    device: msgspec.Raw = msgspec.Raw(b"")
    """Empty: this line has no samples."""
    ranges: msgspec.Raw = msgspec.Raw(b"")
    counters: msgspec.Raw = msgspec.Raw(b"")
    """Empty, as `ranges`: the caller named none."""
    waits: msgspec.Raw = msgspec.Raw(b"")
    ready: msgspec.Raw = msgspec.Raw(b"")
    gradient_order: msgspec.Raw = msgspec.Raw(b"")
    experts: msgspec.Raw = msgspec.Raw(b"")
    """Empty, as the ones above: this step does not have it."""
    bounds: dict[str, tuple[Milliseconds, Milliseconds]] | None = None
    measured_by: MeasuredBy | None = None
    rocm_smi_t_ns: Integer | None = None
    """None: this line has no words of rocm-smi."""
    rocm_smi_output: str = ""
    rocm_smi_exit_code: Integer = 0
    rocm_smi_stderr: str = ""
    rocm_smi_error: str | None = None


_SAMPLES: Final = msgspec.json.Decoder(list[DeviceSample])
_RANGES: Final = msgspec.json.Decoder(list[UserRange])
_COUNTERS: Final = msgspec.json.Decoder(list[CounterValue])
_COMPUTE: Final = msgspec.json.Decoder(list[ComputeRange])
_AUX: Final = msgspec.json.Decoder(list[AuxRange])
_STALLS: Final = msgspec.json.Decoder(list[Stall])
_WAITS: Final = msgspec.json.Decoder(list[Wait])
_READY: Final = msgspec.json.Decoder(list[BucketReady])
_EXPERTS: Final = msgspec.json.Decoder(list[ExpertTokens])
_REASONS: Final = msgspec.json.Decoder(dict[str, str])
_GRADIENTS: Final = msgspec.json.Decoder(list[Gradient])
_DECODER: Final[msgspec.json.Decoder[LeanStep | Anchor | Calibration | Footer]] = msgspec.json.Decoder(
    LeanStep | Anchor | Calibration | Footer
)
"""A union, so that a line without `record` is refused: with a single type, msgspec accepts a missing tag."""


def decode(text: bytes) -> LeanStep | Line:
    """Decode a step as `LeanStep`, or any other line of the schema completely.

    Raises:
        ValueError: it is no line of this schema, or one of its numbers exceeds what a column holds.
    """
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        line = decode_line(text)  # a line of another type, or an error that says what is wrong
    if not isinstance(line, Step):
        return line
    try:  # valid as a full step: a later version added a field, or a number exceeds what a column holds
        values = msgspec.to_builtins(line)
        raw = {name: msgspec.Raw(msgspec.json.encode(values[name])) for name in _RAW if name in values}
        return msgspec.convert({**values, **raw}, LeanStep)
    except msgspec.ValidationError as error:
        raise ValueError(f"not a line of this schema ({error})") from error


_RAW: Final = tuple(field.name for field in msgspec.structs.fields(LeanStep) if field.type is msgspec.Raw)


def check_samples(text: bytes) -> None:
    """Check the `device` field of a step; the decoded value is discarded.

    Raises:
        ValueError: it violates the schema.
    """
    try:
        _SAMPLES.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a line of this schema ({error})") from error


def check_user_marks(ranges: bytes, counters: bytes) -> None:
    """Check those fields of a step; the decoded values are discarded.

    Raises:
        ValueError: they violate the schema, or a time exceeds what a column holds.
    """
    try:
        spans = _RANGES.decode(ranges or b"[]")
        values = _COUNTERS.decode(counters or b"[]")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a line of this schema ({error})") from error
    numbers = [number for row in spans for number in (row.thread, row.depth, row.start_ns, row.end_ns)]
    if any(not -(2**61) < number < 2**61 for number in (*numbers, *(row.t_ns for row in values))):
        raise ValueError("a number in its ranges or counters exceeds what a column holds")


def check_waits(waits: bytes, ready: bytes) -> None:
    """Check those fields of a step; the decoded values are discarded.

    Raises:
        ValueError: they violate the schema.
    """
    try:
        _WAITS.decode(waits or b"[]")
        _READY.decode(ready or b"[]")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a line of this schema ({error})") from error


def contents_of_line(line: LeanStep) -> StepContents:
    """What ran inside a step.

    Raises:
        ValueError: one of its fields violates the schema.
    """
    try:
        return contents_of(
            _COMPUTE.decode(line.compute),
            _AUX.decode(line.aux),
            _STALLS.decode(line.stalls),
            _WAITS.decode(line.waits) if line.waits else None,
            _READY.decode(line.ready or b"[]"),
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a line of this schema ({error})") from error


def bounds_of(line: LeanStep) -> dict[str, tuple[float, float]]:
    """The bounds of the metrics that the marks of a step leave open; those of the others are no news.

    Raises:
        ValueError: a metric is at least more than it is at most.
    """
    found = {name: ends for name, ends in (line.bounds or {}).items() if line.overlap.get(name, 0.0) is None}
    for name, (low, high) in found.items():
        if low > high:
            raise ValueError(f"{name} is at least {low:g} and at most {high:g} in its bounds")
    return found


def reasons_without(text: bytes, names: Collection[str], reason: str) -> bytes:
    """The `reasons` of a step with one reason for all these metrics, whose own have the numbers of the step: so that
    distinct texts stay few.

    Raises:
        ValueError: they violate the schema.
    """
    try:
        said = _REASONS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a line of this schema ({error})") from error
    return msgspec.json.encode(said | dict.fromkeys(names, reason))


def gradients_of(text: bytes) -> tuple[Gradient, ...]:
    """The `gradient_order` field of a step.

    Raises:
        ValueError: it violates the schema.
    """
    try:
        return tuple(_GRADIENTS.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a line of this schema ({error})") from error


def experts_of(text: bytes) -> list[ExpertTokens]:
    """The `experts` field of a step.

    Raises:
        ValueError: it violates the schema.
    """
    try:
        return _EXPERTS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a line of this schema ({error})") from error


class Decoded(dict[bytes, int], Generic[Value]):
    """Numbers the distinct texts of a field and decodes each once: `values_[number]` is the value. Most steps have the
    same text as the one before.

    Raises:
        ValueError: on looking up a text that is not of the type.
    """

    def __init__(self, type_: type[Value]) -> None:
        super().__init__()
        self._decoder = msgspec.json.Decoder(type_)
        self.values_: list[Value] = []

    def __missing__(self, text: bytes) -> int:
        try:
            self.values_.append(self._decoder.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a line of this schema ({error})") from error
        self[text] = number = len(self)
        return number
