"""`aorta train --nproc_per_node` ends with the code of the rank whose failure explains the others."""

from __future__ import annotations

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from aorta.distributed.torchrun import first_failure
from aorta.errors import ConfigError, PeerFailed

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
