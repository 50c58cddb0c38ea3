"""Pipelines on gloo: the same training in every mode and on one rank, and every transfer between stages seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from aorta.records.schema import Step
from tests.recording.modes import MODES
from tests.runs import losses, once, program, record, succeeded, train
from tests.trained_ways import TINY

pytestmark = [pytest.mark.dist, pytest.mark.thorough]

STEPS = 3
SIZES = (
    *TINY,
    f"training.max_steps={STEPS}",
    "training.batch_size=8",
    "training.log_interval=1",
    "scheduler.warmup_steps=1",
    "telemetry.warmup_steps=1",
    "watchdog.timeout_s=0",
    "workload.num_layers=4",
)
GPT = ("workload=gpt", "workload.num_kv_heads=2")
RANKING = ("workload=ranking", "workload.dropout=0")
BESIDE = ("parallel=fsdp_pp", "training.batch_size=4")
"""Two pipelines train beside each other, on an equal part of each batch."""
ZBV = ("parallel.schedule=zbv_zero_bubble", "parallel.stages_per_rank=2")
INTERLEAVED = (
    "parallel.schedule=interleaved_1f1b",
    "parallel.stages_per_rank=2",
    "parallel.reshard_after_forward=true",
)


class Case(NamedTuple):
    """`with_the_loss`: the rank with the last stage of each pipeline."""

    ranks: int
    with_the_loss: list[int]
    model: tuple[str, ...]
    words: tuple[str, ...]


CASES = {
    "1f1b": Case(2, [1], GPT, ("parallel=pp", "parallel.microbatches=4")),
    "zbv_zero_bubble": Case(2, [0], GPT, ("parallel=pp", *ZBV)),  # where the first stage is
    "fsdp-interleaved": Case(4, [2, 3], GPT, (*BESIDE, *INTERLEAVED)),
    "fsdp-ranking": Case(4, [2, 3], RANKING, (*BESIDE, "parallel.overlap=false")),
}
"""Bubbles of more schedules, and of four stages: `tests/device_path/test_pipeline.py`."""

SHARDED = [name for name in CASES if name.startswith("fsdp")]
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def trained(tmp_path_factory, name):
    """One run a mode of a case."""
    case = CASES[name]

    def train_in_every_mode(folder: Path) -> None:
        words = (*SIZES, *case.model, *case.words)
        succeeded(program("tests.recording.modes", str(folder), *words, ranks=case.ranks))

    return once(tmp_path_factory, f"pipeline-{name}", train_in_every_mode)


def steps_of(trained: Path, name: str, *modes: str) -> Iterator[tuple[int, Step]]:
    """Each step of each rank in these modes."""
    for mode in modes:
        for rank in range(CASES[name].ranks):
            yield from ((rank, step) for step in record(trained / mode, rank).steps)


@every_case
def test_a_pipeline_trains_like_one_rank(tmp_path_factory, trained, name):
    """The same loss, and the same norm of the gradients of all stages together, on every rank."""
    folder, case = trained / "dedicated", CASES[name]
    words = (*SIZES, *case.model, "parallel=none")
    alone = once(tmp_path_factory, f"alone-{case.model[0]}", lambda folder: train(folder, *words, ranks=1))
    expected = [step.grad_norm for step in record(alone).steps]
    parts = [losses(folder, rank) for rank in case.with_the_loss]
    mean = [sum(of_step) / len(of_step) for of_step in zip(*parts, strict=True)]
    assert mean == pytest.approx(losses(alone), rel=1e-5)
    assert len({tuple(part) for part in parts}) == len(parts)  # on batches of their own
    for rank in range(case.ranks):
        assert [step.grad_norm for step in record(folder, rank).steps] == pytest.approx(expected, rel=1e-4)


@every_case
def test_every_mode_trains_alike_to_the_last_digit(trained, name):
    """The loss stands where the last stage is, and elsewhere the reason."""
    plain, *others = ([(step.loss, step.grad_norm) for _, step in steps_of(trained, name, mode)] for mode in MODES)
    assert len(plain) == STEPS * CASES[name].ranks
    assert others == [plain] * 2
    for rank, step in steps_of(trained, name, "observe"):
        assert (step.loss is None) == (rank not in CASES[name].with_the_loss)
        assert step.loss is not None or "last stage" in step.reasons["loss"]


@every_case
def test_every_transfer_is_seen_and_waited_for_once(trained, name):
    gathered = {"allgather", "reducescatter"} if name in SHARDED else set()
    for _, step in steps_of(trained, name, *MODES[1:]):
        assert step.coverage.complete, step.coverage.reason
        assert step.coverage.seen == step.coverage.issued == len(step.collectives)
        issued = [(row.group, row.seq, row.kind) for row in step.collectives]
        assert {kind for *_, kind in issued} == {"send", "recv", "allreduce", *gathered}
        # Only sends and receives have a kind in their wait: they are counted apart.
        kinds = {(group, seq): kind for group, seq, kind in issued if kind not in ("send", "recv")}
        waited = [(wait.group, wait.seq, wait.kind or kinds[wait.group, wait.seq]) for wait in step.waits]
        assert sorted(waited) == sorted(issued)


@every_case
def test_bubbles_lie_in_the_pipeline_and_outside_of_computation(trained, name):
    """And within waits for what the stages of one pipeline exchange: waiting for parameters is none."""
    for _, step in steps_of(trained, name, "dedicated"):
        overlap = {key: value or 0 for key, value in step.overlap.items()}
        assert 0 < overlap["bubble_ms"] < overlap["pipeline_ms"] < overlap["window_ms"]
        assert overlap["bubble_ms"] + overlap["compute_ms"] <= overlap["window_ms"] + 1e-6
        assert overlap["bubble_share"] == pytest.approx(overlap["bubble_ms"] / overlap["pipeline_ms"])
        own = {row.group for row in step.collectives if row.kind in ("send", "recv")}
        waited_ns = sum(wait.leave_ns - wait.enter_ns for wait in step.waits if wait.group in own)
        assert overlap["bubble_ms"] * 1e6 <= waited_ns + 1
    if name == "zbv_zero_bubble":
        # Gradients of weights alone are computation that no hook of a block sees. Rank 1 of the V has two stages,
        # neither of them the first.
        blocks = {part.block for part in record(trained / "observe", 1).steps[-1].compute}
        assert {block for block in blocks if "weights" in block} == {"stage.1, weights", "stage.2, weights"}


@pytest.mark.parametrize("name", SHARDED)
def test_transfers_stay_in_a_pipeline_and_parameters_between_ranks_with_the_same_stages(trained, name):
    """Ranks are those of the world, also in groups of their own: 0 and 2 are one pipeline, 0 and 1 share a stage."""
    for rank in range(4):
        kept = record(trained / "dedicated", rank)
        pipeline, shards = [rank % 2, rank % 2 + 2], [2 * (rank // 2), 2 * (rank // 2) + 1]
        members: dict[str, list[list[int]]] = {}
        for row in (row for step in kept.steps for row in step.collectives):
            members.setdefault(row.kind, []).append(kept.footer.groups[row.group])
        assert all(group == pipeline for kind in ("send", "recv") for group in members[kind])
        assert all(group == shards for kind in ("allgather", "reducescatter") for group in members[kind])
        assert pipeline in members["allreduce"]  # the norm of all stages, behind that of the shards
        assert shards in members["allreduce"]
