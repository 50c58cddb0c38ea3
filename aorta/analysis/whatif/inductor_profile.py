"""Measured transfer times as a profile for Inductor's estimator.

torch 2.13 reorders collectives by how long each takes, and takes that from a Chrome trace where
`torch._inductor.config.aten_distributed_optimizations.profile_guided_estimations_profile_path` names one. In one rank's
trace those durations hold the waiting for other ranks (W5). Here they are transfers: the minimum over the ranks.

    profile = inductor_profile(load_run(folder))
    write_profile(Path("profile.json"), profile, overwrite=False)

Torch takes the first event of a kind, ranks, elements and data type (`ProfileData.lookup_collective` of
torch/_inductor/fx_passes/profile_guided_estimation.py), so each has one event: the median over its occurrences. Must
not guess a data type or a number of elements, or load torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from aorta.analysis.collective_matching import LEAVES_EARLY, OK, REASONS, matched_pieces, name_collectives
from aorta.analysis.load.gemm_shapes import known_dtype
from aorta.analysis.merge.trace_writer import trace_file
from aorta.analysis.tables import UNKNOWN, CollectiveName, Ints, Members, Run, global_steps
from aorta.errors import InputError

OPTION: Final = "torch._inductor.config.aten_distributed_optimizations.profile_guided_estimations_profile_path"
KINDS: Final = {
    "allreduce": "allreduce",
    "allgather": "all_gather_into_tensor",
    "reducescatter": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
}
"""Kinds that the estimator is asked for, and a name by which it knows each (`_normalize_collective_name`)."""
_NOT_ASKED: Final = "Inductor's estimator is not asked for this kind"
_NO_DTYPE: Final = "their data type, or its size, is not known"
_NO_ELEMENTS: Final = "their bytes are not known, or no whole number of elements for each rank"
_NO_TIME: Final = "they took no time, and the estimator passes over such events"
_SCALAR_TYPES: Final = {
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
"""Names of c10/core/ScalarType.h; the others are torch's own with a capital letter."""


class ProfileEntry(NamedTuple):
    """What the estimator tells apart, and what AORTA measured of it. Elements are those of one rank's buffers."""

    kind: str
    group: str
    ranks: Members
    dtype: str
    in_elements: int
    out_elements: int
    collectives: int
    transfer_ns: float


@dataclass(frozen=True)
class InductorProfile:
    """Transfers of a run. `groups`: name and ranks of every process group in it; `left_out`: why -> collectives.
    `upper_bounds`: kinds of which some ends were seen only when the caller waited (R6).
    """

    entries: tuple[ProfileEntry, ...]
    groups: tuple[tuple[str, Members], ...]
    left_out: Mapping[str, int]
    upper_bounds: tuple[str, ...]
    world_size: int

    def notes(self) -> list[str]:
        """Return what a reader has to know."""
        notes = [f"left out: {count} collective(s): {why}" for why, count in self.left_out.items()]
        if self.upper_bounds:
            kinds = ", ".join(self.upper_bounds)
            notes.append(f"ends of {kinds} were seen when the caller waited: their transfers are upper bounds")
        return notes


class _Shape(NamedTuple):
    """What the estimator looks a collective up by: it does not ask for the group's name."""

    kind: str
    ranks: Members
    dtype: str
    in_elements: int
    out_elements: int


