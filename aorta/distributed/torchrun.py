"""torchrun for `aorta train --nproc_per_node N`: the same launcher, which ends in one line.

    python -m aorta.distributed.torchrun --standalone --nproc_per_node 2 train.py ...

torchrun itself follows an error of the ranks, who have said it, with a traceback of its own and a list of exit codes,
and ends with 1. Must not hide an error of the launcher.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from aorta.command_line import to_stderr
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE


def launch(arguments: Sequence[str]) -> int:
    """Run torchrun; returns the exit code of the rank that failed first, or 128 + n after signal n."""
    # Its warnings about each process that it ends, and its own list of those that failed.
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic.agent").setLevel(logging.CRITICAL)
    try:
        main(list(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could say nothing itself
            to_stderr(f"error: rank {rank} was ended by {failure.signal_name()}")
            return SIGNAL_EXIT_BASE - failure.exitcode
        return int(failure.exitcode)
    except SignalException as stopped:
        return SIGNAL_EXIT_BASE + int(stopped.sigval)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
