"""How evidence is taken away, renamed, moved or doubled: a mutation makes of trace files others.

The tables that use them are data (`mutants.json`, `contradiction_cases.json`): a name, or a list of a name and its
arguments (`made` of `tests.read.mutants`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from tests.read.evidence_rows import (
    MARK,
    OPERATOR,
    OTHER,
    Change,
    File,
    Row,
    Test,
    is_comm,
    is_timed,
    later,
    on_device,
)

Mutation: TypeAlias = Callable[[Sequence[File], random.Random], "list[File]"]


# What becomes of all rows of a file.


def by_rows(change: Callable[[list[Row], random.Random], list[Row]]) -> Mutation:
    """The same change in every file."""
    return lambda files, chance: [file.changed(change(file.rows, chance)) for file in files]


def without(test: Test, share: float = 1.0) -> Mutation:
    return by_rows(lambda rows, chance: [row for row in rows if not (test(row) and chance.random() < share)])


def changed(test: Test, change: Change | None = None, share: float = 1.0, **values: Any) -> Mutation:
    """Change some rows, or give them these values."""
    made = change or (lambda row: replace(row, **values))
    return by_rows(lambda rows, chance: [made(row) if test(row) and chance.random() < share else row for row in rows])


def renamed(test: Test, name: str, share: float = 1.0) -> Mutation:
    return changed(test, None, share, name=name)


def of_category(test: Test, category: str) -> Mutation:
    """Kineto's rows of an unknown category; the tables of other formats are known or missing."""
    return kineto(changed(test, category=category))


def beside(test: Test, change: Change | None = None, **values: Any) -> Mutation:
    """Some rows are there a second time, changed."""
    made = change or (lambda row: replace(row, **values))
    return by_rows(lambda rows, chance: [*rows, *(made(row) for row in rows if test(row))])


def again(test: Test, later_ns: int, **values: Any) -> Mutation:
    """Some rows are there a second time, a little later."""
    return beside(test, lambda row: replace(later(row, later_ns), **values))


def labels_beside(category: str, name: str) -> Mutation:
    """Kineto's rows that are no work, beside each row of communication."""
    return kineto(beside(is_comm, what=OPERATOR, name=name, category=category, args={}, link=None))


def in_another_order() -> Mutation:
    return by_rows(lambda rows, chance: chance.sample(rows, len(rows)))


def one(test: Test, change: Change, place: float = 0.5) -> Mutation:
    """Change one of some rows: that in the middle, or at another place by its start."""

    def only(rows: list[Row], chance: random.Random) -> list[Row]:
        own = sorted(filter(test, rows), key=lambda row: row.start_ns)
        chosen = own[min(int(place * len(own)), len(own) - 1)] if own else None
        return [change(row) if row is chosen else row for row in rows]

    return by_rows(only)


def in_halves(test: Test) -> Mutation:
    def halves(row: Row) -> list[Row]:
        middle = (row.start_ns + row.end_ns) // 2
        return [replace(row, end_ns=middle), replace(row, start_ns=middle)]

    return by_rows(lambda rows, chance: [part for row in rows for part in (halves(row) if test(row) else [row])])


def first_stream_lost(test: Test) -> Mutation:
    """Lose the stream of the first of some rows."""

    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        stream = next((row.stream for row in rows if test(row)), object())
        return [row for row in rows if row.stream != stream]

    return by_rows(change)


def span(rows: Sequence[Row], test: Test = is_timed) -> tuple[int, int]:
    timed = [row for row in rows if row.what != OTHER and row.end_ns > row.start_ns]
    chosen = [row for row in timed if test(row)] or timed
    return min(row.start_ns for row in chosen), max(row.end_ns for row in chosen)


def in_part(test: Test, low: float, high: float) -> Mutation:
    """Lose what starts in a part of the time of the trace."""

    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        begin, end = span(rows)
        edges = begin + low * (end - begin), begin + high * (end - begin)
        return [row for row in rows if not (test(row) and edges[0] <= row.start_ns < edges[1])]

    return by_rows(change)


def shifted(test: Test, by: float) -> Mutation:
    """Move rows by a part of the length of the trace."""

    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        begin, end = span(rows, on_device)
        return [later(row, int(by * (end - begin))) if test(row) else row for row in rows]

    return by_rows(change)


def scaled(test: Test, by: float, *, starts: bool = False) -> Mutation:
    """Lengths in another unit, and starts too: counted from the first row of the trace."""

    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        begin = min(row.start_ns for row in rows if row.what != OTHER)

        def other(row: Row) -> Row:
            start = begin + int((row.start_ns - begin) * by) if starts else row.start_ns
            return replace(row, start_ns=start, end_ns=start + int((row.end_ns - row.start_ns) * by))

        return [other(row) if row.what != OTHER and test(row) else row for row in rows]

    return by_rows(change)


