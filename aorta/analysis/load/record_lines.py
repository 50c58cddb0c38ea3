"""The lines of a record as the report needs them: everything is required and must be JSON, only what is used is built.

Enters: the text of one line. Leaves: a `LeanStep`. Must not: accept a step that the schema refuses in a field that the
report uses. Of the fields kept as `Raw`, coverage and reasons are decoded by `Decoded`, each distinct text once;
segments and ranges must be there, and their types are checked when a picture reads them.
"""

from __future__ import annotations

from typing import Annotated, Final, Generic, TypeAlias, TypeVar

import msgspec

from aorta.records.reader import decode_line
from aorta.records.schema import Anchor, DeviceSample, EndSource, Footer, Line, Phase, Step

Value = TypeVar("Value")
Integer: TypeAlias = Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]
"""What a column of 64 bits holds, with room for the difference of two: 146 years in nanoseconds."""
Milliseconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""Also ratios. 1e15 ms are 30,000 years; sums of a billion of them are exact enough and finite."""
Loss: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""Whatever diverged in 32 bits fits; a sum of a hundred million of them is finite."""

CollectiveRow: TypeAlias = tuple[
    str, str, Integer, Integer, str | None, Integer, Integer | None, Integer | None, EndSource | None
]
"""`records.schema.Collective`, in its order. A tuple is half the time of a struct to build and to turn over."""


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
    """Empty: no samples in this line."""


_SAMPLES: Final = msgspec.json.Decoder(list[DeviceSample])
_DECODER: Final[msgspec.json.Decoder[LeanStep | Anchor | Footer]] = msgspec.json.Decoder(LeanStep | Anchor | Footer)
"""A union, so that a line without `record` is refused: of one type alone, msgspec takes an absent tag for granted."""


def decode(text: bytes) -> LeanStep | Line:
    """A step, lean; any other line of the schema whole.

    Raises:
        ValueError: it is no line of this schema, or a number of it is beyond what a column holds.
    """
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        line = decode_line(text)  # another record, or a sentence about what is wrong
    if not isinstance(line, Step):
        return line
    try:  # whole it is a step: a later version added a column, or a number is beyond what a column holds
        values = msgspec.to_builtins(line)
        raw = {name: msgspec.Raw(msgspec.json.encode(values[name])) for name in _RAW if name in values}
        return msgspec.convert({**values, **raw}, LeanStep)
    except msgspec.ValidationError as error:
        raise ValueError(f"not a line of this schema ({error})") from error


_RAW: Final = tuple(field.name for field in msgspec.structs.fields(LeanStep) if field.type is msgspec.Raw)


def check_samples(text: bytes) -> None:
    """Decode the `device` of a step, and throw it away.

    Raises:
        ValueError: it is not of the schema.
    """
    try:
        _SAMPLES.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a line of this schema ({error})") from error


class Decoded(dict[bytes, int], Generic[Value]):
    """Text of a field -> its number; `values_[number]` is what it says. Most steps say the same as the one before.

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
