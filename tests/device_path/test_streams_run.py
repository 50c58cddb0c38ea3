"""`workload=streams` in virtual time, with 4 and with 8 hardware queues: the knee, the queues, and every pattern.

As a program (`python -m`) it is `train.py` on two simulated devices, with a limit of hardware queues: takes a folder
for the run's files, and the limit.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import msgspec
import pytest
import torch  # noqa: F401 the simulated device comes with it

from aorta import train_command
from aorta.config.workload import StreamPattern
from aorta.records.run_files import StreamsFile, StreamsPoint
from aorta.streams.patterns import PATTERNS
from tests.simulated import device as simulated
from tests.simulated.programs import launched, needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
LIMITS = (4, 8)
STREAMS = {4: (1, 2, 4, 8, 64), 8: (1, 2, 4, 8, 16)}
"""By limit of hardware queues."""
KERNEL_NS = 100_000
WITHOUT_WAITS = ("independent", "depth_first", "small_kernel_storm", "copies_beside_gemm")
KNOWN = {
    "chained": {2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0},
    "fan_in": {2: 17 / 9, 4: 33 / 9, 8: 65 / 9},
    "fan_out": {2: 17 / 9, 4: 33 / 9, 8: 65 / 9},
    "fork_join": {2: 16.8 / 8.8, 4: 32.8 / 8.8, 8: 64.8 / 8.8},
    "ping_pong": {2: 1.0, 4: 2.0, 8: 4.0},
    "pipeline": {2: 16 / 9, 4: 32 / 11, 8: 64 / 15},
    "moe_bursts": {2: 3.0 / 2.0, 4: 6.0 / 2.5},
    "unbalanced": {2: 5 / 4, 4: 10 / 4, 8: 20 / 4},
    # The reduction of a round runs beside the next round's products: 8 rounds and the last reduction.
    "allreduce_beside_gemm": {2: 16 / 9, 4: 32 / 9},
}
"""By hand, where every stream has a queue: the sum of all kernels over the longest path through them."""


def main(folder: str, limit: int) -> int:
    """One run."""
    simulated.pool_streams(64)
    simulated.costs(launch_ns=0, event_ns=0)
    simulated.real_delays(sleep_ns=0)
    # Everything takes as long as a spin: what a pattern gains then follows from its declaration.
    simulated.lengths(operators={"aten::mm": (KERNEL_NS, 0.0), "memcpy_h2d": (KERNEL_NS, 0.0)})
    simulated.collective_lengths(default=(KERNEL_NS, 0.0))
    simulated.hardware_queues(limit)
    # In virtual time every repetition of a point is as long as the first.
    streams = ",".join(map(str, STREAMS[limit]))
    where = (f"training.output_dir={folder}", f"workload.streams=[{streams}]", "workload.repeats=1")
    return train_command.main(["workload=streams", "training.device=cuda", "parallel=none", *where])


class Done(NamedTuple):
    """What a launch of two ranks has left."""

    text: str
    file: StreamsFile

    def pattern(self, name: str) -> tuple[int | None, dict[int, StreamsPoint]]:
        """The knee, and the points by the number of streams."""
        (found,) = [one for one in self.file.ranks[0].patterns if one.name == name]
        return found.knee_streams, {point.streams: point for point in found.points}

    def gains(self, name: str) -> dict[int, float | None]:
        return {streams: point.gain for streams, point in self.pattern(name)[1].items()}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Done]:
    """By limit of queues."""
    found = {}
    for limit in LIMITS:
        folder = tmp_path_factory.mktemp("streams")
        text = launched("tests.device_path.test_streams_run", str(folder), str(limit)).stdout
        found[limit] = Done(text, msgspec.json.decode((folder / "streams.json").read_bytes(), type=StreamsFile))
    return found


@pytest.mark.parametrize("limit", LIMITS)
def test_as_many_run_at_once_as_there_are_queues_and_the_knee_is_there(done: dict[int, Done], limit: int) -> None:
    """Where nothing waits. Streams that share a queue are named; each priority has as many, so two priorities have
    twice the knee; and a chain has its knee at one stream.
    """
    run, asked = done[limit], STREAMS[limit]
    reached = {streams: min(streams, limit) for streams in asked}
    for name in WITHOUT_WAITS:
        knee, points = run.pattern(name)
        assert knee == limit
        assert run.gains(name) == pytest.approx(reached, rel=1e-3), name
        assert {n: point.concurrency for n, point in points.items()} == pytest.approx(reached, rel=1e-3), name
        assert {n: point.most_at_once for n, point in points.items()} == reached, name
        assert all(point.issued_in_time for point in points.values()), name
    for rank in run.file.ranks:
        assert rank.queues == [list(range(first, asked[-1], limit)) for first in range(limit)]
    _, points = run.pattern("independent")
    assert points[4].shared_queues == []
    assert points[8].shared_queues == ([[0, 4], [1, 5], [2, 6], [3, 7]] if limit == 4 else [])
    assert run.gains("priorities") == pytest.approx({one: min(one, 2 * limit) for one in asked}, rel=1e-3)
    knee, points = run.pattern("chained")
    assert (knee, {point.most_at_once for point in points.values()}) == (1, {1})


@pytest.mark.parametrize("name", KNOWN)
def test_with_enough_queues_a_pattern_gains_its_work_over_its_longest_path(done: dict[int, Done], name: str) -> None:
    gains = done[8].gains(name)
    assert {streams: gains[streams] for streams in KNOWN[name]} == pytest.approx(KNOWN[name], rel=1e-3)
    if name == "pipeline":  # with fewer, a wait blocks the queue for the other streams on it
        assert (done[4].gains(name)[8] or 0) < 2 < (gains[8] or 0)


def test_every_pattern_runs_on_both_ranks_and_the_table_marks_the_knee(done: dict[int, Done]) -> None:
    names = [pattern.name for pattern in StreamPattern]
    assert list(PATTERNS) == names
    for rank in done[4].file.ranks:
        assert [pattern.name for pattern in rank.patterns] == names
        assert all([point.streams for point in pattern.points] == list(STREAMS[4]) for pattern in rank.patterns)
    (row, *_) = [line.split() for line in done[4].text.splitlines() if line.startswith("independent ")]
    assert row == ["independent", "1.00", "2.00", "4.00*", "4.00", "4.00", "4", "4.00", "4"]
    assert "hardware queues: 4 for 64 streams; these streams share one:" in done[4].text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
