"""Stand-in for an interpreter with torch, and for a container's torchrun: writes the run folder it is told to.

Each call is appended to $FAKE_RECORD; $FAKE_ACTS says what launches do, as {"candidate/01": {...}}:
    fail: how many starts end with `code` (7)      ranks: how many of two ranks leave a record (2)
    hang: how many starts leave a rank in a session of its own, as torchrun does, and sleep
    job_step_ms: of every step (100)
"""

# ruff: noqa: T201 - its words are what a launch says
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KEPT = ("FAKE_NAME", "NCCL_ALGO", "RANK", "AORTA_LAUNCH")


def note(**fields: Any) -> list[dict[str, Any]]:
    """Append to the record; returns what stood there."""
    path = Path(os.environ["FAKE_RECORD"])
    before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    with path.open("a") as file:
        file.write(json.dumps(fields | {"argv": sys.argv[1:], "cwd": str(Path.cwd())}) + "\n")
    return before


def hang(act: dict[str, Any]) -> None:
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    note(call="hangs", pid=os.getpid(), rank=rank.pid)
    time.sleep(600)


def write_run(folder: Path, run_id: str, ranks: int, job_step_ms: float) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.analysis.builders import header, metrics, step, write_manifest, write_rank

    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        overlap = metrics(job_step_ms, job_step_ms / 2, job_step_ms / 4, job_step_ms / 8)
        steps = [step(rank, 2, number, overlap=overlap, warmup=number == 0) for number in range(3)]
        write_rank(folder, header(rank, 2, run_id=run_id), steps)
    write_manifest(folder, run_id=run_id, world_size=2)


def launched(words: list[str]) -> int:
    place = next(word for word in reversed(words) if word.startswith("training.output_dir="))
    folder = Path(place.partition("=")[2].strip("'"))
    name = "/".join(folder.parts[-2:])
    before = note(call="launch", name=name, env={key: os.environ.get(key) for key in KEPT})
    starts = sum(line.get("name") == name for line in before)
    act = json.loads(os.environ.get("FAKE_ACTS", "{}")).get(name, {})
    print(f"launch {name}, start {starts}", flush=True)
    if starts < act.get("hang", 0):
        folder.mkdir(parents=True)
        (folder / "rank_0_metrics.jsonl").write_text("{")
        hang(act)
    if starts < act.get("fail", 0):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "half").write_text("half")
        print("RuntimeError: it broke here\ntorchrun ends", file=sys.stderr)
        return int(act.get("code", 7))
    run_id = f"{name.replace('/', '-')}-{len(before)}"
    write_run(folder, run_id, act.get("ranks", 2), act.get("job_step_ms", 100.0))
    return 0


def main(words: list[str]) -> int:
    if words[0] == "-c":
        print(json.dumps({"python": "3.12.1", "torch": os.environ.get("FAKE_TORCH", "2.13.0")}))
        return 0
    if words[-2:] == ["--cfg", "job"]:
        wrong = [word for word in words if re.match(r"wrong", word)]
        note(call="check")
        shown = [word.partition("=") for word in words if word.startswith(("workload.", "instrument."))]
        print("\n".join(f"{key}: {json.dumps(value)}" for key, _, value in shown))  # quoted: off is no boolean
        if wrong:
            print(f"error: no key {wrong[0]}", file=sys.stderr)
        return len(wrong)
    return launched(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
