"""A program that is being recorded, and does steps when it is told to; and the lines of its record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from aorta.records.record_file import stream
from aorta.records.schema import Line, Step
from tests.runs import HANGS_S, ROOT, environment, until

TOLD = """
import sys, torch, aorta
model = torch.nn.Linear(2, 2)
with aorta.record(sys.argv[1], model=model, devices="off", watchdog_timeout_s=float(sys.argv[2])) as recording:
    for told in sys.stdin:
        for _ in range(int(told)):
            if told != "30000\\n":
                model(torch.ones(1, 2)).sum().backward()
            recording.step()
        print("done", flush=True)
"""
"""Records as many steps as a line of its input says; 30,000 of them, which fill the ring, train nothing."""


class Recorded:
    """`watchdog_timeout_s`: 0 is a process that makes its lines itself."""

    def __init__(self, folder: Path, watchdog_timeout_s: float = 600) -> None:
        self.folder, self.record, self.ring = folder, folder / "rank_0_metrics.jsonl", folder / "progress/rank_0.bin"
        words, pipe = [sys.executable, "-c", TOLD, str(folder), str(watchdog_timeout_s)], subprocess.PIPE
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        self.done = 0
        self.stopped: psutil.Process | None = None

    def steps(self, count: int) -> None:
        """Have it do so many steps."""
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"
        self.done += count

    def line_maker(self) -> psutil.Process:
        """The watchdog's process, once there is a line by it."""
        self.until_written(1)
        children = psutil.Process(self.process.pid).children()
        (found,) = [child for child in children if "aorta.autopsy.watchdog" in " ".join(child.cmdline())]
        return found

    def until_written(self, count: int) -> None:
        """Wait for steps in the record."""
        until(lambda: self.record.read_bytes().count(b'"record":"step"') >= count)

    def kill(self) -> None:
        """And wait for its end."""
        with self.process:  # its pipes are closed
            self.process.kill()

    def end(self) -> str:
        """End it, and whatever was stopped; what it said."""
        self.process.stdin.close()
        code = self.process.wait(HANGS_S)
        if self.stopped is not None:  # it has the same standard error
            self.stopped.kill()
        said = self.process.stderr.read()
        assert code == 0, said
        return said


def lines_of(record: Path) -> list[Line]:
    """All of a record, of which every line can be read."""
    problems: list[str] = []
    lines = list(stream(record, problems))
    assert problems == []
    return lines


def steps_of(record: Path) -> list[int]:
    return [line.global_step for line in lines_of(record) if isinstance(line, Step)]
