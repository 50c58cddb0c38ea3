"""The mixture of experts against a loop over tokens, its load-balancing loss, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from aorta.config.schema import Moe
from aorta.config.workload import Dimensions
from aorta.errors import ConfigError
from aorta.workload.gpt import MixtureOfExperts, MoeModel, balance_loss
from tests.loop import resolved
from tests.workload_table import parameter_count, parameters_of_feed_forward

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
        assert parameter.grad is not None
        assert [bool(part.any()) for part in parameter.grad] == [False, False, True, False]
    assert made.router.weight.grad is not None
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
    assert plain.router.weight.grad is not None
    torch.testing.assert_close(weighted.router.weight.grad, plain.router.weight.grad, rtol=1e-5, atol=1e-5)


def test_experts_stand_in_every_so_many_layers() -> None:
    with torch.device("meta"):
        model = MoeModel(DIMS, Moe(num_experts=EXPERTS, expert_interval=2))
        count = sum(p.numel() for p in model.parameters())
    assert len(list(model.experts())) == 2
    more = 2 * ((EXPERTS - 1) * parameters_of_feed_forward(DIMS) + EXPERTS * DIMS.model_dim)
    assert count == parameter_count(DIMS) + more


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("workload.top_k=9",), "workload.top_k=9: must not exceed workload.num_experts=8"),
        (("workload.capacity_factor=0",), "workload.capacity_factor=0.0: must be greater than 0"),
        (("workload.balance_weight=-1",), "workload.balance_weight=-1.0: must be at least 0"),
        (("training.mixed_precision=fp16",), "training.mixed_precision=fp16: workload=moe: the scaled loss"),
        (("parallel=ep", "compile.enabled=true"), "compile.enabled=true: torch.compile does not trace the exchange"),
        (("parallel=ep", "workload.num_experts=9"), "workload.num_experts=9: 2 ranks share the experts"),
    ],
)
def test_what_does_not_fit_is_refused(words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=told):
        resolved("workload=moe", *words)
