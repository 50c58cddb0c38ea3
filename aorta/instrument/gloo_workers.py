"""Derives when a CPU backend really began a collective that it had queued.

gloo reports no start time. It runs the collectives of one group first in, first out on a fixed number of worker
threads, so a start is the later of the issue time and the moment a worker became free (docs/measuring.md, section 1):

    workers = GlooWorkers(1)
    workers.start_ns(issue_ns=0, end_ns=50)   # 0
    workers.start_ns(issue_ns=10, end_ns=80)  # 50: queued behind the first

Must not read a clock.
"""

from __future__ import annotations


class GlooWorkers:
    """The gloo workers of one group; `start_ns` is called in issue order.

    Args:
        count: how many collectives run at once.
    """

    def __init__(self, count: int) -> None:
        self._free_at_ns = [0] * max(count, 1)

    def start_ns(self, issue_ns: int, end_ns: int) -> int:
        """Start of the next collective in order; its worker is busy until `end_ns`."""
        free_at_ns = min(self._free_at_ns)
        start = min(max(issue_ns, free_at_ns), end_ns)
        self._free_at_ns[self._free_at_ns.index(free_at_ns)] = end_ns
        return start
