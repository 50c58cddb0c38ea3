"""Which process this is, from torchrun's variables, which device it gets, and what is asked of a device's module; the
process group, opened and closed whatever happens inside; and the exit code of the rank that explains the others.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from aorta.distributed import cuda, topology, torchrun
from aorta.distributed.topology import (
    backend_for,
    default_label,
    device_name,
    platform_of,
    process_group,
    read_topology,
    select_device,
    share_device,
)
from aorta.distributed.torchrun import first_failure
from aorta.errors import ConfigError, PeerFailed
from tests.distributed.conftest import place
from tests.runs import finished, free_port, succeeded


def variables(rank, world_size, local_rank, local_world_size, **others):
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    return {name: str(value) for name, value in (numbers | others).items()}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0, 1, 0, 0, None)),
        ({"TORCHELASTIC_RUN_ID": "x"}, (0, 1, 0, 1, 0, 0, "x")),
        (variables(1, 2, 1, 2, GROUP_RANK=0, TORCHELASTIC_RESTART_COUNT=3), (1, 2, 1, 2, 0, 3, None)),
        (variables(9, 16, 1, 8, GROUP_RANK=1), (9, 16, 1, 8, 1, 0, None)),
        # another launcher may set only the first two or three
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1, 2, 0, 0, None)),
        (variables(9, 16, 1, 8), (9, 16, 1, 8, 1, 0, None)),
    ],
    ids=["nothing", "run id only", "restarted", "second node", "rank and world size only", "no node rank"],
)
def test_a_place_from_the_environment(environment, expected):
    place = read_topology(environment)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == expected[:4]
    assert (place.node_rank, place.restart_count, place.elastic_run_id) == expected[4:]
    assert place.pid == os.getpid()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"])
def test_a_variable_that_is_no_number(name):
    with pytest.raises(ConfigError, match=f"{name}='one': must be a whole number"):
        read_topology(variables(0, 1, 0, 1) | {name: "one"})


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (5, 1)])
def test_a_rank_outside_the_world(rank, world_size):
    with pytest.raises(ConfigError, match=f"RANK={rank}: must be at least 0 and below WORLD_SIZE={world_size}"):
        read_topology(variables(rank, world_size, 0, 1))


def accelerators(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> list[int]:
    """torch with that many devices of a kind; returns the numbers of those made current."""
    current: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda _name: True)
    return current


def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


def test_a_cpu_is_used_where_asked_for_or_where_there_is_nothing_else(monkeypatch):
    current = accelerators(monkeypatch, "cuda", 2)
    assert select_device("cpu", 5) == torch.device("cpu")
    no_device(monkeypatch)
    assert select_device("auto", 5) == torch.device("cpu")
    assert current == []


@pytest.mark.parametrize(
    ("asked", "local_rank", "there", "sentence"),
    [
        ("cuda", 2, "cuda", r"local rank 2 has no device: torch sees 2; start at most 2 .*device=cpu"),
        ("cuda", 0, "cuda without nccl", r"training\.device=cuda: .*built without nccl, its backend"),
        ("cuda", 0, "xpu", r"training\.device=cuda: torch sees no CUDA or HIP device"),
        ("tpu", 0, "nothing", r"training\.device=tpu: torch .* knows no device of that type; allowed are"),
        ("xpu", 0, "nothing", r"training\.device=xpu: torch .* sees no accelerator on this machine; use"),
    ],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, asked, local_rank, there, sentence):
    current = accelerators(monkeypatch, "xpu" if there == "xpu" else "cuda", 2)
    if there == "nothing":
        no_device(monkeypatch)
    if there == "cuda without nccl":
        monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name != "nccl")
    with pytest.raises(ConfigError, match=sentence):
        select_device(asked, local_rank)
    assert 2 not in current


def test_an_accelerator_is_taken_by_its_type(monkeypatch):
    current = accelerators(monkeypatch, "xpu", 2)
    monkeypatch.setattr(topology, "lacks_streams", lambda _device: iter(()))
    assert select_device("xpu", 1) == torch.device("xpu", 1)
    assert select_device("auto", 0) == torch.device("xpu", 0)
    assert current == [1, 0]
    assert (platform_of(torch.device("xpu", 0)), default_label(torch.device("xpu", 0))) == ("other", "xpu")


def test_an_accelerator_without_what_is_needed_is_refused_by_name(monkeypatch, caplog):
    no_streams = Mock(side_effect=RuntimeError("Backend doesn't support it"))
    accelerators(monkeypatch, "mps", 1)
    monkeypatch.setattr(torch, "Stream", no_streams)
    monkeypatch.setattr(torch, "Event", no_streams)
    with pytest.raises(ConfigError) as refused:
        select_device("mps", 0)
    assert str(refused.value) == (
        "training.device=mps: AORTA cannot measure on mps: it has no streams, its events do not tell the time, "
        "torch.distributed exchanges its tensors through the host (gloo); it needs streams, events that tell the time "
        "and a backend of torch.distributed on the device, as cuda (CUDA and HIP) and xpu have them; use "
        "training.device=cpu"
    )
    assert refused.value.exit_code == 1
    assert select_device("auto", 0) == torch.device("cpu")
    assert "training.device=auto: AORTA cannot measure on mps: it has no streams" in caplog.text


def test_one_stream_is_none_to_move_collectives_to(monkeypatch):
    only = object()
    monkeypatch.setattr(torch, "Stream", lambda _device: only)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _device: only)
    assert next(topology.lacks_streams(torch.device("mps", 0))) == "it has one stream only"


@pytest.mark.parametrize(("hip", "expected"), [(None, "cuda"), ("6.4.0", "rocm")])
def test_the_platform_is_the_build_s(monkeypatch, hip, expected):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert platform_of(torch.device("cuda", 0)) == expected
    assert platform_of(torch.device("cpu")) == "cpu"
    assert default_label(torch.device("cpu")) == "cpu"
    assert device_name(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("version", "there", "absent"),
    [
        ("2.29.7", {"NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}, "NCCL_MULTI_RANK_GPU_ENABLE"),
        ("2.30.7", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "NCCL_HOSTID"),
    ],
)
def test_ranks_of_a_device_are_let_by_what_their_nccl_knows(monkeypatch, version, there, absent):
    for name in (*there, absent, "NCCL_HOSTID", "NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    found = share_device(1, version)
    assert found | there == found
    assert absent not in found
    assert found["NCCL_MAX_CTAS"] == "4"  # the caller's stays
    assert found["NCCL_NVLS_ENABLE"] == os.environ["NCCL_NVLS_ENABLE"] == "0"
    if "NCCL_HOSTID" in found:
        assert found["NCCL_HOSTID"].endswith("-1")


XPU = torch.device("xpu", 1)


def test_random_states_of_host_and_device_are_put_back(monkeypatch):
    module = Mock()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    states = topology.random_states(XPU)
    expected = torch.rand(3)
    topology.set_random_states(states, XPU)
    assert torch.equal(torch.rand(3), expected)
    module.get_rng_state.assert_called_once_with(XPU)
    module.set_rng_state.assert_called_once_with(module.get_rng_state(), XPU)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    cuda._has_device.cache_clear()
    yield
    cuda._has_device.cache_clear()


def test_nothing_is_being_captured_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch built for CUDA, as PyPI's is for Linux, raises where there is no driver."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", Mock(side_effect=RuntimeError("no driver")))
    assert cuda.is_capturing() is False


def test_the_check_for_synchronisations_hides_torch_s_word_about_itself_and_nothing_else(monkeypatch):
    modes = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if mode == "error":
            # As torch words it (torch/csrc/cuda/Module.cpp), once a process.
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet ...", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.warns(UserWarning, match="another"), cuda.no_synchronisation():
        warnings.warn("another", stacklevel=1)
    with pytest.raises(ZeroDivisionError), cuda.no_synchronisation():
        raise ZeroDivisionError
    assert modes == ["error", "default"] * 2


# --- the process group


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
    nobody = dist.DistStoreError("Timed out after 1 seconds waiting for clients. 1/2 clients joined.\nmore")
    monkeypatch.setattr(topology, "_store", Mock(side_effect=nobody))
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
    monkeypatch.setattr(torchrun, "main", Mock(side_effect=ChildFailedError("train.py", failures)))
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
