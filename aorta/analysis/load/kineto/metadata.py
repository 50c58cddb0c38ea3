"""Decodes what surrounds the events of a Kineto trace: where it ran, and the base of its times.

Must not: look at an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from aorta.errors import InputError


class DistributedInfo(msgspec.Struct):
    """What torch writes when `torch.distributed` is initialised at the time of the export."""

    backend: str | None = None
    rank: int | None = None
    world_size: int | None = None
    pg_config: object = None


class Metadata(msgspec.Struct):
    """The members that are used; None where a trace does not have one."""

    distributed: DistributedInfo | None = msgspec.field(default=None, name="distributedInfo")
    devices: list[dict[str, object]] | None = msgspec.field(default=None, name="deviceProperties")
    base_ns: int | None = msgspec.field(default=None, name="baseTimeNanoseconds")
    host: str | None = msgspec.field(default=None, name="host_name")
    cupti: int | str | float | None = msgspec.field(default=None, name="cupti_version")
    cuda: int | str | float | None = msgspec.field(default=None, name="cuda_runtime_version")
    roctracer: int | str | float | None = msgspec.field(default=None, name="roctracer_version")
    rocprofiler: int | str | float | None = msgspec.field(default=None, name="rocprofiler-sdk_version")
    hip: int | str | float | None = msgspec.field(default=None, name="hip_runtime_version")
    partial: object = None
    """AORTA's own: true where the loop ended inside the window."""


_METADATA: Final = msgspec.json.Decoder(Metadata)


def metadata_of(head: Mapping[str, msgspec.Raw], tail: Mapping[str, msgspec.Raw], place: str) -> Metadata:
    """Decode the members before the events, completed by those behind them.

    Args:
        head: members of the outer object before the events.
        tail: members behind the events.
        place: names the trace in errors.

    Raises:
        InputError: a member has an impossible type.
    """
    try:
        before, after = (_METADATA.decode(msgspec.json.encode(members)) for members in (head, tail))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{place}: what stands beside its traceEvents cannot be used: {error}") from error
    said = {name: value for name in Metadata.__struct_fields__ if (value := getattr(before, name)) is not None}
    return msgspec.structs.replace(after, **said)
