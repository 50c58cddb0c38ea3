"""What the tools' own formats hold after a logger wrote to them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_BLOCK = 32768


def tensorboard_events(folder: Path) -> dict[str, dict[int, float | str]]:
    """Tag -> step -> value, of all event files in a folder: TFRecords of protocol buffers."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float | str]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        place = 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            event = Event.FromString(data[place + 12 : place + 12 + length])
            place += 16 + length
            for value in event.summary.value:
                text = value.tensor.string_val
                read = text[0].decode() if text else value.simple_value
                found.setdefault(value.tag.removesuffix("/text_summary"), {})[event.step] = read
    return found


def wandb_records(folder: Path) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Step -> logged values, and the summary, of the one offline run in a folder: a LevelDB log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    place, parts = 7, b""
    history: dict[int, dict[str, Any]] = {}
    summary: dict[str, Any] = {}
    while place + 7 <= len(data):
        if _BLOCK - place % _BLOCK < 7:
            place += _BLOCK - place % _BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, parts = Record.FromString(parts), b""
            if record.WhichOneof("record_type") == "history":
                history[record.history.step.num] = _items(record.history.item)
            summary |= _items(record.summary.update)
    return history, summary


def _items(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
