"""`aorta record`: scripts that know nothing of AORTA are recorded, and do what they did."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest
import torch

import aorta
from aorta.distributed.clock_measurement import ClockSynchronisation
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.recorder import Recorder
from aorta.recording import api, zero_lines
from aorta.recording.open_recording import Recording
from aorta.recording.rank_record import RankRecordWriter
from tests.recording import untouched
from tests.runs import ROOT, environment, finished, program, record, succeeded

SCRIPT = Path(__file__).with_name("untouched.py")
ON_FORKED = "tests.recording.untouched_on_forked_ranks"


def weights(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(line for line in done.stdout.splitlines() if line.startswith("weights"))


BESIDE = ("barrier", "save", "removes", "replaces")
"""Kinds whose training is the plain one, as it is in those with an evaluation."""


@cache
def plain(kind: str, *words: str) -> subprocess.CompletedProcess[str]:
    if kind in BESIDE or "evaluation" in kind:
        return plain("plain", *words)
    with TemporaryDirectory() as folder:
        return program(ON_FORKED, f"{folder}/plain", kind, *words)


def recorded(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run on two ranks; fails the test unless it ended and trained as without AORTA."""
    done = program(ON_FORKED, str(folder), *words)
    assert done.returncode == plain(*words).returncode == 0, done.stderr
    assert weights(done) == weights(plain(*words))
    return done


ONCE = [1] * 7


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "forwards", "optimizers"),
    [
        ("plain", ONCE, ONCE),
        ("accumulation", [3] * 7, ONCE),
        ("scaler", ONCE, [1, 0, 1, 1, 1, 1, 1]),
        ("evaluation", ONCE, ONCE),
        ("unseen evaluation compiled", ONCE, ONCE),
        ("unseen evaluation of an average", ONCE, ONCE),
        ("barrier", ONCE, ONCE),
        ("save", ONCE, ONCE),
        ("gan", [2] * 7, [2] * 7),
    ],
)
def test_steps_and_collectives(tmp_path, kind, forwards, optimizers):
    recorded(tmp_path, kind)
    # What comes rarely is between steps; a barrier that comes in every step is part of it once that is known.
    behind = [2, 4, 6] if "evaluation" in kind else [1, 2, 3, 4] if kind == "barrier" else []
    for rank in (0, 1):
        seen = record(tmp_path, rank)
        first, steps = seen.steps[0].compute[0].block, seen.steps
        assert (seen.footer.reason, seen.footer.exit_code) == ("completed", 0)
        assert [step.global_step for step in steps] == list(range(1, 1 + len(forwards)))
        kinds = [Counter(one.kind for one in step.collectives) for step in steps]
        # The critic of a GAN sees two batches a backward pass.
        assert [found["allreduce"] for found in kinds] == (forwards if kind != "gan" else [3] * 7)
        assert [found["barrier"] for found in kinds] == ([0, 0, 0, 0, 1, 1, 1] if kind == "barrier" else [0] * 7)
        assert all(step.coverage.complete for step in steps)
        passes = [sum(one.block == first and one.phase == "forward" for one in step.compute) for step in steps]
        assert (passes, [len(step.aux) for step in steps]) == (forwards, optimizers)
        assert {(step.lr, step.loss, "recording.note" in step.reasons["loss"]) for step in steps} == {
            (0.01, None, True)
        }
        reasons = {step.global_step: step.reasons.get("boundary", "") for step in steps}
        saved = [5] if kind == "save" and rank == 0 else []
        assert [number for number, why in reasons.items() if "torch.save" in why] == saved
        assert [number for number, why in reasons.items() if "begins at its forward pass" in why] == behind
        assert [number for number, why in reasons.items() if why] == saved + behind


@pytest.mark.dist
def test_what_an_engine_issues_behind_its_optimizer_is_part_of_the_step(tmp_path):
    recorded(tmp_path, "engine")
    parameters = len(list(untouched.Net().parameters()))
    for rank in (0, 1):
        seen = record(tmp_path, rank)
        kinds = [Counter(one.kind for one in step.collectives) for step in seen.steps]
        assert kinds == [Counter(allreduce=parameters, broadcast=parameters)] * 7
        evaluated = [step.global_step for step in seen.steps if "an evaluation" in step.reasons.get("boundary", "")]
        assert evaluated == [2, 4, 6]
        assert [step.coverage.outside for step in seen.steps] == [0, 1, 0, 1, 0, 1, 0]
        assert seen.header.parallel == "zero3"


