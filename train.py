"""The door: compose the configuration, resolve it, run it. `python train.py --help` explains the words."""

from __future__ import annotations

import sys
from pathlib import Path

from aorta.config.door import main
from aorta.config.resolve import Resolved


def run(resolved: Resolved) -> int:
    """Start the run; torch is imported only here, after the configuration was found to be good."""
    from aorta.engine.run import run_training

    return run_training(resolved)


if __name__ == "__main__":
    sys.exit(main(run, Path(__file__).resolve().parent / "config"))
