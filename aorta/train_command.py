"""`aorta train` and `train.py`: compose the configuration, resolve it, run it.

Must not import torch before the configuration was found to be good.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from aorta.command_line import command
from aorta.config import CONFIG_DIR
from aorta.config.multirun import JobLauncher
from aorta.config.resolve import Resolved
from aorta.config.schema import CopyOverlap, Rpc, Streams
from aorta.config.train_cli import main as compose
from aorta.errors import ConfigError
from aorta.installation import checkout, training_program


@command()
def main(arguments: Sequence[str]) -> int:
    """Train with these overrides; returns the exit code.

    Args:
        arguments: overrides and options as `train.py` takes them, and `--nproc_per_node N` for so many ranks on this
            machine, which torchrun starts then.
    """
    ranks, overrides = split_ranks(arguments)
    if ranks is not None:
        _become_torchrun(ranks, overrides)
    sys.argv[1:] = overrides  # where Hydra reads them
    return compose(run, CONFIG_DIR, sweep)


def run(resolved: Resolved) -> int:
    """Start the run."""
    if isinstance(resolved.config.workload, Rpc):
        from aorta.rpc.rpc_run import run_rpc

        return run_rpc(resolved)
    if isinstance(resolved.config.workload, CopyOverlap):
        from aorta.runner.copy_overlap import run_copy_overlap

        return run_copy_overlap(resolved)
    if isinstance(resolved.config.workload, Streams):
        from aorta.streams.streams_run import run_streams

        return run_streams(resolved)
    from aorta.runner.train import run_training

    return run_training(resolved)


def sweep(options: Sequence[str]) -> JobLauncher:
    """What starts the jobs of `--multirun`: training again, once a job."""
    from aorta.experiments import optuna_sweeper
    from aorta.experiments.sweep_launcher import TorchrunJobs

    optuna_sweeper.register()
    return TorchrunJobs(training_program(checkout()), options)


def split_ranks(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The number of ranks that the arguments ask for (`--nproc_per_node`), or None, and the other arguments.

    Raises:
        ConfigError: no number of ranks, or torchrun has started this process already.
    """
    words, ranks = list(arguments), None
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in {"--nproc_per_node", "--nproc-per-node"}:
            ranks = value if equals else next(iter(words[place + 1 :]), "")
            del words[place : place + (1 if equals else 2)]
            break
    if ranks is None:
        return None, words
    if not (ranks.isdecimal() and int(ranks) >= 1) and ranks not in {"gpu", "auto", "cpu"}:
        raise ConfigError(
            f"--nproc_per_node {ranks!r}: a number of ranks from 1 on, or gpu, cpu or auto: one for each device or core"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("--nproc_per_node inside torchrun, which has started the ranks already; give it to torchrun")
    return ranks, words


def _become_torchrun(ranks: str, overrides: Sequence[str]) -> NoReturn:
    """Replace this process by torchrun, whose ranks run this command without the option."""
    torchrun = [sys.executable, "-m", "aorta.distributed.torchrun", "--standalone", "--nproc_per_node", ranks]
    sys.stdout.flush()
    os.execv(sys.executable, [*torchrun, *training_program(checkout()), *overrides])
