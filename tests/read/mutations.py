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
    OTHER,
    Change,
    File,
    Row,
    Test,
    is_timed,
    later,
    on_device,
)

Mutation: TypeAlias = Callable[[Sequence[File], random.Random], "list[File]"]


# What becomes of all rows of a file.


def by_rows(change: Callable[..., list[Row]]) -> Callable[..., Mutation]:
    """Make a function of rows, chance and arguments one of the arguments; its mutation changes each file."""

    def mutation(*given: Any, **named: Any) -> Mutation:
        return lambda files, chance: [file.changed(change(file.rows, chance, *given, **named)) for file in files]

    return mutation


@by_rows
def without(rows: list[Row], chance: random.Random, test: Test, share: float = 1.0) -> list[Row]:
    return [row for row in rows if not (test(row) and chance.random() < share)]


@by_rows
def changed(
    rows: list[Row], chance: random.Random, test: Test, change: Change = replace, share: float = 1.0, **values: Any
) -> list[Row]:
    """Change some rows, and give them these values."""
    return [replace(change(row), **values) if test(row) and chance.random() < share else row for row in rows]


def of_category(test: Test, category: str) -> Mutation:
    """Kineto's rows of an unknown category; the tables of other formats are known or missing."""
    return kineto(changed(test, category=category))


@by_rows
def beside(rows: list[Row], chance: random.Random, test: Test, change: Change = replace, **values: Any) -> list[Row]:
    """Some rows are there a second time, changed, with these values."""
    return [*rows, *(replace(change(row), **values) for row in rows if test(row))]


@by_rows
def in_another_order(rows: list[Row], chance: random.Random) -> list[Row]:
    return chance.sample(rows, len(rows))


@by_rows
def one(rows: list[Row], chance: random.Random, test: Test, change: Change, place: float = 0.5) -> list[Row]:
    """Change one of some rows: that in the middle, or at another place by its start."""
    own = sorted(filter(test, rows), key=lambda row: row.start_ns)
    chosen = own[min(int(place * len(own)), len(own) - 1)] if own else None
    return [change(row) if row is chosen else row for row in rows]


@by_rows
def in_halves(rows: list[Row], chance: random.Random, test: Test) -> list[Row]:
    halves = []
    for row in rows:
        middle = (row.start_ns + row.end_ns) // 2
        halves += [replace(row, end_ns=middle), replace(row, start_ns=middle)] if test(row) else [row]
    return halves


def span(rows: Sequence[Row], test: Test = is_timed) -> tuple[int, int]:
    timed = [row for row in rows if row.what != OTHER and row.end_ns > row.start_ns]
    chosen = [row for row in timed if test(row)] or timed
    return min(row.start_ns for row in chosen), max(row.end_ns for row in chosen)


@by_rows
def in_part(rows: list[Row], chance: random.Random, test: Test, low: float, high: float) -> list[Row]:
    """Lose what starts in a part of the time of the trace."""
    begin, end = span(rows)
    edges = begin + low * (end - begin), begin + high * (end - begin)
    return [row for row in rows if not (test(row) and edges[0] <= row.start_ns < edges[1])]


@by_rows
def shifted(rows: list[Row], chance: random.Random, test: Test, by: float) -> list[Row]:
    """Move rows by a part of the length of the trace."""
    begin, end = span(rows, on_device)
    return [later(row, int(by * (end - begin))) if test(row) else row for row in rows]


@by_rows
def scaled(rows: list[Row], chance: random.Random, test: Test, by: float, *, starts: bool = False) -> list[Row]:
    """Lengths in another unit, and starts too: counted from the first row of the trace."""
    begin = min(row.start_ns for row in rows if row.what != OTHER)

    def other(row: Row) -> Row:
        start = begin + int((row.start_ns - begin) * by) if starts else row.start_ns
        return replace(row, start_ns=start, end_ns=start + int((row.end_ns - row.start_ns) * by))

    return [other(row) if row.what != OTHER and test(row) else row for row in rows]


@by_rows
def recorded(rows: list[Row], chance: random.Random, low: float, high: float) -> list[Row]:
    """Record a part of the time, in which marks begin and end with the recording."""
    begin, end = span(rows)
    first, end = (begin + int(part * (end - begin)) for part in (low, high))
    kept = []
    for row in rows:
        if row.what == OTHER or (row.what != MARK and first <= row.start_ns < end):
            kept.append(row)
        elif row.what == MARK and row.end_ns > first and row.start_ns < end:
            kept.append(replace(row, start_ns=max(row.start_ns, first), end_ns=min(row.end_ns, end)))
    return kept


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


@by_rows
def from_the_middle_on(rows: list[Row], chance: random.Random, test: Test, change: Change) -> list[Row]:
    middle = sum(span(rows, on_device)) // 2
    return [change(row) if test(row) and row.start_ns > middle else row for row in rows]


@by_rows
def open_ended(rows: list[Row], chance: random.Random, test: Test, share: float = 1.0) -> list[Row]:
    """Kineto's rows begin in an event, and end in another."""
    events = []
    for row in rows:
        if not (test(row) and chance.random() < share):
            events.append(row)
            continue
        shown = {"cat": row.category, "name": row.name, "pid": row.device, "tid": row.stream}
        begun = {**shown, "ph": "B", "ts": row.start_ns / 1000, "args": row.args}
        ended = {**shown, "ph": "E", "ts": row.end_ns / 1000}
        events += [Row(OTHER, row.name, 0, 0, raw=event) for event in (begun, ended)]
    return events
