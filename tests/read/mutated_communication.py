"""Mutations of collectives and of what launched them: which are gloo's, a graph's, copies or another device's."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.read.evidence_rows import (
    CALL,
    COPY,
    KERNEL,
    MARK,
    OPERATOR,
    OTHER,
    Row,
    Test,
    called,
    is_call,
    is_comm,
    is_kernel,
    is_operator,
    issues,
    linked,
    on_device,
    sends,
)
from tests.read.mutations import Mutation, bare, by_rows, changed, of_category, then, without


@by_rows
def to_gloo(
    rows: list[Row],
    chance: random.Random,
    share: float = 1.0,
    category: str = "user_annotation",
    thread: int = 9999,
    *,
    calls_kept: bool = False,
) -> list[Row]:
    """Some collectives ran on the host, and nothing launched them."""
    kept, gone = [], set()
    for row in rows:
        if sends(row) and chance.random() < share:
            gone.add(row.link)
            label = "gloo:all_gather" if "gather" in row.name.lower() else "gloo:all_reduce"
            args = {"Input Dims": [[4096]], "Input type": ["float"]}
            row = Row(OPERATOR, label, row.start_ns, row.end_ns, 4000, thread, None, category, args)
        kept.append(row)
    return [row for row in kept if calls_kept or not (row.what == CALL and row.link in gone)]


@by_rows
def to_graphs(
    rows: list[Row], chance: random.Random, share: float, call: str = "cudaGraphLaunch", *, whole: bool = False
) -> list[Row]:
    """A step launches one graph. A share of the graphs (`whole`) or of their kernels have no row, but the first's."""
    marks = sorted((row for row in rows if row.what == MARK), key=lambda row: row.start_ns)
    like = next(filter(is_call, rows), None)
    if like is None or not any(map(is_kernel, rows)):
        return rows
    lost = {number for number in range(1, len(marks)) if whole and chance.random() < share}
    of_kineto = like.category == "cuda_runtime" or like.category == "hip_runtime"
    found = []
    for row in rows:
        number = next((n for n, mark in enumerate(marks) if mark.start_ns <= row.start_ns < mark.end_ns), None)
        if is_operator(row) or (row.what == CALL and "mem" not in row.name.lower()):
            continue
        if row.what == KERNEL and number is not None:
            if number in lost or (not whole and number and chance.random() < share):
                continue
            ids = {"correlation": 9000 + number, "device": 0, "stream": row.stream, "graph id": 3}
            row = replace(row, link=9000 + number, args=ids if of_kineto else row.args)
        found.append(row)
    for number, mark in enumerate(marks):
        start, args = mark.start_ns + 2000, {"correlation": 9000 + number} if of_kineto else like.args
        times = {"start_ns": start, "end_ns": start + 9000, "link": 9000 + number}
        found.append(replace(like, name=call, args=args, **times))
    return found


def to_copies(share: float = 1.0, copy: str = "Memcpy PtoP (Device -> Device)") -> Mutation:
    """Copy engines move collectives."""

    def change(row: Row) -> Row:
        args = {key: value for key, value in row.args.items() if key in ("device", "stream", "correlation")}
        return replace(row, what=COPY, name=copy, category="gpu_memcpy", args=args)

    return changed(sends, change, share)


def to_symmetric(
    share: float = 1.0, copy: str = "Memcpy PtoP (Device -> Device)", op: str = "symm_mem::all_gather"
) -> Mutation:
    """Copy engines move collectives of symmetric memory."""
    operators = changed(issues, name=op, category="cpu_op")
    return then(to_copies(share, copy), without(called("^nccl:")), operators)


def devices(rows_of: str, calls_of: str, test: Test = on_device, platform_too: bool = True) -> Mutation:
    own = then(of_category(test, rows_of), of_category(is_call, calls_of))
    return then(own, bare("deviceProperties", "cupti_version", "roctracer_version")) if platform_too else own


@by_rows
def waits(rows: list[Row], chance: random.Random, ns: int, collectives: int = 1) -> list[Row]:
    """The first collectives, one of each stream, began long before: the recording of other ranks began later."""
    sends = sorted(filter(is_comm, rows), key=lambda row: row.start_ns)[:collectives]
    firsts = [*{row.stream: row for row in reversed(sends)}.values()]
    begin = min(row.start_ns for row in rows if row.what != OTHER)
    moved = []
    for row in rows:
        waits = any(row is each for each in firsts)
        launched = row.what in (CALL, OPERATOR) and any(row.end_ns <= each.start_ns for each in firsts)
        opened = row.what == MARK and row.start_ns <= begin + 1000
        start = 0 if waits or launched or opened or row.what == OTHER else ns
        end = 0 if (launched and not waits) or row.what == OTHER else ns
        moved.append(replace(row, start_ns=row.start_ns + start, end_ns=row.end_ns + end))
    return moved


@by_rows
def all_traces_of(rows: list[Row], chance: random.Random, test: Test, every: int) -> list[Row]:
    """Lose every such row, and the calls and operators of its number."""
    chosen = [row for row in rows if row.what == KERNEL and test(row)][1::every]
    links = {row.link for row in chosen if row.link is not None}
    origins = {row.args["External id"] for row in chosen if "External id" in row.args}
    return [row for row in rows if row.link not in links and row.args.get("External id") not in origins]


@by_rows
def links_permuted(rows: list[Row], chance: random.Random, test: Test) -> list[Row]:
    links = [row.link for row in rows if test(row)]
    chance.shuffle(links)
    return [linked(links.pop())(row) if test(row) else row for row in rows]


@by_rows
def queued(rows: list[Row], chance: random.Random, test: Test) -> list[Row]:
    """Some rows start with the calls that launch them."""
    starts = {row.link: row.start_ns for row in rows if is_call(row)}
    return [replace(row, start_ns=starts[row.link]) if test(row) else row for row in rows]
