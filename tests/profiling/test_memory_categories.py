"""Memory by category of a model whose bytes are known, in numbers and on the page."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import aorta
from aorta.profiling.memory_history import NAMES, by_category
from aorta.profiling.memory_timeline import page
from tests.profiling.windows import listening

WIDTH, LAYERS, BATCH, FLOAT_BYTES = 256, 3, 128, 4
PARAMETER_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * FLOAT_BYTES
STATE_BYTES = 2 * PARAMETER_BYTES + 2 * LAYERS * FLOAT_BYTES
"""Of Adam: two moments of every parameter, and a count of steps for each of the tensors."""
FLAGS = {"record_shapes": True, "profile_memory": True, "with_stack": True}


@pytest.fixture
def step():
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())

    def run():
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        optimizer.step()

    run()  # from here on the optimizer has its state
    return run


def test_parameters_gradients_and_state_have_their_bytes(step):
    with torch.profiler.profile(**FLAGS) as profiler:
        for _ in range(2):
            step()
            profiler.step()
    found = by_category(profiler.profiler.kineto_results)["cpu"]
    most = {name: max(sizes) for name, sizes in found["bytes"].items()}
    assert list(most) == list(NAMES.values())
    assert all(len(sizes) == len(found["times_us"]) for sizes in found["bytes"].values())
    assert most["gradients"] == PARAMETER_BYTES
    assert most["optimizer state"] == STATE_BYTES
    assert PARAMETER_BYTES <= most["parameters"] < 1.5 * PARAMETER_BYTES
    # Each layer keeps its input, or its output, for the backward pass.
    assert LAYERS * BATCH * WIDTH * FLOAT_BYTES <= most["activations"] < 3 * LAYERS * BATCH * WIDTH * FLOAT_BYTES
    # Gradients are there from the backward pass to the next `zero_grad`, the state all the time.
    assert 0 < sum(size == 0 for size in found["bytes"]["gradients"]) < len(found["times_us"])
    assert min(found["bytes"]["optimizer state"][len(found["times_us"]) // 2 :]) == STATE_BYTES


def test_the_page_of_a_window_stacks_them(step, tmp_path):
    profiler = aorta.TorchProfiler(str(tmp_path), memory_filename="m.html", warmup=0, active=2, summary_rows=0, **FLAGS)
    with profiler:
        for _ in range(3):
            step()
            profiler.step()
    text = (tmp_path / "m.html").read_text()
    assert "<h2>cpu by category</h2>" in text
    rows = dict(re.findall(r'<td>([a-z\' ]+)</td><td class="n">[^<]+</td><td class="n">([^<]+)</td>', text))
    assert list(rows) == list(NAMES.values())
    assert rows["gradients"] == f"{PARAMETER_BYTES / 1024:.2f} KiB"
    assert rows["optimizer state"] == f"{STATE_BYTES / 1024**2:.2f} MiB"
    assert not re.search(r"http|//[a-z]|<script", text)


def test_areas_stand_on_each_other():
    sizes = {name: [0, 0] for name in NAMES.values()} | {"parameters": [100, 100], "gradients": [0, 100]}
    text = page({"traceEvents": []}, "two", {"cuda:0": {"times_us": [10, 20], "bytes": sizes}})
    parameters, gradients = (
        [tuple(map(float, point.split(","))) for point in points.split()]
        for points in re.findall(r'points="([^"]+)"><title>(?:parameters|gradients)', text)
    )
    height = parameters[2][1] - parameters[1][1]  # of 100 bytes
    assert height > 0
    assert gradients[1][1] == pytest.approx(parameters[1][1] - height, abs=0.02)
    assert gradients[0][1] == gradients[3][1] == parameters[0][1]


def test_a_torch_that_cannot_divide_it_still_gets_its_page(step, tmp_path, monkeypatch):
    monkeypatch.delattr(torch.profiler._memory_profiler, "MemoryProfileTimeline")
    profiler = aorta.TorchProfiler(str(tmp_path), memory_filename="m.html", warmup=0, active=1, summary_rows=0, **FLAGS)
    with listening() as said, profiler:
        step()
        profiler.step()
    assert "Largest allocations alive at the peak" in (tmp_path / "m.html").read_text()
    assert sum("memory is not divided into categories: AttributeError" in line for line in said) == 1
