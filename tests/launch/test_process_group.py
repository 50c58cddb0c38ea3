"""The process group: opened and closed, whatever happens inside."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from aorta.errors import ConfigError, PeerFailed
from aorta.launch import process_group as module
from aorta.launch.process_group import backend_for, process_group
from tests.launch.conftest import place

CPU = torch.device("cpu")


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


def test_backends():
    assert backend_for(CPU) == "gloo"
    assert backend_for(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
