"""Sequences that ranks share: which chunks each has, and that they train as one rank does with whole sequences."""

from __future__ import annotations

import pytest
import torch

from aorta.parallel.context import in_order, own_chunks
from tests.runs import program, succeeded

RANKS = [1, 2, 3, 4]


@pytest.mark.parametrize("ranks", RANKS)
def test_the_chunks_of_all_ranks_in_order_are_the_sequence(ranks: int) -> None:
    whole = torch.arange(2 * 2 * ranks * 3).view(2, 2 * ranks * 3)
    parts = [own_chunks(whole, 1, rank, ranks) for rank in range(ranks)]
    assert {part.shape for part in parts} == {(2, 6)}
    assert torch.equal(in_order(torch.stack(parts), 2), whole)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_has_as_many_pairs_of_a_query_and_a_key_to_look_at(ranks: int) -> None:
    positions = torch.arange(2 * ranks * 5)
    pairs = [int((own_chunks(positions, 0, rank, ranks) + 1).sum()) for rank in range(ranks)]
    assert pairs == [pairs[0]] * ranks


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_and_gradients_are_those_of_whole_sequences(ranks: int) -> None:
    succeeded(program("tests.parallel.split_sequences", ranks=ranks))
