"""What is decoded of an event and of its arguments. Everything else is skipped where it stands.

Types are wide where traces differ (thread ids are numbers or text), so that one odd value does not refuse a trace.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Number: TypeAlias = int | float | str | None


class Event(msgspec.Struct, gc=False):
    """What is read of an event, times as float64."""

    ph: str | None = None
    cat: str | None = None
    name: str | int | float | None = None
    ts: float | str | None = None
    dur: float | str | None = None
    pid: Number = None
    tid: Number = None
    args: msgspec.Raw = msgspec.Raw(b"null")


class DigitEvent(msgspec.Struct, gc=False):
    """The same with the digits of its times kept, for times that float64 cannot hold."""

    ph: str | None = None
    cat: str | None = None
    name: str | int | float | None = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"null")
    pid: Number = None
    tid: Number = None
    args: msgspec.Raw = msgspec.Raw(b"null")


class Arguments(msgspec.Struct, gc=False):
    """Arguments of a kernel, a copy, `record_param_comms` or a gloo row, as far as they are used."""

    external: Number = msgspec.field(default=None, name="External id")
    external_old: Number = msgspec.field(default=None, name="external id")
    device: Number = None
    stream: Number = None
    bytes: Number = None
    collective: str | None = msgspec.field(default=None, name="Collective name")
    elements_in: Number = msgspec.field(default=None, name="In msg nelems")
    elements_out: Number = msgspec.field(default=None, name="Out msg nelems")
    group_size: Number = msgspec.field(default=None, name="Group size")
    dtype: str | None = None
    group: Number = msgspec.field(default=None, name="Process Group Name")
    ranks: str | list[int] | None = msgspec.field(default=None, name="Process Group Ranks")
    seq: Number = msgspec.field(default=None, name="Seq")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="Input type")
