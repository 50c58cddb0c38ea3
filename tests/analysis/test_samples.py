"""What every reader makes of the real files in `tests/samples`."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from aorta.analysis.account import StepAccount, account_of
from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.read.locations import load_source
from aorta.read.record import load_run

RUN = Path(__file__).resolve().parents[1] / "samples" / "two_gloo_ranks"
PROFILED = 3
"""The step that the traces hold."""
OPERATORS = {"c10d::allreduce_": "allreduce", "c10d::broadcast_": "broadcast", "c10d::barrier": "barrier"}


def counted_by_hand(rank: int) -> Counter[str]:
    """Kinds of the collectives in the profiled step, by the operators in its text."""
    (path,) = (RUN / "torch_profiler" / f"rank{rank}").iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    (step,) = (e for e in events if e.get("cat") == "user_annotation" and e["name"] == f"iteration#{PROFILED}")
    inside = [e for e in events if e.get("cat") == "cpu_op" and step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
    return Counter(OPERATORS[e["name"]] for e in inside if e["name"].startswith("c10d::"))


def test_the_run_is_whole_and_every_metric_has_a_value_or_a_reason() -> None:
    run = load_run(RUN)
    assert (run.health.ranks_read, run.health.ranks_missing, run.health.problems) == ([0, 1], [], [])
    assert set(run.health.endings.values()) == {"completed"}
    entry = aggregate(LabelledRun("sample", run))
    assert entry.steps.rank_steps_read == 12
    assert entry.source.backend == "gloo"
    for name, metric in entry.metrics.items():
        assert (metric.median is None) == (metric.reason is not None), name
    assert entry.metrics["comm_ms"].median > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_the_record_and_the_trace_hold_the_same_collectives(rank: int) -> None:
    tables = load_run(RUN).ranks[rank]
    mine = tables.collectives.of_step(PROFILED)
    told = Counter(mine.names[code][0] for code in mine.name.tolist())
    assert told == counted_by_hand(rank)
    assert told["allreduce"] > 0


def test_the_traces_alone_are_read_as_a_run_of_two_ranks() -> None:
    run = load_source(RUN / "torch_profiler")
    assert sorted(run.ranks) == [0, 1]
    for rank, tables in run.ranks.items():
        assert tables.steps.global_step.tolist() == [PROFILED]
        assert len(tables.collectives) >= sum(counted_by_hand(rank).values())


def test_the_accounts_of_records_and_traces_add_up_to_their_steps() -> None:
    accounts = [account_of(LabelledRun("sample", run)) for run in (load_run(RUN), load_source(RUN / "torch_profiler"))]
    found = [each for each in accounts if isinstance(each, StepAccount)]
    assert found
    for account in found:
        for own in (account, *account.ranks.values()):
            assert own.leaves.total() == own.window_ns > 0
            assert min(own.leaves.values()) >= 0
