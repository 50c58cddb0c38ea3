"""The compiled tap: whose clock it marks on, what it counts, and that it does not wait for the interpreter; where its
library lies, why it is not used, and life without it.

What it sees is what the interceptor in Python sees: `test_dispatcher` and `every_collective` run with both.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from aorta.errors import ToolMissing
from aorta.instrument.dispatcher import all_groups, counts_of_groups, issued_by
from aorta.instrument.instrumentation import Instrumentation
from aorta.instrument.native import build as native
from aorta.instrument.native.__main__ import main
from aorta.instrument.native.native_interceptor import NativeInterceptor
from aorta.records.clocks import read_clocks
from aorta.records.progress import read_progress
from aorta.records.ring_file import RingFile
from aorta.records.schema import InstrumentMode
from tests.instrument.taps import CPU, Answer, Tap, answering, compiled_part
from tests.known_answers.again import attempted
from tests.records.test_progress import facts
from tests.runs import until

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # renamed in torch 2.13
HELD_S = 0.3
ATTEMPTS = 100
"""A collective of one rank may be over at once."""


@pytest.fixture
def tap(world_of_one: None) -> Iterator[Tap]:
    tap = Tap(compiled=True)
    yield tap
    tap.close()


def under_way() -> Any:
    """A collective that was not over when it was looked at."""
    large, gathered = torch.ones(1 << 22), torch.empty(1 << 22)
    for _ in range(ATTEMPTS):
        work = dist.all_gather([gathered], large, async_op=True)
        if not work.is_completed():
            return work
        work.wait()
    pytest.skip(f"{ATTEMPTS} collectives of one rank were over before they could be asked")


def test_the_end_is_seen_while_the_interpreter_is_busy(tap: Tap) -> None:
    """A callback in Python comes when the lock is free again: the same collective, noticed in both ways.

    While the lock is held the collective ends only where its thread gets a core.
    """
    attempted("an end while the interpreter is held", lambda: see_the_end_of_one(tap))


def see_the_end_of_one(tap: Tap) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10 * HELD_S)
    try:
        for _ in range(ATTEMPTS):
            work = under_way()
            called_back: list[int] = []
            work.get_future().add_done_callback(lambda _, seen=called_back: seen.append(time.perf_counter_ns()))
            if not called_back:
                break
            work.wait()
        else:
            pytest.skip(f"{ATTEMPTS} collectives of one rank were over before they could be asked")
        deadline = time.perf_counter() + HELD_S
        while time.perf_counter() < deadline:
            pass
        freed_ns = time.perf_counter_ns()
        until(lambda: bool(called_back))
        work.wait()
        tap.hand_over()
        row = tap.rows[-1]
        assert row.look()
        assert row.end_source == "future"
        assert row.end < freed_ns <= called_back[0]
    finally:
        sys.setswitchinterval(interval)


def test_its_own_time_is_that_of_hooks_and_what_surrounds_the_backend_s_call_and_wait(world_of_one: None) -> None:
    module, now_ns = compiled_part(), 0

    def reading() -> int:
        nonlocal now_ns
        now_ns += 1
        return now_ns

    def backends() -> None:
        nonlocal now_ns
        now_ns += 1_000_000

    class Slow(Answer):
        def wait(self, timeout: Any = None) -> bool:
            backends()
            return super().wait(timeout)

    block = nn.Linear(2, 2)
    tap = Tap(compiled=True, looks=False)
    interceptor, tap.clock_ns = tap.interceptor, reading
    interceptor.ranges.watch("block", block)
    pointer = ctypes.CFUNCTYPE(ctypes.c_int64)(reading)
    works: list[Any] = []
    parts: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "a call": lambda: works.append(dist.all_reduce(torch.ones(2), async_op=True)),
        "a wait": lambda: works.pop().wait(),
        "hooks": lambda: block(torch.ones(2, requires_grad=True)).sum().backward(),
    }
    own_ns = {}
    try:
        with answering(Slow(), backends), closing(interceptor.open(CPU, lambda: None)):
            module.use_clock(ctypes.cast(pointer, ctypes.c_void_p).value)
            for part, happens in parts.items():
                now_ns = 0  # since when `begin` is told that AORTA has worked
                tap.begin()
                happens()
                tap.end()
                own_ns[part] = tap.own_ns()
    finally:
        module.use_clock(0)
        interceptor.ranges.close()
    nothing = own_ns.pop("nothing")
    assert all(nothing < counted < 1_000 for counted in own_ns.values()), (nothing, own_ns)


def test_nothing_is_boxed_for_the_collectives_of_ddp_and_fsdp(tap: Tap) -> None:
    def served(operator: str) -> bool:
        kernels = torch._C._dispatch_dump(f"c10d::{operator}").splitlines()
        (ours,) = (kernel for kernel in kernels if kernel.startswith("BackendSelect"))
        return "interceptor.cpp" in ours and ours.endswith("[ boxed unboxed ]")

    assert [served(name) for name in ("allreduce_", "_allgather_base_", "_reduce_scatter_base_")] == [True] * 3
    assert not served("broadcast_")


def test_a_collective_that_is_over_keeps_no_tensor_while_the_step_goes_on(tap: Tap) -> None:
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    kept = weakref.ref(tensor)
    del tensor, work
    until(lambda: kept() is None)  # its callback is on its way


@pytest.mark.usefixtures("world_of_one")
def test_a_backend_s_count_is_the_one_that_python_is_told() -> None:
    counts = compiled_part().counts_function(dist.distributed_c10d)
    for issued in range(3):
        assert len(all_groups()) == issued + 1
        assert counts() == counts_of_groups(issued_by)
        assert counts()[id(all_groups()[0])] == issued
        dist.all_reduce(torch.ones(2), group=all_groups()[0])
        dist.new_group()


@pytest.mark.usefixtures("world_of_one")
def test_a_group_that_is_destroyed_ends_its_threads_at_once() -> None:
    """Who counts its collectives keeps nothing of it, or the threads would end in AORTA's own time."""
    counts, threads = compiled_part().counts_function(dist.distributed_c10d), Path("/proc/self/task")
    before = set(threads.iterdir())
    dist.new_group()
    counts()
    assert set(threads.iterdir()) > before
    dist.destroy_process_group(all_groups()[1])
    until(lambda: set(threads.iterdir()) <= before)  # the kernel lists a thread a little longer than it runs


