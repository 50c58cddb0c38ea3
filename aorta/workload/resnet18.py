"""ResNet-18 on torch.nn alone (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1).

`images` [batch, 3, height, width] -> `scores` [batch, 1000]. Parameters and buffers have the usual names of this
network's state dicts (`conv1`, `bn1`, `layer1.0.conv1`, ..., `fc`): 11,689,512 parameters in 62 tensors. Must not know
how the model is distributed over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, relu

from aorta.config.schema import Config, DType, Resnet18
from aorta.workload.tasks import Model

CHANNELS, CLASSES = 3, 1000
_WIDTHS = (64, 128, 256, 512)
_BLOCKS_PER_STAGE = 2


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut: 1x1 where width or stride change, the identity elsewhere."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:  # noqa: N803
        shortcut = images_BCHW if self.downsample is None else self.downsample(images_BCHW)
        inner = relu(self.bn1(self.conv1(images_BCHW)))
        out: torch.Tensor = relu(self.bn2(self.conv2(inner)) + shortcut)
        return out


class Stem(nn.Module):
    """The first convolution and the layers before the first stage."""

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:  # noqa: N803
        out: torch.Tensor = self.pool(relu(self.norm(self.conv(images_BCHW))))
        return out


class Head(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:  # noqa: N803
        out: torch.Tensor = self.linear(adaptive_avg_pool2d(images_BCHW, 1).flatten(1))
        return out


class ResNet18(Model):
    """Stem, four stages of two basic blocks, head.

    Stem and head are modules of their own, so that they are timed as a whole, but not registered: their layers are at
    the root, as the names of the state dict require. So they cannot be sharded one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, _WIDTHS[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        inputs = _WIDTHS[0]
        for number, outputs in enumerate(_WIDTHS, start=1):
            stage = nn.Sequential()
            for index in range(_BLOCKS_PER_STAGE):
                stage.append(BasicBlock(inputs, outputs, stride=2 if index == 0 and number > 1 else 1))
                inputs = outputs
            self.add_module(f"layer{number}", stage)
        self.fc = nn.Linear(inputs, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # He et al., "Delving Deep into Rectifiers", ICCV 2015; the other layers keep torch's own.
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # In a tuple, where nn.Module does not look for children.
        self._ends = Stem(self.conv1, self.bn1), Head(self.fc)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:  # noqa: N803
        for _, block in self.blocks():
            images_BCHW = block(images_BCHW)  # noqa: N806
        return images_BCHW

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield `stem`, `layer1.0` to `layer4.1`, and `fc` with the average before it."""
        stem, head = self._ends
        yield "stem", stem
        for number in range(1, len(_WIDTHS) + 1):
            for index in range(_BLOCKS_PER_STAGE):
                yield f"layer{number}.{index}", self.get_submodule(f"layer{number}.{index}")
        yield "fc", head


DTYPES = {DType.fp32: torch.float32, DType.bf16: torch.bfloat16}


@dataclass(frozen=True)
class Images:
    """Images [B, 3, H, W] and targets [B, 1000], both standard normal."""

    images: torch.Tensor
    target: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (self.images,)


class FixedBatch:
    """The same micro-batch again and again; it differs between ranks and depends only on seed and rank."""

    def __init__(self, config: Config, shape: Resnet18, rank: int, world_size: int, device: torch.device) -> None:
        training = config.training
        generator = torch.Generator().manual_seed(config.dataset.seed + rank)
        images = torch.randn(training.batch_size, CHANNELS, shape.image_size, shape.image_size, generator=generator)
        target = torch.randn(training.batch_size, CLASSES, generator=generator)
        dtype = DTYPES[shape.dtype]
        self._batch = Images(images.to(device, dtype), target.to(device, dtype))
        self._micro_batches = training.gradient_accumulation
        self.steps_per_epoch = config.dataset.num_samples // (training.batch_size * self._micro_batches * world_size)

    def epoch(self, epoch: int, first_step: int) -> Iterator[Images]:  # noqa: ARG002  all are alike
        for _ in range((self.steps_per_epoch - first_step) * self._micro_batches):
            yield self._batch

    def for_ever(self) -> Iterator[Images]:
        while True:
            yield self._batch
