"""What a step of `aorta record` is, its number, how the program ended, and what is said where nothing is recorded; and
how ranks that know nothing of each other's training agree on a step behind which all of them begin.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import aorta
from aorta.errors import InputError, PeerFailed
from aorta.read.locations import load_source
from aorta.recording import meeting, zero_lines
from aorta.recording.meeting import Meeting, announce
from aorta.recording.open_recording import Recording
from aorta.report.files import write_report
from tests.recording import untouched
from tests.recording.test_zero_lines import Loop, aorta_record, zero
from tests.runs import HANGS_S, ROOT, environment, finished, record

__all__ = ["zero"]  # a fixture


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(untouched.batch(9, 0))
    model.train()


class Wrapper(nn.Module):
    """In evaluation mode around a module that trains, as Lightning leaves DDP behind a validation."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.eval()
        module.train()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Around(Wrapper):
    """The same under a name that only its class knows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._modules["inside"] = self._modules.pop("module")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


def frozen_but_head(model: nn.Module) -> nn.Module:
    model.eval()
    model.head.train()  # type: ignore[union-attr, operator]
    return model


def unchanged(model: nn.Module) -> nn.Module:
    return model


ONCE = [1] * 10


@pytest.mark.parametrize(
    ("made", "evaluated", "flagged", "passes"),
    [
        (Wrapper, [], [], ONCE),
        (Around, [], [], ONCE),
        (frozen_but_head, [], [], ONCE),
        (unchanged, range(1, 11), [1, 2, 3, 4], [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]),
        (unchanged, [1, 2, 3, 4, 5, 6, 8, 9, 10], [1, 2, 3, 4], [1, 1, 1, 1, 2, 2, 1, 2, 2, 2]),
        (unchanged, [3, 6, 9], [3, 6, 9], ONCE),
        (Wrapper, [6], [6], ONCE),
    ],
)
def test_what_comes_in_nearly_every_step_is_part_of_it(
    zero: zero_lines._ZeroLines,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    made: Callable[[nn.Module], nn.Module],
    evaluated: Collection[int],
    flagged: list[int],
    passes: list[int],
) -> None:
    gc.collect()  # models of other tests
    monkeypatch.setattr(nn.Module, "train", nn.Module.train)
    zero_lines.patch(nn.modules.module)
    loop = Loop(zero)
    net = loop.model
    loop.model = made(net)  # type: ignore[assignment]
    loop.train(1)
    restarted: list[int] = []
    restart = Recording.restart
    monkeypatch.setattr(Recording, "restart", lambda self: restarted.append(self._next) or restart(self))  # type: ignore[func-returns-value]
    for step in range(1, 11):
        if step in evaluated:
            evaluate(net)
        loop.train(1)
    zero._end_with_program()
    steps = record(tmp_path / "run").steps
    assert [step.global_step for step in steps if "boundary" in step.reasons] == flagged
    assert restarted == flagged
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
def test_steps_are_numbered_as_the_optimizer_counts_them(
    zero: zero_lines._ZeroLines,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    kind: type[torch.optim.Optimizer],
    made: int,
    first: int,
    said: str,
) -> None:
    loop = Loop(zero)
    step = zero.around_step(torch.optim.Optimizer.profile_hook_step(kind.step), 0)
    step.hooked = True  # type: ignore[attr-defined]
    loop.optimizer = type(kind.__name__, (kind,), {"step": step})(loop.model.parameters(), 0.01)
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
def test_a_caught_exit_is_not_how_the_program_ended(script: str, code: int, noted: int | None) -> None:
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


HIDDEN = [
    ["bash", "-c", "exec python -I -c pass"],
    [sys.executable, "-c", "import os, sys; os.execve(sys.executable, ['python', '-c', ''], {'PYTHONPATH': '/tmp'})"],
    ["env", "-u", "PYTHONPATH", sys.executable, "-c", "pass"],
]


@pytest.mark.parametrize("words", HIDDEN)
def test_where_nothing_is_recorded_the_report_explains_it(tmp_path: Path, words: list[str]) -> None:
    done = aorta_record(tmp_path / "run", *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with pytest.raises(
        InputError, match=r"/run: nothing is recorded of `.*`, started at .* UTC on .*:\nno process of it"
    ):
        load_source(tmp_path / "run")


def test_why_nothing_is_recorded_is_kept_for_the_report(
    zero: zero_lines._ZeroLines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("injected")

    aorta_record(tmp_path / "run", "true")
    monkeypatch.setattr(zero_lines, "trained_models", fails)
    Loop(zero).train(2)
    with pytest.raises(InputError, match=r"nothing is recorded of `true`, .*:\naorta: RuntimeError: injected$"):
        load_source(tmp_path / "run")


def test_an_earlier_run_is_not_taken_for_what_was_not_recorded(zero: zero_lines._ZeroLines, tmp_path: Path) -> None:
    aorta_record(tmp_path / "run", "true")
    Loop(zero).train(8)
    zero._end_with_program()
    assert load_source(tmp_path / "run").health.files_left_out == []
    aorta_record(tmp_path / "run", "true")
    (said,) = load_source(tmp_path / "run").health.files_left_out
    assert said.startswith("the run that was started last, as this is an earlier one; ")


def test_every_line_says_whose_it_is(
    zero: zero_lines._ZeroLines, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_runs_whose_steps_may_not_mean_the_same_are_compared_with_a_word(
    zero: zero_lines._ZeroLines, tmp_path: Path
) -> None:
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


COMPILES = "the program ended while the interceptor was compiled, which goes on: record again in a minute"


class Opened:
    """What opens a run: it waits as `aorta.record` does, and is closed where nobody wants it any more."""

    def __init__(self, own: list[Meeting], behind: int) -> None:
        self.behind, self.error = behind, None
        own[0].until_held()

    def close(self, error: Exception) -> None:
        self.error = error


def joins(store: dist.Store, rank: int, ranks: int) -> Meeting:
    own: list[Meeting] = []
    ready = threading.Event()

    def open_run(behind: int) -> Opened:
        ready.wait(HANGS_S)
        return Opened(own, behind)

    own.append(Meeting(store, rank, ranks, lambda: None, open_run))
    ready.set()
    return own[0]


@pytest.mark.parametrize("ahead", [0, 1, 50])
def test_ranks_begin_behind_one_step_however_far_one_is_ahead(ahead: int) -> None:
    store, begun = dist.HashStore(), {}

    def trains(rank: int) -> None:
        own = joins(store, rank, 2)
        for step in range(1, 100_000):
            slow = rank == 0 or step <= ahead
            if own.stepped():
                begun[rank] = (step, own.result.behind, own.left_out)
                return
            threading.Event().wait(0.003 if slow else 0.001)

    threads = [threading.Thread(target=trains, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert begun[0] == begun[1]
    step, behind, left_out = begun[0]
    assert (step, left_out) == (behind, [])


def test_ranks_that_step_together_begin_behind_their_first_step() -> None:
    store, begun = dist.HashStore(), {}

    def trains(rank: int) -> None:
        own = joins(store, rank, 2)
        begun[rank] = own.stepped(HANGS_S) and own.result.behind

    threads = [threading.Thread(target=trains, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert begun == {0: 1, 1: 1}


def test_a_rank_that_cannot_is_named_and_one_that_comes_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_program_that_ends_is_not_waited_for_and_hears_who_was_missing() -> None:
    own = joins(dist.HashStore(), 0, 3)
    assert not own.stepped()
    assert own.give_up() == "no optimizer step was taken by ranks 1, 2"


def test_a_program_that_ends_while_its_rank_prepares_says_so() -> None:
    prepared, asked = threading.Event(), threading.Event()

    def prepare() -> None:
        asked.set()
        prepared.wait(HANGS_S)

    own = Meeting(dist.HashStore(), 0, 1, prepare, lambda _behind: None)
    assert asked.wait(HANGS_S)
    assert not own.stepped()
    assert own.give_up() == COMPILES
    prepared.set()
