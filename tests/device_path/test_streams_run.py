"""`workload=streams` in virtual time, with 4 and with 8 hardware queues: the knee, the queues, and every pattern."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from aorta.config.workload import StreamPattern
from aorta.records.run_files import StreamsFile, StreamsPoint
from aorta.streams.patterns import PATTERNS
from tests.device_path.launch import launched
from tests.simulated.programs import needs_device

pytestmark = [pytest.mark.simulated, pytest.mark.dist, needs_device, pytest.mark.thorough]
LIMITS = (4, 8)
WITHOUT_WAITS = ("independent", "depth_first", "small_kernel_storm", "copies_beside_gemm")
STREAMS = {4: (1, 2, 4, 8, 64), 8: (1, 2, 4, 8, 16)}


class Done:
    """What a launch of two ranks has left, for each limit of queues."""

    def __init__(self, folder: Path) -> None:
        self.text: dict[int, str] = {}
        self.files: dict[int, StreamsFile] = {}
        for limit in LIMITS:
            words = ("tests.device_path.program_streams", str(folder / str(limit)), str(limit))
            self.text[limit] = launched(*words).stdout
            whole = (folder / str(limit) / "streams.json").read_bytes()
            self.files[limit] = msgspec.json.decode(whole, type=StreamsFile)

    def knee(self, limit: int, pattern: str) -> int | None:
        (found,) = [one for one in self.files[limit].ranks[0].patterns if one.name == pattern]
        return found.knee_streams

    def points(self, limit: int, pattern: str) -> dict[int, StreamsPoint]:
        (found,) = [one for one in self.files[limit].ranks[0].patterns if one.name == pattern]
        return {point.streams: point for point in found.points}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return Done(tmp_path_factory.mktemp("streams"))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("pattern", WITHOUT_WAITS)
def test_without_waits_as_many_run_at_once_as_there_are_queues_and_the_knee_is_there(
    done: Done, pattern: str, limit: int
) -> None:
    points = done.points(limit, pattern)
    reached = {streams: min(streams, limit) for streams in STREAMS[limit]}
    assert {n: point.gain for n, point in points.items()} == pytest.approx(reached, rel=1e-3)
    assert {n: point.concurrency for n, point in points.items()} == pytest.approx(reached, rel=1e-3)
    assert {n: point.most_at_once for n, point in points.items()} == reached
    assert all(point.issued_in_time for point in points.values())
    assert done.knee(limit, pattern) == limit


@pytest.mark.parametrize("limit", LIMITS)
def test_each_priority_has_as_many_queues_so_two_priorities_have_twice_the_knee(done: Done, limit: int) -> None:
    gains = {streams: point.gain for streams, point in done.points(limit, "priorities").items()}
    assert gains == pytest.approx({streams: min(streams, 2 * limit) for streams in STREAMS[limit]}, rel=1e-3)


@pytest.mark.parametrize("limit", LIMITS)
def test_streams_that_share_a_queue_are_named(done: Done, limit: int) -> None:
    for rank in done.files[limit].ranks:
        assert rank.queues == [list(range(first, STREAMS[limit][-1], limit)) for first in range(limit)]
    points = done.points(limit, "independent")
    assert points[4].shared_queues == []
    assert points[8].shared_queues == ([[0, 4], [1, 5], [2, 6], [3, 7]] if limit == 4 else [])


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


@pytest.mark.parametrize("pattern", KNOWN)
def test_with_a_queue_for_each_stream_a_pattern_gains_its_work_over_its_longest_path(done: Done, pattern: str) -> None:
    points = done.points(8, pattern)
    assert {n: points[n].gain for n in KNOWN[pattern]} == pytest.approx(KNOWN[pattern], rel=1e-3)
    assert points[1].gain == pytest.approx(1, rel=1e-3)


def test_a_chain_has_its_knee_at_one_stream(done: Done) -> None:
    assert {done.knee(limit, "chained") for limit in LIMITS} == {1}
    assert {point.most_at_once for point in done.points(4, "chained").values()} == {1}


def test_a_wait_blocks_the_queue_for_the_other_streams_on_it(done: Done) -> None:
    few, enough = (done.points(limit, "pipeline")[8].gain for limit in LIMITS)
    assert few < 2 < enough


def test_every_pattern_runs_on_both_ranks_and_the_table_marks_the_knee(done: Done) -> None:
    names = [pattern.name for pattern in StreamPattern]
    assert list(PATTERNS) == names
    for rank in done.files[4].ranks:
        assert [pattern.name for pattern in rank.patterns] == names
        assert all([point.streams for point in pattern.points] == list(STREAMS[4]) for pattern in rank.patterns)
    (row, *_) = [line.split() for line in done.text[4].splitlines() if line.startswith("independent ")]
    assert row == ["independent", "1.00", "2.00", "4.00*", "4.00", "4.00", "4", "4.00", "4"]
    assert "hardware queues: 4 for 64 streams; these streams share one:" in done.text[4]
