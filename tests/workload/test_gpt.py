"""The decoder and its mixture of experts against arithmetic, a plain computation of its attention, and loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from aorta.config.schema import Config, Dataset, Gpt, Moe, Training
from aorta.config.workload import SIZES, Dimensions, dimensions_of
from aorta.workload import task_of
from aorta.workload.gpt import (
    Attention,
    GptModel,
    MixtureOfExperts,
    MoeModel,
    NextTokenLoss,
    SyntheticText,
    balance_loss,
    rotated,
)
from tests.workload_table import parameter_count, parameters_of_feed_forward

CPU = torch.device("cpu")
TINY = Dimensions(num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2, mlp_hidden_dim=48, vocab_size=50)
PUBLISHED = {"1b": 1_100_048_384, "3b": 3_426_473_600, "7b": 6_738_415_616}


@pytest.mark.parametrize("size", SIZES)
def test_a_size_has_the_parameters_that_its_name_and_the_arithmetic_say(size: str) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in GptModel(SIZES[size]).parameters())
    assert count == parameter_count(SIZES[size]) == PUBLISHED.get(size, count)
    assert count == pytest.approx(float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]], rel=0.15)
    assert dimensions_of(Gpt(size=size, num_layers=2)) == SIZES[size]._replace(num_layers=2)


def test_attention_is_that_of_the_formula() -> None:
    """softmax(q k / sqrt(E)) v over what came before, each head of keys serving two of queries."""
    torch.manual_seed(0)
    attention, positions = Attention(TINY).double(), torch.arange(5)
    hidden = torch.randn(2, 5, 32, dtype=torch.float64)
    query, key, value = (project(hidden).view(2, 5, -1, 8) for project in (attention.wq, attention.wk, attention.wv))
    query, key = (rotated(heads.transpose(1, 2), positions).transpose(1, 2) for heads in (query, key))
    expected = torch.zeros(2, 5, 4, 8, dtype=torch.float64)
    for place in range(5):
        for head in range(4):
            scores = (query[:, place, head, None] * key[:, : place + 1, head // 2]).sum(-1) / 8**0.5
            weights = scores.softmax(dim=-1)
            expected[:, place, head] = (weights.unsqueeze(-1) * value[:, : place + 1, head // 2]).sum(1)
    torch.testing.assert_close(attention(hidden, positions), attention.wo(expected.flatten(2)))


def test_rotation_keeps_lengths_and_depends_on_distances_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def product(of_query: int, of_key: int) -> float:
        turned = rotated(query, torch.tensor([of_query])), rotated(key, torch.tensor([of_key]))
        assert turned[0].norm().item() == pytest.approx(query.norm().item(), rel=1e-6)
        return float((turned[0] * turned[1]).sum())

    assert product(3, 1) == pytest.approx(product(103, 101), abs=1e-4)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-3)


def test_stages_one_behind_the_other_are_the_whole() -> None:
    stages = []
    for index in range(3):
        torch.manual_seed(0)
        stages.append(GptModel(TINY).pipeline_stage(index, 3))
    torch.manual_seed(0)
    whole, tokens = GptModel(TINY), torch.randint(50, (2, 6))
    out = tokens
    for stage in stages:
        out = stage(out)
    assert torch.equal(out, whole(tokens))
    names = [name for name, _ in whole.blocks()]
    assert names == ["embed", "layers.0", "layers.1", "layers.2", "norm", "head"]
    assert [name for stage in stages for name, _ in stage.blocks()] == names
    assert {key for stage in stages for key in stage.state_dict()} == set(whole.state_dict())


def test_it_learns_the_successors() -> None:
    shape = Gpt(num_layers=1, model_dim=32, num_heads=4, num_kv_heads=2, mlp_hidden_dim=48, vocab_size=20)
    config = Config(
        training=Training(batch_size=16), dataset=Dataset(num_samples=256, sequence_length=12), workload=shape
    )
    torch.manual_seed(0)
    task = task_of(config)
    model, loss = task.model(), NextTokenLoss()
    optimizer, batches = torch.optim.AdamW(model.parameters(), lr=1e-2), task.batches(0, 1, CPU).for_ever()
    losses = []
    for _, batch in zip(range(60), batches, strict=False):
        value = loss(model(*batch.inputs), batch.target)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    # The first guesses among 20 tokens; the least is the entropy of what follows: 1.25.
    assert losses[0] == pytest.approx(3.0, abs=0.1)
    assert 1.2 < losses[-1] < 1.9


def test_tokens_are_the_seed_s_alone_and_leave_the_global_random_state() -> None:
    config, before = Config(dataset=Dataset(num_samples=20, sequence_length=6)), torch.get_rng_state()
    (tokens,) = SyntheticText(config, 9, CPU).samples
    assert torch.equal(torch.get_rng_state(), before)
    assert (tokens.shape, tokens.dtype) == ((20, 7), torch.int32)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 9
    assert torch.equal(tokens, SyntheticText(config, 9, CPU).samples.tokens)


DIMS = Dimensions(num_layers=4, model_dim=16, num_heads=4, num_kv_heads=2, mlp_hidden_dim=24, vocab_size=50)
TOKENS, EXPERTS = 12, 4


def mixture(balance_weight: float = 0.0, **settings: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    made = MixtureOfExperts(DIMS, Moe(num_experts=EXPERTS, **settings), balance_weight).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def one_by_one(made: MixtureOfExperts, tokens: torch.Tensor, capacity: int) -> tuple[torch.Tensor, int]:
    """The same by loops: all first choices in the order of the tokens, then the second ones."""
    shares = made.router(tokens).float().softmax(dim=-1)
    out, taken = torch.zeros_like(tokens), [0] * EXPERTS
    dropped = 0
    for rank in range(made._top_k):
        for at, token in enumerate(tokens):
            weight, expert = (each[rank] for each in shares[at].topk(made._top_k))
            number = int(expert)
            if taken[number] == capacity:
                dropped += 1
                continue
            taken[number] += 1
            w1, w3, w2 = (parameter[number] for parameter in (made.experts.w1, made.experts.w3, made.experts.w2))
            out[at] = out[at] + weight * ((silu(token @ w1) * (token @ w3)) @ w2)
    return out, dropped


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("capacity_factor", [0.4, 1.0, 4.0])
def test_outputs_are_those_of_a_loop_over_tokens(top_k: int, capacity_factor: float) -> None:
    made = mixture(top_k=top_k, capacity_factor=capacity_factor)
    tokens = torch.randn(TOKENS, 16, dtype=torch.float64)
    expected, dropped = one_by_one(made, tokens, made.capacity(TOKENS))
    torch.testing.assert_close(made(tokens.view(3, 4, 16)).flatten(0, 1), expected)
    assert (dropped > 0) == (capacity_factor < 1.0) or capacity_factor == 1.0


def test_gradients_go_to_the_experts_that_were_chosen_and_to_the_router() -> None:
    made = mixture(top_k=1, capacity_factor=4.0)
    torch.nn.init.zeros_(made.router.weight)
    torch.nn.init.ones_(made.router.weight[2])  # every token, of positive numbers, chooses expert 2
    made(torch.rand(1, TOKENS, 16, dtype=torch.float64)).sum().backward()
    for parameter in made.experts.parameters():
        assert [bool(part.any()) for part in parameter.grad] == [False, False, True, False]
    assert made.router.weight.grad.any()


def test_the_balance_loss_is_one_for_equal_shares_and_the_number_of_experts_for_one_alone() -> None:
    equal = torch.full((8, EXPERTS), 1 / EXPERTS)
    assert balance_loss(equal, torch.full((EXPERTS,), 2)).item() == pytest.approx(1)
    alone = torch.eye(EXPERTS)[0].repeat(8, 1)
    assert balance_loss(alone, torch.tensor([8, 0, 0, 0])).item() == pytest.approx(EXPERTS)


def test_its_gradient_is_that_of_a_loss_that_is_added() -> None:
    tokens = torch.randn(1, TOKENS, 16, dtype=torch.float64)
    plain, weighted = mixture(), mixture(balance_weight=0.3)
    weighted(tokens).square().sum().backward()
    plain(tokens).square().sum().backward()
    shares = plain.router(tokens.flatten(0, 1)).float().softmax(dim=-1)
    sent = torch.bincount(shares.topk(2, dim=-1).indices.flatten(), minlength=EXPERTS)
    (0.3 * balance_loss(shares, sent)).backward()  # on top of what is there
    torch.testing.assert_close(weighted.router.weight.grad, plain.router.weight.grad, rtol=1e-5, atol=1e-5)


def test_experts_stand_in_every_so_many_layers() -> None:
    with torch.device("meta"):
        model = MoeModel(DIMS, Moe(num_experts=EXPERTS, expert_interval=2))
        count = sum(p.numel() for p in model.parameters())
    assert len(list(model.experts())) == 2
    more = 2 * ((EXPERTS - 1) * parameters_of_feed_forward(DIMS) + EXPERTS * DIMS.model_dim)
    assert count == parameter_count(DIMS) + more
