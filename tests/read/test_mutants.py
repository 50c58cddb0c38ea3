"""Evidence that is taken away is never 0: a report of a trace that lacks some says so, or what it says of all."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from aorta.records.schema import Coverage
from tests.analysis.builders import collective, footer, header, line_of, metrics, step
from tests.read.evidence_files import COPY, JOBS, KERNEL, MARK, File, device_rows, job, kineto_job
from tests.read.mutants import RECORD_MUTATIONS, Records, answer, judge, mutants, record_answer, shares, verdicts

NAMELESS: Final = "communication of unknown name, without operators"
HALF: Final = "communication of the last half lost, and who issued it"
KNOWN: Final = {"rocprofv3-json": {NAMELESS}, "rocprofv3-csv": {NAMELESS}, "nsys": {NAMELESS}, "kineto-cpu": {HALF}}
"""Mutants that are wrong: nothing in them claims what is missing. These formats do not say how many ranks there are;
half of the steps of a job may communicate.
"""


@pytest.mark.parametrize("name", JOBS)
def test_healthy_traces_are_read_in_full(name: str) -> None:
    """The whole of a trace is what a sweep over the rows of the job gives."""
    found = answer(job(name)).values
    for rank in (0, 1):
        rows = list(device_rows(rank))
        edges = sorted({edge for row in rows for edge in (row.start_ns, row.end_ns)})
        right = dict.fromkeys(("compute_ms", "comm_ms", "compute_comm_ms", "copy_ms"), 0.0)
        for low, high in itertools.pairwise(edges):
            active = {(row.what, row.communicates) for row in rows if row.start_ns <= low and high <= row.end_ns}
            for metric, needed in (
                ("compute_ms", {(KERNEL, False)}),
                ("comm_ms", {(KERNEL, True)}),
                ("compute_comm_ms", {(KERNEL, False), (KERNEL, True)}),
                ("copy_ms", {(COPY, False)}),
            ):
                right[metric] += (high - low) / 1e6 if needed <= active else 0
        if name == "kineto-cpu":
            del right["copy_ms"]
        assert {metric: found["whole", metric][rank].value for metric in right} == pytest.approx(right)


@pytest.mark.thorough
@pytest.mark.parametrize("name", JOBS)
def test_mutants(name: str) -> None:
    found = verdicts(job(name))
    wrong = {mutant: each.wrong[:3] for mutant, each in found.items() if each.outcome == "wrong"}
    assert wrong.keys() == KNOWN.get(name, set()), (shares(found), wrong)


def test_local_ranks_in_folders_of_nodes_are_no_ranks_of_the_job() -> None:
    """Both nodes have a rank 0: one job of four processes, whose ranks are unknown."""
    first, second = job("rocprofv3-csv")
    files = [
        replace(file, path=Path(f"node{node}") / f"rank{file.path.parts[0][-1]}" / f"{node}{file.path.name}")
        for node, own in enumerate(([first, second], [shifted_by(first, 3_000), shifted_by(second, 3_000)]))
        for file in own
    ]
    found = answer(files)
    assert found.refused is None
    assert [each.value for each in found.values["run", "compute_ms"]] == [pytest.approx(5.466, abs=0.001)]
    assert len(found.values["whole", "compute_ms"]) == 4


def shifted_by(file: File, ns: int) -> File:
    return file.changed(replace(row, start_ns=row.start_ns + ns, end_ns=row.end_ns + ns) for row in file.rows)


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_processes_of_two_hosts_are_no_windows_of_one(hosts: tuple[str, str]) -> None:
    """Without marks, a later trace of the same rank and folder is a later window only on the same host."""
    file = kineto_job(0).changed(row for row in kineto_job(0).rows if row.what != MARK)
    later = shifted_by(file, 60_000_000_000)
    files = [
        replace(each.changed(host=host), path=Path(f"rank0.{number}.json"))
        for number, (each, host) in enumerate(zip((file, later), hosts, strict=True))
    ]
    assert len(answer(files).values["whole", "compute_ms"]) == len(set(hosts))


def record_lines() -> Records:
    """The records of two ranks, eight steps of 10 ms in which two of three all-reduces are hidden."""
    files = {}
    for rank in range(2):
        lines = [
            step(
                rank,
                2,
                number,
                overlap=metrics(10, 6 + 0.01 * number, 3, 2),
                coverage=Coverage(3, 3, complete=True),
                collectives=[
                    collective(seq=3 * number + at, start_ms=3.0 * at, end_ms=3.0 * at + 1) for at in range(3)
                ],
            )
            for number in range(8)
        ]
        every = [header(rank, 2), *lines, footer(len(lines))]
        files[f"rank_{rank}_metrics.jsonl"] = [json.loads(line_of(line)) for line in every]
    return files


def test_records_that_lack_evidence_give_the_same_numbers_or_none() -> None:
    healthy = record_lines()
    right = record_answer(healthy)
    assert right.values["run", "overlap_ratio"][0].value == pytest.approx(2 / 3)
    found = {name: judge(right, record_answer(change(healthy))) for name, change in RECORD_MUTATIONS.items()}
    assert {name: each.wrong for name, each in found.items() if each.outcome == "wrong"} == {}
    told = {name for name, each in found.items() if each.outcome in ("null", "refused")}
    assert told >= {
        "a rank's file lost",
        "collectives lost",
        "half of the collectives lost",
        "a model that is not recorded",
    }


def test_there_are_many() -> None:
    assert len(list(mutants(job("kineto-cuda")))) >= 60
