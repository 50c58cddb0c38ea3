"""What `summary.json` holds, as types that are computed, rendered and written.

`dataset` describes one run, `comparison` two of them and the file. JSON is the serialisation of these structs
(`as_json`) and nothing else; their JSON Schemas are generated from them (`scripts/json_schemas.py`).

A field with the default `ABSENT` is a key that not every file holds: it is left out where nothing set it, and `known`
reads it as None. Must not compute anything.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

_Value = TypeVar("_Value")

ABSENT: Final[Any] = msgspec.UNSET
"""Default of a field whose key is left out of the JSON."""


def known(value: _Value | None) -> _Value | None:
    """Return a value of a struct, or None where its key is absent."""
    return None if value is msgspec.UNSET else value


def as_json(value: object) -> Any:
    """Return a struct, or a container of structs, as plain JSON values in the order of the fields."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=lambda scalar: scalar.item())  # of numpy
