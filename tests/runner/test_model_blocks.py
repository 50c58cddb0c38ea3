"""Which blocks are found in models as people write them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aorta.errors import ConfigError
from aorta.runner.api_arguments import chosen_blocks, find_blocks, refuse_compiled_in_place


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Plain(nn.Module):
    """Repeats nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.Identity()
        self.act = nn.ReLU()
        self.head = nn.Linear(4, 10)


class Wrapper(nn.Module):
    """Keeps a module as FSDP1 does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(), Layer()), nn.Linear(4, 2)
    )


def wrapped() -> nn.Module:
    model = Transformer()
    model.layers = nn.ModuleList(Wrapper(layer) for layer in model.layers)
    return Wrapper(model)


def compiled_layers() -> nn.Module:
    model = Transformer()
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="eager")  # type: ignore[assignment]
    return model


TRANSFORMER = ["embedding", "layers.0", "layers.1", "act", "head"]


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (Transformer, TRANSFORMER),
        (residual, ["0", "1.0", "1.1", "2.0", "2.1", "3"]),
        (Plain, ["Plain"]),
        (lambda: nn.Linear(4, 4), ["Linear"]),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "1", "2"]),
        (lambda: nn.ModuleList([nn.Linear(4, 4), Plain()]), ["0", "1"]),
        (wrapped, TRANSFORMER),
        (compiled_layers, TRANSFORMER),
        (lambda: torch.compile(Transformer(), backend="eager"), ["OptimizedModule"]),
    ],
)
def test_found(build, names):
    assert [name for name, _ in find_blocks(build())] == names


def test_blocks_of_a_wrapped_model_are_the_modules_inside():
    assert {type(block) for name, block in find_blocks(wrapped()) if name.startswith("layers")} == {Layer}


def test_a_shared_module_is_one_block():
    shared = nn.Linear(4, 4)
    assert [name for name, _ in find_blocks(nn.Sequential(shared, Layer(), shared, nn.Linear(4, 4)))] == ["0", "1", "3"]


def test_chosen_by_name_or_as_a_module():
    model, loss, other = Transformer(), nn.MSELoss(), nn.MSELoss()
    assert chosen_blocks(model, ["layers.1", model.head, loss, other, loss]) == [
        ("layers.1", model.layers[1]),
        ("head", model.head),
        ("MSELoss", loss),
        ("MSELoss#2", other),
    ]


def test_a_name_that_is_not_there():
    with pytest.raises(ConfigError, match=r"blocks='layer\.1': Transformer has no such module; .*layers\.1"):
        chosen_blocks(Transformer(), ["layer.1"])


@pytest.mark.parametrize(
    ("call", "words"), [(find_blocks, "no parameters"), (lambda m: chosen_blocks(m, []), "blocks")]
)
def test_nothing_to_bracket(call, words):
    with pytest.raises(ConfigError, match=words):
        call(nn.ReLU())


@pytest.mark.parametrize("which", ["", "layers.0", "layers.0.mlp.1"])
def test_modules_compiled_in_place(which):
    model = Transformer()
    model.get_submodule(which).compile(backend="eager")
    blocks = find_blocks(model)
    if which == "layers.0.mlp.1":  # inside a block, whose own hooks stay outside
        refuse_compiled_in_place(model, blocks)
    else:
        with pytest.raises(ConfigError, match=r"compiled in place.*torch\.compile"):
            refuse_compiled_in_place(model, blocks)
