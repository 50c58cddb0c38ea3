"""Evidence that is taken away is never 0: a report of a trace that lacks some says so, or what it says of all."""

from __future__ import annotations

import json
from typing import Final

import pytest

from aorta.records.schema import Coverage
from tests.analysis.builders import collective, footer, header, line_of, metrics, step
from tests.read.answers import Records, answer, judge, record_answer, shares
from tests.read.evidence_jobs import JOBS, Shape, device_rows, drawn_shape, job, sums_ms
from tests.read.mutants import RECORD_MUTATIONS, mutants, verdicts

KNOWN: Final = {"kineto-cpu": {"a tenth of all events lost"}, "rocpd": {"a tenth of all device rows lost"}}
"""Mutants that are wrong: nothing in them claims what is missing, as no call launches the operators of a CPU, and rocpd
links no copies.
"""


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", [None, 1, 2, 3, 5, 6, 7])
def test_healthy_traces_are_read_in_full(name: str, seed: int | None) -> None:
    """The whole of a trace is what a sweep over the rows of the job gives."""
    shape = Shape() if seed is None else drawn_shape(seed)
    found = answer(job(name, shape))
    assert found.refused is None
    for rank in range(shape.ranks):
        right = sums_ms(list(device_rows(rank, shape)))
        if name == "kineto-cpu":
            del right["copy_ms"]
        assert {metric: found.values["whole", metric][rank].value for metric in right} == pytest.approx(right)


@pytest.mark.thorough
@pytest.mark.parametrize("name", JOBS)
def test_mutants(name: str) -> None:
    found = verdicts(job(name))
    wrong = {mutant: each.wrong[:3] for mutant, each in found.items() if each.outcome == "wrong"}
    assert wrong.keys() == KNOWN.get(name, set()), (shares(found), wrong)


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
