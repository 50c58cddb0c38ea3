"""What a killed rank had finished and not written is appended to its record, once, by whoever looks first."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aorta.read.record import load_run
from aorta.records import salvage as salvage_module
from aorta.records.progress import ROWS_AT, SLOTS, may_have_unread_rows
from aorta.records.record_file import stream
from aorta.records.ring_file import ROW
from aorta.records.ring_steps import MOST
from aorta.records.salvage import salvage
from aorta.records.schema import Step
from tests.runs import HANGS_S, ROOT, environment

STEPS = MOST + 3
KILLED = """
import os, sys, torch, aorta
model = torch.nn.Linear(2, 2)
with aorta.record(sys.argv[1], model=model, devices="off", watchdog_timeout_s=float(sys.argv[2])) as recording:
    for _ in range(int(sys.argv[3])):
        model(torch.ones(1, 2)).sum().backward()
        recording.step()
    print("done", flush=True)
    sys.stdin.read() if sys.argv[4] == "waits" else os.kill(os.getpid(), 9)
"""

IN_PYTHON = """
from aorta.instrument import instrumentation
instrumentation.compiled = lambda *_, **__: (None, "not wanted")
"""


def command(
    folder: Path, ending: str = "killed", *, steps: int = STEPS, timeout_s: float = 0, before: str = ""
) -> list[str]:
    """A recorded program that is killed in its loop."""
    return [sys.executable, "-c", before + KILLED, str(folder), str(timeout_s), str(steps), ending]


def killed(folder: Path, **how: Any) -> Path:
    """The record of such a program, and its ring."""
    done = subprocess.run(
        command(folder, **how),
        cwd=ROOT,
        env=environment(),
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    return folder / "rank_0_metrics.jsonl"


def steps_of(record: Path) -> list[int]:
    """Numbers of the steps in a record, of which every line can be read."""
    problems: list[str] = []
    found = [line.global_step for line in stream(record, problems) if isinstance(line, Step)]
    assert problems == []
    return found


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody has looked at."""
    folder = tmp_path_factory.mktemp("dead") / "run"
    assert len(steps_of(killed(folder))) < STEPS
    return folder


@pytest.fixture
def run(dead: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(dead, tmp_path / "run"))


def test_without_compiled_code_no_step_is_lost_either(tmp_path: Path) -> None:
    record = killed(tmp_path, before=IN_PYTHON)
    assert len(steps_of(record)) < STEPS
    salvage(tmp_path)
    assert steps_of(record) == list(range(STEPS))


def torn(record: Path) -> None:
    """A line was being written."""
    with record.open("a") as file:
        file.write('{"record":"step","rank":0,"wor')


@pytest.mark.parametrize("before", [lambda _record: None, torn], ids=["whole", "torn"])
def test_every_finished_step_is_in_the_record_once(run: Path, before: Callable[[Path], None]) -> None:
    record = run / "rank_0_metrics.jsonl"
    written = record.read_bytes()
    before(record)
    assert salvage(run) == STEPS - len(steps_of_bytes(written))
    assert record.read_bytes().startswith(written)
    assert steps_of(record) == list(range(STEPS))
    assert not may_have_unread_rows(run / "progress" / "rank_0.bin")
    assert (run / "progress" / "rank_0.bin").stat().st_size < ROWS_AT * 2
    assert salvage(run) == 0


def steps_of_bytes(written: bytes) -> list[bytes]:
    """Lines of steps."""
    return [line for line in written.splitlines() if line.startswith(b'{"record":"step"')]


def test_who_reads_the_run_completes_it_first(run: Path) -> None:
    load_run(run)
    assert steps_of(run / "rank_0_metrics.jsonl") == list(range(STEPS))


def test_the_next_run_in_the_folder_completes_it_before_it_is_moved(run: Path) -> None:
    killed(run, steps=1)
    (earlier,) = (run / "history").iterdir()
    assert steps_of(earlier / "rank_0_metrics.jsonl") == list(range(STEPS))


def test_the_watchdog_completes_it_when_the_rank_dies(tmp_path: Path) -> None:
    record = killed(tmp_path, timeout_s=60)
    ring = tmp_path / "progress" / "rank_0.bin"
    deadline = time.monotonic() + HANGS_S
    while may_have_unread_rows(ring) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert steps_of(record) == list(range(STEPS))


def test_the_record_of_a_rank_that_lives_is_left_alone(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "waits"), cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"done\n"
    before = (tmp_path / "rank_0_metrics.jsonl").read_bytes()
    assert salvage(tmp_path) == 0
    assert (tmp_path / "rank_0_metrics.jsonl").read_bytes() == before
    process.communicate(timeout=HANGS_S)
    assert steps_of(tmp_path / "rank_0_metrics.jsonl") == list(range(STEPS))
    assert not may_have_unread_rows(tmp_path / "progress" / "rank_0.bin")


def test_a_ring_of_another_record_is_left_alone(run: Path) -> None:
    record = run / "rank_0_metrics.jsonl"
    changed = record.read_text().replace('"monotonic_ns":', '"monotonic_ns":1', 1)
    record.write_text(changed)
    assert salvage(run) == 0
    assert record.read_text() == changed
    assert "rank_0.bin: steps that its rank had finished may be missing" in load_run(run).health.files_left_out[0]


def test_a_ring_that_was_damaged_is_left_alone(run: Path) -> None:
    ring, record = run / "progress" / "rank_0.bin", run / "rank_0_metrics.jsonl"
    before = record.read_bytes()
    data = bytearray(ring.read_bytes())
    data[ROWS_AT + ROW.fields["name"][1] :: ROW.itemsize] = b"\x55" * SLOTS  # type: ignore[index]
    ring.write_bytes(data)
    problems: list[str] = []
    assert salvage(run, problems) == 0
    assert [problem.partition(":")[0] for problem in problems] == ["rank_0.bin"]
    assert record.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_read_as_it_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(salvage_module, "open_own", refuse)
    assert salvage(run) == 0
