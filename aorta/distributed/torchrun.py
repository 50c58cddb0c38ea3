"""torchrun for `aorta train --nproc_per_node N`: the same launcher, which ends in one line.

    python -m aorta.distributed.torchrun --standalone --nproc_per_node 2 train.py ...

torchrun itself ends with 1, a traceback of its own and a list of exit codes. Rank 0 has printed its error; that of
another rank, left in a file, is printed here. All ranks are on this host, so their stores listen on the loopback
interface alone. Must not hide an error of the launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from aorta.command_line import begin_process, to_stderr
from aorta.errors import EXIT_OK, SIGNAL_EXIT_BASE, PeerFailed

if __name__ == "__main__":
    begin_process()  # before torch, whose import may swallow Ctrl-C

import torch.distributed
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend
from torch.distributed.run import determine_local_world_size, get_args_parser, main

_LOOPBACK: Final = "127.0.0.1"


def launch(arguments: Sequence[str]) -> int:
    """Run torchrun; returns the exit code of the rank that failed first, or 128 + n after signal n."""
    # Its warnings about each process that it ends, its own list of those that failed and of their files, and what
    # follows a signal.
    for name in ("torch.distributed.elastic.multiprocessing", "torch.distributed.elastic.multiprocessing.errors"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic.agent.server.api").addFilter(
        lambda record: "signal" not in str(record.msg)
    )
    with suppress(ValueError):  # it cannot count such ranks, and `main` says so
        # One compute thread for each of several ranks, as torchrun sets with four lines about it.
        if determine_local_world_size(get_args_parser().parse_args(list(arguments)).nproc_per_node) > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "--standalone" in arguments:
        torch.distributed.TCPStore = c10d_rendezvous_backend.TCPStore = _LoopbackStore  # type: ignore
        arguments = ["--local-addr", _LOOPBACK, *arguments]
    try:
        main(list(arguments))
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        if failure.exitcode < 0:  # it could say nothing itself
            to_stderr(f"error: rank {rank} was ended by {failure.signal_name()}")
            return SIGNAL_EXIT_BASE - failure.exitcode
        # An error file's message is a mapping; rank 0 has printed its own by then.
        messages: list[Any] = [failed and failed.message for failed in (failure, error.failures.get(0))]
        left, by_root = (message.get("message") if isinstance(message, dict) else None for message in messages)
        if left and (not by_root or error.failures[0].exitcode == PeerFailed.exit_code):
            to_stderr(f"error: {left}")
        return int(failure.exitcode)
    except SignalException as stopped:
        return SIGNAL_EXIT_BASE + int(stopped.sigval)
    return EXIT_OK


class _LoopbackStore(TCPStore):
    """A store whose server cannot be reached from another host; torch's own listens on every interface."""

    def __init__(self, host_name: str, port: int, *, is_master: bool, **named: Any) -> None:
        if is_master:
            listener = socket.create_server((_LOOPBACK, port))
            host_name, port = listener.getsockname()
            named["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, is_master=is_master, **named)


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank whose failure explains the others, and that failure.

    torchrun looks at its ranks now and then and notes the time in whole seconds, and a rank that names a failed peer
    may end before that peer. So an error of a rank's own comes first, then the earliest; of the same second, a request
    to end comes last: torchrun sends it to whoever is left.
    """

    def order(rank: int) -> tuple[bool, int, int, int]:
        failure = failures[rank]
        code = failure.exitcode
        asked = code in (-signal.SIGTERM, SIGNAL_EXIT_BASE + signal.SIGTERM)
        own = code > 0 and code != PeerFailed.exit_code and not asked
        return not own, failure.timestamp, 2 if asked else int(code == PeerFailed.exit_code), rank

    rank = min(failures, key=order)
    return rank, failures[rank]


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
