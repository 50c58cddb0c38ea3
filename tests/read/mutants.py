"""Mutants of evidence: healthy traces and records from which evidence was taken, or in which it was renamed, moved or
doubled.

No mutation changes what the devices did. So every number that a report gives of a mutant is that of the healthy traces,
or null, with bounds (if any) that hold it. Everything else is wrong (`tests.read.answers`).
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from aorta.errors import InputError
from tests.read.answers import Line, Records, Verdict, answer, judge
from tests.read.evidence_files import CALL, COPY, ISSUES, KERNEL, MARK, OPERATOR, OTHER, File, Row

Test: TypeAlias = Callable[[Row], bool]
Mutation: TypeAlias = Callable[[Sequence[File], random.Random], "list[File]"]


def is_comm(row: Row) -> bool:
    return row.communicates


def is_kernel(row: Row) -> bool:
    return row.what == KERNEL


def computes(row: Row) -> bool:
    return row.what == KERNEL and not row.communicates


def on_device(row: Row) -> bool:
    return row.what in (KERNEL, COPY)


def is_copy(row: Row) -> bool:
    return row.what == COPY


def is_call(row: Row) -> bool:
    return row.what == CALL


def is_mark(row: Row) -> bool:
    return row.what == MARK


def issues(row: Row) -> bool:
    return row.what == OPERATOR and ISSUES.match(row.name) is not None and not row.communicates


def is_operator(row: Row) -> bool:
    return row.what == OPERATOR and not row.communicates


def by_rows(change: Callable[[list[Row], random.Random], list[Row]]) -> Mutation:
    """The same change in every file."""
    return lambda files, chance: [file.changed(change(file.rows, chance)) for file in files]


def without(test: Test, share: float = 1.0) -> Mutation:
    return by_rows(lambda rows, chance: [row for row in rows if not (test(row) and chance.random() < share)])


def changed(test: Test, change: Callable[[Row], Row], share: float = 1.0) -> Mutation:
    return by_rows(lambda rows, chance: [change(row) if test(row) and chance.random() < share else row for row in rows])


def renamed(test: Test, name: str, share: float = 1.0) -> Mutation:
    return changed(test, lambda row: replace(row, name=name), share)


def of_category(test: Test, category: str) -> Mutation:
    """Kineto's rows of an unknown category; the tables of other formats are known or missing."""
    return lambda files, chance: [
        file.changed([replace(row, category=category) if test(row) else row for row in file.rows])
        if file.format == "kineto"
        else file
        for file in files
    ]


def doubled(test: Test) -> Mutation:
    return by_rows(lambda rows, chance: [*rows, *(replace(row) for row in rows if test(row))])


def then(*mutations: Mutation) -> Mutation:
    def apply(files: Sequence[File], chance: random.Random) -> list[File]:
        for mutate in mutations:
            files = mutate(files, chance)
        return [*files]

    return apply


def facts(last_only: bool = False, **values: object) -> Mutation:
    return lambda files, chance: [
        file
        if last_only and file is not files[-1]
        else file.changed(**{k: v for k, v in values.items() if k in file.facts})
        for file in files
    ]


def unranked_paths(files: Sequence[File], chance: random.Random) -> list[File]:
    names = [Path(re.sub(r"(?i)rank[_-]?(\d+)", r"p\1", str(file.path))) for file in files]
    return [replace(file, path=name) for file, name in zip(files, names, strict=True)]


def _span(rows: Sequence[Row], test: Test = on_device) -> tuple[int, int]:
    timed = [row for row in rows if row.what != OTHER and row.end_ns > row.start_ns]
    chosen = [row for row in timed if test(row)] or timed
    return min(row.start_ns for row in chosen), max(row.end_ns for row in chosen)