def aorta_record(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    own = environment(PYTHONPATH=str(ROOT))
    return finished([sys.executable, "-m", "aorta", "record", str(folder), "--", *words], own=own)


def evaluated_once(model: torch.nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(untouched.batch(9, 0))
    model.train()


class Loop:
    """A training of one process whose optimizer is watched, as `patch` has every class of optimizers watched."""

    def __init__(self, zero: zero_lines._ZeroLines | None, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        torch.manual_seed(0)
        self.model = untouched.Net()
        step = kind.step
        step = step if hasattr(step, "hooked") else torch.optim.Optimizer.profile_hook_step(step)
        step = step if zero is None else zero.around_step(step, 0)
        step.hooked = True
        self.optimizer = type(kind.__name__, (kind,), {"step": step})(self.model.parameters(), 0.01)

    def train(self, steps: int, *, evaluate: bool = False) -> list[torch.Tensor]:
        for step in range(steps):
            if evaluate:
                evaluated_once(self.model)
            self.optimizer.zero_grad()
            self.model(untouched.batch(step, 0)).square().mean().backward()
            self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture
def zero(tmp_path, monkeypatch):
    monkeypatch.setenv(zero_lines.VARIABLE, str(tmp_path / "run"))
    monkeypatch.setattr(api, "standing_aside", [])
    monkeypatch.setattr(zero_lines, "_zero", made := zero_lines._ZeroLines())
    return made


BEGINNING = [
    (zero_lines, "trained_models"),
    *((api, name) for name in ("start", "called_around", "find_blocks", "meet", "prepare", "recorded_run")),
    *((Instrumentation, name) for name in ("watch", "watch_backward")),
    *((api, name) for name in ("noted_phases", "marked_optimizers", "Recording")),
    (torch.nn.Module, "register_forward_pre_hook"),
]
INSIDE = [
    (zero_lines._ZeroLines, "_stepped"),
    *((Recording, name) for name in ("note", "step", "restart")),
    *((Recorder, name) for name in ("end", "begin")),
    (RankRecordWriter, "step"),
]
ENDS = [(Recording, "_end"), (Recorder, "finish"), (RankRecordWriter, "complete"), (ClockSynchronisation, "at_end")]
CLOSING = [*ENDS, (api, "to_stderr")]


@pytest.mark.parametrize(
    ("owner", "name"), BEGINNING + INSIDE + CLOSING, ids=lambda value: getattr(value, "__name__", value)
)
def test_an_error_of_aortas_is_one_line_and_the_training_goes_on(zero, monkeypatch, capfd, tmp_path, owner, name):
    loop, without = Loop(zero), Loop(None)
    for one in (loop, without):
        one.train(0 if (owner, name) in BEGINNING else 1)
    monkeypatch.setattr(owner, name, Mock(side_effect=RuntimeError("injected")))
    loop.train(4)
    weights = loop.train(4, evaluate=True)
    zero._end_with_program()
    monkeypatch.undo()
    assert zero.is_over
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("aorta: nothing")]
    assert [line.rpartition(": ")[2] for line in said] == ["injected"]
    without.train(4)
    assert all(map(torch.equal, weights, without.train(4, evaluate=True)))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in loop.model.modules())
    with aorta.record(tmp_path / "again", model=loop.model):
        pass  # and nothing was left open


def test_an_unclear_boundary_is_said_in_the_step(zero, tmp_path):
    loop = Loop(zero)
    other, of_the_script = zero.around_step(lambda _optimizer: None, 0), object()
    loop.train(2)
    other(of_the_script)
    loop.train(1)
    loop.model(untouched.batch(0, 0)).sum().backward()
    with torch.no_grad():
        loop.model.eval()(untouched.batch(1, 0))
    loop.model.train()
    loop.optimizer.step()
    other(of_the_script)
    loop.train(1)
    loop.optimizer.step()  # without a forward pass: a further group of parameters
    loop.train(1)
    zero._end_with_program()
    steps = record(tmp_path / "run").steps
    reasons = [step.reasons.get("boundary", "").partition(" ")[0] for step in steps]
    assert reasons == ["", "", "an", "", "other"]
    assert [len(step.aux) for step in steps] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("steps", [0, 3])
def test_it_ends_where_a_recording_of_the_script_begins(zero, tmp_path, capfd, steps):
    loop = Loop(zero)
    loop.train(steps)
    with aorta.record(tmp_path / "own", model=loop.model) as recording:
        loop.train(2)
        recording.step()
    assert len(record(tmp_path / "own").steps) == 1
    said, error = capfd.readouterr().err, "the program records itself from here on"
    if not steps:
        assert "aorta: nothing is recorded: the program records itself" in said
        assert not (tmp_path / "run").exists()
        return
    assert f"aorta: {error}" in said
    footer = record(tmp_path / "run").footer
    assert (footer.steps_written, footer.error) == (2, f"rank 0: ConfigError: {error}")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(ValueError("in the middle"), 1, "ValueError: in the middle"), (None, 3, "SystemExit: 3"), (None, 0, None)],
)
def test_what_ends_the_script_is_in_the_footer(zero, tmp_path, monkeypatch, error, code, said):
    Loop(zero).train(3)
    if error is None:
        zero.exits(code)
    else:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    zero._end_with_program()
    footer = record(tmp_path / "run").footer
    assert (footer.error, footer.exit_code) == (said and f"rank 0: {said}", code)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["python3", "-I", "x.py"], 2, "error: python3 -I: hides PYTHONPATH from Python, and so AORTA"),
        (["python", "-uE", "-m", "x"], 2, "error: python -uE: hides PYTHONPATH"),
        ([], 2, "error: there is no command; it follows two dashes"),
        (["no-such-program"], 127, "error: no-such-program: cannot be started: No such file or directory"),
        (["python3", "-W", "ignore", "-sI", "x.py"], 2, "error: python3 -sI: hides PYTHONPATH"),
        (["python", "-u", "-c", "import sys; sys.exit(5)", "-I"], 5, ""),
        (["python", "-cI = 4; raise SystemExit(I)"], 4, ""),
        (["python", "-XIS", "-Wignore::EncodingWarning", "-c", "import sys; sys.exit(6)"], 6, ""),
        (["bash", "-c", "exec python -c 'import os; os.kill(os.getpid(), 15)'"], -15, ""),
    ],
)
def test_commands_that_train_nothing(tmp_path, words, code, said):
    done = aorta_record(tmp_path / "run", *words)
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == bool(said)
    left = [path.name for path in (tmp_path / "run").glob("*")]
    assert left == ([] if code == 2 else ["aorta_record.txt"])


