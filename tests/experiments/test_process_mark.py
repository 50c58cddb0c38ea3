"""What carries the mark of a launch is found and ended, and nothing else."""

from __future__ import annotations

import secrets
import subprocess

from aorta.experiments.process import MARK, end_marked
from tests.experiments.test_process import gone


def test_only_marked_processes_are_ended() -> None:
    command = ["sleep", "600"]
    one, two = secrets.token_hex(8), secrets.token_hex(8)  # tests of another checkout may run beside these
    mine = subprocess.Popen(command, env={"PATH": "/usr/bin:/bin", MARK: one})
    other = subprocess.Popen(command, env={"PATH": "/usr/bin:/bin", MARK: two})
    try:
        assert end_marked(one) == 1
        assert gone(mine.pid)
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()