def in_part(test: Test, low: float, high: float) -> Mutation:
    """Lose what starts in a part of the time of the trace."""

    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        begin, end = _span(rows, lambda row: row.what != OTHER)
        edges = begin + low * (end - begin), begin + high * (end - begin)
        return [row for row in rows if not (test(row) and edges[0] <= row.start_ns < edges[1])]

    return by_rows(change)


def shifted(test: Test, by: float, *, last_only: bool = False) -> Mutation:
    """Move rows by a part of the length of the trace."""

    def change(file: File) -> File:
        begin, end = _span(file.rows)
        far = int(by * (end - begin))
        moved = [replace(r, start_ns=r.start_ns + far, end_ns=r.end_ns + far) if test(r) else r for r in file.rows]
        return file.changed(moved)

    return lambda files, chance: [file if last_only and file is not files[-1] else change(file) for file in files]


def waits(ns: int, collectives: int = 1) -> Mutation:
    """The first collectives, one of each stream, began long before: the recording of other ranks began later."""

    def change(file: File) -> File:
        sends = sorted((row for row in file.rows if row.communicates), key=lambda row: row.start_ns)[:collectives]
        firsts = [*{row.stream: row for row in reversed(sends)}.values()]
        begin = min(row.start_ns for row in file.rows if row.what != OTHER)
        moved = []
        for row in file.rows:
            waits = any(row is each for each in firsts)
            launched = row.what in (CALL, OPERATOR) and any(row.end_ns <= each.start_ns for each in firsts)
            opened = row.what == MARK and row.start_ns <= begin + 1000
            start = 0 if waits or launched or opened or row.what == OTHER else ns
            end = 0 if (launched and not waits) or row.what == OTHER else ns
            moved.append(replace(row, start_ns=row.start_ns + start, end_ns=row.end_ns + end))
        return file.changed(moved)

    return lambda files, chance: [change(file) for file in files]


def by_gloo(files: Sequence[File], chance: random.Random) -> list[File]:
    """Communication ran on the host, beside the kernels."""

    def change(row: Row) -> Row:
        if not row.communicates or row.what != KERNEL:
            return row
        kind = "all_gather" if "allgather" in row.name.lower() else "all_reduce"
        args = {"Input Dims": [[4096]], "Input type": ["float"]}
        return Row(OPERATOR, f"gloo:{kind}", row.start_ns, row.end_ns, 4000, 9999, None, "user_annotation", args)

    moved = by_rows(lambda rows, chance: [change(row) for row in rows])
    kineto = [file for file in files if file.format == "kineto"]
    return facts(backend="gloo")(moved(kineto, chance), chance) if kineto else [*files]


def by_copies(files: Sequence[File], chance: random.Random) -> list[File]:
    """Communication is moved by copy engines, for torch's symmetric memory."""

    def change(row: Row) -> Row:
        if row.communicates and row.what == KERNEL:
            args = {key: value for key, value in row.args.items() if key in ("device", "stream", "correlation")}
            return replace(row, what=COPY, name="Memcpy PtoP (Device -> Device)", category="gpu_memcpy", args=args)
        return replace(row, name="symm_mem::all_gather") if issues(row) else row

    if not any(row.communicates and row.what == KERNEL for file in files for row in file.rows):
        return [*files]
    return [file.changed(map(change, file.rows)) if file.format == "kineto" else file for file in files]


def by_graphs(share_lost: float) -> Mutation:
    """A step launches one graph; some of the graphs, or of their kernels, are lost."""

    def change(file: File, chance: random.Random) -> File:
        marks = [row for row in file.rows if row.what == MARK]
        if file.format != "kineto" or not any(map(is_kernel, file.rows)):
            return file
        rows = []
        for row in file.rows:
            number = next((n for n, mark in enumerate(marks) if mark.start_ns <= row.start_ns < mark.end_ns), None)
            if row.what == CALL or is_operator(row):
                continue
            if row.what == KERNEL and number is not None:
                if number and chance.random() < share_lost:
                    continue
                ids = {"correlation": 900 + number, "device": 0, "stream": row.stream}
                row = replace(row, link=900 + number, args={**ids, "graph id": 3})
            rows.append(row)
        for number, mark in enumerate(marks):
            start, args = mark.start_ns + 1000, {"correlation": 900 + number}
            call = ("cudaGraphLaunch", start, start + 9000, 4000, 4000, 900 + number, "cuda_runtime", args)
            rows.append(Row(CALL, *call))
        return file.changed(rows)

    return lambda files, chance: [change(file, chance) for file in files]


