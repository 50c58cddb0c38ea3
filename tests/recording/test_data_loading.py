"""Time in `next()` of a DataLoader is auxiliary work called `data`, without a line of the loop that says so; and
`recording.range`: in the record, in tables and on the page.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, dataloader

import aorta
import aorta.analysis
from aorta.analysis.account import COMPUTATION, IDLE, OUTSIDE, account_of
from aorta.analysis.aggregate import LabelledRun
from aorta.errors import ConfigError
from aorta.instrument.event_clock import HostClock
from aorta.read.record import load_run
from aorta.report.page.timelines import NAMED, spans_of
from aorta.report.summary import write_report
from tests.runs import record

OWN = dataloader._BaseDataLoaderIter.__next__


class Batches(Dataset[torch.Tensor]):
    def __init__(self, sleep_s: float = 0.0) -> None:
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        return torch.full((4,), float(range(6)[index]))


class Stream(IterableDataset[torch.Tensor]):
    """Batches of another loader."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.inner


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def train(net: nn.Module, loader: Any, recording: aorta.Recording | None = None) -> list[float]:
    """Train an epoch; returns how long the loop waited for each batch."""
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    waited_ms, batches = [], iter(loader)
    while True:
        begun_s = time.perf_counter()
        try:
            batch = next(batches)
        except StopIteration:
            return waited_ms
        waited_ms.append(1e3 * (time.perf_counter() - begun_s))
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if recording is not None:
            recording.step()


def data_ms(folder: Path) -> list[list[float]]:
    """How long each range called data of each step is."""
    return [
        [(span.end_ns - span.start_ns) / 1e6 for span in step.aux if span.name == "data"]
        for step in record(folder).steps
    ]


def recorded(folder, net):
    return aorta.record(folder, model=net, warmup_steps=0, devices="off")


def means(folder: Path, depth: int) -> dict[tuple[str, ...], float]:
    account = account_of(LabelledRun("run", load_run(folder)))
    assert not isinstance(account, str)
    assert sum(account.ms(depth).values()) == pytest.approx(account.step_ms)
    return account.ms(depth)


@pytest.mark.parametrize("sleep_s", [0.02, 0.0], ids=["slow", "healthy"])
def test_the_wait_for_a_batch_is_data_and_the_training_the_same(tmp_path, sleep_s):
    net, plain = model(), model()
    with recorded(tmp_path, net) as recording:
        waited_ms = train(net, DataLoader(Batches(sleep_s)), recording)
        assert recording._recorder.progress.enter("forward") != "data"  # the end of an epoch is no error
    train(plain, DataLoader(Batches()))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    seen_ms = data_ms(tmp_path)
    assert [len(step) for step in seen_ms] == [1] * 6  # the StopIteration is behind the last step
    for (seen,), outside in zip(seen_ms, waited_ms, strict=True):
        assert 1e3 * sleep_s <= seen <= outside
    assert means(tmp_path, 2)[OUTSIDE, "data"] == pytest.approx(sum(map(sum, seen_ms)) / 6)


@pytest.mark.parametrize("how", ["a loader of a loader", "a range of the loop", "both"])
def test_time_is_data_once(tmp_path, how):
    net, loader = model(), DataLoader(Batches(0.001))
    if how != "a range of the loop":
        loader = DataLoader(Stream(loader), batch_size=None)
    with recorded(tmp_path, net) as recording:
        batches = iter(loader)
        for _ in range(3):
            if how == "a loader of a loader":
                batch = next(batches)
            else:
                with recording.aux("data"):
                    batch = next(batches)
            net(batch).sum().backward()
            recording.step()
    assert [len(step) for step in data_ms(tmp_path)] == [1] * 3


def test_other_threads_children_and_what_is_behind_the_recording_are_no_data(tmp_path):
    with recorded(tmp_path, model()) as recording:
        thread = threading.Thread(target=lambda: list(DataLoader(Batches())))
        thread.start()
        thread.join()
        recording.step()
        # Workers run loaders of their own; they live on behind the end of an epoch, and of the recording.
        inner = Stream(DataLoader(Batches()))
        kept = DataLoader(inner, batch_size=None, num_workers=1, persistent_workers=True, timeout=60)
        assert [[float(batch.max()) for batch in kept] for _ in range(2)] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2
        recording.step()
    assert [len(step) for step in data_ms(tmp_path)] == [0, 2 * 7]
    assert len(list(kept)) == 6


def test_iterators_are_torchs_own_again(tmp_path):
    def theirs(iterator):
        mine.append(iterator)
        return below(iterator)

    mine = []
    with recorded(tmp_path / "a", model()):
        batches = iter(DataLoader(Batches()))
        with pytest.raises(NotImplementedError, match="cannot be pickled"):
            copy.copy(batches)
        assert dataloader._BaseDataLoaderIter.__next__ is not OWN
    assert dataloader._BaseDataLoaderIter.__next__ is OWN
    assert float(next(batches).max()) == 0.0
    try:
        with recorded(tmp_path / "b", model()) as recording:
            below, dataloader._BaseDataLoaderIter.__next__ = dataloader._BaseDataLoaderIter.__next__, theirs
            next(batches)
            recording.step()
        assert float(next(batches).max()) == 2.0  # a function that somebody put around ours stays
        assert mine == [batches] * 2
    finally:
        dataloader._BaseDataLoaderIter.__next__ = OWN
    assert [len(step) for step in data_ms(tmp_path / "b")] == [1]


