"""Every strategy in every mode: the same training to the last digit, every collective seen, every group named.

The modes of one strategy run one after another in one launch (`modes.py`); what they left is then looked at, here and
by `tests/instrument/test_fabric.py`.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
# An independent count of the collectives: torch.profiler's operator rows and shapes.
KINDS = {
    "c10d::allreduce_": "allreduce",
    "c10d::_allgather_base_": "allgather",
    "c10d::allgather_": "allgather",
    "c10d::allgather_into_tensor_coalesced_": "allgather",
    "c10d::_reduce_scatter_base_": "reducescatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reducescatter",
    "c10d::broadcast_": "broadcast",
}
FULL_ARRAY = {"allreduce": 0, "allgather": 0, "reducescatter": 1, "broadcast": 0}
# Its outputs are lists of lists, which the profiler does not describe; its input is one rank's part.
ONE_PART = "c10d::allgather_"
BYTES = {"float": 4, "c10::BFloat16": 2}
PROFILED = ("profiling.enabled=true", "profiling.wait=1", "profiling.warmup=1", "profiling.active=2")
"""Words for `train.py`; the steps seen are 2 and 3."""


def profiler_rows(folder: Path, rank: int) -> dict[int, list[tuple[str, int]]]:
    """Step -> (kind, bytes) of every collective, sorted; gathers into lists must be those of all ranks."""
    world_size = json.loads((folder / "run.json").read_text())["world_size"]
    (path,) = (folder / "torch_profiler" / f"rank{rank}").iterdir()
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
    windows = {
        int(event["name"].split("#")[1]): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"].startswith("iteration#") and event["cat"] == "user_annotation"
    }
    rows: dict[int, list[tuple[str, int]]] = {}
    for step, (begin, end) in windows.items():
        operators = [e for e in events if e["cat"] == "cpu_op" and begin <= e["ts"] < end]
        inside = [e for e in operators if e["name"].startswith("c10d::")]
        unknown = {e["name"] for e in inside} - set(KINDS)
        assert not unknown, f"operators this witness cannot read: {unknown}"
        rows[step] = sorted((KINDS[e["name"]], _bytes(e, world_size)) for e in inside)
    return rows


def _bytes(event: dict[str, Any], world_size: int) -> int:
    part = event["name"] == ONE_PART
    position = 1 if part else FULL_ARRAY[KINDS[event["name"]]]
    dims, kind = event["args"]["Input Dims"][position], event["args"]["Input type"][position]
    if dims and isinstance(dims[0], list):  # a list of tensors
        return sum(math.prod(one) for one in dims) * 4 * (world_size if part else 1)
    return math.prod(dims) * BYTES[kind]


def trained(factory: pytest.TempPathFactory, name: str) -> Path:
    """The folder of a case: a run for each mode, and for its compiled form; one launch."""
    ranks, words = CASES[name]

    def launch(folder: Path) -> None:
        succeeded(program("tests.recording.modes", str(folder), *TINY, *PROFILED, *words, ranks=ranks))

    return once(factory, f"modes-{name}", launch)


def check(folder: Path, ranks: int, runs: Sequence[str]) -> None:
    """The three runs of one form against each other and against the profiler."""
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
            # R8: counted by the backends, and by the profiler.
            for step in seen.steps:
                assert step.coverage.complete, step.coverage.reason
                assert step.coverage.seen == step.coverage.issued == len(step.collectives)
                assert step.coverage.unwatched == 0
            check_waits(seen.steps)
            witness = profiler_rows(folder / run, rank)
            assert set(witness) == {2, 3}
            for number, rows in witness.items():
                assert sorted((c.kind, c.bytes) for c in seen.steps[number].collectives) == rows


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
        assert {stall.cause for stall in step.stalls} <= {"wait", "hand_over"}
        assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(step.stalls))


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
    if (
        name == "tp"
    ):  # waiting inside a block, in C++, is seen, and is not its computation (R5); others may hold up a step
        assert any(waits_inside_a_block(step) for step in record(folder / MODES[-1]).steps)


def waits_inside_a_block(step: Step) -> bool:
    """Most of what is exposed is waited for inside blocks, some of it in the forward pass of a layer."""
    spans = {(span.block, span.phase): span for span in step.compute}
    layer = spans["encoder.0", "forward"]
    return (step.overlap["compute_stall_ms"] or 0) > 0.5 * (step.overlap["exposed_comm_ms"] or 0) > 0 and any(
        layer.start_ns <= stall.start_ns < stall.end_ns <= layer.end_ns for stall in step.stalls
    )


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