def last(mutate: Mutation) -> Mutation:
    """Only in the last file."""
    return lambda files, chance: [*files[:-1], *mutate(files[-1:], chance)]


def second_copy(files: Sequence[File], chance: random.Random) -> list[File]:
    return [*files, replace(files[-1], path=files[-1].path.with_name(f"copy-{files[-1].path.name}"))]


def _elsewhere(row: Row) -> Row:
    if isinstance(row.device, str):
        return replace(row, device="Agent 4")
    return replace(row, device={0: 1, 7002: 7001}.get(row.device, row.device))


def _device_lost(row: Row) -> Row:
    args = {key: value for key, value in row.args.items() if key != "device"}
    return replace(row, device=None, args=args)


def _rounded(row: Row) -> Row:
    return replace(row, start_ns=row.start_ns // 1000 * 1000, end_ns=row.end_ns // 1000 * 1000)


def below_zero(files: Sequence[File], chance: random.Random) -> list[File]:
    """Kineto's times may be below 0: they count from a base."""
    by_ns = 5_000_000_000
    return [
        shifted_ns(file, -by_ns).changed(clock=file.facts["clock"] + by_ns) if file.format == "kineto" else file
        for file in files
    ]


def shifted_ns(file: File, ns: int) -> File:
    return file.changed(replace(row, start_ns=row.start_ns + ns, end_ns=row.end_ns + ns) for row in file.rows)


def linked(row: Row, link: int | None) -> Row:
    args = {**row.args, "correlation": link} if "correlation" in row.args else row.args
    return replace(row, link=link, args=args)


def without_args(row: Row, *names: str) -> Row:
    return replace(row, args={key: value for key, value in row.args.items() if key not in names})


def _halves(row: Row) -> list[Row]:
    middle = (row.start_ns + row.end_ns) // 2
    both = [replace(row, end_ns=middle), replace(row, start_ns=middle)]
    return both if row.communicates and row.what == KERNEL else [row]


def labels_beside(category: str, name: str) -> Mutation:
    """Kineto's rows that are no work, beside each row of communication."""

    def beside(row: Row) -> list[Row]:
        return [row, replace(row, what=OPERATOR, name=name, category=category, args={}, link=None)]

    return lambda files, chance: [
        file.changed(part for row in file.rows for part in (beside(row) if is_comm(row) else [row]))
        if file.format == "kineto"
        else file
        for file in files
    ]


def _of_old(row: Row) -> Row:
    old = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "cuda_runtime": "Runtime", "cpu_op": "Operator"}
    return replace(row, category=old.get(row.category or "", row.category))


def _unfinished(rows: list[Row]) -> list[Row]:
    last_mark = max((row for row in rows if is_mark(row)), key=lambda row: row.start_ns, default=None)
    return [replace(row, end_ns=row.start_ns) if row is last_mark else row for row in rows]


def _sending(rows: Sequence[Row]) -> object:
    """The first stream of communication."""
    return next((row.stream for row in rows if is_comm(row)), object())


def first_step_without(test: Test) -> Mutation:
    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        mark = min((row for row in rows if is_mark(row)), key=lambda row: row.start_ns)
        return [row for row in rows if not (test(row) and row.start_ns < mark.end_ns)]

    return by_rows(change)


MYSTERY: Final = "fused_op_1729"
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


# Records ------------------------------------------------------------------------------------------------------------


