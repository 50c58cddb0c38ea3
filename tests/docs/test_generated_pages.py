"""Pages that a program writes in part are as it would write them: behaviours, workloads."""

from __future__ import annotations

import re

import pytest

from tests import workload_table
from tests.recording.test_every_strategy import CASES
from tests.recording.test_pipeline import CASES as PIPELINES
from tests.runs import ROOT
from tests.trained_ways import PIPELINES as STRATEGIES


def test_every_behaviour_has_a_test_that_names_it_and_stands_once_in_order() -> None:
    page = (ROOT / "docs" / "dev" / "spec-rows.md").read_text().partition("## A.")[2]
    in_tables = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| row |")]
    rows = [(row[0], int(row[1:])) for row in re.findall(r"^\| ([A-Z]\d+) \| [^|]+ \|[^|]+\|$", page, re.MULTILINE)]
    assert (len(rows), rows) == (len(in_tables), sorted(set(rows)))
    marks = "".join(
        mark
        for path in (ROOT / "tests").rglob("test_*.py")
        for mark in re.findall(r"^@pytest\.mark\.spec\(([^)]*)\)", path.read_text(), re.MULTILINE)
    )
    assert {(row[0], int(row[1:])) for row in re.findall(r'"([A-Z]\d+)"', marks)} == set(rows)


@pytest.mark.thorough
def test_workloads_are_current() -> None:
    written = workload_table.PAGE.read_text()
    assert written == workload_table.updated(written), "run: python -m tests.workload_table"


def test_what_the_table_says_is_trained_is_trained() -> None:
    for strategy in STRATEGIES:
        in_pipelines = {case.workload for case in PIPELINES.values() if case.strategy == strategy}
        assert in_pipelines == {name for name, strategies in workload_table.TRAINED.items() if strategy in strategies}
    assert workload_table.TRAINED["ranking"] == {*CASES, *STRATEGIES}
    assert {name: ranks for name, (ranks, _) in CASES.items()}.items() <= workload_table.RANKS.items()
