"""A Slurm of its own for the tests: munged, slurmctld and two slurmd on this machine, in a folder of their own.

Nothing of a Slurm that the machine may have is used or touched: other ports, other sockets, SLURM_CONF.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.runs import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel", "salloc")
NODES = ("aorta0", "aorta1")
CONF = """\
ClusterName=aorta
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=60
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


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
def cluster(environment: dict[str, str]) -> Iterator[Cluster]:
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

    try:
        munge = ["--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
        munge += [f"--{name}-file={folder}/munged.{name}" for name in ("log", "pid", "seed")]
        start("munged", *munge)
        _until(lambda: (folder / "munge.socket").exists(), made, daemons, "munged")
        start("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for node in NODES:
            start("slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", node)
        _until(lambda: made("sinfo", "-h", "-o", "%D %t").stdout.split() == ["2", "idle"], made, daemons, "nodes")
        yield made
    finally:
        made("scancel", "--state=RUNNING", "--full")
        made("scancel", "--state=PENDING")
        _quiet(made)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _quiet(made: Cluster) -> None:
    for _ in range(100):
        if not made("squeue", "-h").stdout.strip():
            return
        time.sleep(0.2)


def _until(condition, made: Cluster, daemons: list[subprocess.Popen[bytes]], what: str) -> None:
    for _ in range(300):
        if condition():
            return
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        assert not ended, f"{ended} ended\n{made.logs()}"
        time.sleep(0.1)
    raise AssertionError(f"{what} did not come up\n{made.logs()}")