def inductor_profile(run: Run, last: int | None = None) -> InductorProfile:
    """Return the transfers of a run behind its warm-up.

    Args:
        last: of the last so many global steps; None: of all.

    Raises:
        InputError: there is none, and why.
    """
    names = name_collectives(run)
    issued = [name for tables in run.ranks.values() for name in tables.collectives.names]
    steps = global_steps(run.ranks.values())
    found: defaultdict[_Shape, list[Ints]] = defaultdict(list)
    groups: dict[_Shape, str] = {}
    left_out: Counter[str] = Counter()
    bounded = set[str]()
    for piece, matched in matched_pieces(
        run, names, None if last is None else (int(steps[-last:][0]), int(steps[-1]) + 1)
    ):
        for reason, count in enumerate(np.bincount(matched.reason[matched.used], minlength=len(REASONS)).tolist()):
            if reason != OK:
                why = REASONS[reason]
                left_out[_NOT_ASKED if why == LEAVES_EARLY else why] += count
        clear = matched.used & (matched.reason == OK)
        name_of, times = piece.name[matched.last][clear], matched.transfer_ns[clear]
        for number in np.unique(name_of).tolist():
            these: Ints = times[name_of == number]
            group, ranks = names.groups[names.group[number]]
            shape = _shape(issued[number], ranks)
            if isinstance(shape, str):
                left_out[shape] += len(these)
                continue
            left_out[_NO_TIME] += int(np.count_nonzero(these <= 0))
            found[shape].append(these[these > 0])
            groups.setdefault(shape, group)
            if issued[number].end_source == "wait":
                bounded.add(shape.kind)
    pooled = {shape: np.concatenate(parts) for shape, parts in sorted(found.items())}
    entries = tuple(
        ProfileEntry(shape.kind, groups[shape], *shape[1:], len(times), float(np.median(times)))
        for shape, times in pooled.items()
        if len(times)
    )
    left_out = Counter({why: count for why, count in left_out.items() if count})
    if not entries:
        why = "; ".join(f"{count} left out: {why}" for why, count in left_out.items()) or "it has no collective"
        raise InputError(f"{run.location}: no profile for Inductor: no transfer is known behind the warm-up ({why})")
    known = tuple((name, ranks) for name, ranks in dict.fromkeys(names.groups) if ranks)
    return InductorProfile(entries, known, left_out, tuple(sorted(bounded)), run.health.world_size)


def _shape(name: CollectiveName, ranks: Members) -> _Shape | str:
    """Return what the estimator looks a collective up by, or why it cannot be said."""
    if name.kind not in KINDS:
        return _NOT_ASKED
    dtype, width = known_dtype(name.dtype)
    if dtype is None or width is None:
        return _NO_DTYPE
    whole, beside = divmod(name.bytes, width)
    part, uneven = divmod(whole, len(ranks))
    split = name.kind in ("allgather", "reducescatter")
    if name.bytes == UNKNOWN or beside or (split and uneven) or not whole:
        return _NO_ELEMENTS
    taken, given = (part if name.kind == "allgather" else whole), (part if name.kind == "reducescatter" else whole)
    return _Shape(name.kind, ranks, _SCALAR_TYPES.get(dtype, dtype.capitalize()), taken, given)


def write_profile(path: Path, profile: InductorProfile, *, overwrite: bool) -> None:
    """Write the trace that torch's `ProfileData.load` reads. Its events stand one behind the other.

    Raises:
        InputError: it exists and may not be replaced, cannot be written, or has a name that torch would not read.
    """
    if path.suffix != ".json":
        raise InputError(f"{path}: torch reads this profile as plain text; a name that ends in .json is needed")
    with trace_file(path, overwrite=overwrite) as file:
        at_us = 0.0
        for entry in profile.entries:
            file.write(_event(entry, at_us))
            at_us += entry.transfer_ns / 1e3
        groups = [
            {"pg_name": name, "ranks": list(ranks), "pg_size": len(ranks)} for name, ranks in sorted(profile.groups)
        ]
        file.finish(
            {
                "schemaVersion": 1,
                "distributedInfo": {"world_size": profile.world_size, "pg_count": len(groups), "pg_config": groups},
                "otherData": {"made_by": "aorta whatif --inductor-profile", "durations": "median of minima over ranks"},
            }
        )


def _event(entry: ProfileEntry, at_us: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": f"{entry.kind} of {entry.out_elements} {entry.dtype}",
        "pid": 0,
        "tid": 0,
        "ts": at_us,
        "dur": entry.transfer_ns / 1e3,
        "args": {
            "Collective name": KINDS[entry.kind],
            "Process Group Name": entry.group,
            "Process Group Ranks": str(list(entry.ranks)),
            "Group size": len(entry.ranks),
            "In msg nelems": entry.in_elements,
            "Out msg nelems": entry.out_elements,
            "dtype": entry.dtype,
            "collectives": entry.collectives,
        },
    }