ROUNDABOUT = """
import os, sys, multiprocessing, torch
from torch.utils.data import DataLoader
sys.path.insert(0, {folder!r})
import untouched
if __name__ == "__main__":
    if "again" not in sys.argv:  # a wrapper that becomes the program
        os.execv(sys.executable, [sys.executable, __file__, "again"])
    torch.manual_seed(0)
    model = untouched.Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for way in ("fork", "spawn"):
        data = DataLoader([torch.ones(16)] * 8, batch_size=4, num_workers=1, multiprocessing_context=way)
        for x in data:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            child = multiprocessing.get_context(way).Process(target=untouched.said, args=(model,))
            child.start()
            child.join()
"""


@pytest.mark.thorough
def test_children_and_wrappers(tmp_path):
    (script := tmp_path / "script.py").write_text(ROUNDABOUT.format(folder=str(SCRIPT.parent)))
    done = succeeded(aorta_record(tmp_path / "run", sys.executable, str(script)))
    assert len(weights(done)) == 4
    assert [path.name for path in (tmp_path / "run").glob("rank_*")] == ["rank_0_metrics.jsonl"]
    seen = record(tmp_path / "run")
    assert (seen.footer.steps_written, seen.footer.reason, seen.header.attempt) == (3, "completed", 0)
    assert seen.header.world_size == 1
    assert [{span.name for span in step.aux} for step in seen.steps] == [{"data", "optimizer"}] * 3
    assert not (tmp_path / "run" / "history").exists()
