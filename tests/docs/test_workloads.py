"""The tables of docs/workloads.md are those of the configuration and of what tests train."""

from __future__ import annotations

import pytest

from tests import workload_table
from tests.runner.test_every_strategy import CASES
from tests.runner.test_pipeline import CASES as PIPELINES
from tests.trained_ways import PIPELINES as STRATEGIES


@pytest.mark.thorough
def test_the_page_is_current() -> None:
    written = workload_table.PAGE.read_text()
    assert written == workload_table.updated(written), "run: python -m tests.workload_table"


def test_what_it_says_is_trained_is_trained() -> None:
    for strategy in STRATEGIES:
        in_pipelines = {case.workload for case in PIPELINES.values() if case.strategy == strategy}
        assert in_pipelines == {name for name, strategies in workload_table.TRAINED.items() if strategy in strategies}
    assert workload_table.TRAINED["ranking"] == {*CASES, *STRATEGIES}
    assert {name: ranks for name, (ranks, _) in CASES.items()}.items() <= workload_table.RANKS.items()
