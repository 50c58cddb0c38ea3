"""The door: compose the configuration, resolve it, run it. `python train.py --help` explains the words."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from aorta.config.multirun import JobLauncher
from aorta.config.resolve import Resolved
from aorta.config.schema import Rpc
from aorta.config.train_cli import main


def run(resolved: Resolved) -> int:
    """Start the run; torch is imported only here, after the configuration was found to be good."""
    if isinstance(resolved.config.workload, Rpc):
        from aorta.rpc.rpc_run import run_rpc

        return run_rpc(resolved)
    from aorta.runner.train import run_training

    return run_training(resolved)


def sweep(options: Sequence[str]) -> JobLauncher:
    """What starts the jobs of `--multirun`: this file again, once a job."""
    from aorta.experiments import optuna_sweeper
    from aorta.experiments.sweep_launcher import TorchrunJobs

    optuna_sweeper.register()
    return TorchrunJobs(Path(__file__).resolve(), options)


if __name__ == "__main__":
    sys.exit(main(run, Path(__file__).resolve().parent / "config", sweep))