def test_an_error_of_a_dataset_is_the_callers_and_one_of_ours_is_not(tmp_path, monkeypatch, caplog):
    with recorded(tmp_path, model()) as recording:
        with pytest.raises(IndexError):
            next(iter(DataLoader(Batches(), sampler=[7])))
        recording.restart()
        broken = Mock(side_effect=OSError("no more events"))
        with monkeypatch.context() as patch:
            patch.setattr(HostClock, "mark", broken)
            patch.setattr(recording._recorder, "_span", lambda *_: SimpleNamespace(__enter__=broken))
            assert len(list(DataLoader(Batches()))) == 6
        broken.assert_called_once()
        recording.step()
    (said,) = [text for text in caplog.messages if "DataLoader" in text]
    assert "OSError: no more events" in said
    assert data_ms(tmp_path) == [[]]


def test_a_named_range_explains_idle_time(tmp_path):
    net = model()
    with recorded(tmp_path, net) as recording, recording.range("everything"):
        for _ in range(4):
            with recording.range("prepare"):
                with recording.range("tokenize"):
                    time.sleep(0.02)
                time.sleep(0.002)
            elsewhere = threading.Thread(target=lambda: recording.range("beside").__enter__())
            elsewhere.start()
            elsewhere.join()
            with recording.range("forward"):
                loss = net(torch.ones(4)).sum()
            loss.backward()
            recording.step()
    idle_ms = {words[1]: ms for words, ms in means(tmp_path, 2).items() if words[0] == IDLE}
    assert idle_ms['range "tokenize"'] >= 20
    assert idle_ms['range "prepare"'] >= 2
    assert {name for name in idle_ms if name.startswith("range")} == {'range "tokenize"', 'range "prepare"'}
    assert (COMPUTATION,) in means(tmp_path, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three steps, of which 1 and 2 share a range."""
    place, net = tmp_path_factory.mktemp("run"), model()
    with recorded(place, net) as recording:
        across = recording.range("across <b>")
        for step in range(3):
            if step == 1:
                across.__enter__()
            with recording.range("forward"), recording.range("inner"):
                net(torch.ones(2, 4)).square().mean().backward()
            if step == 2:
                across.__exit__(None, None, None)
                with suppress(ValueError), recording.range("fails"):
                    raise ValueError
            recording.step()
        with recording.range("behind the last step"):
            pass
    return place


def test_a_range_stands_in_the_step_that_ends_first_after_it(folder, tmp_path):
    steps = record(folder).steps
    usual = ["forward", "inner"]
    assert [[row.name for row in step.ranges] for step in steps] == [usual, usual, ["across <b>", *usual, "fails"]]
    across, forward, inner, _ = steps[2].ranges
    assert across.start_ns < 0 < across.end_ns  # it began in the step before
    assert across.start_ns + steps[2].start_mono_ns >= steps[1].start_mono_ns
    assert (across.depth, forward.depth, inner.depth) == (0, 1, 2)
    for step in steps:
        assert all(0 <= row.start_ns <= row.end_ns <= step.end_mono_ns - step.start_mono_ns for row in step.ranges[-2:])
    with recorded(tmp_path, model()) as recording:
        with recording.range("dropped"):
            pass
        recording.restart()
        recording.step()
    assert "ranges" not in json.loads((tmp_path / "rank_0_metrics.jsonl").read_text().splitlines()[1])
    with pytest.raises(ConfigError, match=r"recording\.range\(\): the recording has ended"):
        recording.range("late")
    assert aorta.analysis.user_ranges(tmp_path).empty


def test_frames_have_a_row_and_the_page_has_a_lane_for_them(folder, tmp_path):
    ranges = aorta.analysis.user_ranges(folder)
    assert ranges["name"].value_counts().to_dict() == {"forward": 3, "inner": 3, "across <b>": 1, "fails": 1}
    assert ranges["error"].dropna().tolist() == ["ValueError"]
    assert (ranges["duration_ms"] > 0).all()
    assert ranges["start_mono_ns"].is_monotonic_increasing
    assert (aorta.analysis.steps(folder)["aux_ms"] == 0).all()  # they change no metric
    spans = spans_of(LabelledRun("x", aorta.analysis.load_run(folder)), 10_000, 8)
    assert spans.lanes[-3:] == [NAMED, f"{NAMED}, level 2", f"{NAMED}, level 3"]
    assert {"forward", "inner"} <= set(spans.whats)
    assert (spans.columns["length"][spans.columns["lane"] >= len(spans.lanes) - 3] > 0).all()
    write_report({"x": folder}, tmp_path)
    assert "across <b>" not in (tmp_path / "report.html").read_text()
