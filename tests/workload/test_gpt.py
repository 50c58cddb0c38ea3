"""The decoder against arithmetic, a plain computation of its attention, and what its parts promise a pipeline."""

from __future__ import annotations

import pytest
import torch

from aorta.config.schema import Config, Dataset, Gpt, Training
from aorta.config.workload import SIZES, Dimensions, dimensions_of
from aorta.errors import ConfigError
from aorta.workload.gpt import Attention, CausalAttention, GptModel, NextTokenLoss, SyntheticText, rotated
from aorta.workload.workloads import task_of
from tests.loop import resolved
from tests.workload_table import parameter_count

CPU = torch.device("cpu")
TINY = Dimensions(num_layers=3, model_dim=32, num_heads=4, num_kv_heads=2, mlp_hidden_dim=48, vocab_size=50)
PUBLISHED = {"1b": 1_100_048_384, "3b": 3_426_473_600, "7b": 6_738_415_616}


@pytest.mark.parametrize("size", SIZES)
def test_a_size_has_the_parameters_that_its_name_and_the_arithmetic_say(size: str) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in GptModel(SIZES[size]).parameters())
    assert count == parameter_count(SIZES[size]) == PUBLISHED.get(size, count)
    named = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert count == pytest.approx(named, rel=0.15)


def test_a_dimension_that_is_set_replaces_the_size_s() -> None:
    assert dimensions_of(Gpt(size="7b", num_layers=2)) == SIZES["7b"]._replace(num_layers=2)


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


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_fewer_queries_than_keys_are_those_of_the_last_positions(kv_heads: int) -> None:
    torch.manual_seed(0)
    attention, query = CausalAttention(), torch.randn(2, 4, 7, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, kv_heads, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(attention(query[:, :, 4:], key, value), attention(query, key, value)[:, :, 4:])


def test_rotation_keeps_lengths_and_depends_on_distances_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def product(of_query: int, of_key: int) -> float:
        turned = rotated(query, torch.tensor([of_query])), rotated(key, torch.tensor([of_key]))
        assert turned[0].norm().item() == pytest.approx(query.norm().item(), rel=1e-6)
        return float((turned[0] * turned[1]).sum())

    assert product(3, 1) == pytest.approx(product(103, 101), abs=1e-4)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-3)


def test_no_position_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model, tokens = GptModel(TINY), torch.randint(50, (1, 6))
    changed = tokens.clone()
    changed[0, 4] = (tokens[0, 4] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_stages_one_behind_the_other_are_the_whole() -> None:
    stages = []
    for layers in (range(1), range(1, 2), range(2, 3)):
        torch.manual_seed(0)
        stage = GptModel(TINY)
        stage.keep(layers)
        stages.append(stage)
    torch.manual_seed(0)
    whole, tokens = GptModel(TINY), torch.randint(50, (2, 6))
    out = tokens
    for stage in stages:
        out = stage(out)
    assert torch.equal(out, whole(tokens))
    names = [name for stage in stages for name, _ in stage.blocks()]
    assert (
        names == [name for name, _ in whole.blocks()] == ["embed", "layers.0", "layers.1", "layers.2", "norm", "head"]
    )
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
    for _ in range(60):
        batch = next(batches)
        value = loss(model(*batch.inputs), batch.target)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    # The first guesses among 20 tokens; the least is the entropy of what follows: 1.25.
    assert losses[0] == pytest.approx(3.0, abs=0.1)
    assert 1.2 < losses[-1] < 1.9


def test_tokens_are_the_seed_s_alone_and_leave_the_global_random_state() -> None:
    config = Config(dataset=Dataset(num_samples=20, sequence_length=6))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    (tokens,) = SyntheticText(config, 9, CPU).samples
    assert torch.equal(torch.rand(3), expected)
    assert tokens.shape == (20, 7)
    assert tokens.dtype == torch.int32
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 9
    assert torch.equal(tokens, SyntheticText(config, 9, CPU).samples.tokens)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("workload.size=9b",), "workload.size='9b': must be one of 10m, 100m, 350m, 1b, 3b, 7b"),
        (("workload.num_layers=0",), "workload.num_layers=0: must be at least 1"),
        (("workload.model_dim=100",), "workload.model_dim=100: must be an even multiple of workload.num_heads=8"),
        (("workload.num_kv_heads=3",), "workload.num_kv_heads=3: must divide workload.num_heads=8"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(words: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("[", r"\[")):
        resolved("workload=gpt", *words)


def test_heads_that_the_ranks_cannot_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"workload.num_kv_heads=4: 8 ranks compute a layer together \(parallel=tp\)"):
        resolved("workload=gpt", "parallel=tp")
