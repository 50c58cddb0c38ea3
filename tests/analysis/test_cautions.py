"""What is odd about a dataset's numbers is said, and nothing is said of ordinary ones; which expert is named as hot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aorta.analysis.aggregate import LabelledRun
from aorta.analysis.cautions import FEW_STEPS
from aorta.analysis.load.records import load_run
from aorta.analysis.report.report_folder import write_report
from aorta.records.schema import ExpertTokens
from tests.analysis.builders import collective, header, metrics, step, write_manifest, write_rank
from tests.analysis.by_json import aggregate, cautions, expert_sentences

pytestmark = pytest.mark.usefixtures("no_pictures")

USUAL = metrics(20, 16, 8, 4)


def entry(folder: Path, overlaps: list[dict[str, Any]]) -> dict[str, Any]:
    """The entry of a run of two ranks whose steps have these metrics."""
    folder.mkdir()
    for rank in range(2):
        write_rank(folder, header(rank, 2), [step(rank, 2, at, overlap=found) for at, found in enumerate(overlaps)])
    return aggregate(LabelledRun("x", load_run(folder)))


def test_few_steps_are_said_to_be_few(tmp_path: Path) -> None:
    (said,) = cautions(entry(tmp_path / "few", [USUAL] * 3))
    assert said.startswith("only 3 steps after warm-up")
    assert "training." not in said  # a loop of one's own has no such key
    assert cautions(entry(tmp_path / "enough", [USUAL] * (FEW_STEPS + 1))) == []


def test_a_denominator_of_zero_is_counted(tmp_path: Path) -> None:
    overlaps = [USUAL] * (FEW_STEPS + 1) + [metrics(20, 16, 0, 0)] * 2
    (said,) = cautions(entry(tmp_path / "x", overlaps))
    assert said == (
        "overlap_ratio rests on 42 of 46 values, one per step and rank: in the others comm_ms is 0 or not known, and "
        "the ratio undefined"
    )


def test_an_efficiency_outside_0_to_1_is_not_left_to_stand(tmp_path: Path) -> None:
    found = entry(tmp_path / "x", [USUAL] * (FEW_STEPS + 1))
    found["metrics"]["overlap_efficiency"] |= {"min": -0.2, "max": 1.3, "median": 0.9}
    (said,) = cautions(found)
    assert said.startswith("overlap_efficiency is -0.200 and 1.300, which no share of a whole can be")


def test_a_run_without_steps_has_none() -> None:
    assert cautions({"count": 0, "reason": "no step is left after warm-up"}) == []


def test_rows_that_round_to_the_same_name_are_told_apart(tmp_path: Path) -> None:
    rows = [collective("allreduce", at, bytes=size) for at, size in enumerate((1_000_000, 1_000_004))]
    for rank in range(2):
        write_rank(tmp_path, header(rank, 2), [step(rank, 2, overlap=USUAL, collectives=rows)])
    text = write_report({"x": tmp_path}, tmp_path / "out", html=False).text
    assert "allreduce 1000000 B n=2 group world" in text
    assert "allreduce 1000004 B n=2 group world" in text
    assert "allreduce 1 MB" not in text


def test_a_record_of_one_rank_says_how_to_start_more(tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 1), [step(0, 1, overlap=metrics(20, 16, 0, 0))])
    assert any("torchrun --standalone --nproc_per_node N" in note for note in load_run(tmp_path).health.notes())


STEPS = 3


def routed(folder: Path, *by_rank: list[ExpertTokens], mesh: dict[str, int] | None = None) -> dict[str, Any]:
    """The dataset's entry of a run whose ranks do the same in each step, more than that in a warm-up."""
    ranks = len(by_rank)
    for rank, rows in enumerate(by_rank):
        more = [ExpertTokens(row.block, [9_999, *row.tokens[1:]], 9_999) for row in rows]
        lines = [
            step(rank, ranks, number, overlap=metrics(10, 8, 4, 2), warmup=not number, experts=rows if number else more)
            for number in range(STEPS + 1)
        ]
        write_rank(folder, header(rank, ranks), lines)
    write_manifest(folder, world_size=ranks, plan={} if mesh is None else {"mesh": mesh})
    return aggregate(LabelledRun("x", load_run(folder)))


def test_a_hot_expert_is_named_with_its_block_and_its_rank(tmp_path: Path) -> None:
    even, hot = ExpertTokens("layers.0", [50, 50, 50, 50], 0), ExpertTokens("layers.1", [20, 20, 20, 140], 50)
    found = routed(tmp_path, [even, hot], [even, ExpertTokens("layers.1", [30, 30, 30, 110], 70)], mesh={"expert": 2})
    experts = found["experts"]
    assert experts["rank_steps"] == 2 * STEPS
    assert [block["tokens"] for block in experts["blocks"]] == [[300] * 4, [150, 150, 150, 750]]
    assert [block["dropped_share"] for block in experts["blocks"]] == [0, 0.3]
    assert experts["hottest"] == {"block": "layers.1", "expert": 3, "times_mean": 2.5}
    assert (experts["named"], experts["reason"], experts["ranks"]) == (True, None, [1])
    (sentence,) = expert_sentences(found)
    assert sentence == (
        "expert 3 of layers.1 is hot: it is sent 2.5 times the mean of its block, and 30% of the block's tokens find "
        "no room (1 of 2 blocks send most to that number; computed by rank 1)"
    )


@pytest.mark.parametrize(
    ("mesh", "ranks", "words"),
    [
        ({"expert": 4}, [2], "computed by rank 2"),
        ({"shard": 2, "expert": 2}, [1, 3], "computed by rank 1, 3"),
        (None, None, "computed by every rank, for its own tokens"),
    ],
)
def test_the_mesh_says_which_ranks_compute_it(
    tmp_path: Path, mesh: dict[str, int] | None, ranks: list[int] | None, words: str
) -> None:
    rows = [ExpertTokens("layers.0", [40, 40, 300, 40], 0)]
    found = routed(tmp_path, rows, rows, rows, rows, mesh=mesh)
    assert found["experts"]["ranks"] == ranks
    assert words in expert_sentences(found)[0]


@pytest.mark.parametrize("tokens", [[50, 50, 200], [15, 15, 70]])
def test_twice_the_mean_is_enough_and_so_are_a_hundred_tokens_an_expert(tmp_path: Path, tokens: list[int]) -> None:
    assert routed(tmp_path, [ExpertTokens("layers.0", tokens, 0)])["experts"]["named"]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([60, 60, 60, 100], "no expert is sent 2 times the mean of its block"),
        ([2, 2, 2, 30], "27 tokens an expert are few: 100 are needed"),
    ],
)
def test_nobody_is_named_for_what_chance_alone_does(tmp_path: Path, tokens: list[int], reason: str) -> None:
    found = routed(tmp_path, [ExpertTokens("layers.0", tokens, 0)])
    assert (found["experts"]["named"], found["experts"]["reason"]) == (False, reason)
    assert expert_sentences(found) == []


def test_without_experts_nothing_is_said(tmp_path: Path) -> None:
    for rows in ([], [ExpertTokens("layers.0", [0, 0], 0)], [ExpertTokens("layers.0", [], 0)]):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        assert "experts" not in routed(folder, rows)
