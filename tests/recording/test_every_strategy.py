"""Every strategy in every mode: the same training to the last digit, every collective seen, every group named.

The modes of one strategy run one after another in one launch (`modes.py`); what they left is then looked at, here and
by `tests/instrument/test_fabric.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from aorta.records.schema import Step
from tests.recording.modes import MODES
from tests.runs import losses, once, program, record, succeeded, train
from tests.trained_ways import TINY as SIZES

pytestmark = pytest.mark.dist

STEPS = 4
TINY = (
    *SIZES,
    f"training.max_steps={STEPS}",
    "training.gradient_accumulation=2",
    "training.log_interval=100",
    "dataset.num_samples=512",
    "telemetry.warmup_steps=2",
    "watchdog.timeout_s=0",  # of many runs each would start a process
)
CASES = {
    "none": (2, ("parallel=none",)),
    "ddp": (2, ("parallel=ddp", "compile")),
    "fsdp1": (2, ("parallel=fsdp1",)),
    "fsdp": (2, ("parallel=fsdp", "compile")),
    "tp": (2, ("parallel=tp", "compile")),
    "hsdp": (4, ("parallel=hsdp",)),
    "fsdp_tp": (4, ("parallel=fsdp_tp",)),
    "fsdp_cp": (4, ("parallel=fsdp_cp", "workload=gpt")),
}
SHORT = ("none", "ddp")
"""Those of the short gate."""


def trained(factory: pytest.TempPathFactory, name: str) -> Path:
    """The folder of a case: a run for each mode, and for its compiled form; one launch."""
    ranks, words = CASES[name]

    def launch(folder: Path) -> None:
        succeeded(program("tests.recording.modes", str(folder), *TINY, *words, ranks=ranks))

    return once(factory, f"modes-{name}", launch)


def check(folder: Path, ranks: int, runs: Sequence[str]) -> None:
    """The three runs of one form against each other and against what the backends counted."""
    for rank in range(ranks):
        plain = losses(folder / runs[0], rank)
        assert len(plain) == STEPS
        assert None not in plain
        unseen = record(folder / runs[0], rank).steps
        check_unknown(unseen)
        norms = [step.grad_norm for step in unseen]
        for run in runs[1:]:
            seen = record(folder / run, rank)
            # docs/dev/measuring.md, K4: the same to the last digit.
            assert losses(folder / run, rank) == plain
            assert [step.grad_norm for step in seen.steps] == norms
            # R8. By torch.profiler: `tests/known_answers/test_crosscheck.py`.
            for step in seen.steps:
                assert step.coverage.complete, step.coverage.reason
                assert step.coverage.seen == step.coverage.issued == len(step.collectives)
                assert step.coverage.unwatched == 0
            check_waits(seen.steps)


def check_unknown(steps: Sequence[Step]) -> None:
    """What `instrument.mode=off` does not measure is null, and not zero."""
    for step in steps:
        assert step.overlap["overlap_ratio"] is None
        assert step.overlap["compute_ms"] is None
        assert {step.per_stream_ms[lane] for lane in ("compute", "allreduce", "reducescatter")} == {None}
        assert step.per_stream_ms["aux"] is not None
        assert "instrument.mode=off" in step.reasons["overlap_ratio"]
        assert not step.coverage.complete


def check_waits(steps: Sequence[Step]) -> None:
    """The training waits once for every collective, behind its issue, and goes on behind its end."""
    for step in steps:
        rows = {(row.group, row.seq): row for row in step.collectives}
        assert sorted((wait.group, wait.seq) for wait in step.waits) == sorted(rows)
        for wait in step.waits:
            row = rows[wait.group, wait.seq]
            assert row.issue_ns <= wait.enter_ns <= wait.leave_ns
            # The host may see a completion later than the thread that waited for it.
            assert wait.leave_ns >= row.end_ns or row.end_source == "future"
        assert [wait.enter_ns for wait in step.waits] == sorted(wait.enter_ns for wait in step.waits)


def check_groups(folder: Path, ranks: int) -> None:
    """A group has one name and one set of ranks everywhere, and its collectives are the same, in order, on each."""
    records = [record(folder, rank) for rank in range(ranks)]
    members: dict[str, list[int]] = {}
    for rank, one in enumerate(records):
        for name, group in one.footer.groups.items():
            assert members.setdefault(name, group) == group
            assert rank in group
    for name, group in members.items():
        rows = [
            [row for step in records[rank].steps for row in step.collectives if row.group == name] for rank in group
        ]
        calls = [[(row.seq, row.kind, row.bytes, row.dtype) for row in of_rank] for of_rank in rows]
        assert all(other == calls[0] for other in calls)
        assert [seq for seq, *_ in calls[0]] == list(range(len(calls[0])))


def check_every_gradient_byte_is_reduced_once(folder: Path) -> None:
    """Also where gradients of several micro-batches are accumulated."""
    parameters = json.loads((folder / "run.json").read_text())["plan"]["parameters"]
    for step in record(folder).steps:
        reduced = [c for c in step.collectives if c.kind == "allreduce" and c.dtype == "float32"]
        assert sum(c.bytes for c in reduced) == 4 * parameters


def check_each_block_is_gathered_twice_a_micro_batch_and_scattered_once(folder: Path) -> None:
    """Its parameters are given back behind the forward pass; one all-reduce is the norm of the gradients."""
    blocks = len(json.loads((folder / "run.json").read_text())["plan"]["sharded_blocks"])
    for step in record(folder).steps:
        kinds = Counter(c.kind for c in step.collectives)
        assert kinds == {"allgather": 2 * 2 * blocks, "reducescatter": blocks, "allreduce": 1}
        moved = {kind: sum(c.bytes for c in step.collectives if c.kind == kind) for kind in kinds}
        assert moved["allgather"] == 2 * 2 * moved["reducescatter"]


@pytest.mark.spec("D7")
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_every_mode_trains_alike_and_sees_everything(tmp_path_factory, name):
    folder, (ranks, words) = trained(tmp_path_factory, name), CASES[name]
    for form in ("", "-compiled")[: 1 + ("compile" in words)]:
        runs = [mode + form for mode in MODES]
        check(folder, ranks, runs)
        check_groups(folder / runs[1], ranks)
    if name == "ddp":
        check_every_gradient_byte_is_reduced_once(folder / MODES[-1])
    if name == "fsdp":
        check_each_block_is_gathered_twice_a_micro_batch_and_scattered_once(folder / MODES[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["tp", "fsdp"])
def test_many_small_steps_do_not_hang(tmp_path, strategy):
    """Small steps are what deadlocks, where an interceptor holds the interpreter lock (R1, K4)."""
    words = (*TINY, "training.max_steps=200", "training.gradient_accumulation=1", "dataset.num_samples=1600")
    # The watchdog: a collective that does not end within 60 s fails the run; 200 steps may take longer than that.
    words = (*words, "workload.num_layers=1", "training.batch_size=2", "training.timeout_s=60")
    train(tmp_path, *words, f"parallel={strategy}")
    assert len(record(tmp_path).steps) == 200
    assert json.loads((tmp_path / "run.json").read_text())["warnings"] == []
