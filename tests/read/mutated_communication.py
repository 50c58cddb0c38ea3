"""Mutations by which collectives are another's: gloo's, a graph's, another library's, copies or another device's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.read.evidence_rows import CALL, COPY, KERNEL, MARK, OPERATOR, File, Row
from tests.read.mutations import (
    Mutation,
    by_rows,
    changed,
    facts,
    is_call,
    is_comm,
    is_kernel,
    is_operator,
    issues,
    of_category,
    on_device,
    then,
    without,
)


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


def by_device_copies(files: Sequence[File], chance: random.Random) -> list[File]:
    """Communication is moved by copies that say nothing of another device."""

    def change(row: Row) -> Row:
        args = {key: value for key, value in row.args.items() if key in ("device", "stream", "correlation")}
        return replace(row, what=COPY, name="Memcpy DtoD (Device -> Device)", category="gpu_memcpy", args=args)

    sent = changed(lambda row: row.communicates and row.what == KERNEL, change)
    return sent(files, chance) if files[0].format == "kineto" else [*files]


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


def to_gloo(
    share: float = 1.0, category: str = "user_annotation", thread: int = 9999, backend: str | None = None
) -> Mutation:
    """Some collectives ran on the host."""

    def change(rows: list[Row], chance: random.Random) -> list[Row]:
        kept, called = [], set()
        for row in rows:
            if is_comm(row) and row.what == KERNEL and chance.random() < share:
                called.add(row.link)
                label = "gloo:all_gather" if "gather" in row.name.lower() else "gloo:all_reduce"
                args = {"Input Dims": [[4096]], "Input type": ["float"]}
                row = Row(OPERATOR, label, row.start_ns, row.end_ns, 4000, thread, None, category, args)
            kept.append(row)
        return [row for row in kept if not (row.what == CALL and row.link in called)]

    return then(by_rows(change), facts(backend=backend)) if backend else by_rows(change)


def to_graphs(share: float, call: str = "cudaGraphLaunch", *, whole: bool = False) -> Mutation:
    """A step launches one graph. A share of the graphs (`whole`) or of their kernels have no row, but the first's."""

    def change(file: File, chance: random.Random) -> File:
        marks = sorted((row for row in file.rows if row.what == MARK), key=lambda row: row.start_ns)
        like = next(row for row in file.rows if row.what == CALL)
        lost = {n for n in range(1, len(marks)) if whole and chance.random() < share}
        rows = []
        for row in file.rows:
            number = next((n for n, mark in enumerate(marks) if mark.start_ns <= row.start_ns < mark.end_ns), None)
            if is_operator(row) or (row.what == CALL and "mem" not in row.name.lower()):
                continue
            if row.what == KERNEL and number is not None:
                if number in lost or (not whole and number and chance.random() < share):
                    continue
                row = replace(row, link=9000 + number)
                if file.format == "kineto":
                    ids = {"correlation": 9000 + number, "device": 0, "stream": row.stream}
                    row = replace(row, args={**ids, "graph id": 3})
            rows.append(row)
        for number, mark in enumerate(marks):
            start = mark.start_ns + 2000
            made = replace(like, name=call, start_ns=start, end_ns=start + 9000, link=9000 + number)
            rows.append(replace(made, args={"correlation": 9000 + number}) if file.format == "kineto" else made)
        return file.changed(rows)

    return lambda files, chance: [change(file, chance) for file in files]


def labelled(library: str) -> Mutation:
    """NCCL's labels are another library's."""
    return by_rows(
        lambda rows, chance: [
            replace(row, name=row.name.replace("nccl:", f"{library}:")) if row.name.startswith("nccl:") else row
            for row in rows
        ]
    )


def bare(*keys: str) -> Mutation:
    """Kineto's members beside the events lost."""
    return lambda files, chance: [
        replace(file, rest={key: value for key, value in file.rest.items() if key not in keys})
        if file.format == "kineto"
        else file
        for file in files
    ]


def to_symmetric(
    share: float = 1.0, copy: str = "Memcpy PtoP (Device -> Device)", op: str = "symm_mem::all_gather"
) -> Mutation:
    """Copy engines move collectives of symmetric memory."""

    def change(row: Row) -> Row:
        args = {key: value for key, value in row.args.items() if key in ("device", "stream", "correlation")}
        return replace(row, what=COPY, name=copy, category="gpu_memcpy", args=args)

    sent = changed(lambda row: is_comm(row) and row.what == KERNEL, change, share)
    one_each = without(lambda row: row.name.startswith("nccl:"))
    return then(sent, one_each, changed(issues, lambda row: replace(row, name=op, category="cpu_op")))


def devices(
    rows_of: str, calls_of: str, test: Callable[[Row], bool] = on_device, platform_too: bool = True
) -> Mutation:
    own = then(of_category(test, rows_of), of_category(is_call, calls_of))
    return then(own, bare("deviceProperties", "cupti_version", "roctracer_version")) if platform_too else own
