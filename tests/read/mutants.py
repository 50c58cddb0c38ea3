"""Mutants of evidence: healthy traces and records from which evidence was taken, or in which it was renamed, moved or
doubled.

No mutation changes what the devices did. So every number that a report gives of a mutant is that of the healthy traces,
or null, with bounds (if any) that hold it. Everything else is wrong (`tests.read.answers`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from aorta.errors import InputError
from tests.read.answers import Verdict, answer, judge
from tests.read.evidence_rows import KERNEL, OTHER, File
from tests.read.mutated_communication import by_copies, by_device_copies, by_gloo, by_graphs
from tests.read.mutations import (
    Mutation,
    _device_lost,
    _elsewhere,
    _halves,
    _of_old,
    _rounded,
    _sending,
    _unfinished,
    again,
    all_traces_of,
    as_text,
    below_zero,
    by_rows,
    changed,
    computes,
    doubled,
    facts,
    first_step_without,
    in_another_file,
    in_part,
    is_call,
    is_comm,
    is_copy,
    is_kernel,
    is_mark,
    is_operator,
    issues,
    labels_beside,
    last,
    last_step_without,
    linked,
    links_permuted,
    of_category,
    on_device,
    on_devices_of_halves,
    one,
    open_ended,
    recorded,
    renamed,
    scaled,
    second_copy,
    shifted,
    step_elsewhere,
    step_lost,
    step_twice,
    then,
    unranked_paths,
    waits,
    without,
    without_args,
)

MYSTERY: Final = "fused_op_1729"
HOUR_NS: Final = 3_600_000_000_000
_SAID: Final = ("Collective name", "Process Group Name", "Group size", "Seq")


MUTATIONS: Final[Mapping[str, Mutation]] = {
    # Lost, all or some.
    "device rows lost": without(on_device),
    "kernels lost": without(is_kernel),
    "computation lost": without(computes),
    "communication lost": without(is_comm),
    "communication lost, and who issued it": without(lambda row: is_comm(row) or issues(row)),
    "copies lost": without(is_copy),
    "calls lost": without(is_call),
    "operators lost": without(is_operator),
    "operators that issue communication lost": without(issues),
    "calls and operators lost": without(lambda row: is_call(row) or is_operator(row)),
    "marks lost": without(is_mark),
    "half of the communication lost": without(is_comm, 0.5),
    "a third of the communication lost": without(is_comm, 0.33),
    "half of the computation lost": without(computes, 0.5),
    "a third of the computation lost": without(computes, 0.33),
    "half of all kernels and their calls lost": then(without(computes, 0.5), without(is_call, 0.5)),
    "half of the calls lost": without(is_call, 0.5),
    "half of the marks lost": without(is_mark, 0.5),
    "names of kernels lost": renamed(is_kernel, ""),
    "names of half of the computation lost": renamed(computes, "", 0.5),
    # Renamed.
    "communication of unknown name": renamed(is_comm, MYSTERY),
    "communication of unknown name, without operators": then(renamed(is_comm, MYSTERY), without(is_operator)),
    "half of the communication of unknown name": renamed(is_comm, MYSTERY, 0.5),
    "computation of unknown name": renamed(computes, MYSTERY),
    "marks of unknown name": renamed(is_mark, "phase"),
    "calls of unknown name": renamed(is_call, "acmeEnqueue"),
    "operators of unknown name": renamed(is_operator, "acme::op"),
    # Of a category that nobody knows.
    "device rows of an unknown category": of_category(on_device, "acme_op"),
    "communication of an unknown category": of_category(is_comm, "acme_ccl"),
    "computation of an unknown category": of_category(computes, "acme_op"),
    "copies of an unknown category": of_category(is_copy, "acme_copy"),
    "calls of an unknown category": of_category(is_call, "acme_runtime"),
    "device rows of privateuse1": then(
        of_category(on_device, "privateuse1_op"), of_category(is_call, "privateuse1_runtime")
    ),
    "device rows of MTIA": then(of_category(on_device, "mtia_ccp_events"), of_category(is_call, "mtia_runtime")),
    # Streams, devices, processes.
    "streams lost": changed(on_device, lambda row: replace(row, stream=None)),
    "all on one stream": changed(on_device, lambda row: replace(row, stream=7)),
    "devices lost": changed(on_device, _device_lost),
    "communication on another device": changed(is_comm, _elsewhere),
    "all on another device": changed(on_device, _elsewhere),
    # Doubled.
    "rows of the device twice": doubled(on_device),
    "communication twice": doubled(is_comm),
    "marks twice": doubled(is_mark),
    "one trace twice": second_copy,
    # Cut, or recorded for a part of the time only.
    "cut at the end": in_part(lambda row: True, 0.7, 2),
    "device rows of the last third lost": in_part(on_device, 0.67, 2),
    "device rows of the first half lost": in_part(on_device, -1, 0.5),
    "communication of the last half lost": in_part(is_comm, 0.5, 2),
    "communication of the last half lost, and who issued it": in_part(lambda row: is_comm(row) or issues(row), 0.5, 2),
    "marks of the last half lost": in_part(is_mark, 0.5, 2),
    "kernels and calls of the first third lost": in_part(lambda row: on_device(row) or is_call(row), -1, 0.34),
    # Rank, world, host, clock.
    "ranks lost": then(facts(rank=None), unranked_paths),
    "world size lost": facts(world_size=None),
    "ranks and world size lost": then(facts(rank=None, world_size=None), unranked_paths),
    "one rank lost": lambda files, chance: [*files[:1]],
    "both are rank 0": then(facts(rank=0), unranked_paths),
    "hosts lost": facts(host=None),
    "hosts differ": facts(last_only=True, host="node2"),
    "clock lost": facts(clock=None),
    "clocks an hour apart": lambda files, chance: [
        file.changed(clock=file.facts["clock"] + 3_600_000_000_000)
        if file.facts.get("clock") and file is files[-1]
        else file
        for file in files
    ],
    # One rank is unlike the others.
    "one rank without marks": last(without(is_mark)),
    "one rank without communication": last(without(is_comm)),
    "one rank without device rows": last(without(on_device)),
    "one rank with half of its kernels": last(without(is_kernel, 0.5)),
    # Communication another way.
    "communication by gloo": by_gloo,
    "communication by copies": by_copies,
    "launched by graphs": by_graphs(0),
    "launched by graphs, half of their kernels lost": by_graphs(0.5),
    "launched by graphs, all but the first lost": by_graphs(1),
    # Time.
    "the first collective waits": lambda files, chance: [*waits(5_000_000_000)(files[:1], chance), *files[1:]],
    "the device lags": shifted(on_device, 0.6),
    "the device lags, launches unknown": then(without(is_call), shifted(on_device, 0.6)),
    "the device lags, without copies": shifted(is_kernel, 0.6),
    # What profilers write otherwise, and what they leave out here and there.
    "a tenth of all device rows lost": without(on_device, 0.1),
    "a tenth of all events lost": without(lambda row: not is_mark(row) and row.what != OTHER, 0.1),
    "a third of the communication without length": changed(
        is_comm, lambda row: replace(row, end_ns=row.start_ns), 0.33
    ),
    "a third of the computation without length": changed(computes, lambda row: replace(row, end_ns=row.start_ns), 0.33),
    "a third of the communication ends before it starts": changed(
        is_comm, lambda row: replace(row, end_ns=row.start_ns - 5000), 0.33
    ),
    "times in whole microseconds": changed(lambda row: row.what != OTHER, _rounded),
    "rows in another order": by_rows(lambda rows, chance: chance.sample(rows, len(rows))),
    "times below 0, counted from a later base": below_zero,
    "numbers of launches are all 0": changed(lambda row: on_device(row) or is_call(row), lambda row: linked(row, 0)),
    "numbers of launches repeat": changed(
        lambda row: on_device(row) or is_call(row), lambda row: linked(row, (row.link or 0) % 7 + 1)
    ),
    "numbers of launches lost on half of the device rows": changed(on_device, lambda row: linked(row, None), 0.5),
    "operators' numbers lost": changed(lambda row: True, lambda row: without_args(row, "External id")),
    "arguments of kernels lost": changed(on_device, lambda row: without_args(row, *row.args)),
    "sequence numbers and groups lost": changed(
        lambda row: True,
        lambda row: without_args(row, "Seq", "Process Group Name", "Process Group Ranks", "Group size"),
    ),
    "communication in two pieces": by_rows(lambda rows, chance: [part for row in rows for part in _halves(row)]),
    "labels on the device": labels_beside("gpu_user_annotation", "nccl:all_reduce"),
    "Python functions beside": labels_beside("python_function", "torch/distributed/c10d.py(99): all_reduce"),
    "capitalised categories": by_rows(lambda rows, chance: [_of_old(row) for row in rows]),
    "the last mark without end": by_rows(lambda rows, chance: _unfinished(rows)),
    "marks overlap": changed(is_mark, lambda row: replace(row, end_ns=row.end_ns + (row.end_ns - row.start_ns) // 3)),
    "every mark begins early": changed(
        is_mark, lambda row: replace(row, start_ns=row.start_ns - (row.end_ns - row.start_ns) // 5)
    ),
    "marks of a second family": by_rows(
        lambda rows, chance: [*rows, *(replace(row, name=f"epoch {row.name}") for row in rows if is_mark(row))]
    ),
    "world size 1 stated": facts(world_size=1),
    "world size 1 stated, communication lost": then(facts(world_size=1), without(is_comm)),
    "world size 1 stated, communication of unknown name": then(facts(world_size=1), renamed(is_comm, MYSTERY)),
    "rank lost in the last file": facts(last_only=True, rank=None),
    "names of communication without its library": changed(
        is_comm, lambda row: replace(row, name=re.sub("(?i)(nccl|rccl)(Symk)?(Dev)?Kernel_?", "device_", row.name))
    ),
    "communication by another library": renamed(
        lambda row: is_comm(row) and row.what == KERNEL, "void mscclpp::kernel(int)"
    ),
    "one stream lost": by_rows(lambda rows, chance: [row for row in rows if row.stream != _sending(rows)]),
    "computation of the first step lost": first_step_without(computes),
    "communication of the first step lost": first_step_without(is_comm),
    "communication of the first step lost, and its calls": first_step_without(
        lambda row: is_comm(row) or is_call(row) or issues(row)
    ),
    "half of the computation begins and ends in events of their own": open_ended(computes, 0.5),
    "kernels begin and end in events of their own": open_ended(is_kernel),
    "communication begins and ends in events of their own, without operators": then(
        open_ended(is_comm), without(is_operator), without(is_call)
    ),
    "a third of the computation ends before it starts": changed(
        computes, lambda row: replace(row, end_ns=row.start_ns - 1000), 0.33
    ),
    "a fifth of the communication lasts longer than half an hour": changed(
        is_comm, lambda row: replace(row, end_ns=row.start_ns + 31 * 60 * 1_000_000_000), 0.2
    ),
    "the device lags by less than nothing": shifted(on_device, -0.05),
    "the device lags by less than nothing, one rank": last(shifted(on_device, -0.08)),
    "calls of XPU, a third of the computation lost": then(
        of_category(is_call, "xpu_runtime"), renamed(is_call, "urEnqueueKernelLaunch"), without(computes, 0.33)
    ),
    "calls of MTIA, a third of the kernels lost": then(
        of_category(is_call, "mtia_runtime"), renamed(is_call, "enqueue"), without(is_kernel, 0.33)
    ),
    "every third collective and all that tells of it lost": all_traces_of(is_comm, 3),
    "every fourth kernel and all that tells of it lost": all_traces_of(computes, 4),
    "numbers of launches are text, a third of the computation lost": then(
        changed(lambda row: on_device(row) or is_call(row), as_text), without(computes, 0.33)
    ),
    "kernels communicate and multiply": renamed(
        lambda row: is_comm(row) and row.what == KERNEL, "gemm_all_reduce_persistent_kernel"
    ),
    "arguments of collectives contradict their kernels": changed(
        lambda row: on_device(row) and "Collective name" in row.args,
        lambda row: replace(row, args={**row.args, "Collective name": "_reduce_scatter_base"}),
    ),
    "cut within the last step, without calls": then(
        without(is_call), without(is_operator), in_part(lambda row: not is_mark(row), 0.85, 2)
    ),
    # What cannot have been so: two rows at once on a stream or of a launch, before their launch, far from all others.
    "communication again, a little later": again(is_comm, 300_000),
    "kernels again on another stream, a little later": again(is_kernel, 300_000, stream=31),
    "numbers of launches permuted": links_permuted(on_device),
    "numbers of launches permuted among calls": links_permuted(is_call),
    "one kernel lasts 20 ms more": one(computes, lambda row: replace(row, end_ns=row.end_ns + 20_000_000)),
    "one collective lasts 10 s more": one(is_comm, lambda row: replace(row, end_ns=row.end_ns + 10_000_000_000)),
    "one kernel begins 5 ms early": one(computes, lambda row: replace(row, start_ns=row.start_ns - 5_000_000)),
    "one kernel begins at 0": one(computes, lambda row: replace(row, start_ns=0, end_ns=row.end_ns - row.start_ns)),
    "one collective runs an hour later": one(
        is_comm, lambda row: replace(row, start_ns=row.start_ns + HOUR_NS, end_ns=row.end_ns + HOUR_NS)
    ),
    "cut within a step, and its mark": recorded(0, 0.62),
    "cut at the begin within a step, and its mark": recorded(0.38, 1),
    "computation of the last step lost, and its calls": last_step_without(lambda row: computes(row) or is_call(row)),
    "half of the devices' numbers are text": changed(
        lambda row: on_device(row) and isinstance(row.device, int),
        lambda row: replace(row, device=str(row.device)),
        0.5,
    ),
    "devices of another number from the middle on": on_devices_of_halves,
    "communication in another file": in_another_file(is_comm),
    "operators begin and end in events of their own, a third of the communication lost": then(
        without(is_comm, 0.33), open_ended(is_operator)
    ),
    # Held against other ranks, other streams and the order of launches.
    "all times of one rank in another unit": last(scaled(lambda row: True, 0.001, starts=True)),
    "the device's times of one rank in another unit": last(scaled(on_device, 1000, starts=True)),
    "computation of one rank in another unit": last(scaled(computes, 0.001)),
    "copies of one rank in another unit": last(scaled(is_copy, 0.001)),
    "marks in another unit": scaled(is_mark, 0.001, starts=True),
    "the device's clock of one rank is slower by a tenth": last(scaled(on_device, 0.9, starts=True)),
    "copies on another device": changed(is_copy, _elsewhere),
    "every other row on another device": by_rows(
        lambda rows, chance: [_elsewhere(row) if on_device(row) and at % 2 else row for at, row in enumerate(rows)]
    ),
    "computation of a step on another device": step_elsewhere,
    "a step twice": step_twice,
    "a step lost with its mark": step_lost,
    "communication by copies of the device, without operators": then(by_device_copies, without(is_operator)),
    "communication of one rank of unknown name, without operators": last(
        then(renamed(is_comm, MYSTERY), without(is_operator), changed(is_kernel, lambda row: without_args(row, *_SAID)))
    ),
}


def mutants(files: Sequence[File]) -> Iterator[tuple[str, list[File]]]:
    """Yield each mutant that differs from the healthy traces."""
    for number, (name, mutate) in enumerate(MUTATIONS.items()):
        changed_files = mutate(files, random.Random(number))
        if _told(changed_files) != _told(files):
            yield name, changed_files


def _told(files: Sequence[File]) -> list[object]:
    return [(file.path, file.facts, [{**vars(row), "raw": None} for row in file.rows]) for file in files]


def verdicts(files: Sequence[File]) -> dict[str, Verdict]:
    """Judge every mutant of some healthy traces."""
    right = answer(files)
    if right.refused is not None:
        raise InputError(right.refused)
    return {name: judge(right, answer(mutant), name) for name, mutant in mutants(files)}
