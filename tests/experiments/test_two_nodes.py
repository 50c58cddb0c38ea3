"""Two torchrun nodes on this machine with folders of their own; gathered, they are one run for the report."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.runs import HANGS_S, ROOT, SMALL, environment, free_port, record

pytestmark = [pytest.mark.dist, pytest.mark.thorough]


def ended(processes):
    """Each process's code and words; none is left running."""
    try:
        said = [process.communicate(timeout=HANGS_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], said


def command(script, *words):
    done = subprocess.run(
        [sys.executable, str(ROOT / "analysis" / script), *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=HANGS_S,
    )
    return done.returncode, done.stdout, done.stderr


def test_two_nodes_without_a_shared_disk_become_one_run(tmp_path):
    # Port 0 would have each node choose its own; a file cannot be a meeting point of two machines, this is one.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--rdzv_id", tmp_path.name]
    words = [*SMALL, "label=both", "profiling.enabled=true", "profiling.wait=1", "profiling.warmup=1"]
    folders = [tmp_path / "node0", tmp_path / "node1"]
    nodes = [
        subprocess.Popen(
            [*torchrun, str(ROOT / "train.py"), *words, f"training.output_dir={folder}"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for folder in folders
    ]
    codes, said = ended(nodes)
    assert codes == [0, 0], said
    there = [sorted(path.name for path in (folder / "both").glob("rank_*")) for folder in folders]
    assert sorted([*there[0], *there[1]]) == ["rank_0_metrics.jsonl", "rank_1_metrics.jsonl"]
    assert len(there[0]) == 1
    into = tmp_path / "gathered"
    code, out, err = command("gather.py", "--into", into, *(folder / "both" for folder in folders))
    assert code == 0, err
    assert "2 of 2 ranks" in out
    run_id = json.loads((into / "run.json").read_text())["run_id"]
    assert [record(into, rank).header.run_id for rank in (0, 1)] == [run_id, run_id]
    assert all(any((into / "torch_profiler" / f"rank{rank}").iterdir()) for rank in (0, 1))
    report = tmp_path / "report"
    code, _, err = command("overlap_report.py", "--log-dir", into, "--label", "both", "--output", report)
    assert code == 0, err
    entry = json.loads((report / "summary.json").read_text())["datasets"]["both"]
    assert entry["health"]["ranks_missing"] == []
    # What needs every rank is there: collectives matched across the two nodes.
    assert entry["metrics"]["job_step_ms"]["median"] > 0
    assert any(row["transfer_ms"]["median"] is not None for row in entry["collectives"])
    # One node alone: the report is not whole, and the command that gathers says so.
    code, _, err = command("gather.py", "--into", tmp_path / "half", folders[0] / "both")
    assert code == 5
    assert "no record of rank" in err
    assert any((tmp_path / "half").iterdir())
