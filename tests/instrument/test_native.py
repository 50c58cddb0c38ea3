"""The compiled tap: whose clock it marks on, what it counts, and that it does not wait for the interpreter.

What it sees is what the interceptor in Python sees: `test_dispatcher` and `every_collective` run with both.
"""

from __future__ import annotations

import ctypes
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from aorta.instrument.dispatcher import all_groups, issued_by
from aorta.instrument.native.native_interceptor import NativeInterceptor
from aorta.records.progress import ProgressState, read_progress
from aorta.records.ring_file import RingFile
from tests.instrument.steps import Rows
from tests.instrument.taps import CPU, Answer, Tap, answering, compiled_part
from tests.known_answers.again import attempted
from tests.records.test_progress import facts

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # renamed in torch 2.13
HELD_S = 0.3
PATIENCE_S = 30.0
"""For what comes at once, unless the machine is busy."""
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
        assert work is not None
        if not work.is_completed():
            return work
        work.wait()
    pytest.skip(f"{ATTEMPTS} collectives of one rank were over before they could be asked")


def wait_until(happened: Callable[[], bool]) -> None:
    """With the interpreter free."""
    deadline = time.perf_counter() + PATIENCE_S
    while not happened() and time.perf_counter() < deadline:
        time.sleep(0.001)


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
        wait_until(lambda: bool(called_back))
        work.wait()
        tap.hand_over()
        row = tap.rows[-1]
        assert row.look()
        assert row.end_source == "future"
        assert row.end < freed_ns <= called_back[0]
    finally:
        sys.setswitchinterval(interval)


def test_a_handle_may_go_before_it_has_ended(tap: Tap) -> None:
    under_way()  # nobody keeps it
    dist.barrier()
    tap.hand_over()
    assert [row.kind for row in tap.rows][-2:] == ["allgather", "barrier"]
    wait_until(tap.rows[-2].look)
    assert tap.rows[-2].end_source == "future"


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
    rows = Rows(module, {})
    interceptor = rows.interceptor
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
                rows.begin()
                happens()
                rows.end()
                own_ns[part] = rows.own_ns()
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
    assert work is not None
    work.wait()
    kept = weakref.ref(tensor)
    del tensor, work
    wait_until(lambda: kept() is None)  # its callback is on its way
    assert kept() is None


@pytest.mark.usefixtures("world_of_one")
def test_a_backend_s_count_is_the_one_that_python_is_told() -> None:
    module = compiled_part()
    for issued in range(3):
        (group,) = all_groups()
        assert module.issued_by(group) == issued_by(group) == issued
        dist.all_reduce(torch.ones(2))


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


def noted(path: Path, *, compiled: bool) -> list[ProgressState]:
    ring, states = RingFile.create(path, facts()), []
    progress = ring.progress

    def look() -> None:
        seen = read_progress(path)
        assert seen.torn is None
        states.append(seen.state._replace(phase_since_ns=0, progress_ns=0))

    progress.begin_step(3)
    progress.enter("forward")
    if compiled:
        for _ in range(2):
            NativeInterceptor(compiled_part(), {}, ring)
    look()
    assert progress.enter("optimizer") == "forward"  # what was noted before goes on
    assert progress.enter("mine") == "mine"
    look()
    assert progress.enter("".join(["back", "ward"])) == "optimizer"  # equal, and another object
    look()
    progress.end_step()
    look()
    progress.begin_step(1 << 38)
    look()
    with pytest.raises(OSError, match="full"), progress.phase("checkpoint"):
        raise OSError("full")
    look()
    return states


def test_compiled_functions_note_what_python_does(tmp_path: Path) -> None:
    by_python, compiled = (noted(tmp_path / str(each), compiled=each) for each in (False, True))
    assert compiled == by_python
    assert [state.phase for state in compiled] == ["forward", "optimizer", "backward", "none", "step", "checkpoint"]
