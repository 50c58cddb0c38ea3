"""Classifies kernels and operators by name: compute, copy or communication, and which kind of collective.

Takes each distinct name once, with additional patterns from the command line, and gives codes of
`interval_table.IntervalClass` and `interval_table.KIND_CODE`. The patterns are unanchored (docs/dev/measuring.md, W12):
`void ncclDevKernel...` is communication too. Must not: look at anything but the name; where a format has categories,
its reader selects by them first (W13).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.interval_table import KIND_CODE, NULL, IntervalClass
from aorta.errors import InputError
from aorta.timeline.kernel_names import COMM, COPY

_KINDS: Final = (
    ("reducescatter", r"(?<![a-z])reduce_?scatter"),
    ("allgather", r"(?<![a-z])all_?gather|multimem_all_gather"),
    ("allreduce", r"(?<![a-z])all_?reduce|cross_device_reduce|quick_?reduce|multimem_one_shot"),
    ("alltoall", r"(?<![a-z])all_?to_?all"),
    ("broadcast", r"(?<![a-z])(broadcast|bcast)"),
    ("barrier", r"(?<![a-z])barrier"),
    ("gather", r"(?<![a-z])gather"),
    ("scatter", r"(?<![a-z])scatter"),
    ("reduce", r"(nccl\w*kernel_|(?<![a-z]))reduce(?![a-z])"),
    # `ncclDevKernel_SendRecv` alone does not say whether it is a send, a receive or an all-to-all.
    ("send", r"(?<![a-z])i?send(?!_?recv)"),
    ("recv", r"(?<!send_)(?<!send)(?<![a-z])i?recv"),
)
_KIND_PATTERNS: Final = tuple((KIND_CODE[kind], re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS)
_WORD_STARTS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class NameClassifier:
    """Classifies names by the built-in patterns and additional ones.

    Raises:
        InputError: an additional pattern is not a regular expression.
    """

    def __init__(self, comm_patterns: Sequence[str] = ()) -> None:
        for pattern in comm_patterns:
            _check(pattern)
        self.comm_patterns = tuple(comm_patterns)
        self._comm = re.compile("|".join(f"(?:{part})" for part in (*COMM, *comm_patterns)), re.IGNORECASE)
        self._copy = re.compile("|".join(f"(?:{part})" for part in COPY), re.IGNORECASE)
        self._known: dict[str, IntervalClass] = {}

    def class_of(self, name: str) -> IntervalClass:
        """Class of one kernel. An empty name is `UNKNOWN`; what is neither communication nor a copy is compute."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._class_of(name)
        return found

    def _class_of(self, name: str) -> IntervalClass:
        if not name.strip():
            return IntervalClass.UNKNOWN
        if self._comm.search(name):
            return IntervalClass.COMM
        return IntervalClass.COPY if self._copy.search(name) else IntervalClass.COMPUTE

    def kernels(self, names: Sequence[str]) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """Class and kind of each name, to be indexed by name codes: `classes[name_codes]`."""
        classes = np.array([self.class_of(name) for name in names], dtype=np.int8)
        kinds = [kind_of(name) if cls == IntervalClass.COMM else NULL for name, cls in zip(names, classes, strict=True)]
        return classes, np.array(kinds, dtype=np.int8)


def kind_of(name: str) -> int:
    """Code of the kind in the name of a communication kernel, API call or operator (`ncclDevKernel_AllReduce_Sum_bf16`,
    `c10d::_allgather_base_`, `ncclAllReduce`, `all_to_allv`), or `NULL` where the name does not say.
    """
    words = _WORD_STARTS.sub("_", name)
    return next((code for code, pattern in _KIND_PATTERNS if pattern.search(words)), NULL)


def _check(pattern: str) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise InputError(f"--comm-pattern {pattern!r}: not a regular expression: {error}") from None
    if compiled.search(""):
        raise InputError(
            f"--comm-pattern {pattern!r}: it matches the empty text, so every kernel would be communication"
        )
