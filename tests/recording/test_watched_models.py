"""Models under `aorta.record`: saved, copied, compiled, several, one that is not recorded, and one in a child."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import time
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import aorta
from aorta.instrument import instrumentation
from aorta.read.record import load_run
from aorta.records.progress import read_progress
from aorta.records.ring_file import RingFile
from tests.recording.test_api import X, train
from tests.runs import HANGS_S, ROOT, environment, finished, record


class Net(nn.Module):
    """A model of two blocks, at module level so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(params=["native", "python"])
def timed_by(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(instrumentation, "compiled", lambda *_, **__: (None, "not wanted"))
    elif instrumentation.compiled(torch.device("cpu"), wanted=True, emulated=False)[0] is None:
        pytest.skip("the compiled part is not built")
    return str(request.param)


def passes_of(folder: Path) -> list[int]:
    return [len(step.compute) for step in record(folder).steps]


def test_a_watched_model_is_saved_and_copied_without_aorta(tmp_path, timed_by):
    model = Net()
    with aorta.record(tmp_path, model=model) as recording:
        average = torch.optim.swa_utils.AveragedModel(model)
        copied = copy.deepcopy(model)
        for other in (average, copied):
            other(X).sum().backward()
        train(model, recording, 1)
        saved = io.BytesIO()
        torch.save(model, saved)
        text = pickle.dumps(model)
        copied(X).sum().backward()
        average.update_parameters(model)
        train(model, recording, 1)
    assert b"aorta" not in text + saved.getvalue()
    again = pickle.loads(text)
    torch.testing.assert_close(torch.load(io.BytesIO(saved.getvalue()), weights_only=False)(X), again(X))
    assert passes_of(tmp_path) == [4, 4]
    for other in (average, copied):
        other(X).sum().backward()
        torch.save(other, io.BytesIO())


@pytest.mark.parametrize("how", ["around it", "in place", "a part in place"])
def test_what_is_compiled_is_watched_from_outside(tmp_path, timed_by, how, capsys):
    def trained(folder: Path | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        graphs = CompileCounter()
        model = nn.Sequential(Net(), Net()) if how == "a part in place" else Net()
        called = torch.compile(model, backend=graphs) if how == "around it" else model
        if how != "around it":
            (model if how == "in place" else model[0]).compile(backend=graphs)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with nullcontext() if folder is None else aorta.record(folder, model=model) as recording:
            for _ in range(3):
                optimizer.zero_grad()
                called(X).square().mean().backward()
                optimizer.step()
                if recording is not None:
                    recording.step()
        return list(model.parameters()), graphs.frame_count

    plain, watched = trained(None), trained(tmp_path)
    assert watched[1] == plain[1] > 0
    assert all(torch.equal(one, other) for one, other in zip(plain[0], watched[0], strict=True))
    said = [line for line in capsys.readouterr().err.splitlines() if "compiled in place" in line]
    reason = load_run(tmp_path).manifest["reasons"].get("plan.blocks")
    assert [line.removeprefix("aorta: ") for line in said] == ([] if how == "around it" else [reason])
    blocks = {"around it": {"OptimizedModule"}, "in place": set(), "a part in place": {"Sequential"}}[how]
    for step in record(tmp_path).steps:
        assert {each.block for each in step.compute} == blocks
        assert (step.overlap["compute_ms"] is None) == (not blocks)
        assert ("compiled in place" in step.reasons.get("compute_ms", "")) == (not blocks)


@pytest.mark.parametrize("watched", ["one", "both", "checkpoints"])
def test_collectives_of_a_model_that_is_not_recorded_are_said(tmp_path, timed_by, watched, world_of_one):
    first, second = (nn.Sequential(Net(), Net()) for _ in range(2))
    if watched == "checkpoints":  # whose backward passes run within that of the model
        first = nn.Sequential(*(checkpoint_wrapper(each, CheckpointImpl.REENTRANT) for each in first))
    models = [DistributedDataParallel(each, bucket_cap_mb=1e-5) for each in (first, second)]
    recorded = models if watched == "both" else models[:1]
    with aorta.record(tmp_path, model=recorded, warmup_steps=1) as recording:
        for _ in range(3):
            for each in models[: 1 if watched == "checkpoints" else 2]:
                each(X.clone().requires_grad_()).square().mean().backward()
            recording.step()
    found = [step.coverage for step in record(tmp_path).steps]
    assert found[-1].unwatched == (found[-1].seen // 2 if watched == "one" else 0)
    assert found[-1].seen >= 4
    run = load_run(tmp_path)
    said = [gap.lanes for gap in run.health.gaps if "belong to a model that is not recorded" in gap.why]
    assert said == ([["compute"]] if watched == "one" else [])
    assert np.isnan(run.steps.column("compute_ms")[-1]) == (watched == "one")


def _in_a_child(model: nn.Module, recording: aorta.Recording) -> None:
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with recording.range("tokenize"):
        recording.step()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(4))
    assert "_compiled_call_impl" not in vars(model.layers[0])


def _ends_the_block(folder: Path, code: int) -> None:
    with aorta.record(folder, model=(model := Net())) as recording:
        train(model, recording, 2)
        if (child := os.fork()) == 0:
            sys.exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
        assert RingFile.open(folder / "progress" / "rank_0.bin").owner != child
        train(model, recording, 1)


@pytest.mark.parametrize("code", [0, 3])
def test_a_forked_child_that_leaves_the_block_does_not_end_the_recording(tmp_path, code):
    words = f"from pathlib import Path; from {__name__} import _ends_the_block as f; f(Path({str(tmp_path)!r}), {code})"
    done = finished([sys.executable, "-c", words], own=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr
    assert (done.stderr.count(" recorded"), done.stderr.count("Traceback")) == (1, 0)
    assert len(record(tmp_path).steps) == 3
    assert record(tmp_path).footer.reason == "completed"


def test_a_forked_child_has_no_part_in_the_recording(tmp_path, timed_by):
    model = Net()
    with aorta.record(tmp_path, model=model) as recording:
        recorder, progress = recording._recorder, tmp_path / "progress" / "rank_0.bin"
        train(model, recording, 2)
        before = read_progress(progress)
        # As other threads of the parent may hold them, which the child does not have.
        with getattr(recorder, "_lock", nullcontext()), recorder.user_marks._lock:
            child = get_context("fork").Process(target=_in_a_child, args=(model, recording))
            child.start()
        child.join(HANGS_S)
        assert child.exitcode == 0
        assert read_progress(progress) == before
        assert "_compiled_call_impl" in vars(model.layers[0])
        train(model, recording, 1)
        worker = get_context("fork").Process(target=time.sleep, args=(HANGS_S,))
        worker.start()
    with aorta.record(tmp_path, model=model) as recording:  # while it lives
        train(model, recording, 1)
    worker.kill()
    worker.join()
    assert passes_of(tmp_path) == [4]
    assert passes_of(next((tmp_path / "history").iterdir())) == [4, 4, 4]
