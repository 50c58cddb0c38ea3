"""Clocks of ranks against rank 0's, over the store."""

from __future__ import annotations

import time
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch.distributed as dist

from aorta.config.schema import Clock
from aorta.distributed import clock_measurement as module
from aorta.distributed.clock_measurement import ClockSynchronisation
from aorta.distributed.output_folder import RunFolder
from aorta.records.clocks import CLOCK_SYNC_FILE, read_clock_sync
from tests.distributed.conftest import World, place

OFFSET_NS, DRIFT_PPM = 123_456_789, 80.0


def synchronise(world: World, folder: Path, settings: Clock, ranks: int = 2, pause_s: float = 0.0):
    """`at_start`, a pause, `at_end` on every rank; gives each rank's result."""
    run = RunFolder(folder, "run", 0)

    def work(peers):
        clocks = ClockSynchronisation(settings, peers, place(peers.rank, ranks), run)
        clocks.at_start()
        time.sleep(pause_s)
        peers.gather("pause", None)
        return clocks.at_end()

    return world(ranks, work)


@pytest.mark.spec("C12")
def test_an_injected_offset_and_drift_are_found_within_their_bounds(world, tmp_path):
    settings = Clock(fake_offset_ns=OFFSET_NS, fake_drift_ppm=DRIFT_PPM)
    results = synchronise(world, tmp_path, settings, pause_s=0.5)
    one = results[0].of(1)
    assert one.injected.offset_ns == OFFSET_NS
    since = one.injected.since_ns
    for sample in (one.start, one.end):
        # The fake clock shows t + offset + drift * (t - since): what it is ahead at this instant, from its own reading.
        ahead = OFFSET_NS + DRIFT_PPM * 1e-6 * (sample.at_ns - OFFSET_NS - since)
        assert abs(sample.offset_ns - ahead) <= sample.bound_ns + 1
        assert sample.samples == settings.sync_samples
    assert abs(one.drift_ppm - DRIFT_PPM) <= one.drift_bound_ppm
    # A clock that gains 80 ppm shows 1.00008 s a second, so the slope over its own time is 80 / 1.00008.
    true_ns = since + 400_000_000
    shown = one.injected.shown(true_ns)
    assert abs(one.to_reference(shown) - true_ns) <= one.bound_ns(shown) + 1
    assert results[0] == results[1], "every rank knows the result"


@pytest.mark.spec("C15", "C18")
def test_the_file_holds_what_was_measured_and_what_follows_from_it(world, tmp_path):
    """Ranks of one host are within their bound of each other."""
    result, *_ = synchronise(world, tmp_path, Clock(), ranks=3, pause_s=0.05)
    assert [entry.rank for entry in result.ranks] == [0, 1, 2]
    for sample in (sample for entry in result.ranks for sample in (entry.start, entry.end)):
        assert abs(sample.offset_ns) <= sample.bound_ns >= sample.rtt_ns / 2
    path = tmp_path / CLOCK_SYNC_FILE
    assert read_clock_sync(path) == result
    plain = msgspec.json.decode(path.read_bytes())
    assert plain["reference_rank"] == 0
    assert plain["clock"] == "CLOCK_REALTIME"
    assert plain["complete"] is True
    one = plain["ranks"][1]
    assert one["offset_ns"] == one["start"]["offset_ns"]
    assert one["drift_ppm"] == pytest.approx(
        (one["end"]["offset_ns"] - one["start"]["offset_ns"]) / (one["end"]["at_ns"] - one["start"]["at_ns"]) * 1e6
    )
    assert one["bound_worst_ns"] == max(one["start"]["bound_ns"], one["end"]["bound_ns"])
    assert one["start"]["samples"] == 32
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.spec("C15")
def test_a_rank_that_is_gone_at_the_end_keeps_its_offset_and_has_no_bound(world, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_COMES_S", 2.0)
    monkeypatch.setattr(module, "_ANSWERS_S", 60.0)
    run = RunFolder(tmp_path, "run", 0)

    def work(peers):
        clocks = ClockSynchronisation(Clock(), peers, place(peers.rank, 3), run)
        clocks.at_start()
        if peers.rank == 1:
            return None
        peers.store.set(f"still/{peers.rank}", "1")
        peers.store.wait(["still/0", "still/2"])
        return clocks.at_end()

    sync = world(3, work)[0]
    gone, there = sync.of(1), sync.of(2)
    assert gone.end is None
    assert "rank 1 did not answer" in gone.reason
    assert gone.drift_ppm is None
    assert gone.bound_ns(gone.start.at_ns) is None
    assert gone.to_reference(gone.start.at_ns) == gone.start.at_ns - gone.start.offset_ns
    assert there.end is not None
    assert there.reason is None
    plain = msgspec.json.decode((tmp_path / CLOCK_SYNC_FILE).read_bytes())["ranks"][1]
    assert (plain["bound_end_ns"], plain["bound_worst_ns"], plain["drift_ppm"]) == (None, None, None)


def test_nothing_is_measured_when_it_is_off(world, tmp_path):
    assert synchronise(world, tmp_path, Clock(sync=False)) == [None, None]
    assert not (tmp_path / CLOCK_SYNC_FILE).exists()


@pytest.mark.parametrize("gone", [False, True])
def test_the_store_is_left_as_it_was_and_may_be_gone_at_the_end(world, tmp_path, gone):
    def work(peers):
        before = peers.store.timeout
        clocks = ClockSynchronisation(Clock(), peers, place(), RunFolder(tmp_path, "run", 0))
        clocks.at_start()
        if gone:
            peers.store = Mock(wraps=peers.store, timeout=before)
            peers.store.set.side_effect = dist.DistNetworkError("Connection reset by peer")
        return clocks.at_end().complete, peers.store.timeout == before

    assert world(1, work) == [(True, True)]
