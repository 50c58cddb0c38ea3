"""Evidence that is taken away is never 0: a report of a trace that lacks some says so, or what it says of all."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from tests.read.evidence_files import COPY, JOBS, KERNEL, device_rows, job
from tests.read.mutants import answer, mutants, shares, verdicts

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


def test_there_are_many() -> None:
    assert len(list(mutants(job("kineto-cuda")))) >= 60
