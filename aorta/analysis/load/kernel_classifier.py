"""Classifies kernels and operators by name, and finds a trace's steps by the texts of its ranges.

Three parts. *Classes*: compute, copy or communication, and which kind of collective. Each distinct name is taken once,
with additional patterns from the command line, and gets codes of `interval_table.IntervalClass` and
`interval_table.KIND_CODE`. Patterns are unanchored (docs/dev/measuring.md, W12): `void ncclDevKernel...` is
communication too. *Data types* of torch's C++ and of NCCL get torch's name. *Steps*: of ranges by NVTX, ROCTx or
`record_function`; `ProfilerStep#3` is step 3. One family of markers is used per process: of `iteration#7` and
`ProfilerStep#3` in one trace, only one counts.

Must not: classify by anything but the name (W13: readers select by a format's categories first), or guess a step from
anything but a marker.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.interval_table import KIND_CODE, NO_WINDOWS, NULL, IntervalClass, Windows, windows
from aorta.errors import InputError
from aorta.timeline import kernel_names
from aorta.timeline.arrays import Int64
from aorta.timeline.kernel_names import in_words

_KINDS: Final = (
    ("reducescatter", r"(?<![a-z])reduce_?scatter|userbuffers\w{0,40}_rs(?![a-z])"),
    ("allgather", r"(?<![a-z])all_?gather|userbuffers\w{0,40}_ag(?![a-z])"),
    ("allreduce", r"(?<![a-z])all_?reduce|cross_device_reduce|quick_?reduce|multimem_one_shot"),
    ("alltoall", r"(?<![a-z])all_?to_?all|(?<![a-z])a2a(?![a-z])|(deep_ep|dpsk|mori|_ep).{0,60}(dispatch|combine)"),
    ("broadcast", r"(?<![a-z])(broadcast|bcast)"),
    ("barrier", r"(?<![a-z])barrier"),
    ("gather", r"(?<![a-z])gather"),
    ("scatter", r"(?<![a-z])scatter"),
    ("reduce", r"(nccl\w{0,40}kernel_|(?<![a-z]))reduce(?![a-z])"),
    # `ncclDevKernel_SendRecv` alone does not say whether it is a send, a receive or an all-to-all.
    ("send", r"(?<![a-z])(i?send(?!_?recv)|push_?send|put_signal)"),
    ("recv", r"(?<!send_)(?<!send)(?<![a-z])(i?recv|push_?recv|wait_signal)"),
)
_KIND_PATTERNS: Final = tuple((KIND_CODE[kind], re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS)


class NameClassifier:
    """Classifies names by the built-in patterns and additional ones.

    Raises:
        InputError: an additional pattern is not a regular expression.
    """

    def __init__(self, comm_patterns: Sequence[str] = ()) -> None:
        for pattern in comm_patterns:
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise InputError(f"--comm-pattern {pattern!r}: not a regular expression: {error}") from None
            if compiled.search(""):
                raise InputError(
                    f"--comm-pattern {pattern!r}: it matches the empty text, so every kernel would be communication"
                )
        added = "|".join(f"(?:{part})" for part in comm_patterns)
        self._added = re.compile(added, re.IGNORECASE) if added else None
        self._known: dict[str, IntervalClass] = {}

    def class_of(self, name: str) -> IntervalClass:
        """Classify one kernel. An empty name is `UNKNOWN`; what is neither communication nor a copy is compute."""
        if name not in self._known:
            if not name.strip():
                self._known[name] = IntervalClass.UNKNOWN
            elif kernel_names.communicates(name) or (self._added is not None and self._added.search(name)):
                self._known[name] = IntervalClass.COMM
            else:
                self._known[name] = IntervalClass.COPY if kernel_names.copies(name) else IntervalClass.COMPUTE
        return self._known[name]

    def kernels(self, names: Sequence[str]) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """Return the class and kind of each name, to be indexed by name codes: `classes[name_codes]`."""
        classes = np.array([self.class_of(name) for name in names], dtype=np.int8)
        kinds = [kind_of(name) if cls == IntervalClass.COMM else NULL for name, cls in zip(names, classes, strict=True)]
        return classes, np.array(kinds, dtype=np.int8)


def kind_of(name: str) -> int:
    """Return the code of the kind that a communication kernel, API call or operator is named after: `ncclAllReduce`,
    `c10d::_allgather_base_`, `ncclDevKernel_AllReduce_Sum_bf16`, `all_to_allv`. `NULL` where the name does not say.
    """
    words = in_words(name)
    return next((code for code, pattern in _KIND_PATTERNS if pattern.search(words)), NULL)


_TORCH_TYPES: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "uint8": (1, ("byte", "unsigned char", "uint8_t")),
    "int8": (1, ("char", "signed char", "int8_t")),
    "int16": (2, ("short", "short int")),
    "int32": (4, ("int", "uint32")),
    "int64": (8, ("long", "long int", "uint64", "long long")),
    "float16": (2, ("half", "c10::half", "f16")),
    "bfloat16": (2, ("c10::bfloat16", "bf16")),
    "float32": (4, ("float", "f32")),
    "float64": (8, ("double", "f64")),
    "bool": (1, ()),
    "complex64": (8, ("complexfloat", "c10::complex<float>")),
    "complex128": (16, ("complexdouble", "c10::complex<double>")),
    "float8_e4m3fn": (1, ("f8e4m3", "c10::float8_e4m3fn")),
    "float8_e5m2": (1, ("f8e5m2", "c10::float8_e5m2")),
    "float8_e4m3fnuz": (1, ("c10::float8_e4m3fnuz",)),
    "float8_e5m2fnuz": (1, ("c10::float8_e5m2fnuz",)),
}
_BY_NAME: Final = {
    name: (torch_name, size) for torch_name, (size, others) in _TORCH_TYPES.items() for name in (torch_name, *others)
}


def known_dtype(name: str | None) -> tuple[str | None, int | None]:
    """Return torch's name of a data type and its bytes per element (c10/core/ScalarType.h). An unknown name is returned
    unchanged, with None.
    """
    if not name:
        return None, None
    found = _BY_NAME.get(name.lower())
    return (name, None) if found is None else found


def add_comm_pattern(parser: argparse.ArgumentParser) -> None:
    """Add the option `--comm-pattern`, which collects additional patterns for `NameClassifier`."""
    parser.add_argument(
        "--comm-pattern",
        action="append",
        default=[],
        metavar="REGEX",
        help="kernels of traces whose names match are communication too; repeatable, unanchored, case ignored",
    )


MARKS: Final = ("aorta.step=", "iteration#", "ProfilerStep#")
"""What stands before the number, best first: AORTA's own two carry the global step, the third is `torch.profiler`'s
`step()`.
"""
MARK: Final = re.compile(rf"(?P<kind>{'|'.join(map(re.escape, MARKS))})(?P<step>\d{{1,18}})$")
FAMILIES: Final = (
    *((mark, re.compile(rf"^{re.escape(mark)}(\d{{1,18}})$")) for mark in MARKS),
    ("step", re.compile(r"^(?:train(?:ing)?[ _.]?)?(?:step|iter(?:ation)?)[ _:=#]{1,2}(\d{1,18})$", re.IGNORECASE)),
)
"""Families of step markers; where a trace holds several, the first one here is used."""


def step_numbers(texts: Sequence[str]) -> tuple[Int64, str | None]:
    """Step number of each text (`NULL` where it is no marker of the family used), and that family; None without any."""
    for family, pattern in FAMILIES:
        found = [pattern.match(text) for text in texts]
        if any(found):
            return np.array([int(match[1]) if match else NULL for match in found], dtype=np.int64), family
    return np.full(len(texts), NULL, np.int64), None


def step_windows(texts: Sequence[str], start_ns: Int64, end_ns: Int64) -> tuple[Windows, tuple[str, ...]]:
    """Return the windows of the steps that ranges mark, and notes about them. Ranges of length 0 are no windows (a
    mark, or a range still open when the recording ended). Of several ranges of one step the earliest counts.
    """
    numbers, family = step_numbers(texts)
    used = np.flatnonzero((numbers != NULL) & (end_ns > start_ns))
    if family is None or not len(used):
        return NO_WINDOWS, ("no step markers: one window from the first to the last record",)
    used = used[np.argsort(start_ns[used], kind="stable")]
    first = used[np.unique(numbers[used], return_index=True)[1]]
    repeated = len(used) - len(first)
    notes = (f"{repeated} marker(s) {family}N repeat a step; the first of each is used",) if repeated else ()
    return windows(numbers[first], start_ns[first], end_ns[first]), notes
