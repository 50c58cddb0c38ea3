"""Names of folders, files and kernels need not be UTF-8; every writer says them with backslashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.read.kineto_files import ALLREDUCE, GEMM, document, kernel
from tests.read.rocprof_files import as_csv
from tests.read.test_sources import report

RECORD = """
import sys, torch, aorta
model = torch.nn.Linear(4, 4)
with aorta.record(sys.argv[1], model=model) as recording:
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        recording.step()
"""


def _folder(tmp_path: Path) -> Path:
    return Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))


def test_a_report_of_traces_and_of_a_record(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "traces").mkdir(parents=True)
    rows = [kernel(GEMM, 0, 50), kernel("k_MARK", 60, 5), kernel(ALLREDUCE, 20, 70, stream=9)]
    text = json.dumps(document(rows, cupti_version=26)).encode().replace(b"MARK", b"\xe9")
    (folder / "traces" / "rank0.json").write_bytes(text)
    done = subprocess.run(
        [sys.executable, "-c", RECORD, str(folder / "run")],
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
    )
    assert "Traceback" not in done.stderr
    (folder / "csv").mkdir()
    for name, content in as_csv("direct").items():
        (folder / "csv" / name).write_bytes(content.replace(b"Cijk", b"\xe9"))
    for name in ("traces", "run", "csv"):
        report(["--log-dir", str(folder / name), "--label", "x"], folder / name / "out")
        summary = (folder / name / "out" / "summary.json").read_bytes()
        msgspec.json.decode(summary)
        assert rb"caf\\udce9" in summary
