"""Reads a checkpoint as data: torch's own loader runs whatever code a pickle names.

Must not be imported in a run that loads no checkpoint: torch's checkpoint package takes a second.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem


class PlainPlanner(DefaultLoadPlanner):
    """Takes plain data and tensors only: torch's own planner runs whatever code a pickle names."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), checked)  # torch reads it again, without a check
        checked.seek(0)
        super().load_bytes(read_item, checked)


class PlainReader(FileSystemReader):
    """Takes `.metadata` only if it is torch's, names nothing but the classes that torch writes there, and no file
    outside of the checkpoint.
    """

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        if kwargs.get("rank") is not None:  # torch looks for this where it could not read `.metadata`
            raise pickle.UnpicklingError("metadata of single ranks, which AORTA does not write, is not loaded")
        with Path(self.path, ".metadata").open("rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise pickle.UnpicklingError("its .metadata is not that of a checkpoint")
        for info in found.storage_data.values():
            if Path(info.relative_path).name != str(info.relative_path):
                raise pickle.UnpicklingError(f"its .metadata names a file elsewhere: {info.relative_path}")
        return found


class _MetadataUnpickler(pickle._Unpickler):
    """Refuses every name but those that torch's own metadata is made of, none of which does anything when loaded."""

    dispatch = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # it takes as much memory as the file says

    def find_class(self, module: str, name: str) -> Any:
        if module == _METADATA_MODULE and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its .metadata names {module}.{name}, which no checkpoint does; it is not loaded")


_METADATA_MODULE: Final = "torch.distributed.checkpoint.metadata"
_METADATA_NAMES: Final = (
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")),
)
"""Beside those, what a `.metadata` of torch 2.13 names."""
