"""Pipelines on gloo: the same training in every mode and on one rank, and every transfer between stages seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.modes import MODES
from tests.runs import losses, program, record, succeeded, train

pytestmark = pytest.mark.dist

STEPS = 5
SIZES = (
    f"training.max_steps={STEPS}",
    "training.batch_size=8",
    "training.log_interval=1",
    "dataset.num_samples=128",
    "dataset.sequence_length=8",
    "scheduler.warmup_steps=1",
    "telemetry.warmup_steps=1",
    "workload.num_layers=4",
    "workload.model_dim=32",
    "workload.num_heads=4",
    "workload.mlp_hidden_dim=64",
    "workload.vocab_size=100",
)
GPT = ("workload=gpt", "workload.num_kv_heads=2")
CASES = {
    "1f1b": (2, (*GPT, "parallel.microbatches=4")),
    "gpipe": (2, (*GPT, "parallel.schedule=gpipe", "parallel.microbatches=2")),
    "zbv_zero_bubble": (2, (*GPT, "parallel.schedule=zbv_zero_bubble", "parallel.stages_per_rank=2")),
    "1f1b-four": (4, (*GPT, "parallel.microbatches=4")),
    "ranking": (2, ("workload=ranking", "workload.dropout=0")),
}
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same models and samples on one rank."""
    folder = Path(tmp_path_factory.mktemp("alone"))
    for name, words in (("gpt", GPT), ("ranking", CASES["ranking"][1])):
        train(folder / name, *SIZES, *words, "parallel=none", ranks=1)
    return {name: folder / ("ranking" if name == "ranking" else "gpt") for name in CASES}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Case -> folder with one run a mode."""
    found = {}
    for name, (ranks, words) in CASES.items():
        found[name] = folder = Path(tmp_path_factory.mktemp("pipeline"))
        succeeded(program("tests.runner.modes", str(folder), *SIZES, "parallel=pp", *words, ranks=ranks))
    return found


def rank_with_the_loss(name: str) -> int:
    """The V-shaped schedule has the last stage where the first is."""
    return 0 if "zbv" in name else CASES[name][0] - 1


@every_case
def test_a_pipeline_trains_like_one_rank(trained: dict[str, Path], alone: dict[str, Path], name: str) -> None:
    """The same loss, and the same norm of the gradients of all stages together, on every rank."""
    expected = [step.grad_norm for step in record(alone[name]).steps]
    folder = trained[name] / "dedicated"
    assert losses(folder, rank_with_the_loss(name)) == pytest.approx(losses(alone[name]), rel=1e-5)
    for rank in range(CASES[name][0]):
        assert [step.grad_norm for step in record(folder, rank).steps] == pytest.approx(expected, rel=1e-4)


@every_case
def test_every_mode_trains_alike_to_the_last_digit(trained: dict[str, Path], name: str) -> None:
    for rank in range(CASES[name][0]):
        plain = record(trained[name] / MODES[0], rank).steps
        assert len(plain) == STEPS
        for mode in MODES[1:]:
            seen = record(trained[name] / mode, rank).steps
            assert [(step.loss, step.grad_norm) for step in seen] == [(step.loss, step.grad_norm) for step in plain]


@every_case
def test_the_loss_stands_where_the_last_stage_is_and_elsewhere_the_reason(trained: dict[str, Path], name: str) -> None:
    for rank in range(CASES[name][0]):
        for step in record(trained[name] / "observe", rank).steps:
            if rank == rank_with_the_loss(name):
                assert step.loss is not None
            else:
                assert step.loss is None
                assert "last stage" in step.reasons["loss"]


@every_case
def test_every_transfer_is_seen_and_waited_for_once(trained: dict[str, Path], name: str) -> None:
    for mode in MODES[1:]:
        for rank in range(CASES[name][0]):
            for step in record(trained[name] / mode, rank).steps:
                assert step.coverage.complete, step.coverage.reason
                assert step.coverage.seen == step.coverage.issued == len(step.collectives)
                assert isinstance(step.waits, list)
                issued = [(row.group, row.seq, row.kind) for row in step.collectives]
                assert {kind for *_, kind in issued} == {"send", "recv", "allreduce"}
                # An all-reduce has no kind in its wait: only sends and receives are counted apart.
                waited = [(wait.group, wait.seq, wait.kind or "allreduce") for wait in step.waits]
                assert sorted(waited) == sorted(issued)


@every_case
def test_bubbles_lie_in_the_pipeline_and_outside_of_computation(trained: dict[str, Path], name: str) -> None:
    for rank in range(CASES[name][0]):
        for step in record(trained[name] / "dedicated", rank).steps:
            overlap = {key: value or 0 for key, value in step.overlap.items()}
            assert 0 < overlap["bubble_ms"] < overlap["pipeline_ms"] < overlap["window_ms"]
            assert overlap["bubble_ms"] + overlap["compute_ms"] <= overlap["window_ms"] + 1e-6
            assert overlap["bubble_share"] == pytest.approx(overlap["bubble_ms"] / overlap["pipeline_ms"])
            unseen = record(trained[name] / "off", rank).steps[0]
            assert unseen.overlap["bubble_ms"] is None
            assert unseen.reasons["bubble_ms"]


def test_gradients_of_weights_alone_count_as_computation(trained: dict[str, Path]) -> None:
    """No hook of a block sees them run. Rank 1 of the V has two stages, neither of them the first."""
    blocks = [part.block for part in record(trained["zbv_zero_bubble"] / "observe", 1).steps[-1].compute]
    assert {block for block in blocks if "weights" in block} == {"stage.1, weights", "stage.2, weights"}
