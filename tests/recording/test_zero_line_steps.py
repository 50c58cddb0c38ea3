"""What a step of `aorta record` is, its number, how the program ended, and what is said where nothing is recorded; and
how ranks that know nothing of each other's training agree on a step behind which all of them begin.
"""

from __future__ import annotations

import gc
import inspect
import logging
import re
import sys
import threading
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import aorta
from aorta.errors import InputError, PeerFailed
from aorta.read.locations import load_source
from aorta.recording import meeting, zero_lines
from aorta.recording.injected import sitecustomize
from aorta.recording.meeting import Meeting, announce
from aorta.recording.open_recording import Recording
from aorta.report.summary import write_report
from tests.recording.test_zero_lines import Loop, aorta_record, evaluated_once, zero
from tests.runs import HANGS_S, ROOT, environment, finished, record

__all__ = ["zero"]  # a fixture


class Wrapper(nn.Module):
    """In evaluation mode around a module that trains, as Lightning leaves DDP behind a validation."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.eval()
        module.train()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


ONCE = [1] * 10


def frozen_but_head(model):
    model.eval()
    model.head.train()
    return model


@pytest.mark.parametrize(
    ("made", "evaluated", "flagged", "passes"),
    [
        (Wrapper, [], [], ONCE),
        (frozen_but_head, [], [], ONCE),
        (None, range(1, 11), [1, 2, 3, 4], [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]),
        (None, [1, 2, 3, 4, 5, 6, 8, 9, 10], [1, 2, 3, 4], [1, 1, 1, 1, 2, 2, 1, 2, 2, 2]),
        (None, [3, 6, 9], [3, 6, 9], ONCE),
        (Wrapper, [6], [6], ONCE),
    ],
)
def test_what_comes_in_nearly_every_step_is_part_of_it(zero, monkeypatch, tmp_path, made, evaluated, flagged, passes):
    gc.collect()  # models of other tests
    monkeypatch.setattr(nn.Module, "train", nn.Module.train)
    zero_lines.patch(nn.modules.module)
    loop = Loop(zero)
    net = loop.model
    if made is not None:
        loop.model = made(net)
    loop.train(1)
    restarted, restart = [], Recording.restart
    monkeypatch.setattr(Recording, "restart", lambda self: restarted.append(self._next) or restart(self))
    for step in range(1, 11):
        if step in evaluated:
            evaluated_once(net)
        loop.train(1)
    zero._end_with_program()
    steps = record(tmp_path / "run").steps
    assert [step.global_step for step in steps if "boundary" in step.reasons] == restarted == flagged
    heads = [[one for one in step.compute if one.block.endswith("head") and one.phase == "forward"] for step in steps]
    assert [len(head) for head in heads] == passes


@pytest.mark.parametrize(
    ("kind", "made", "first", "said"),
    [
        (torch.optim.AdamW, 0, 1, "from its second step on; blocks"),
        (torch.optim.AdamW, 500, 501, "from step 501 on; blocks"),
        (torch.optim.RMSprop, 41, 42, "from step 42 on; blocks"),
        (torch.optim.SGD, 500, 1, "from its second step on, as step 1 (SGD does not count them); blocks"),
    ],
)
def test_steps_are_numbered_as_the_optimizer_counts_them(zero, capfd, tmp_path, kind, made, first, said):
    loop = Loop(zero, kind)
    for parameter in loop.model.parameters() if made and kind is not torch.optim.SGD else ():
        shape = dict.fromkeys(("exp_avg", "exp_avg_sq", "square_avg"), torch.zeros_like(parameter))
        loop.optimizer.state[parameter] = {"step": torch.tensor(float(made)), **shape}
    loop.train(3)
    zero._end_with_program()
    seen = record(tmp_path / "run")
    assert [step.global_step for step in seen.steps] == [first, first + 1]
    assert seen.header.start_step == first
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("script", "code", "noted"),
    [
        ("leave()", 4, 4),
        ("try: leave()\nfinally: print()", 4, 4),
        ("try: leave()\nexcept SystemExit as error: raise", 4, 4),
        ("try: leave()\nexcept SystemExit: pass", 0, None),
        ("try: leave()\nexcept SystemExit as error: kept = error", 0, None),
        ("with contextlib.suppress(SystemExit): leave()", 0, None),
        ("other = threading.Thread(target=leave); other.start(); other.join()", 0, None),
        ("try: leave()\nexcept SystemExit: raise ValueError", 1, None),
    ],
)
def test_a_caught_exit_is_not_how_the_program_ended(script, code, noted):
    program = (
        "import atexit, contextlib, sys, threading\n"
        "from types import SimpleNamespace\n"
        "from aorta.recording import zero_lines\n"
        "module = SimpleNamespace(__name__='torch.optim.optimizer')\n"
        "module.Optimizer = SimpleNamespace(profile_hook_step=None)\n"
        "zero_lines.patch(module)\n"
        "def leave(): sys.exit(4)\n"
        "def said(): print('noted', zero_lines._zero._exit and zero_lines._zero._exit.code)\n"
        f"atexit.register(said)\n{script}\n"
    )
    done = finished([sys.executable, "-c", program], own=environment(PYTHONPATH=str(ROOT)))
    assert (done.returncode, done.stdout.split()[-1]) == (code, str(noted)), done.stderr


def test_every_module_that_is_watched_is_patched():
    assert set(re.findall('case "(.+)":', inspect.getsource(zero_lines.patch))) == sitecustomize._WATCHED


def test_the_report_explains_why_nothing_is_recorded(zero, monkeypatch, tmp_path):
    done = aorta_record(tmp_path / "run", "true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    said = "/run: nothing is recorded of `true`, started at .* UTC on .*:\n"
    with pytest.raises(InputError, match=f"{said}no process of it"):
        load_source(tmp_path / "run")
    monkeypatch.setattr(zero_lines, "trained_models", Mock(side_effect=RuntimeError("injected")))
    Loop(zero).train(2)
    with pytest.raises(InputError, match=f"{said}aorta: RuntimeError: injected$"):
        load_source(tmp_path / "run")


def test_an_earlier_run_is_not_taken_for_what_was_not_recorded(zero, tmp_path):
    aorta_record(tmp_path / "run", "true")
    Loop(zero).train(8)
    zero._end_with_program()
    assert load_source(tmp_path / "run").health.files_left_out == []
    aorta_record(tmp_path / "run", "true")
    (said,) = load_source(tmp_path / "run").health.files_left_out
    assert said.startswith("the run that was started last, as this is an earlier one; ")


def test_every_line_says_whose_it_is(zero, capfd, tmp_path, monkeypatch):
    gc.collect()  # models of other tests
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")  # of an earlier run
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # of pytest
    loop = Loop(zero)
    loop.model.layers[0].compile(backend="eager")  # which cannot be hooked
    loop.train(1)
    logging.getLogger("aorta.recording").warning("something of the machine")
    loop.train(2)
    zero._end_with_program()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 6
    assert all(line.startswith("aorta: ") and "aorta.record" not in line for line in lines), lines


def test_runs_whose_steps_may_not_mean_the_same_are_compared_with_a_word(zero, tmp_path):
    Loop(zero).train(9)
    zero._end_with_program()
    loop = Loop(None)
    with aorta.record(tmp_path / "lines", model=loop.model) as recording:
        for _ in range(9):
            loop.train(1)
            recording.step()
    sources = {"lines": tmp_path / "lines", "run": tmp_path / "run"}
    comparison = write_report(sources, tmp_path / "o", "lines", "run", html=False).summary["comparison"]
    said = "steps may not mean the same: recording.step() ends them in the reference, the optimizer in the candidate"
    assert said in comparison["warnings"]


def opened(behind: int) -> Mock:
    """A run, opened as by `aorta.record`: once the training waits for it."""
    meeting.joined.get().until_held()
    return Mock(behind=behind)


def joins(store: dist.Store, rank: int, ranks: int) -> Meeting:
    return Meeting(store, rank, ranks, lambda: None, opened)


@pytest.mark.parametrize("ahead", [None, 0, 1, 50])
def test_ranks_begin_behind_one_step_however_far_one_is_ahead(ahead):
    """None: ranks that step together begin behind their first step."""
    store, begun = dist.HashStore(), {}

    def trains(rank):
        own = joins(store, rank, 2)
        for step in range(1, 100_000):
            if own.stepped(HANGS_S) if ahead is None else own.stepped():
                begun[rank] = (step, own.result.behind, own.left_out)
                return
            threading.Event().wait(0.003 if rank == 0 or step <= ahead else 0.001)

    threads = [threading.Thread(target=trains, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert begun[0] == begun[1]
    step, behind, left_out = begun[0]
    assert (step, left_out) == (behind, [])
    assert ahead is not None or step == 1


def test_a_rank_that_cannot_is_named_and_one_that_comes_late_is_left_out(monkeypatch):
    store = dist.HashStore()
    announce(store, 1, "ValueError: no model")
    with pytest.raises(PeerFailed, match="rank 1: ValueError: no model"):
        joins(store, 0, 2).stepped(HANGS_S)

    monkeypatch.setattr(meeting, "OTHERS_S", 0.0)
    store = dist.HashStore()
    alone = joins(store, 0, 2)
    assert alone.stepped(HANGS_S)
    assert (alone.result.behind, alone.left_out) == (1, [1])
    with pytest.raises(PeerFailed, match="rank 1 took its first optimizer step when the others had begun"):
        joins(store, 1, 2).stepped(HANGS_S)


def test_a_program_that_ends_is_not_waited_for_and_hears_who_was_missing():
    own = joins(dist.HashStore(), 0, 3)
    assert not own.stepped()
    assert own.give_up() == "no optimizer step was taken by ranks 1, 2"
    prepared, asked = threading.Event(), threading.Event()
    own = Meeting(dist.HashStore(), 0, 1, lambda: asked.set() or prepared.wait(HANGS_S), lambda _behind: None)
    assert asked.wait(HANGS_S)
    assert not own.stepped()
    said = "the program ended while the interceptor was compiled, which goes on: record again in a minute"
    assert own.give_up() == said
    prepared.set()