def recorded(low: float, high: float) -> Mutation:
    """Record a part of the time, in which marks begin and end with the recording."""

    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        begin, end = span(rows)
        first, end = (begin + int(part * (end - begin)) for part in (low, high))
        kept = []
        for row in rows:
            if row.what == OTHER or (row.what != MARK and first <= row.start_ns < end):
                kept.append(row)
            elif row.what == MARK and row.end_ns > first and row.start_ns < end:
                kept.append(replace(row, start_ns=max(row.start_ns, first), end_ns=min(row.end_ns, end)))
        return kept

    return by_rows(change)


# What becomes of some files, ranks or steps.


def then(*mutations: Mutation) -> Mutation:
    def apply(files: Sequence[File], chance: random.Random) -> list[File]:
        for mutate in mutations:
            files = mutate(files, chance)
        return [*files]

    return apply


def _of(meant: Callable[[Sequence[File], int], bool], mutate: Mutation) -> Mutation:
    """Only in some files, one by one."""
    return lambda files, chance: [
        each for at, file in enumerate(files) for each in (mutate([file], chance) if meant(files, at) else [file])
    ]


def kineto(mutate: Mutation) -> Mutation:
    return _of(lambda files, at: files[at].format == "kineto", mutate)


def on(mutate: Mutation, *ranks: int) -> Mutation:
    """Only in the files of some ranks, counted round."""
    return _of(lambda files, at: at in {rank % len(files) for rank in ranks}, mutate)


def last(mutate: Mutation) -> Mutation:
    return on(mutate, -1)


def in_steps(mutate: Mutation, *steps: int) -> Mutation:
    """Only what begins in some steps, counted round, their marks included."""

    def change(file: File, chance: random.Random) -> File:
        marks = sorted((row for row in file.rows if row.what == MARK), key=lambda row: row.start_ns)
        chosen = [marks[step % len(marks)] for step in steps]
        inside = [is_timed(r) and any(m.start_ns <= r.start_ns < m.end_ns for m in chosen) for r in file.rows]
        kept, own = (
            [r for r, is_in in zip(file.rows, inside, strict=True) if is_in is which] for which in (False, True)
        )
        found = mutate([file.changed(own)], chance)[0].rows
        return file if found == own else file.changed([*kept, *found])

    return lambda files, chance: [change(file, chance) for file in files]


def facts(**values: object) -> Mutation:
    return lambda files, chance: [
        file.changed(**{k: v for k, v in values.items() if k in file.facts}) for file in files
    ]


def clock_later(ns: int) -> Mutation:
    return lambda files, chance: [
        file.changed(clock=file.facts["clock"] + ns) if file.facts.get("clock") else file for file in files
    ]


def bare(*keys: str) -> Mutation:
    """Kineto's members beside the events lost."""
    return kineto(
        lambda files, chance: [
            replace(file, rest={key: value for key, value in file.rest.items() if key not in keys}) for file in files
        ]
    )


def unranked_paths(files: Sequence[File], chance: random.Random) -> list[File]:
    names = [Path(re.sub(r"(?i)rank[_-]?(\d+)", r"p\1", str(file.path))) for file in files]
    return [replace(file, path=name) for file, name in zip(files, names, strict=True)]


def only_first(files: Sequence[File], chance: random.Random) -> list[File]:
    return [*files[:1]]


def second_copy(files: Sequence[File], chance: random.Random) -> list[File]:
    return [*files, replace(files[-1], path=files[-1].path.with_name(f"copy-{files[-1].path.name}"))]


def merged(files: Sequence[File], chance: random.Random) -> list[File]:
    """Two ranks in one file."""
    return [files[0].changed([*files[0].rows, *files[1].rows])]


def in_another_file(test: Test) -> Mutation:
    """Some rows of a process are in a file of their own."""

    def parts(file: File) -> list[File]:
        other = file.changed(row for row in file.rows if test(row))
        kept = file.changed(row for row in file.rows if not test(row))
        return [kept, replace(other, path=file.path.with_name(f"b{file.path.name}"))]

    return lambda files, chance: [part for file in files for part in parts(file)]


def from_the_middle_on(test: Test, change: Change) -> Mutation:
    def apply(rows: list[Row], chance: random.Random) -> list[Row]:
        middle = sum(span(rows, on_device)) // 2
        return [change(row) if test(row) and row.start_ns > middle else row for row in rows]

    return by_rows(apply)


def open_ended(test: Test, share: float = 1.0) -> Mutation:
    """Kineto's rows begin in an event, and end in another."""

    def events(row: Row) -> list[Row]:
        shown = {"cat": row.category, "name": row.name, "pid": row.device, "tid": row.stream}
        begun = {**shown, "ph": "B", "ts": row.start_ns / 1000, "args": row.args}
        ended = {**shown, "ph": "E", "ts": row.end_ns / 1000}
        return [Row(OTHER, row.name, 0, 0, raw=event) for event in (begun, ended)]

    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        meant = [test(row) and chance.random() < share for row in rows]
        return [each for row, opens in zip(rows, meant, strict=True) for each in (events(row) if opens else [row])]

    return kineto(by_rows(change))
