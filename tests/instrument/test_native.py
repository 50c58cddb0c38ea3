"""The compiled part: whose clock it stamps with, that it does not wait for the interpreter, and life without it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.errors import ToolMissing
from aorta.instrument.issued import Issued
from aorta.instrument.native import build as native
from aorta.instrument.native.__main__ import main

HELD_S = 0.3
ATTEMPTS = 100
"""About every second all-reduce of one rank is over at once."""


@pytest.fixture(scope="module")
def module() -> Any:
    found, why_not = native.load()
    if found is None:
        pytest.skip(f"the compiled part is {why_not}")
    return found


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A gloo world of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[no-untyped-call]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is built there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.load.cache_clear()
    yield tmp_path
    native.load.cache_clear()


def work_of(future: torch.futures.Future[Any]) -> Any:
    return torch._C._distributed_c10d._create_work_from_future(future)


def test_it_stamps_the_moment_of_completion_on_the_clock_of_every_other_mark(module: Any) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    completion = module.on_completion(work_of(future))
    assert (completion.end_ns, completion.done()) == (0, False)
    before = time.perf_counter_ns()
    future.set_result(1)
    after = time.perf_counter_ns()
    assert before <= completion.end_ns <= after
    assert completion.done()


def test_what_failed_has_ended_too(module: Any) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    completion = module.on_completion(work_of(future))
    future.set_exception(ValueError("broken"))
    assert completion.done()
    assert completion.end_ns > 0


def test_what_has_ended_before_it_is_asked_for(module: Any) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(1)
    assert module.on_completion(work_of(future)).end_ns > 0


def test_a_handle_may_go_before_it_has_ended(module: Any) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    module.on_completion(work_of(future))
    future.set_result(1)  # the callback is still there, and writes into what it alone holds


def test_the_end_is_seen_while_the_interpreter_is_busy(module: Any, alone: None) -> None:
    """A callback in Python comes when the lock is free again: the same collective, stamped in both ways."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10 * HELD_S)
    try:
        for _ in range(ATTEMPTS):
            work = dist.all_reduce(torch.ones(4), async_op=True)
            assert work is not None
            completion = module.on_completion(work)
            called_back: list[int] = []
            work.get_future().add_done_callback(lambda _, seen=called_back: seen.append(time.perf_counter_ns()))
            if not called_back:
                break
            work.wait()
        else:
            pytest.skip(f"{ATTEMPTS} all-reduces of one rank were over before they could be asked")
        deadline = time.perf_counter() + HELD_S
        while time.perf_counter() < deadline:
            pass
        freed_ns = time.perf_counter_ns()
        time.sleep(0.01)
        work.wait()
        assert 0 < completion.end_ns < freed_ns <= called_back[0]
    finally:
        sys.setswitchinterval(interval)


def test_another_thread_may_note_the_end_between_two_looks() -> None:
    class Ended:
        end_ns = 7

    class Raced(Issued):
        """Its completion is there once: the thread that stamps has taken it away by the second time."""

        left = [Ended()]

        @property  # type: ignore[override]
        def completion(self) -> Any:
            return self.left.pop() if self.left else None

        @completion.setter
        def completion(self, _: Any) -> None:
            pass

    issued = Raced("allreduce", "world", 0, 4, "float32", 5)
    assert issued.look()
    assert issued.end == 7


def test_the_first_to_notice_counts(module: Any) -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    issued = Issued("allreduce", "world", 0, 4, "float32", time.perf_counter_ns())
    issued.completion = module.on_completion(work_of(future))
    assert not issued.look()
    future.set_result(1)
    issued.stamp("wait")  # the caller came later
    assert issued.end_source == "future"
    assert issued.look()


def test_without_it_the_reason_is_said_and_nothing_fails(somewhere_else: Path) -> None:
    assert native.completions(wanted=True) == (None, f"python: not built; {native.BUILD_COMMAND} does it")
    assert native.host_ends(torch.device("cpu"), wanted=True)["host_ends"].endswith("does it")
    assert native.host_ends(torch.device("cuda"), wanted=True) == {}


def test_not_wanted() -> None:
    assert native.completions(wanted=False) == (None, "python: instrument.native=false")


def test_a_library_of_another_build_is_left_alone(somewhere_else: Path) -> None:
    path = native.library()
    path.parent.mkdir()
    path.write_bytes(b"no library")
    module, why_not = native.load()
    assert module is None
    assert str(path) in str(why_not)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), RuntimeError("no home directory")])
def test_a_home_that_cannot_be_looked_into_is_a_reason(
    somewhere_else: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    if isinstance(error, OSError):
        monkeypatch.setattr(Path, "stat", fail)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", fail)
    assert native.completions(wanted=True) == (None, f"python: cannot be looked for: {error}")
    assert main() == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_build_that_fails_says_so(
    somewhere_else: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (somewhere_else / "aorta").write_text("a file where the folder should be")
    assert main() in (1, 127)  # 127: no compiler on this machine
    assert capsys.readouterr().err.startswith("error: ")
    assert native.completions(wanted=True)[1].startswith("python: cannot be looked for: [Errno 20]")


def test_no_compiler(somewhere_else: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(ToolMissing, match="ninja not found"):
        native.build()
    assert main() == 127
    assert "Install g++ and ninja" in capsys.readouterr().err
    assert list(somewhere_else.rglob("*.so")) == []
