"""`workload=streams` in virtual time, with 4 and with 8 hardware queues: the knee, the queues, and every pattern."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from aorta.records.streams_file import StreamsFile, StreamsPoint
from tests.ranks import forked
from tests.runs import HANGS_S, environment, succeeded
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device]
LIMITS = (4, 8)
STREAMS = (1, 2, 4, 8, 16, 64)


class Done:
    """What one launch of two ranks has left, by limit of queues."""

    def __init__(self, folder: Path) -> None:
        own = environment(PYTHONPATH=environment()["PYTHONPATH"], AORTA_SIMULATED_DEVICES="2")
        words = ("tests.streams.program_streams", str(folder), *map(str, LIMITS))
        ended = succeeded(forked(*words, ranks=2, environment=own, timeout_s=HANGS_S))
        self.text = ended.stdout
        self.files = {
            limit: msgspec.json.decode((folder / str(limit) / "streams.json").read_bytes(), type=StreamsFile)
            for limit in LIMITS
        }

    def points(self, limit: int, pattern: str, rank: int = 0) -> dict[int, StreamsPoint]:
        (found,) = [one for one in self.files[limit].ranks[rank].patterns if one.name == pattern]
        return {point.streams: point for point in found.points}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return Done(tmp_path_factory.mktemp("streams"))


def test_show(done: Done) -> None:
    print(done.text)
