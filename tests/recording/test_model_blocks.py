"""Which blocks are found in models as people write them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from aorta.errors import ConfigError
from aorta.recording.api_arguments import called_around, chosen_blocks, find_blocks, outside_compiled, strategy_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Plain(nn.Module):
    """Repeats nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class Transformer(nn.Module):
    """With the dictionary of layers that torchtitan's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(10, 4)
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(2)})
        self.norm = nn.LayerNorm(4)
        self.dropout, self.act = nn.Identity(), nn.ReLU()
        self.output = nn.Linear(4, 10)


class Wrapper(nn.Module):
    """Keeps a module as FSDP1 does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def of_wrapped(wrapper, model):
    """The model, with each of its layers in a wrapper."""
    for name, layer in list(model.layers.named_children()):
        setattr(model.layers, name, wrapper(layer))
    return model


def sharded(model):
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard([model.norm, model.output])
    return fully_shard(model)


def compiled(module):
    return torch.compile(module, backend="eager")


def named_parts():
    """All parts in one dictionary, and the layers in a list among them."""
    model, layers = nn.Module(), nn.ModuleList([Layer(), Layer()])
    model.transformer = nn.ModuleDict({"wte": nn.Embedding(10, 4), "wpe": nn.Embedding(8, 4), "h": layers})
    model.lm_head = nn.Linear(4, 10)
    return model


def sequences():
    inner = (nn.Sequential(Layer(), Layer()) for _ in range(2))
    return nn.Sequential(nn.Conv1d(1, 4, 3), *inner, nn.Linear(4, 2))


def nested():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Plain(), Plain()), nn.Linear(4, 2))


def sharing():
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, Layer(), shared, nn.Linear(4, 4))


TRANSFORMER = ["tok_embeddings", "layers.0", "layers.1", "norm", "act", "output"]
OF_FIRST, OF_SECOND = ([f"{number}.{name}" for name in TRANSFORMER] for number in (0, 1))


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (Transformer, TRANSFORMER),
        (sequences, ["0", "1.0", "1.1", "2.0", "2.1", "3"]),
        (Plain, ["Plain"]),
        (lambda: nn.Linear(4, 4), ["Linear"]),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "1", "2"]),
        (lambda: nn.ModuleList([nn.Linear(4, 4), Plain()]), ["0", "1"]),
        (sharing, ["0", "1", "3"]),
        (named_parts, [*(f"transformer.{name}" for name in ("wte", "wpe", "h.0", "h.1")), "lm_head"]),
        (lambda: of_wrapped(checkpoint_wrapper, Transformer()), TRANSFORMER),
        (lambda: Wrapper(of_wrapped(Wrapper, Transformer())), TRANSFORMER),
        (lambda: of_wrapped(compiled, Transformer()), TRANSFORMER),
        (lambda: compiled(Transformer()), ["OptimizedModule"]),
        (lambda: sharded(Transformer()), TRANSFORMER),
        (lambda: DistributedDataParallel(Transformer()), TRANSFORMER),
        (lambda: nn.ModuleList(DistributedDataParallel(Plain()) for _ in range(2)), ["0", "1"]),
        (lambda: nn.ModuleList([DistributedDataParallel(Transformer()), Plain()]), [*OF_FIRST, "1"]),
        (lambda: [DistributedDataParallel(Transformer()), Transformer()], [*OF_FIRST, *OF_SECOND]),
    ],
)
def test_found(world_of_one, build, names):
    model = build()
    models = model if isinstance(model, list) else [model]
    found = find_blocks(*models)
    assert [name for name, _ in found] == names
    assert not any(isinstance(block, DistributedDataParallel | Wrapper) for _, block in found)
    if isinstance(model, DistributedDataParallel | FSDPModule | list):
        assert chosen_blocks(names, *models) == found


def test_the_wrapper_around_an_inner_model_is_what_is_called(world_of_one):
    inner = Transformer()
    assert called_around(inner) is inner
    wrapper = DistributedDataParallel(inner)
    assert called_around(inner) is called_around(wrapper) is wrapper
    assert strategy_of(called_around(inner)) == "ddp"
    assert called_around(inner.output) is inner.output  # a part that is recorded alone
    other = Transformer()
    wrapper = DistributedDataParallel(torch.compile(other, backend="eager"))
    assert called_around(other) is wrapper


def test_chosen_by_name_or_as_a_module():
    model, loss, other = Transformer(), nn.MSELoss(), nn.MSELoss()
    assert chosen_blocks(["layers.1", model.output, loss, other, loss], model) == [
        ("layers.1", model.layers["1"]),
        ("output", model.output),
        ("MSELoss", loss),
        ("MSELoss#2", other),
    ]
    with pytest.raises(ConfigError, match=r"blocks='layer\.1': Transformer has no such module; .*layers\.1"):
        chosen_blocks(["layer.1"], Transformer())
    with pytest.raises(ConfigError, match="no parameters"):
        find_blocks(nn.ReLU())
    with pytest.raises(ConfigError, match="blocks"):
        chosen_blocks([], nn.ReLU())


@pytest.mark.parametrize(
    ("build", "compiled", "names"),
    [
        (Transformer, ["layers.0.mlp"], TRANSFORMER),  # inside a block, whose own hooks stay outside
        (Transformer, ["norm"], ["Transformer"]),
        (Transformer, ["layers.0", "layers.1"], ["Transformer"]),  # a dictionary is not called
        (Transformer, [""], []),
        (nested, ["1.0"], ["0", "2", "1"]),
        (lambda: DistributedDataParallel(Plain()), ["module"], ["DistributedDataParallel"]),
    ],
)
def test_modules_compiled_in_place(world_of_one, build, compiled, names):
    model = build()
    for name in compiled:
        model.get_submodule(name).compile(backend="eager")
    found, why = outside_compiled(model, find_blocks(model))
    assert [name for name, _ in found] == names
    assert (why is None) == (names == TRANSFORMER)
    if why is not None:
        named = compiled[0] or "tok_embeddings"
        assert build is not Transformer or f"cannot hook modules compiled in place by .compile(): {named}" in why
        assert (f"timed instead: {names[-1]}" if names else "their compute is not timed") in why
