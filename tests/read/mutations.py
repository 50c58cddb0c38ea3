"""How evidence is taken away, renamed, moved or doubled: a mutation makes of trace files others."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from tests.read.evidence_rows import CALL, COPY, ISSUES, KERNEL, MARK, OPERATOR, OTHER, File, Row

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


def scaled(test: Test, by: float, *, starts: bool = False) -> Mutation:
    """Lengths in another unit, and starts too: counted from the first row of the trace."""

    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        begin = min(row.start_ns for row in rows if row.what != OTHER)
        changed = []
        for row in rows:
            if row.what != OTHER and test(row):
                start = begin + int((row.start_ns - begin) * by) if starts else row.start_ns
                row = replace(row, start_ns=start, end_ns=start + int((row.end_ns - row.start_ns) * by))
            changed.append(row)
        return changed

    return by_rows(change)


def _in_step(number: int, change: Callable[[list[Row]], list[Row]]) -> Mutation:
    """Change all that begins in a step, its mark included."""

    def apply(rows: list[Row], chance: random.Random) -> list[Row]:
        mark = sorted((row for row in rows if is_mark(row)), key=lambda row: row.start_ns)[number]
        inside = [row.what != OTHER and mark.start_ns <= row.start_ns < mark.end_ns for row in rows]
        kept = [row for row, own in zip(rows, inside, strict=True) if not own]
        return [*kept, *change([row for row, own in zip(rows, inside, strict=True) if own])]

    return by_rows(apply)


def _later(rows: list[Row], by_ns: int) -> list[Row]:
    return [*rows, *(replace(row, start_ns=row.start_ns + by_ns, end_ns=row.end_ns + by_ns) for row in rows)]


step_lost: Final = _in_step(1, lambda rows: [])
step_twice: Final = _in_step(1, lambda rows: _later(rows, 60_000_000))
step_elsewhere: Final = _in_step(1, lambda rows: [_elsewhere(row) if computes(row) else row for row in rows])


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


def open_ended(test: Test, share: float = 1.0) -> Mutation:
    """Kineto's rows begin in an event, and end in another."""

    def change(file: File, chance: random.Random) -> File:
        rows: list[Row] = []
        for row in file.rows:
            if file.format == "kineto" and test(row) and chance.random() < share:
                shown = {"cat": row.category, "name": row.name, "pid": row.device, "tid": row.stream}
                begun = {**shown, "ph": "B", "ts": row.start_ns / 1000, "args": row.args}
                ended = {**shown, "ph": "E", "ts": row.end_ns / 1000}
                rows += [Row(OTHER, row.name, 0, 0, raw=event) for event in (begun, ended)]
            else:
                rows.append(row)
        return file.changed(rows)

    return lambda files, chance: [change(file, chance) for file in files]


def all_traces_of(test: Test, every: int) -> Mutation:
    """Lose every such row, and the calls and operators of its number."""

    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        chosen = [row for row in rows if row.what == KERNEL and test(row)][1::every]
        links = {row.link for row in chosen if row.link is not None}
        origins = {row.args["External id"] for row in chosen if "External id" in row.args}
        gone = {id(row) for row in rows if row.link in links or row.args.get("External id") in origins}
        return [row for row in rows if id(row) not in gone]

    return by_rows(change)


def as_text(row: Row) -> Row:
    return replace(row, args={key: str(value) if "orrelation" in key else value for key, value in row.args.items()})


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


def again(test: Test, later_ns: int, **changes: Any) -> Mutation:
    """Rows are in the trace a second time, a little later."""

    def once_more(row: Row) -> Row:
        return replace(row, start_ns=row.start_ns + later_ns, end_ns=row.end_ns + later_ns, **changes)

    return by_rows(lambda rows, chance: [*rows, *(once_more(row) for row in rows if test(row))])


def links_permuted(test: Test) -> Mutation:
    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        links = [row.link for row in rows if test(row)]
        chance.shuffle(links)
        return [linked(row, links.pop()) if test(row) else row for row in rows]

    return by_rows(change)


def one(test: Test, change: Callable[[Row], Row]) -> Mutation:
    """Change the row in the middle of those."""

    def only(rows: list[Row], chance: random.Random) -> list[Row]:
        own = [row for row in rows if test(row)]
        return [change(row) if own and row is own[len(own) // 2] else row for row in rows]

    return by_rows(only)


def last_step_without(test: Test) -> Mutation:
    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        mark = max((row for row in rows if is_mark(row)), key=lambda row: row.start_ns)
        return [row for row in rows if not (test(row) and mark.start_ns <= row.start_ns < mark.end_ns)]

    return by_rows(change)


def recorded(low: float, high: float) -> Mutation:
    """Record a part of the time, in which marks begin and end with the recording."""

    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        begin, end = _span(rows, lambda row: row.what != OTHER)
        first, last = (begin + int(part * (end - begin)) for part in (low, high))
        kept = [
            row for row in rows if row.what == OTHER or (is_mark(row) and row.end_ns > first and row.start_ns < last)
        ]
        kept += [row for row in rows if row.what not in (OTHER, MARK) and first <= row.start_ns < last]
        return [
            replace(row, start_ns=max(row.start_ns, first), end_ns=min(row.end_ns, last)) if is_mark(row) else row
            for row in kept
        ]

    return by_rows(change)


def on_devices_of_halves(files: Sequence[File], chance: random.Random) -> list[File]:
    """From the middle of a Kineto trace on, its device has another number."""

    def change(file: File) -> File:
        begin, end = _span(file.rows)
        later = [on_device(row) and row.start_ns > (begin + end) // 2 for row in file.rows]
        return file.changed(_elsewhere(row) if moved else row for row, moved in zip(file.rows, later, strict=True))

    return [change(file) if file.format == "kineto" else file for file in files]


def in_another_file(test: Test) -> Mutation:
    """Some rows of a process are in a file of their own."""

    def parts(file: File) -> list[File]:
        other = file.changed(row for row in file.rows if test(row))
        kept = file.changed(row for row in file.rows if not test(row))
        return [kept, replace(other, path=file.path.with_name(f"b{file.path.name}"))]

    return lambda files, chance: [part for file in files for part in parts(file)]
