"""The same map here, in processes, and on a Dask cluster: the same columns, in the same order."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import aorta.analysis
from aorta.analysis.aggregate import LabelledRun, aggregate
from aorta.documents import as_json
from aorta.errors import InputError, ToolMissing
from aorta.read import engines
from aorta.read.engines import Dask, Local, progress
from aorta.read.record import load_run
from aorta.report.command import _engine, parser
from tests.analysis.builders import simulated_run

ROOT = Path(__file__).resolve().parents[2]
RANKS = 5
needs_dask = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None,
    reason='distributed is not installed: pip install "PATH/TO/CHECKOUT[dask]"',
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five ranks, one of whose files is broken."""
    place = simulated_run(tmp_path_factory.mktemp("run"), label="x", ranks=RANKS, steps=6)
    (place / "rank_3_metrics.jsonl").write_text("rubbish\n")
    return place


def entry(folder: Path, engine: object) -> str:
    return json.dumps(as_json(aggregate(LabelledRun("x", load_run(folder, engine)))))  # type: ignore[arg-type]


def test_two_processes_give_what_one_gives(folder: Path) -> None:
    here = entry(folder, Local(1))
    assert entry(folder, Local(2)) == here
    assert json.loads(here)["health"]["files_left_out"][0].startswith("rank_3_metrics.jsonl:1: ")


def test_little_to_read_starts_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ProcessPoolExecutor", None)
    assert list(load_run(folder).ranks) == [0, 1, 2, 4]


def kill(file: Path) -> None:
    os._exit(9)


def test_a_process_that_is_killed_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a process that was reading ended: killed .* --jobs 1"):
        list(Local(2).map(kill, [tmp_path] * 2))


class Buffer:
    """Stands for what a reader holds while it reads."""


BUFFERS: list[weakref.ref[Buffer]] = []


def refuse(file: Path) -> None:
    buffer = Buffer()
    BUFFERS.append(weakref.ref(buffer))
    try:
        raise ValueError("broken")
    except ValueError as error:
        raise InputError("refused") from error


def test_a_refusal_that_is_raised_again_keeps_nothing_of_the_reader_alive(tmp_path: Path) -> None:
    gc.disable()  # or it might collect a cycle in time
    try:
        (result,) = Local(1).map(refuse, [tmp_path])
        with pytest.raises(InputError, match=r"^refused$"):
            raise result
        assert BUFFERS.pop()() is None
    finally:
        gc.enable()


def pid(file: Path) -> int:
    return os.getpid()


def test_few_files_are_under_way_at_a_time(tmp_path: Path) -> None:
    submitted: list[Path] = []

    def submit(path: Path) -> SimpleNamespace:
        submitted.append(path)
        return SimpleNamespace(result=lambda: 0)

    results = engines._bounded(submit, [tmp_path] * 50, 4)
    next(results)
    assert len(submitted) == 4
    assert len(list(results)) == 49


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scheduler and two worker processes on loopback; yields the address."""
    place = tmp_path_factory.mktemp("dask")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = place / "scheduler.json"
    of_all = ["--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(found)]
    log = (place / "log").open("w")
    started = []

    def start(part: str, *words: str) -> None:
        command = [sys.executable, "-c", f"from distributed.cli.dask_{part} import main; main()", *of_all, *words]
        streams = {"stdout": subprocess.DEVNULL, "stderr": log}
        started.append(subprocess.Popen(command, cwd=place, env=environment, **streams))

    try:
        start("scheduler", "--port", "0")
        for _ in range(2):
            start("worker", "--nthreads", "1", "--no-nanny")
        deadline = time.monotonic() + 600
        while not found.exists():
            assert time.monotonic() < deadline, (place / "log").read_text()
            time.sleep(0.1)
        address = json.loads(found.read_text())["address"]
        import distributed

        with distributed.Client(address, timeout=600, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=600)
        yield address
    finally:
        for process in started:
            process.kill()  # asked to end, one now and then waits for another that has gone
            process.wait()
        log.close()


@pytest.mark.thorough
@needs_dask
@pytest.mark.filterwarnings("default")  # of distributed and tornado, at their own start and end
def test_a_cluster_gives_what_this_machine_gives(cluster: str, folder: Path) -> None:
    assert entry(folder, Dask(cluster)) == entry(folder, Local(1))
    assert {path.name for path in folder.iterdir()} == {f"rank_{rank}_metrics.jsonl" for rank in range(RANKS)} | {
        "run.json"
    }
    workers = set(Dask(cluster).map(pid, [*folder.glob("*.jsonl")] * 4))
    assert len(workers) == 2
    assert os.getpid() not in workers
    assert list(aorta.analysis.load_run(folder, scheduler=cluster).ranks) == [0, 1, 2, 4]


def test_the_words_choose_the_engine() -> None:
    chosen = [_engine(parser().parse_args(words)) for words in ([], ["--jobs", "3"], ["--scheduler", "a"])]
    assert chosen == [Local(), Local(3), Dask("a")]


@needs_dask
@pytest.mark.filterwarnings("default")
def test_no_scheduler_is_an_error_with_the_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_CONNECT", "1s")
    with pytest.raises(InputError, match=r"no Dask scheduler answers at 'tcp://127\.0\.0\.1:9'"):
        load_run(folder, Dask("tcp://127.0.0.1:9"))


def test_without_the_package_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ToolMissing, match=r"CHECKOUT\[dask\]"):
        load_run(folder, Dask("tcp://127.0.0.1:9"))


def test_a_bar_on_a_terminal_and_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(pause_s: float) -> str:
        with progress(3, "reading x") as tick:
            time.sleep(4 * pause_s)  # the bar comes once it is worth one
            for _ in range(3):
                tick()
                time.sleep(pause_s)
        return capsys.readouterr().err

    assert run(0) == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert "reading x" in run(0.15)
