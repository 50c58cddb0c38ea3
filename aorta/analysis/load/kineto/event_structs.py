"""What is decoded of a Kineto trace: of an event and its arguments, and of what surrounds the events (`metadata_of`:
where it ran, and the base of its times). Everything else is skipped without being decoded.

Types are wide where traces differ (thread ids are numbers or text), so that one odd value does not make a trace
unreadable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias, Union

import msgspec

from aorta.errors import InputError

Number: TypeAlias = int | float | str | None


class _Timed(msgspec.Struct, gc=False):
    ph: str | None = None
    name: str | int | float | None = None
    ts: Number = None
    dur: Number = None
    pid: Number = None
    tid: Number = None
    args: msgspec.Raw = msgspec.Raw(b"null")


class _Digits(msgspec.Struct, gc=False):
    ph: str | None = None
    name: str | int | float | None = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"null")
    pid: Number = None
    tid: Number = None
    args: msgspec.Raw = msgspec.Raw(b"null")


class _Call(msgspec.Struct, gc=False):
    ph: str | None = None
    ts: Number = None
    args: msgspec.Raw = msgspec.Raw(b"null")


class _DigitCall(msgspec.Struct, gc=False):
    ph: str | None = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    args: msgspec.Raw = msgspec.Raw(b"null")


class _Skipped(msgspec.Struct, gc=False):
    pass


class Event(_Timed, gc=False):
    """The members of an event that are read, with times as int or float64."""

    cat: str | None = None


class DigitEvent(_Digits, gc=False):
    """The same with the digits of its times preserved, for times that float64 cannot represent."""

    cat: str | None = None


KERNELS: Final = frozenset({"kernel", "Kernel"})
COPIES: Final = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset", "gpu_memcpy_p2p"})
DEVICE: Final = KERNELS | COPIES
"""Categories of work on a device; old traces capitalise them."""
OPERATORS: Final = frozenset({"cpu_op", "Operator"})
HOST: Final = OPERATORS | {"user_annotation", "collective_comm"}
"""`gpu_user_annotation` is not among them: it is a copy, on the device's row, of a range of the host. It carries a
stream, but is no work (W13).
"""
CALLS: Final = frozenset({"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime"})
"""Calls of the host that launch kernels and copies, which have the same `correlation`."""
_OTHERS: Final = (
    *("ac2g", "fwdbwd", "gpu_user_annotation", "python_function", "cpu_instant_event", "overhead", "Trace"),
    *("cuda_sync", "cuda_profiler_range"),
    *("xpu_runtime", "xpu_driver", "mtia_runtime", "privateuse1_runtime", "privateuse1_driver"),
)
"""Categories that make up most of a trace and are never read. One that is missing here costs time, and nothing else."""


def _by_category(base: type[msgspec.Struct], call: type[msgspec.Struct]) -> msgspec.json.Decoder[list[Any]]:
    read = [_of_category(category, base) for category in sorted(DEVICE | HOST)]
    read += [_of_category(category, call) for category in sorted(CALLS)]
    skipped = [_of_category(category, _Skipped) for category in _OTHERS]
    return msgspec.json.Decoder(list[Union[tuple(read + skipped)]])  # type: ignore[misc]  # noqa: UP007


def _of_category(category: str, base: type[msgspec.Struct]) -> type[msgspec.Struct]:
    name, constants = f"{base.__name__}_{category}", {"cat": category}
    return msgspec.defstruct(name, [], bases=(base,), namespace=constants, tag_field="cat", tag=category, gc=False)


EVENTS: Final = msgspec.json.Decoder(list[Event])
DIGIT_EVENTS: Final = msgspec.json.Decoder(list[DigitEvent])
EVENTS_BY_CATEGORY: Final = _by_category(_Timed, _Call)
DIGIT_EVENTS_BY_CATEGORY: Final = _by_category(_Digits, _DigitCall)
"""Decode the same events faster: those of other categories are skipped without being decoded. These two decoders refuse
an unknown category, and an event without one.
"""


class Arguments(msgspec.Struct, gc=False):
    """The arguments that are used of a kernel, a copy, `record_param_comms` or a gloo row."""

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
