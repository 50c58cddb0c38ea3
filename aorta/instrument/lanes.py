"""When a CPU backend really began a collective that it had queued.

gloo gives no start time. It runs the collectives of one group first in, first out on a fixed number of worker threads
(lanes), so a start follows from the issue times and the ends: it is the later of the issue and the moment a lane
became free (docs/measuring.md, section 1). Pure; must not: read a clock.
"""

from __future__ import annotations


class Lanes:
    """The worker threads of one group; `start_ns` is asked in issue order.

    Args:
        count: how many collectives run at once.
    """

    def __init__(self, count: int) -> None:
        self._free_at_ns = [0] * max(count, 1)

    def start_ns(self, issue_ns: int, end_ns: int) -> int:
        """Start of the next collective in order, and take its lane until `end_ns`."""
        free_at_ns = min(self._free_at_ns)
        start = min(max(issue_ns, free_at_ns), end_ns)
        self._free_at_ns[self._free_at_ns.index(free_at_ns)] = end_ns
        return start
