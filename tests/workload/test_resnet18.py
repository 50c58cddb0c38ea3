"""ResNet-18 against its published sizes and against the same network written with functions only."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn import functional

from aorta.config.schema import Config, Dataset, DType, Optimizer, Resnet18, Training
from aorta.workload import task_of
from aorta.workload.resnet18 import FixedBatch, ResNet18

CPU = torch.device("cpu")
WIDTHS = {1: 64, 2: 128, 3: 256, 4: 512}


def config(dtype: DType = DType.fp32, size: int = 40, **training: int) -> Config:
    return Config(
        workload=Resnet18(image_size=size, dtype=dtype),
        training=Training(**{"batch_size": 2} | training),
        dataset=Dataset(num_samples=100),
        optimizer=Optimizer(lr=1e-3, weight_decay=0.0),
    )


@pytest.mark.spec("B10")
def test_parameters_and_buffers_are_the_published_ones() -> None:
    """Their names: `written_out` calls each by its own."""
    model = ResNet18()
    assert (sum(p.numel() for p in model.parameters()), len(list(model.parameters()))) == (11_689_512, 62)
    assert (len(list(model.buffers())), sum(b.numel() for b in model.buffers())) == (60, 9_620)
    kinds = [type(module).__name__ for module in model.modules()]
    assert (kinds.count("Conv2d"), kinds.count("BatchNorm2d"), kinds.count("Linear")) == (20, 20, 1)
    assert "torchvision" not in sys.modules
    assert model(torch.randn(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.spec("B10")
def test_it_starts_as_usual() -> None:
    torch.manual_seed(0)
    for name, parameter in ResNet18().named_parameters():
        if parameter.dim() == 4:  # normal, variance 2 / (output channels x kernel)
            wanted = (2 / (parameter.shape[0] * parameter.shape[2] * parameter.shape[3])) ** 0.5
            assert parameter.std().item() == pytest.approx(wanted, rel=0.05), name
        elif ".bn" in name or name.startswith("bn") or "downsample.1" in name:
            assert torch.all(parameter == (1 if name.endswith("weight") else 0)), name


def written_out(state: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.batch_norm(x, None, None, state[f"{name}.weight"], state[f"{name}.bias"], training=True)

    def conv(x: torch.Tensor, name: str, stride: int, padding: int) -> torch.Tensor:
        return functional.conv2d(x, state[f"{name}.weight"], stride=stride, padding=padding)

    x = functional.max_pool2d(norm(conv(images, "conv1", 2, 3), "bn1").clamp(min=0), 3, 2, 1)
    for stage in WIDTHS:
        for block in (0, 1):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and not block else 1
            inner = norm(conv(x, f"{at}.conv1", stride, 1), f"{at}.bn1").clamp(min=0)
            shortcut = x if stride == 1 else norm(conv(x, f"{at}.downsample.0", 2, 0), f"{at}.downsample.1")
            x = (norm(conv(inner, f"{at}.conv2", 1, 1), f"{at}.bn2") + shortcut).clamp(min=0)
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


@pytest.mark.spec("B10")
def test_it_computes_what_the_network_written_out_computes() -> None:
    torch.manual_seed(1)
    model, images = ResNet18().double(), torch.randn(3, 3, 70, 50, dtype=torch.float64)
    assert torch.allclose(model(images), written_out(model.state_dict(), images), atol=1e-10)


def test_its_blocks_hold_every_parameter_once_and_run_in_order() -> None:
    model = ResNet18()
    names = [name for name, _ in model.blocks()]
    assert names == ["stem", *(f"layer{stage}.{block}" for stage in WIDTHS for block in (0, 1)), "fc"]
    held = [id(p) for _, block in model.blocks() for p in block.parameters()]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    ran: list[str] = []
    for name, block in model.blocks():
        block.register_forward_hook(lambda *_, name=name: ran.append(name))
    model(torch.randn(2, 3, 40, 40))
    assert ran == names


@pytest.mark.spec("B9")
def test_one_batch_for_ever_a_rank_its_own() -> None:
    settings = config(DType.bf16, batch_size=3, gradient_accumulation=2)
    before = torch.get_rng_state()
    mine, other = (FixedBatch(settings, settings.workload, rank, 2, CPU) for rank in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert mine.steps_per_epoch == 100 // (3 * 2 * 2)
    epoch = list(mine.epoch(4, 6))
    assert len(epoch) == (8 - 6) * 2
    (images,), target = epoch[0].inputs, epoch[0].target
    assert (images.shape, target.shape) == ((3, 3, 40, 40), (3, 1000))
    assert images.dtype == target.dtype == torch.bfloat16
    for values in (images.float(), target.float()):
        assert values.mean().item() == pytest.approx(0, abs=0.05)
        assert values.std().item() == pytest.approx(1, abs=0.05)
    assert all(torch.equal(batch.images, images) for batch in epoch)
    endless = mine.for_ever()
    assert all(torch.equal(next(endless).target, target) for _ in range(20))
    assert not torch.equal(next(other.for_ever()).images, images)
    again = FixedBatch(settings, settings.workload, 0, 2, CPU)
    assert torch.equal(next(again.for_ever()).images, images)


@pytest.mark.spec("B9")
def test_the_model_is_in_the_type_asked_for_and_learns_by_the_squared_error_and_plain_gradient_descent() -> None:
    assert {p.dtype for p in task_of(config(DType.bf16)).model().parameters()} == {torch.bfloat16}
    loss = task_of(config()).loss()
    assert loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 5.0]])).item() == pytest.approx((1 + 9) / 2)
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = task_of(config()).optimizer([{"params": [weight]}])
    for _ in range(3):  # a momentum would show from the second on
        weight.grad = torch.tensor([10.0, 20.0])
        optimizer.step()
    assert weight.tolist() == pytest.approx([1 - 3 * 1e-3 * 10, -2 - 3 * 1e-3 * 20])
