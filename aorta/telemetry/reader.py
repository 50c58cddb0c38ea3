"""Read one rank's record back, whatever state its process left it in.

Enters: the path of a `rank_<rank>_metrics.jsonl`. Leaves: a `RankRecord` with what could be read and a list of what
could not, each with file and line. Must not: guess a value, or fail on a line a killed process left half-written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from aorta.errors import InputError
from aorta.telemetry.schema import SCHEMA_VERSION, Anchor, Footer, Header, Line, Step

RANK_FILE_NAME = re.compile(r"^rank_(\d+)_metrics\.jsonl$")
_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Header | Step | Anchor | Footer)


class _Version(msgspec.Struct, tag_field="record", tag="header"):
    """As much of a header as every version of the schema has."""

    schema_version: int


_VERSION_DECODER = msgspec.json.Decoder(_Version)


@dataclass
class RankRecord:
    """What one file holds. `steps` are those of the training, `isolated` those of the baselines behind it, each in the
    order of the file. `problems` are sentences with `file:line`; `footer` is None after a kill.
    """

    path: Path
    header: Header
    steps: list[Step] = field(default_factory=list)
    anchors: list[Anchor] = field(default_factory=list)
    footer: Footer | None = None
    problems: list[str] = field(default_factory=list)
    isolated: list[Step] = field(default_factory=list)


def read_rank(path: Path) -> RankRecord:
    """Read one record.

    Raises:
        InputError: the file cannot be opened, is empty, or does not begin with a header of this schema.
    """
    problems: list[str] = []
    lines = _lines(path, problems)
    header = next(lines, None)
    if problems or not isinstance(header, Header):
        seen = problems[0] if problems else "the file is empty" if header is None else "another line"
        raise InputError(f"{path.name}:1: expected a header line of an AORTA record, saw {seen} (in {path.parent})")
    record = RankRecord(path, header, problems=problems)
    for line in lines:
        match line:
            case Step(phase="train"):
                record.steps.append(line)
            case Step():
                record.isolated.append(line)
            case Anchor():
                record.anchors.append(line)
            case Footer():
                record.footer = line
            case Header():
                raise InputError(f"{path.name}: a second header (run {line.run_id}): two runs are mixed in one file")
    if record.footer is None:
        problems.append(f"{path.name}: no footer: the process was killed, or still runs")
    return record


def stream(path: Path, problems: list[str]) -> Iterator[Line]:
    """The lines of one record as they are read, for what cannot hold them all; `problems` grows as `read_rank`'s does.

    Raises:
        InputError: the file cannot be read, or is of another schema.
    """
    return _lines(path, problems)


def _lines(path: Path, problems: list[str]) -> Iterator[Line]:
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    problems.append(f"{path.name}:{number}: cut off in mid-line; ignored")
                    return
                if number == 1:
                    _check_version(path, text)
                try:
                    yield _DECODER.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    problems.append(f"{path.name}:{number}: not a line of this schema ({error}); ignored")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


def _check_version(path: Path, text: bytes) -> None:
    try:
        version = _VERSION_DECODER.decode(text).schema_version
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # not a header of any version: `read_rank` says what it is
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{path.name}:1: schema version {version}; this AORTA reads version {SCHEMA_VERSION} (in {path.parent})"
        )
