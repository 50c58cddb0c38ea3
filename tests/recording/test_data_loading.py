"""Time in `next()` of a DataLoader is auxiliary work called `data`, without a line of the loop that says so."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, dataloader

import aorta
from aorta.analysis.account import COMPUTATION, IDLE, OUTSIDE, account_of
from aorta.analysis.aggregate import LabelledRun
from aorta.instrument.event_clock import HostClock
from aorta.read.record import load_run
from tests.recording.test_zero_lines import recorded
from tests.runs import record

SLOW_MS = 20.0
OWN = dataloader._BaseDataLoaderIter.__next__


class Batches(Dataset[torch.Tensor]):
    """`spent_ms`: how long its batches took by its own clock."""

    def __init__(self, sleep_s: float = 0.0, count: int = 6) -> None:
        self.sleep_s, self.count, self.spent_ms = sleep_s, count, [0.0] * count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        begun_s = time.perf_counter()
        time.sleep(self.sleep_s)
        self.spent_ms[index] = 1e3 * (time.perf_counter() - begun_s)
        return torch.full((4,), float(index))


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


def means(folder: Path, depth: int) -> dict[tuple[str, ...], float]:
    account = account_of(LabelledRun("run", load_run(folder)))
    assert not isinstance(account, str)
    assert sum(account.ms(depth).values()) == pytest.approx(account.step_ms)
    return account.ms(depth)


@pytest.mark.parametrize("sleep_s", [SLOW_MS / 1e3, 0.0], ids=["slow", "healthy"])
def test_the_wait_for_a_batch_is_data_and_the_training_the_same(tmp_path: Path, sleep_s: float) -> None:
    batches, net, plain = Batches(sleep_s), model(), model()
    with aorta.record(tmp_path, model=net, warmup_steps=0, devices="off") as recording:
        waited_ms = train(net, DataLoader(batches), recording)
        assert recording._recorder.progress.enter("forward") != "data"  # the end of an epoch is no error
    train(plain, DataLoader(Batches()))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    seen_ms = data_ms(tmp_path)
    assert [len(step) for step in seen_ms] == [1] * 6  # the StopIteration is behind the last step
    for inside, (seen,), outside in zip(batches.spent_ms, seen_ms, waited_ms, strict=True):
        assert inside <= seen <= outside
    account_ms = means(tmp_path, 2)
    assert account_ms[OUTSIDE, "data"] == pytest.approx(sum(map(sum, seen_ms)) / 6)
    assert account_ms[OUTSIDE, "data"] >= 1e3 * sleep_s


@pytest.mark.dist
def test_without_a_line(tmp_path: Path) -> None:
    recorded(tmp_path, "slow data")
    for rank in (0, 1):
        steps = record(tmp_path, rank).steps
        assert [[span.name for span in step.aux] for step in steps] == [["data", "optimizer"]] * 7
    account_ms = means(tmp_path, 2)
    assert account_ms[OUTSIDE, "data"] >= SLOW_MS


@pytest.mark.parametrize("how", ["a loader of a loader", "a range of the loop", "both"])
def test_time_is_data_once(tmp_path: Path, how: str) -> None:
    net, loader = model(), DataLoader(Batches(0.001))
    if how != "a range of the loop":
        loader = DataLoader(Stream(loader), batch_size=None)
    with aorta.record(tmp_path, model=net, warmup_steps=0, devices="off") as recording:
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


def test_other_threads_children_and_what_is_behind_the_recording_are_no_data(tmp_path: Path) -> None:
    net = model()
    with aorta.record(tmp_path, model=net, warmup_steps=0, devices="off") as recording:
        thread = threading.Thread(target=lambda: list(DataLoader(Batches())))
        thread.start()
        thread.join()
        recording.step()
        # Workers run loaders of their own; they live on behind the end of an epoch, and of the recording.
        kept = DataLoader(
            Stream(DataLoader(Batches())), batch_size=None, num_workers=1, persistent_workers=True, timeout=60
        )
        assert [[float(batch.max()) for batch in kept] for _ in range(2)] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2
        recording.step()
    assert [len(step) for step in data_ms(tmp_path)] == [0, 2 * 7]
    assert len(list(kept)) == 6


def test_iterators_are_torchs_own_again(tmp_path: Path) -> None:
    mine: list[object] = []
    with aorta.record(tmp_path / "a", model=model(), devices="off") as recording:
        batches = iter(DataLoader(Batches()))
        assert isinstance(batches, dataloader._SingleProcessDataLoaderIter)
        assert isinstance(copy.copy(DataLoader(Batches())), DataLoader)
        with pytest.raises(NotImplementedError, match="cannot be pickled"):
            copy.copy(batches)
        ours = dataloader._BaseDataLoaderIter.__next__
        recording.step()
    assert dataloader._BaseDataLoaderIter.__next__ is OWN is not ours
    assert float(next(batches).max()) == 0.0

    def theirs(iterator: Any) -> Any:
        mine.append(iterator)
        return below(iterator)

    try:
        with aorta.record(tmp_path / "b", model=model(), devices="off") as recording:
            below = dataloader._BaseDataLoaderIter.__next__
            dataloader._BaseDataLoaderIter.__next__ = theirs  # type: ignore[method-assign]
            next(batches)
            recording.step()
        assert float(next(batches).max()) == 2.0  # a function that somebody put around ours stays
        assert mine == [batches] * 2
    finally:
        dataloader._BaseDataLoaderIter.__next__ = OWN  # type: ignore[method-assign]
    assert [len(step) for step in data_ms(tmp_path / "b")] == [1]


def test_an_error_of_a_dataset_is_the_callers_and_one_of_ours_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    with aorta.record(tmp_path, model=net, warmup_steps=0, devices="off") as recording:
        with pytest.raises(IndexError):
            next(iter(DataLoader(Batches(), sampler=[7])))
        recording.restart()
        marks = iter([None])

        def mark(*_: object) -> int:
            next(marks)
            raise OSError("no more events")

        with monkeypatch.context() as broken:
            broken.setattr(HostClock, "mark", mark)
            broken.setattr(recording._recorder, "_span", lambda *_: SimpleNamespace(__enter__=mark))
            loaded = list(DataLoader(Batches()))
        assert len(loaded) == 6
        recording.step()
    (said,) = [text for text in caplog.messages if "DataLoader" in text]
    assert "OSError: no more events" in said
    assert data_ms(tmp_path) == [[]]


def test_a_named_range_explains_idle_time(tmp_path: Path) -> None:
    net = model()
    with aorta.record(tmp_path, model=net, warmup_steps=0, devices="off") as recording, recording.range("everything"):
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
