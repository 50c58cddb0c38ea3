"""`scripts/slurm.sbatch` on a real Slurm: two nodes are one run; signals, failures, disks of their own."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from aorta.analysis import load_run
from tests.experiments import slurm
from tests.runs import ROOT, SMALL, environment, free_port, record

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm.missing()), reason=f"Slurm is not installed: {', '.join(slurm.missing())}"),
]
SCRIPT = str(ROOT / "scripts" / "slurm.sbatch")


@pytest.fixture(scope="module")
def cluster():
    with slurm.cluster(environment(AORTA_ROOT=str(ROOT))) as made:
        yield made


@pytest.fixture
def sbatch(cluster, tmp_path):
    """Submits and waits; returns the exit code and what the job said."""

    def run(*words, nodes=2, **more):
        done = cluster(
            "sbatch", "--wait", f"--nodes={nodes}", SCRIPT, *SMALL, *words, cwd=tmp_path, timeout_s=240, **more
        )
        said = "\n".join(path.read_text() for path in sorted(tmp_path.glob("aorta-*.log")))
        return done.returncode, f"{said}\n{done.stderr}\n{cluster.logs() if done.returncode else ''}"

    return run


def test_two_nodes_are_one_run(sbatch, tmp_path):
    code, said = sbatch("label=both", NPROC="2")
    assert code == 0, said
    folder = tmp_path / "artifacts" / "both"
    run = load_run(folder)
    assert (run.source.world_size, sorted(run.ranks)) == (4, [0, 1, 2, 3])
    assert [run.ranks[rank].source.node_rank for rank in range(4)] == [0, 0, 1, 1]
    assert [run.ranks[rank].source.local_rank for rank in range(4)] == [0, 1, 0, 1]
    assert run.health.ranks_missing == []
    assert json.loads((folder / "run.json").read_text())["world_size"] == 4


def test_disks_of_their_own_are_copied_together(sbatch, tmp_path):
    scratch = tmp_path / "scratch"
    code, said = sbatch("label=mine", SCRATCH=str(scratch), INTO="together")
    assert code == 0, said
    assert sorted(load_run(tmp_path / "together").ranks) == [0, 1]
    assert all((tmp_path / "together" / "logs" / f"rank_{rank}.log").is_file() for rank in (0, 1))
    assert list(scratch.iterdir()) == []  # each had a folder of its own there: what was copied is removed
    assert not (tmp_path / "artifacts").exists()


def test_a_job_that_fails_says_so(sbatch, tmp_path):
    code, said = sbatch("training.start_step=3")
    assert code != 0
    assert "training.start_step" in said


def test_a_cancelled_job_stops_after_the_same_step(cluster, tmp_path):
    words = [*SMALL, "label=long", "training.max_steps=1000000", "training.epochs=1000000"]
    done = cluster("sbatch", "--parsable", "--nodes=2", SCRIPT, *words, cwd=tmp_path)
    number = done.stdout.strip()
    folder = tmp_path / "artifacts" / "long"
    for _ in range(600):
        if all((folder / f"rank_{rank}_metrics.jsonl").exists() and record(folder, rank).steps for rank in (0, 1)):
            break
        time.sleep(0.1)
    else:
        pytest.fail(cluster.logs())
    assert cluster("scancel", number).returncode == 0
    for _ in range(600):
        if not cluster("squeue", "-h", "-j", number).stdout.strip():
            break
        time.sleep(0.1)
    records = [record(folder, rank) for rank in (0, 1)]
    assert [each.footer.reason if each.footer else None for each in records] == ["signal", "signal"], cluster.logs()
    assert len({each.steps[-1].global_step for each in records}) == 1


def test_what_it_cannot_do_is_said_before_anything_starts(cluster, sbatch, tmp_path):
    done = cluster("bash", SCRIPT, cwd=tmp_path)
    assert done.returncode == 1
    assert "not inside a Slurm job. Start it with: sbatch --nodes=2 scripts/slurm.sbatch" in done.stderr
    code, said = sbatch(nodes=1, NPROC="two")
    assert code == 1
    assert "NPROC is 'two'; it must be a whole number of processes a node" in said


def test_an_a_b_of_ones_own_program_as_documented(cluster, tmp_path):
    page = (ROOT / "docs" / "compare.md").read_text()
    words = shlex.split(re.search(r"^salloc .+$", page, re.MULTILINE)[0])
    words[words.index("--output") + 1] = str(tmp_path / "ab")
    path = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
    done = cluster(*words, cwd=ROOT, timeout_s=600, PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr + cluster.logs()
    report = cluster("aorta", "report", str(tmp_path / "ab"), cwd=tmp_path, timeout_s=120, PATH=path)
    assert report.returncode == 0, report.stderr
    assert "4 against 4 launches" in report.stdout


def test_a_script_of_ones_own_on_two_nodes_as_documented(cluster, tmp_path):
    script = next(block for block in (ROOT / "docs" / "gpu.md").read_text().split("```") if "#!/bin/bash" in block)
    for shown, here in (
        (" --gpus-per-node=8", ""),
        (".venv/bin/activate", str(Path(sys.executable).with_name("activate"))),
        ("--nproc_per_node 8", "--nproc_per_node 1"),
        ("$head:29500", f"127.0.0.1:{free_port()}"),  # the names of these nodes lead nowhere
        ("my.py", str(ROOT / "docs" / "examples" / "plain.py")),
        ("/shared/run1", str(tmp_path / "run1")),
    ):
        assert shown in script
        script = script.replace(shown, here)
    (tmp_path / "job.sh").write_text(script.lstrip())
    done = cluster("sbatch", "--wait", "job.sh", cwd=tmp_path, timeout_s=240, PYTHONPATH=str(ROOT))
    said = "\n".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert done.returncode == 0, said + done.stderr + cluster.logs()
    assert sorted(load_run(tmp_path / "run1").ranks) == [0, 1]
    assert "on 2 ranks of" in said