def test_a_world_that_is_made_again_is_seen_again() -> None:
    """torch gives the second one the name of the first."""
    tap, seen = Tap(compiled=True), []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(2))
        seen.append(dict(tap.groups))
        tap.groups.clear()
        dist.destroy_process_group()
    tap.hand_over()
    tap.close()
    tap.interceptor.close()
    assert seen[0] == seen[1] != {}
    assert [row.seq for row in tap.rows] == [0, 1]


@pytest.mark.parametrize("compiled", [False, True], ids=["python", "native"])
def test_phases_are_noted_alike_by_both(tmp_path: Path, compiled: bool) -> None:
    ring, seen = RingFile.create(path := tmp_path / "rank_0.bin", facts()), []
    progress = ring.progress

    def look(said: str, expected: str) -> None:
        assert said == expected
        seen.append((state := read_progress(path).state).phase)
        assert (state.step, state.steps_done) == ((1 << 38, 1) if len(seen) > 4 else (3, len(seen) // 4))

    progress.begin_step(3)
    progress.enter("forward")
    for _ in range(2 * compiled):
        NativeInterceptor(compiled_part(), {}, ring)
    look(progress.enter("optimizer"), "forward")  # what was noted before goes on
    look(progress.enter("mine"), "mine")
    look(progress.enter("".join(["back", "ward"])), "optimizer")  # equal, and another object
    progress.end_step()
    look("", "")
    progress.begin_step(1 << 38)
    look("", "")
    with pytest.raises(OSError, match="full"), progress.phase("checkpoint"):
        raise OSError("full")
    look("", "")
    assert seen == ["optimizer", "optimizer", "backward", "none", "step", "checkpoint"]


# --- its library


@pytest.fixture
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing is built there; it is the current folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    native.load.cache_clear()
    yield tmp_path
    native.load.cache_clear()


def why_not(device: torch.device = CPU, *, wanted: bool = True, emulated: bool = False) -> str:
    """Why it is not used on a device."""
    module, why = native.compiled(device, wanted=wanted, emulated=emulated)
    assert module is None
    return str(why)


def test_without_it_the_reason_is_said_and_nothing_fails(somewhere_else: Path) -> None:
    not_built = f"python: not built; {native.BUILD_COMMAND} does it"
    assert why_not() == not_built
    assert native.interceptor_for(CPU, "observe", wanted=True, emulated=False) == {"interceptor": not_built}
    Instrumentation(CPU, "observe", 0, 1, read_clocks(), lambda step: None, native=True).close()
    path = native.library()
    path.parent.mkdir()
    path.write_bytes(b"no library")  # of another build, which is left alone
    native.load.cache_clear()
    assert str(path) in why_not()


def test_where_it_is_not_used() -> None:
    assert why_not(wanted=False) == "python: instrument.native=false"
    assert why_not(emulated=True) == "python: the fabric is emulated"
    assert native.interceptor_for(CPU, "off", wanted=True, emulated=False) == {}
    if native.load()[0] is None:
        pytest.skip(f"the compiled interceptor: {native.load()[1]}")
    # A device whose streams cannot be asked whether they are captured is not looked at.
    assert re.fullmatch(rf"none: torch {re.escape(torch.__version__)} on xpu: \S.+", why_not(torch.device("xpu")))


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), RuntimeError("no home directory")])
def test_a_home_that_cannot_be_looked_into_is_a_reason(somewhere_else, monkeypatch, capsys, error):
    fail = Mock(side_effect=error)
    if isinstance(error, OSError):
        monkeypatch.setattr(Path, "stat", fail)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", fail)
    assert why_not() == f"python: cannot be looked for: {error}"
    assert main() == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_build_that_fails_says_so(somewhere_else: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (somewhere_else / "aorta").write_text("a file where the folder should be")
    assert main() in (1, 127)  # 127: no compiler on this machine
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")  # torch may have warned before
    assert why_not().startswith("python: cannot be looked for: [Errno 20]")


def test_without_a_compiler_what_is_missing_is_named(somewhere_else, monkeypatch, capsys):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(native.FIRST_USE, raising=False)
    with pytest.raises(ToolMissing, match=r"c\+\+ not found"):
        native.build()
    assert main() == 127
    assert "Install g++" in capsys.readouterr().err
    assert list(somewhere_else.rglob("*.so")) == []
    ensure_built()
    assert why_not() == f"python: not built: c++ not found, which g++ brings; {native.BUILD_COMMAND} does it"


def ensure_built(mode: InstrumentMode = "observe", *, wanted: bool = True, emulated: bool = False) -> None:
    native.ensure_built(mode, wanted=wanted, emulated=emulated)


def asked_to_build(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let runs build, with this text in place of the compiler's work, which notes that it ran."""
    monkeypatch.delenv(native.FIRST_USE, raising=False)
    monkeypatch.setenv("CXX", sys.executable)  # one that is there
    code = f"import os, sys, time; path = {str(native.library())!r}; open('runs', 'a').write('x'); {program}"
    monkeypatch.setattr(native, "_BUILD", (sys.executable, "-c", code))


def test_the_first_run_builds_it_once_whatever_the_number_of_ranks(somewhere_else, monkeypatch):
    asked_to_build(monkeypatch, "time.sleep(0.3); open(path, 'w').close()")
    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(lambda _: ensure_built(), range(4)))
    assert (native.library().exists(), Path("runs").read_text()) == (True, "x")


def test_a_build_outlives_the_run_that_began_it(somewhere_else: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_to_build(monkeypatch, "time.sleep(1); open(path, 'w').close()")
    run = os.fork()
    if run == 0:
        os.setsid()
        threading.Thread(target=ensure_built).start()
        while not Path("runs").exists():
            time.sleep(0.01)
        os.killpg(0, signal.SIGKILL)  # as torchrun ends a rank
    os.waitpid(run, 0)
    assert not native.library().exists()
    ensure_built()
    assert (native.library().exists(), Path("runs").read_text()) == (True, "x")


def test_a_build_that_fails_in_a_run_is_said_and_not_repeated(somewhere_else, monkeypatch):
    asked_to_build(monkeypatch, "sys.exit('no headers')")
    for _ in range(2):
        ensure_built()
    assert Path("runs").read_text() == "x"
    assert why_not() == f"python: could not be built: exit code 1: no headers; {native.BUILD_COMMAND} tries again"


@pytest.mark.parametrize(
    ("how", "variable"),
    [({"mode": "off"}, "1"), ({"wanted": False}, "1"), ({"emulated": True}, "1"), ({}, "0")],
    ids=["off", "not wanted", "emulated", "forbidden"],
)
def test_nothing_is_built_that_a_run_does_not_use(somewhere_else, monkeypatch, how, variable):
    asked_to_build(monkeypatch, "open(path, 'w').close()")
    monkeypatch.setenv(native.FIRST_USE, variable)
    ensure_built(**how)
    assert not native.library().parent.exists()
