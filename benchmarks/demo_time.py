"""How long the demo takes on this machine: `python -m benchmarks.demo_time` prints one line of JSON.

Regime: `aorta demo` in an empty folder with an empty home, the environment already made; eight launches of two ranks
and the report, as a newcomer starts it. `seconds` is wall time, to be below `target_s` on a quiet machine; `lines` what
stands on a terminal: its own output, the line in front and the bar. `load_average` (one minute, before) says how quiet
it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.runs import ROOT, environment

TARGET_S = 90.0


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(HOME=folder, PYTHONPATH=str(ROOT))
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "aorta", "demo"],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - begin
        page = Path(folder) / "reports" / "demo" / "report.html"
        answer = {
            "seconds": round(seconds, 1),
            "target_s": TARGET_S,
            "lines": 2 + len(done.stdout.splitlines()),
            "page_bytes": page.stat().st_size if page.exists() else None,
            "exit_code": done.returncode,
            "load_average": round(load, 1),
        }
    sys.stdout.write(json.dumps(answer) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
