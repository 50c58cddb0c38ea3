"""The process group, opened and closed whatever happens inside; and the exit code of the rank that explains the
others.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from aorta.distributed import topology as module
from aorta.distributed import torchrun
from aorta.distributed.topology import backend_for, process_group
from aorta.distributed.torchrun import first_failure
from aorta.errors import ConfigError, PeerFailed
from tests.distributed.conftest import place
from tests.runs import finished, free_port, succeeded

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def test_a_world_of_one_opens_and_closes_as_often_as_asked():
    for ending in (None, ZeroDivisionError, None):
        with suppress(ZeroDivisionError), process_group(place(), CPU, timeout_s=10) as peers:
            assert dist.get_world_size() == 1
            assert dist.get_backend() == "gloo"
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [1, 1, 1]
            assert peers.gather("x", peers.rank) == [0]
            if ending is not None:
                raise ending
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


def test_behind_an_error_a_devices_groups_are_aborted_not_shut_down(monkeypatch, caplog):
    """On the CPU, with a device that is one in name only: what is called, and in place of what."""
    calls = []

    def abort() -> None:
        calls.append("abort")
        raise RuntimeError("no such group")  # which hides no error

    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: calls.append("init"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    with process_group(place(), CUDA, timeout_s=10):
        pass
    assert calls == ["init", "destroy"]
    for error in (Aborted, KeyboardInterrupt):
        calls.clear()
        with pytest.raises(error), process_group(place(), CUDA, timeout_s=10):
            raise error
        assert calls == ["init", "abort"]
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


PEER = PeerFailed.exit_code


@pytest.mark.parametrize(
    ("codes", "times", "rank"),
    [
        ((PEER, ConfigError.exit_code), (0, 0), 1),
        ((PEER, ConfigError.exit_code), (0, 2), 1),
        ((PEER, PEER), (1, 0), 1),
        ((-signal.SIGTERM, PEER), (0, 0), 1),
        ((128 + signal.SIGTERM, PEER), (0, 0), 1),
        ((PEER, -signal.SIGKILL), (0, 0), 1),
        ((PEER, -signal.SIGKILL), (0, 30), 0),  # torchrun ends those that do not heed it
        ((-signal.SIGTERM, -signal.SIGTERM), (0, 0), 0),
    ],
)
def test_the_failure_that_explains_the_others(codes: tuple[int, ...], times: tuple[int, ...], rank: int) -> None:
    failures = {}
    for at, (code, time) in enumerate(zip(codes, times, strict=True)):
        failures[at] = ProcessFailure(local_rank=at, pid=1, exitcode=code, error_file="")
        failures[at].timestamp = time
    assert first_failure(failures) == (rank, failures[rank])


@pytest.mark.parametrize(
    ("codes", "left", "said"),
    [
        ((1, 1), ("broken", "rank 1: broken"), ""),  # rank 0 has said it
        ((-signal.SIGTERM, 1), ("broken", "rank 1: broken"), ""),  # and was asked to end after that
        ((-signal.SIGTERM, 1), (None, "rank 1: broken"), "error: rank 1: broken\n"),
        ((PEER, 1), ("rank 1 has failed", "rank 1: broken"), "error: rank 1: broken\n"),
        ((-signal.SIGTERM, 1), (None, None), ""),  # its traceback is on the terminal
        ((PEER, -signal.SIGKILL), (None, None), "error: rank 1 was ended by SIGKILL\n"),
    ],
)
def test_the_summary_has_the_error_of_a_rank_that_did_not_say_it(monkeypatch, tmp_path, capsys, codes, left, said):
    failures = {}
    for rank, (code, message) in enumerate(zip(codes, left, strict=True)):
        file = tmp_path / f"{rank}.json"
        if message is not None:
            file.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "0"}}}))
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(file))
        failures[rank].timestamp = 0

    def fail(_arguments):
        raise ChildFailedError("train.py", failures)

    monkeypatch.setattr(torchrun, "main", fail)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert torchrun.launch(["--nproc_per_node", "2", "train.py"]) == (128 + signal.SIGKILL if codes[1] < 0 else 1)
    assert capsys.readouterr().err == said


def test_stores_of_ranks_on_one_host_listen_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(
        "import os, psutil, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "found = psutil.Process(os.getppid()).net_connections()\n"
        "print(*(each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN))\n"
    )
    words = ["-m", "aorta.distributed.torchrun", "--standalone", "--nproc_per_node", "1", str(tmp_path / "rank.py")]
    done = succeeded(finished([sys.executable, *words]))
    assert set(done.stdout.split()) == {"127.0.0.1"}
