"""What an upload in flight costs training: `python -m benchmarks.upload_cost`.

Regime: one process, steps of matrix products of about 100 ms, one thread; blocks of steps alternate in palindromes,
with and without uploads of a file of `--mib` MiB to S3 (moto's server in a process of its own, s3fs as the client), one
after another as long as the block lasts. The first block is for the caches. `a_a` is the same plan without any upload,
which says how far two halves differ on this machine anyway.

Prints one JSON object last: the ratio of step times with an upload in flight to those without, with its 95 % interval;
exit 1 when its median is above 1.01, or when `a_a` does not lie within 1 % of 1: then the ratio says nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from aorta.profiling.trace_names import Moment, TraceWindow
from aorta.profiling.trace_saver import Job, SavedFile, Saver
from aorta.profiling.upload import destination
from benchmarks import plans

_SERVER = """
import os, sys
os.nice(19)  # in earnest it runs on another machine
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""


class Uploads:
    """Files submitted to a saver one after another while `on` is set."""

    def __init__(self, folder: Path, mib: int) -> None:
        self._content = os.urandom(1 << 20) * mib
        self._folder, self._number = folder, 0
        self.saver = Saver(keep=0)
        self._to = destination("s3://bucket", "{file}", {}, overwrite=True)
        self.on = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def _feed(self) -> None:
        while not self._stop.wait(0.005):
            if self.on and self.saver.pending == 0:
                self._number += 1
                name = f"{self._number}.json"
                output = SavedFile("trace", self._folder / name, self._to, name)
                window = TraceWindow(0, 0, False, Moment(batch=self._number))
                self.saver.submit(Job(window, lambda path: path.write_bytes(self._content), [output]))

    def close(self) -> int:
        """Files that arrived."""
        self._stop.set()
        self._thread.join()
        self.saver.drain(120)
        return sum(bool(file.address) for window in self.saver.windows for file in window.files)


def step(matrix: torch.Tensor) -> float:
    """Seconds of one step."""
    begin = time.perf_counter()
    for _ in range(4):
        matrix = matrix @ matrix
        matrix = matrix / matrix.norm()
    return time.perf_counter() - begin


def pairs(uploads: Uploads | None, words: Any) -> list[tuple[float, float]]:
    """Median step without and with uploads, a pair a half of a palindrome."""
    matrix = torch.randn(words.size, words.size)
    found: list[tuple[float, float]] = []
    for half in range(words.halves + 1):
        block: dict[bool, float] = {}
        for on in (False, True) if half % 2 == 0 else (True, False):
            if uploads is not None:
                uploads.on = on
                while not on and uploads.saver.pending:
                    time.sleep(0.01)
            block[on] = statistics.median(step(matrix) for _ in range(words.steps))
        found.append((block[False], block[True]))
    return found[1:]


def measure(words: Any) -> int:
    """Serve, train, print."""
    torch.set_num_threads(1)
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert server.stdout is not None
        host, port = server.stdout.readline().split()
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        import fsspec

        fsspec.filesystem("s3").mkdir("bucket")
        with tempfile.TemporaryDirectory() as folder:
            a_a = plans.median_ratio([pairs(None, words)])
            uploads = Uploads(Path(folder), words.mib)
            ratio = plans.median_ratio([pairs(uploads, words)])
            arrived = uploads.close()
    finally:
        server.communicate("")
    figures = {"ratio": ratio, "a_a": a_a, "files_arrived": arrived, "mib_each": words.mib, "steps": words.steps}
    targets = {
        "with / without <= 1.01": ratio["median"] <= 1.01,
        "a_a within 1 %": a_a["low"] >= 0.99 and a_a["high"] <= 1.01,
        "arrived": arrived > 0,
    }
    return plans.say("upload_cost", figures, targets)


def main() -> int:
    """Parse, measure, print."""
    parser = plans.arguments(__doc__)
    quick = "--quick" in sys.argv
    parser.add_argument("--halves", type=int, default=4 if quick else 12)
    parser.add_argument("--steps", type=int, default=6 if quick else 20)
    parser.add_argument("--size", type=int, default=900)
    parser.add_argument("--mib", type=int, default=32)
    return plans.run(parser, measure, lambda _words: None)


if __name__ == "__main__":
    sys.exit(main())
