"""Pages that a program writes in part are as it would write them: behaviours, workloads."""

from __future__ import annotations

import pytest

from tests import spec_rows, workload_table
from tests.recording.test_every_strategy import CASES
from tests.recording.test_pipeline import CASES as PIPELINES
from tests.trained_ways import PIPELINES as STRATEGIES


def test_behaviours_are_current_and_stand_once_in_order() -> None:
    written = spec_rows.PAGE.read_text()
    assert written == spec_rows.updated(written), "run: python -m tests.spec_rows"
    rows = [(line["row"][0], int(line["row"][1:])) for line in spec_rows.ROW.finditer(written)]
    assert rows == sorted(set(rows))
    in_tables = [line for line in written.partition("## A.")[2].splitlines() if line.startswith("| ")]
    assert len(rows) == len(in_tables) - in_tables.count("| row | behaviour | seen | tests |")


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
