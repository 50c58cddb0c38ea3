"""Calls through torch.distributed.rpc: seen, and otherwise as if nobody looked. One process that calls itself."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress

import pytest
import torch
import torch.distributed.rpc as rpc
from torch.autograd.profiler import record_function
from torch.distributed.rpc import rpc_sync as imported_before

from aorta.records.run_files import CALL_MARK
from aorta.rpc.tracer import TracedRpc, close_window, open_window, summed
from tests.runs import HANGS_S

pytestmark = pytest.mark.dist
ORIGINALS = (rpc.rpc_sync, rpc.rpc_async, rpc.remote)
ONES = torch.ones(2)


@pytest.fixture(scope="module", autouse=True)
def worker(tmp_path_factory):
    """This process as the only worker; it may call itself."""
    meeting = tmp_path_factory.mktemp("rpc") / "meet"
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"file://{meeting}", rpc_timeout=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 warns of its own use of a deprecated form
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    yield
    rpc.shutdown()


RELEASED = threading.Event()


def waits():
    return RELEASED.wait(HANGS_S)


def square(x, *, scale=1):
    return x * x * scale


def fails():
    raise ValueError("x")


def allocates(size):
    """Makes three tensors of `size` floats, the first of them in a range, and gives the last one away."""
    with record_function("mine"):
        first = torch.empty(size)
    second = first + first
    del first
    return second * second


def asks(size):
    """Makes a tensor, and has another call make three."""
    with record_function("before and after"):
        mine = torch.empty(size)
        rpc.rpc_sync("alone", allocates, args=(size,))
        return mine * mine


def fails_late(size):
    kept = torch.empty(size)
    raise ValueError(f"{len(kept)}")


def again(x):
    return rpc.rpc_sync("alone", square, args=(x,))


@rpc.functions.async_execution
def later(x):
    return rpc.rpc_async("alone", torch.add, args=(x, x))


def plus_one(x: torch.Tensor):
    return x + 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is, and is still to be passed through
    scripted = torch.jit.script(plus_one)


@pytest.mark.spec("C2")
def test_the_functions_are_torchs_own_before_and_after():
    with suppress(KeyError), TracedRpc():
        assert rpc.rpc_sync is not ORIGINALS[0]
        assert imported_before is rpc.rpc_sync, "a name taken before counts too"
        assert rpc.rpc_sync.__doc__ == ORIGINALS[0].__doc__
        raise KeyError
    assert (rpc.rpc_sync, rpc.rpc_async, rpc.remote) == ORIGINALS
    assert imported_before is ORIGINALS[0]


@pytest.mark.spec("C2")
def test_values_references_and_keywords_come_back_unchanged():
    plain = rpc.remote(0, square, args=(ONES,))
    with TracedRpc() as traced:
        assert rpc.rpc_sync("alone", torch.add, args=(ONES, 3)).tolist() == [4, 4]
        assert rpc.rpc_async(rpc.get_worker_info(), square, args=(ONES,), kwargs={"scale": 5}).wait().tolist() == [5, 5]
        reference = rpc.remote(0, square, args=(ONES,))
        assert type(reference) is type(plain)
        assert reference.to_here().tolist() == [1, 1]
        assert imported_before("alone", square, (ONES,)).tolist() == [1, 1]
        assert traced.settle(HANGS_S)
    assert [call.name for call in traced.calls] == [
        "rpc_sync#aten::add(alone -> alone)",
        "rpc_async#square(alone -> alone)",
        "rpc_remote#square(alone -> alone)",
        "rpc_sync#square(alone -> alone)",
    ]
    assert len({call.call_id for call in traced.calls}) == 4
    assert all(call.issue_ns < call.reply_ns for call in traced.calls)


@pytest.mark.spec("C2")
def test_exceptions_keep_type_and_message():
    def message(call):
        with pytest.raises(ValueError, match="x") as caught:
            call()
        return str(caught.value).splitlines()[:2]

    ways = (
        lambda: rpc.rpc_sync("alone", fails),
        lambda: rpc.rpc_async("alone", fails).wait(),
        lambda: rpc.remote("alone", fails).to_here(),
    )
    plain = [message(way) for way in ways]
    with TracedRpc() as traced:
        assert [message(way) for way in ways] == plain
        assert traced.settle(HANGS_S)
        with pytest.raises(TypeError, match="function should be callable"):
            rpc.rpc_sync("alone", 3)
        with pytest.raises(RuntimeError, match="nobody"):
            rpc.rpc_sync("nobody", fails)
    # Of rpc.remote torch tells its caller that the call arrived, not how it ended: to_here raises it.
    assert [call.error for call in traced.calls] == ["ValueError", "ValueError", None]


@pytest.mark.spec("C2")
def test_what_cannot_be_wrapped_passes_with_one_warning(caplog):
    with TracedRpc() as traced:
        assert rpc.rpc_sync("alone", later, args=(ONES,)).tolist() == [2, 2]
        assert rpc.rpc_sync("alone", scripted, args=(ONES,)).tolist() == [2, 2]
        assert rpc.rpc_async("alone", later, args=(ONES,)).wait().tolist() == [2, 2]
    said = [record.message for record in caplog.records if "not marked on the callee" in record.message]
    assert len(said) == 1
    by_hand = [call for call in traced.calls if "aten::add" not in call.name]
    assert [call.traced for call in by_hand] == [False] * 3


@pytest.mark.spec("C2")
def test_a_timeout_is_kept():
    try:
        with TracedRpc(), pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            rpc.rpc_sync("alone", waits, timeout=0.05)
    finally:
        RELEASED.set()


@pytest.mark.spec("C3")
def test_a_call_inside_a_call_repeats_the_outer_name():
    with TracedRpc() as traced:
        assert rpc.rpc_sync("alone", again, args=(ONES,)).tolist() == [1, 1]
    outer, inner = traced.calls
    assert outer.name == "rpc_sync#again(alone -> alone)"
    assert inner.name == "rpc_sync#again(alone -> alone)#remote_op: rpc_sync#square(alone -> alone)"
    assert inner.parent == outer.call_id
    assert CALL_MARK not in inner.name


@pytest.mark.spec("C6")
def test_C6_what_each_call_allocates_is_measured_on_its_own():
    size, nbytes = 1000, 4000
    with TracedRpc() as traced:
        rpc.rpc_sync("alone", allocates, args=(size,))  # nobody asked for memory yet
        open_window()
        waits = [rpc.rpc_async("alone", allocates, args=(size * n,)) for n in range(1, 21)]
        assert [len(wait.wait()) for wait in waits] == [size * n for n in range(1, 21)]
        rpc.rpc_sync("alone", asks, args=(size,))
        with pytest.raises(ValueError, match="1000"):
            rpc.rpc_sync("alone", fails_late, args=(size,))
        found = close_window()
        rpc.rpc_sync("alone", allocates, args=(size,))
        assert close_window() == {}
    calls = {call.call_id: call for call in traced.calls}
    assert len(found) == 23
    for n, wait in enumerate([c for c in traced.calls if c.kind == "rpc_async"], start=1):
        memory = found[wait.call_id]
        figures = (memory.allocated_bytes, memory.freed_bytes, memory.peak_bytes)
        assert figures == (3 * n * nbytes, 2 * n * nbytes, 2 * n * nbytes)
        assert {name: (op.allocated_bytes, op.self_allocated_bytes) for name, op in memory.operators.items()} == {
            "mine": (n * nbytes, 0),
            "aten::empty": (n * nbytes, n * nbytes),
            "aten::add": (n * nbytes, n * nbytes),
            "aten::mul": (n * nbytes, n * nbytes),
        }
    # A call made inside a measured one is measured for itself, and not by torch's own means as well.
    inner = next(c for c in traced.calls if c.parent is not None)
    assert found[inner.call_id].allocated_bytes == 3 * nbytes
    assert found[inner.parent].operators["aten::mul"].self_allocated_bytes == nbytes
    assert found[inner.parent].operators.keys() == {"before and after", "aten::empty", "aten::mul"}
    assert all("fails_late" not in calls[call_id].name or m.allocated_bytes for call_id, m in found.items())


def test_memory_is_summed_up_in_the_order_of_events():
    alloc = "memory_alloc"
    events = [("mark", "__start_profile", 0), (alloc, "", 10), ("push", "a", 0), (alloc, "", 100), ("push", "a", 0)]
    events += [(alloc, "", 7), ("pop", "", 0), (alloc, "", -100), ("pop", "", 0), ("pop", "", 0), (alloc, "", 50)]
    found = summed(events)
    assert (found.allocated_bytes, found.freed_bytes, found.peak_bytes) == (167, 100, 117)
    assert {name: (op.allocated_bytes, op.self_allocated_bytes) for name, op in found.operators.items()} == {
        "a": (107, 107)
    }
