"""Mutants of evidence: healthy traces from which evidence was taken, or in which it was renamed, moved or doubled.

No mutation of `mutants.json` changes what the devices did. So every number that a report gives of a mutant is that of
the healthy traces, or null, with bounds (if any) that hold it. Everything else is wrong (`tests.read.answers`).

`sibling_cases.json` has siblings of what public cases showed: for every kind some inputs, of other formats, names,
numbers of ranks, streams and steps, with the fault in some steps, on some ranks, or twice.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from aorta.errors import InputError
from tests.read import evidence_rows, mutated_communication, mutations
from tests.read.answers import MOVED, Answer, Value, Verdict, answer, judge
from tests.read.evidence_jobs import Shape, drawn_shape, job, sums_ms
from tests.read.evidence_rows import COPY, KERNEL, MARK, File
from tests.read.mutations import Mutation, then

_NAMES: Final = vars(evidence_rows) | vars(mutated_communication) | vars(mutations)


def made(form: Any) -> Any:
    """Make of data what it stands for: a name, or a list of a name and its arguments, of which a dictionary at the end
    has those that are given by name. Text that is no name is itself.
    """
    if isinstance(form, str):
        return _NAMES.get(form, form)
    if not isinstance(form, list):
        return form
    name, *arguments = form
    named = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    return _NAMES[name](*map(made, arguments), **named)


def mutation(form: Any) -> Mutation:
    """Make a mutation of a form, or of a list of forms that follow one another."""
    several = isinstance(form, list) and isinstance(form[0], list)
    made_: Mutation = then(*map(made, form)) if several else made(form)
    return made_


def _table(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text())


MUTATIONS: Final = {name: mutation(form) for name, form in _table("mutants.json").items()}
KINDS: Final[dict[str, dict[str, Any]]] = _table("sibling_cases.json")


def mutants(files: Sequence[File]) -> Iterator[tuple[str, list[File]]]:
    """Yield each mutant that differs from the healthy traces."""
    for number, (name, mutate) in enumerate(MUTATIONS.items()):
        changed_files = mutate(files, random.Random(number))
        if changed_files != files:
            yield name, changed_files


def verdicts(files: Sequence[File]) -> dict[str, Verdict]:
    """Judge every mutant of some healthy traces."""
    right = answer(files)
    if right.refused is not None:
        raise InputError(right.refused)
    return {name: judge(right, answer(mutant), name) for name, mutant in mutants(files)}


class Sibling(NamedTuple):
    """An input: what is right, and the traces; `name`: which windows it moves (`MOVED`)."""

    right: Answer
    files: list[File]
    name: str


def siblings(kind: str) -> Iterator[tuple[str, Sibling]]:
    """Yield the inputs of one kind."""
    formats, moves = KINDS[kind]["formats"], KINDS[kind].get("moves", "")
    for number, form in enumerate(KINDS[kind]["mutations"]):
        name, shape = formats[number % len(formats)], drawn_shape(100 + 7 * number + len(kind))
        healthy = job(name, shape)
        files = mutation(form)(healthy, random.Random(number))
        right = moved_answer(files, shape) if moves == MOVED else answer(healthy)
        yield f"{number}: {name}", Sibling(right, files, moves)


def moved_answer(files: Sequence[File], shape: Shape) -> Answer:
    """What is right where streams moved: a step is what it launched, or what ran between its marks."""
    values: dict[tuple[str, str], list[Value]] = defaultdict(list)
    for file in files:
        ran = [row for row in file.rows if row.what in (KERNEL, COPY)]
        marks = sorted((row for row in file.rows if row.what == MARK), key=lambda row: row.start_ns)
        windows = [("whole", ran)]
        for number, mark in enumerate(marks):
            windows.append(("step", [row for row in ran if (row.link - 101) // len(shape.step) == number]))
            inside = [(max(row.start_ns, mark.start_ns), min(row.end_ns, mark.end_ns), row) for row in ran]
            windows.append(("step", [replace(r, start_ns=a, end_ns=b) for a, b, r in inside if a < b]))
        for window, rows in windows:
            found = sums_ms(rows)
            found["exposed_comm_ms"] = found["comm_ms"] - found["compute_comm_ms"]
            for metric, value in found.items():
                values[window, metric].append(Value(value))
    return Answer(values, bool(marks))
