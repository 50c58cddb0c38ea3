"""`aorta train --nproc_per_node` ends with the code of the rank whose failure explains the others."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from aorta.distributed import torchrun
from aorta.distributed.torchrun import first_failure
from aorta.errors import ConfigError, PeerFailed
from tests.runs import finished, succeeded

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
    for place, (code, time) in enumerate(zip(codes, times, strict=True)):
        failures[place] = ProcessFailure(local_rank=place, pid=1, exitcode=code, error_file="")
        failures[place].timestamp = time
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
