"""The process group: opened and closed, whatever happens inside."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from aorta.distributed import topology as module
from aorta.distributed.topology import backend_for, process_group
from aorta.errors import ConfigError, PeerFailed
from tests.distributed.conftest import place
from tests.runs import free_port

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def test_a_world_of_one_opens_and_closes_as_often_as_asked():
    for _ in range(2):
        with process_group(place(), CPU, timeout_s=10) as peers:
            assert dist.get_world_size() == 1
            assert dist.get_backend() == "gloo"
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [1, 1, 1]
            assert peers.gather("x", peers.rank) == [0]
        assert not dist.is_initialized()


def test_an_error_inside_closes_it_too():
    with pytest.raises(ZeroDivisionError), process_group(place(), CPU, timeout_s=10):
        raise ZeroDivisionError
    assert not dist.is_initialized()


def test_a_world_size_without_a_meeting_place(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(ConfigError, match=r"WORLD_SIZE=2: .*MASTER_ADDR expected.*; start the ranks with torchrun"),
        process_group(place(0, 2), CPU, timeout_s=10),
    ):
        pass
    assert not dist.is_initialized()


def test_ranks_that_do_not_come(monkeypatch):
    def nobody(*_, **__):
        raise dist.DistStoreError("Timed out after 1 seconds waiting for clients. 1/2 clients joined.\nmore")

    monkeypatch.setattr(module, "_store", nobody)
    with (
        pytest.raises(PeerFailed, match=r"rank 1 could not meet the other 1 rank.*1/2 clients joined\.$"),
        process_group(place(1, 2), CPU, timeout_s=1),
    ):
        pass


def test_a_rank_whose_launcher_has_ended_does_not_wait_for_it(monkeypatch):
    for name, value in {"ADDR": "127.0.0.1", "PORT": str(free_port())}.items():
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with (
        pytest.raises(PeerFailed, match=r"rank 1 cannot reach its launcher, which has ended: .*refused"),
        process_group(place(1, 2), CPU, timeout_s=600),
    ):
        pass


class Aborted(Exception):
    pass


def test_behind_an_error_a_devices_groups_are_aborted_not_shut_down(monkeypatch):
    """On the CPU, with a device that is one in name only: what is called, and in place of what."""
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: calls.append("init"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append("abort"))
    with process_group(place(), CUDA, timeout_s=10):
        pass
    assert calls == ["init", "destroy"]
    for error in (Aborted, KeyboardInterrupt):
        calls.clear()
        with pytest.raises(error), process_group(place(), CUDA, timeout_s=10):
            raise error
        assert calls == ["init", "abort"]


def test_an_abort_that_fails_hides_no_error(monkeypatch, caplog):
    def broken() -> None:
        raise RuntimeError("no such group")

    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", broken)
    with pytest.raises(Aborted), process_group(place(), CUDA, timeout_s=10):
        raise Aborted
    assert "could not be aborted and is left to the end of the process: no such group" in caplog.text


def test_this_torch_can_abort_a_group_and_open_another():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
    with process_group(place(), CPU, timeout_s=10):
        assert dist.is_initialized()


def test_backends():
    assert backend_for(CPU) == "gloo"
    assert backend_for(CUDA) == "cpu:gloo,cuda:nccl"
    assert backend_for(torch.device("xpu", 0)) == "cpu:gloo,xpu:xccl"
