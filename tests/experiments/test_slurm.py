"""`scripts/slurm.sbatch` on a real Slurm: two nodes are one run; signals, failures, disks of their own.

munged, slurmctld and two slurmd run on this machine, in a folder of their own. Nothing of a Slurm that the machine may
have is used or touched: other ports, other sockets, SLURM_CONF.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from aorta.analysis import load_run
from tests.runs import ROOT, SMALL, environment, free_port, record, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel", "salloc")
NODES = ("aorta0", "aorta1")
CONF = Path(__file__).with_name("slurm.conf").read_text()


def missing() -> list[str]:
    """Programs that are not installed."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


@dataclass
class Cluster:
    """Runs Slurm's commands against it."""

    folder: Path
    environment: dict[str, str]

    def __call__(self, *words: str, cwd: Path | None = None, timeout_s: float = 60, **more: str):
        return subprocess.run(
            words, cwd=cwd, env=self.environment | more, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


@contextmanager
def running(environment: dict[str, str]) -> Iterator[Cluster]:
    """Start it, wait until both nodes are idle; afterwards stop everything and remove the folder."""
    folder = Path(tempfile.mkdtemp(prefix="aorta-slurm-", dir="/tmp"))  # a socket's path must be short
    names = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": folder, "nodes": NODES}
    (folder / "slurm.conf").write_text(CONF.format(ports=[free_port() for _ in range(3)], **names))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    own = {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{environment['PATH']}:/usr/sbin:/sbin"}
    made = Cluster(folder, {name: value for name, value in environment.items() if not name.startswith("SLURM")} | own)
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        with (folder / f"{'-'.join(words[:1] + words[-1:]).replace('/', '_')[:40]}.out.log").open("wb") as out:
            daemons.append(subprocess.Popen(words, env=made.environment, stdout=out, stderr=out))

    def come_up(condition) -> None:
        until(lambda: condition() or any(daemon.poll() is not None for daemon in daemons))
        assert condition(), made.logs()

    try:
        munge = ["--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
        munge += [f"--{name}-file={folder}/munged.{name}" for name in ("log", "pid", "seed")]
        start("munged", *munge)
        come_up((folder / "munge.socket").exists)
        start("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for node in NODES:
            start("slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", node)
        come_up(lambda: made("sinfo", "-h", "-o", "%D %t").stdout.split() == ["2", "idle"])
        yield made
    finally:
        made("scancel", "--state=RUNNING", "--full")
        made("scancel", "--state=PENDING")
        until(lambda: not made("squeue", "-h").stdout.strip())
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed: {', '.join(missing())}"),
]
SCRIPT = str(ROOT / "scripts" / "slurm.sbatch")


@pytest.fixture(scope="module")
def cluster():
    with running(environment(AORTA_ROOT=str(ROOT))) as made:
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


def test_two_nodes_with_disks_of_their_own_are_one_run_copied_together(sbatch, tmp_path):
    scratch, folder = tmp_path / "scratch", tmp_path / "together"
    code, said = sbatch("label=mine", NPROC="2", SCRATCH=str(scratch), INTO="together")
    assert code == 0, said
    run = load_run(folder)
    assert (run.source.world_size, sorted(run.ranks), run.health.ranks_missing) == (4, [0, 1, 2, 3], [])
    assert [run.ranks[rank].source.node_rank for rank in range(4)] == [0, 0, 1, 1]
    assert [run.ranks[rank].source.local_rank for rank in range(4)] == [0, 1, 0, 1]
    assert json.loads((folder / "run.json").read_text())["world_size"] == 4
    assert all((folder / "logs" / f"rank_{rank}.log").is_file() for rank in range(4))
    assert list(scratch.iterdir()) == []  # each had a folder of its own there: what was copied is removed
    assert not (tmp_path / "artifacts").exists()


def test_a_cancelled_job_stops_after_the_same_step(cluster, tmp_path):
    words = [*SMALL, "label=long", "training.max_steps=1000000", "training.epochs=1000000"]
    done = cluster("sbatch", "--parsable", "--nodes=2", SCRIPT, *words, cwd=tmp_path)
    number = done.stdout.strip()
    folder = tmp_path / "artifacts" / "long"
    for rank in (0, 1):
        until((folder / f"rank_{rank}_metrics.jsonl").exists)
        until(lambda rank=rank: record(folder, rank).steps)
    assert cluster("scancel", number).returncode == 0
    until(lambda: not cluster("squeue", "-h", "-j", number).stdout.strip())
    records = [record(folder, rank) for rank in (0, 1)]
    assert [each.footer.reason if each.footer else None for each in records] == ["signal", "signal"], cluster.logs()
    assert len({each.steps[-1].global_step for each in records}) == 1


def test_what_it_cannot_do_and_a_job_that_fails_are_said(cluster, sbatch, tmp_path):
    done = cluster("bash", SCRIPT, cwd=tmp_path)
    assert done.returncode == 1
    assert "not inside a Slurm job. Start it with: sbatch --nodes=2 scripts/slurm.sbatch" in done.stderr
    code, said = sbatch(nodes=1, NPROC="two")
    assert code == 1
    assert "NPROC is 'two'; it must be a whole number of processes a node" in said
    code, said = sbatch("training.start_step=3")
    assert (code != 0, "training.start_step" in said) == (True, True)


def test_an_a_b_of_ones_own_program_as_documented(cluster, tmp_path):
    page = (ROOT / "docs" / "compare.md").read_text()
    words = shlex.split(re.search(r"^salloc .+$", page, re.MULTILINE)[0])
    words[words.index("--output") + 1] = str(tmp_path / "ab")
    path = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
    done = cluster(*words, cwd=ROOT, timeout_s=600, PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr + cluster.logs()
    report = cluster("aorta", "report", str(tmp_path / "ab"), cwd=tmp_path, timeout_s=120, PATH=path)
    assert report.returncode == 0, report.stderr
    assert len(list((tmp_path / "ab").glob("*/0?/run.json"))) == 8, "four launches a side"


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
