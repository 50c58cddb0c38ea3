"""Check on this machine's devices that the telemetry is right, cheap, free of waits and of races: one process a device,
one table, one exit code. A single process stands for 8 ranks on an emulated network, since NCCL runs no kernels for
one; with training.ranks_per_device=N several share a device, and NCCL is set to let them.

Overrides of train.py go to every run; parallel=A,B chooses the strategies (default: ddp,fsdp). The table is printed,
and written as JSON as well.

Exit 0: nothing failed, and at least one comparison of times was judged. 1: a check failed, there is no device, or an
override is wrong. 4: nothing failed, but no comparison of times could be judged. 5: a rank ended before the table was
written.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from hydra.errors import HydraException

from aorta.command_line import command, end_with_parent, to_stdout
from aorta.config.schema import Config
from aorta.distributed import cuda
from aorta.errors import ConfigError, RunIncomplete
from aorta.gpu_check.check_ranks import PAIRS, chosen
from aorta.gpu_check.check_table import CheckReport
from aorta.recording.train_step import resolved

DEFAULT_JSON = Path("artifacts", "gpu_check.json")
NO_DEVICE = "torch sees no CUDA or HIP device on this machine, so nothing was checked. Run it where there is one"


@command()
def main(words: Sequence[str]) -> int:
    asked = parser().parse_args(words)
    strategies, overrides = strategies_in(asked.words)
    if not (devices := cuda.device_count()):
        raise ConfigError(NO_DEVICE)
    # For two ranks: a single rank that stands for several is refused some strategies.
    sharing = _config(chosen(strategies[0], overrides, ranks=2)).training.ranks_per_device
    count = processes(os.environ, devices, sharing)
    for strategy in strategies:
        _config(chosen(strategy, overrides, count))
    # torchrun ends with 1 whatever its ranks end with, so the exit code comes from the report.
    report = checked(asked.json.resolve(), count, strategies, overrides, asked.pairs)
    to_stdout(f"the same as JSON: {asked.json}")
    return report.exit_code


def strategies_in(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the strategies that `parallel=A,B` among the words asks for, and the other words."""
    asked = [word.removeprefix("parallel=") for word in words if word.startswith("parallel=")]
    others = [word for word in words if not word.startswith("parallel=")]
    return (asked[-1] if asked else "ddp,fsdp").split(","), others


def _config(words: Sequence[str]) -> Config:
    try:
        return resolved(*words).config
    except HydraException as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def processes(environment: Mapping[str, str], devices: int, ranks_per_device: int = 1) -> int:
    """Return the number of ranks: NPROC, else `ranks_per_device` per device.

    Raises:
        ConfigError: NPROC is no number of processes.
    """
    most = devices * ranks_per_device
    text = environment.get("NPROC") or str(most)
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError(f"NPROC={text!r}: must be a whole number of processes, 1 to {most}: torch sees {devices}")
    return int(text)


def checked(
    path: Path,
    count: int,
    strategies: Sequence[str],
    words: Sequence[str],
    pairs: int = PAIRS,
) -> CheckReport:
    """Run the ranks, which print the table and write `path`.

    Raises:
        RunIncomplete: they ended without it.
    """
    path.unlink(missing_ok=True)  # an earlier report must not be taken for this one
    launch = [sys.executable, "-m", "aorta.distributed.torchrun", "--standalone", "--nproc_per_node", str(count)]
    own = ["--module", "aorta.gpu_check.check_ranks", str(path), ",".join(strategies), str(pairs)]
    command = [*launch, *own, *words]
    ranks = subprocess.Popen(
        command, env={"OMP_NUM_THREADS": "1", **os.environ}, preexec_fn=end_with_parent(os.getpid())
    )
    code = ranks.wait()
    if code or not path.exists():
        raise RunIncomplete(
            f"the ranks ended with exit code {code} before the table was written; see their output above"
        )
    return msgspec.json.decode(path.read_bytes(), type=CheckReport)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    add = parser.add_argument
    add("--json", type=Path, default=DEFAULT_JSON, metavar="FILE", help="where the rows go as JSON")
    blocks = "blocks of steps compared with and without the instrument; fewer are quicker and say less"
    add("--pairs", type=_at_least_one, default=PAIRS, metavar="N", help=blocks)
    sharing = "training.ranks_per_device=2: real NCCL kernels on one card, overlap judged under MPS only"
    add("words", nargs="*", metavar="OVERRIDE", help=f"for train.py, such as training.batch_size=4; {sharing}")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 on")
    return int(text)


class _AsWritten(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass
