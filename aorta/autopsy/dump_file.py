"""The files of torch's Flight Recorder: pickles and JSON, as their fields.

A pickle is read without executing anything that it names. Must not say what the fields mean (`flight_recorder`).
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from aorta.records.files import decode_json, read_small
from aorta.records.schema import Integer, Rank

_JSON: Final = msgspec.json.Decoder(dict[str, Any])
_PYTHONS: Any = pickle._Unpickler  # type: ignore[attr-defined,unused-ignore]
_UNBOUNDED: Final = b"".join((pickle.DICT, pickle.EMPTY_SET, pickle.FROZENSET, pickle.BYTEARRAY8))
_VALUES_PER_BYTE: Final = 4
"""Values of a pickle for each of its bytes, at most: a frame of three, which entries share, takes two to five bytes."""
_Shape: TypeAlias = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**62)]], msgspec.Meta(max_length=64)]


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: Integer = 0


class _DumpedGroup(msgspec.Struct):
    desc: str = ""
    ranks: str | list[Rank] = ""

    def __post_init__(self) -> None:
        """Take the ranks as numbers: torch writes them as text."""
        if isinstance(self.ranks, str):
            self.ranks = msgspec.convert(re.findall(r"\d+", self.ranks), list[Rank], strict=False)


class _Status(msgspec.Struct):
    last_enqueued_collective: Integer = -1
    last_completed_collective: Integer = -1


class DumpEntry(msgspec.Struct):
    process_group: tuple[str | Integer, str]
    profiling_name: str
    collective_seq_id: Integer
    state: Literal["scheduled", "started", "completed"]
    p2p_seq_id: Integer = 0
    record_id: Integer = 0
    pg_id: Integer | None = None
    time_created_ns: Integer | None = None
    time_discovered_started_ns: Integer | None = None
    time_discovered_completed_ns: Integer | None = None
    input_sizes: list[_Shape] = []
    input_dtypes: list[str] = []
    output_sizes: list[_Shape] = []
    retired: bool = False
    timeout_ms: Integer | None = None
    is_p2p: bool = False
    frames: list[_Frame] = []

    @property
    def name(self) -> str:
        return self.profiling_name.partition(":")[2] or self.profiling_name

    @property
    def batch(self) -> tuple[str | int, int, int]:
        """What the messages of a batch share."""
        return self.process_group[0], self.collective_seq_id, self.p2p_seq_id


class Dump(msgspec.Struct):
    """A dump. `oldest`, `has_holes`: the first number of its entries, and whether some are missing behind it."""

    version: str
    comm_lib_version: str = ""
    nccl_version: str = ""
    pg_config: dict[str, _DumpedGroup] = {}
    pg_status: dict[str, _Status] = {}
    entries: list[DumpEntry] = []
    oldest: int = 0
    has_holes: bool = False

    def __post_init__(self) -> None:
        """Order the entries, as a process numbers them, and leave out what was issued before the numbers of a group
        began anew: a process that destroys its groups and makes others gives these the same names. And what has no
        name: torch names every group that ranks share, and this one a process made by itself.
        """
        self.entries.sort(key=lambda entry: entry.record_id)
        numbers = [entry.record_id for entry in self.entries]
        self.oldest = numbers[0] if numbers else 0
        self.has_holes = len(numbers) > 1 and numbers[-1] - numbers[0] >= len(set(numbers))
        first, newest = dict[str | int, int](), dict[str | int, int]()
        for index, entry in enumerate(self.entries):
            group, number = entry.process_group[0], entry.collective_seq_id
            if number < newest.get(group, 0):
                first[group] = index
            newest[group] = number
        self.entries = [
            entry
            for index, entry in enumerate(self.entries)
            if entry.process_group[0] != "" and index >= first.get(entry.process_group[0], 0)
        ]

    @property
    def is_of_unfinished(self) -> bool:
        """Whether it leaves out finished work (TORCH_INCLUDE_ONLY_ACTIVE)."""
        finished = any(entry.state == "completed" for entry in self.entries)
        return not finished and any(status.last_completed_collective > 0 for status in self.pg_status.values())

    @property
    def backend(self) -> str:
        """`nccl`, `gloo`, ...: of the newest entry."""
        return self.entries[-1].profiling_name.partition(":")[0]


class _TextKeys(dict[str, Any]):
    """A dictionary that refuses other keys, which may all have one hash."""

    def __setitem__(self, key: str, value: Any) -> None:
        if type(key) is not str:
            raise ValueError(f"it has the key {key!r:.40}; those of a dump are text")
        super().__setitem__(key, value)


class _PlainUnpickler(_PYTHONS):  # type: ignore[misc]
    """Builds containers, text and numbers, in time and memory that grow with the bytes, and refuses whatever a pickle
    would import. The compiled unpickler reserves as much memo as an index says.
    """

    dispatch: Final = {code: load for code, load in _PYTHONS.dispatch.items() if code not in _UNBOUNDED}
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(_TextKeys())

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants to import {module}.{name}, which no dump needs")


def _unpickled(content: bytes) -> Any:
    """Return the plain data in a pickle, unless it repeats its parts until they fill the memory."""
    value = _PlainUnpickler(io.BytesIO(content)).load()
    seen, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, (dict, list, tuple)):
            seen += len(item)
            if seen > _VALUES_PER_BYTE * len(content):
                raise ValueError(f"its {len(content)} bytes unfold to more than {seen} values")
            left += item.values() if isinstance(item, dict) else item
    return value


def read_dump(path: Path) -> Dump | str:
    """Return a dump, or why it cannot be read."""
    try:
        content = read_small(path)
        if not content:
            return f"{path.name} is empty: the disk was full, or the process ended while it wrote"
        raw = decode_json(content, _JSON) if content[:1] == b"{" else _unpickled(content)
        dump = msgspec.convert(raw, Dump, strict=False)
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    except (
        ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError, TypeError, ValueError,
        pickle.UnpicklingError, struct.error,
    ) as error:  # fmt: skip
        return f"{path.name} is torn, or no dump: {str(error) or type(error).__name__}"
    if dump.version.partition(".")[0] != "2":
        return f"{path.name} is of version {dump.version}; versions 2.x (torch 2.5 and later) can be read"
    return dump
