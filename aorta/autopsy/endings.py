"""Which of the processes that ended did so by themselves: when one rank dies, its launcher and broken connections end
the others. Must not look at collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aorta.autopsy.job import JobEvidence, Rank
from aorta.errors import SIGNAL_EXIT_BASE

_ASKED_TO_END: Final = ("SIGTERM", "SIGINT", "SIGHUP")
"""Signals with which launchers end the other ranks after one has failed."""


def ended_first(job: JobEvidence, waited_for: Sequence[int]) -> list[Rank]:
    """Return the ranks that ended by themselves: by a signal that no launcher sends or with an error of their own; else
    the only one that failed, or those that failed while others run, or those that the running ranks wait for.

    Args:
        waited_for: ranks that others wait for and that wait for nobody.
    """
    ended = [rank for rank in job.ranks.values() if rank.has_ended]
    if own := [rank for rank in ended if _by_itself(rank)]:
        return own
    if job.missing:
        return []  # one of them may have ended first
    running = any(not rank.has_ended for rank in job.ranks.values())
    failed = [rank for rank in ended if not (rank.exit is not None and rank.exit.exit_code == 0)]
    failed = [rank for rank in failed if not rank.lost_a_peer]
    if not running:
        return failed if len(failed) == 1 else []
    by_signal = [rank for rank in failed if rank.exit is not None and rank.exit.signal is not None]
    return by_signal or failed or [rank for rank in ended if rank.rank in waited_for]


def how_it_ended(rank: Rank) -> str:
    """` by SIGKILL`, ` with exit code 1`, ...; empty where it is not known."""
    if rank.exit is None:
        return ""
    if rank.exit.signal is not None:
        return f" by {rank.exit.signal}"
    if rank.exit.exception is not None:
        return f" with {rank.exit.exception}"
    return f" with exit code {rank.exit.exit_code}" if rank.exit.exit_code is not None else ""


def _by_itself(rank: Rank) -> bool:
    if (
        rank.exit is None or (rank.exit.exit_code or 0) >= SIGNAL_EXIT_BASE
    ):  # it ended in order, as a signal asked it to
        return False
    if rank.exit.signal is not None:
        return rank.exit.signal not in _ASKED_TO_END
    if rank.exit.exception is not None:
        return not rank.lost_a_peer
    return False
