"""Faults that are injected on purpose: their names are checked, and what they do is noticed and explained."""

from __future__ import annotations

import pytest

from aorta.autopsy.verdict import Kind
from aorta.config.groups.faults import FAULTS, Fault, PlannedFault, fault_rules, planned_faults
from aorta.records.progress_file import PHASES
from benchmarks.autopsy_scores import Planned, run


def test_the_pool_speaks_of_verdicts_and_phases_that_there_are() -> None:
    assert len(FAULTS) >= 20
    for fact in FAULTS.values():
        assert fact.verdict in Kind.__args__  # type: ignore[attr-defined]
        assert fact.phase in (None, *PHASES)


def test_two_faults_at_once() -> None:
    fault = Fault("slow_data+sigkill", "0+1", 7)
    assert list(fault_rules(fault, 2)) == []
    assert planned_faults(fault) == [PlannedFault("slow_data", 0, 7), PlannedFault("sigkill", 1, 7)]
    assert planned_faults(Fault()) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("sigkil"), "did you mean sigkill?"),
        (Fault("sigkill", "2"), "at least 0 and below 2"),
        (Fault("sigkill", "x"), "must be a rank"),
        (Fault("sigkill", "0+1"), "one for each of sigkill"),
        (Fault("sigkill", step=-1), "fault.step=-1"),
    ],
)
def test_what_cannot_be_injected_is_named(fault: Fault, said: str) -> None:
    (rule,) = fault_rules(fault, 2)
    assert said in rule


@pytest.mark.parametrize("kind", ["sigkill", "stuck_data"])
def test_a_fault_of_a_training_is_explained(kind: str) -> None:
    row = run(Planned(kind, 2, "ddp", timeout_s=4.0))
    assert (row["exact"], row["healthy_accused"], row["phase"], row["verdict"]) == (True, 0, True, True)