def in_steps(change: Callable[[Line, int], Line | None], *, last_only: bool = False) -> Callable[[Records], Records]:
    """Change steps, or leave them out, by their place in the file."""

    def of(lines: list[Line]) -> list[Line]:
        found, at = [], 0
        for line in lines:
            kept: Line | None = line
            if line["record"] == "step":
                kept, at = change(copy.deepcopy(line), at), at + 1
            found += [] if kept is None else [kept]
        return found

    return lambda records: {
        name: lines if last_only and name != max(records) else of(lines) for name, lines in records.items()
    }


def in_lines(name: str, **values: Any) -> Callable[[Records], Records]:
    """Set fields of one kind of line in the last file."""
    return lambda records: {
        file: [line | values if line["record"] == name and file == max(records) else line for line in lines]
        for file, lines in records.items()
    }


def _shifted(line: Line, by_ns: int) -> Line:
    return line | {key: line[key] + by_ns for key in ("start_mono_ns", "end_mono_ns", "t_start_ns", "t_end_ns")}


def _covered(line: Line, **values: Any) -> Line:
    return line | {"coverage": line["coverage"] | values}


RECORD_MUTATIONS: Final[Mapping[str, Callable[[Records], Records]]] = {
    "a rank's file lost": lambda records: {name: records[name] for name in sorted(records)[:-1]},
    "a rank's file cut at its half": lambda records: {
        name: lines[: len(lines) // 2] if name == max(records) else lines for name, lines in records.items()
    },
    "a rank's file twice": lambda records: records | {"rank_01_metrics.jsonl": records["rank_1_metrics.jsonl"]},
    "both files are of rank 0": in_lines("header", rank=0),
    "another attempt": in_lines("header", attempt=1),
    "footers lost": lambda records: {name: lines[:-1] for name, lines in records.items()},
    "a footer that counts more steps": in_lines("footer", steps_written=99),
    "groups lost": in_lines("footer", groups={}),
    "every second step lost": in_steps(lambda line, at: None if at % 2 else line),
    "the last steps lost": in_steps(lambda line, at: None if at > 5 else line),
    "steps of one rank lost": in_steps(lambda line, at: None if at % 3 else line, last_only=True),
    "steps twice": lambda records: {
        name: [each for line in lines for each in [line] * (1 + (line["record"] == "step"))]
        for name, lines in records.items()
    },
    "steps in another order": lambda records: {
        name: [lines[0], *reversed(lines[1:-1]), lines[-1]] for name, lines in records.items()
    },
    "collectives lost": in_steps(lambda line, at: line | {"collectives": []}),
    "half of the collectives lost": in_steps(lambda line, at: line | {"collectives": line["collectives"][::2]}),
    "collectives of one rank lost": in_steps(lambda line, at: line | {"collectives": []}, last_only=True),
    "more collectives issued than seen": in_steps(lambda line, at: _covered(line, issued=9)),
    "a model that is not recorded": in_steps(lambda line, at: _covered(line, unwatched=line["coverage"]["seen"])),
    "collectives between steps": in_steps(lambda line, at: _covered(line, outside=3)),
    "steps of another rank's size of the world": in_steps(lambda line, at: line | {"world_size": 4}, last_only=True),
    "metrics lost": in_steps(lambda line, at: line | {"overlap": {"window_ms": line["overlap"]["window_ms"]}}),
    "exposed time lost": in_steps(
        lambda line, at: line | {"overlap": {k: v for k, v in line["overlap"].items() if "exposed" not in k}}
    ),
    "times of a rank lost": in_steps(lambda line, at: line | {"start_mono_ns": None}, last_only=True),
    "clocks an hour apart": in_steps(lambda line, at: _shifted(line, 3_600_000_000_000), last_only=True),
    "ends of collectives lost": in_steps(
        lambda line, at: line | {"collectives": [[*row[:7], None, *row[8:]] for row in line["collectives"]]}
    ),
}
