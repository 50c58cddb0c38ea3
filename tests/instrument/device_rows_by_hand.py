"""A ring whose rows a test writes, of a device or of a CPU: steps that were drawn, or made by hand."""

from __future__ import annotations

from aorta.instrument.ring_rows import RingRows
from aorta.records import ring_file as rf
from aorta.records.ring_file import RingGroup
from aorta.records.schema import STALL_CUTOFF_NS
from tests.instrument.taps import ring_in_memory

LANES = 2
Mark = tuple[int, int]
"""When the device passed it, and when the host had recorded it."""


class DeviceByHand:
    """One rank's ring."""

    def __init__(self, bound_ns: int | None = 3, stall_cutoff_ns: int = STALL_CUTOFF_NS) -> None:
        """Of a CPU, whose marks the host never recorded, where `bound_ns` is None."""
        self.ring = ring_in_memory(stall_cutoff_ns, 4096, bound_ns=bound_ns)
        self.append = RingRows(self.ring).append
        self.group = self.ring.group(RingGroup("0", LANES, counts_point_to_point=True))
        self.op = next(at for at, one in enumerate(self.ring.facts.operators) if one.kind == "allreduce")
        self.steps = 0
        self.last_launch: int | None = None

    def between(self, kind: int, begin: Mark | None, end: Mark | None, **fields: int) -> int:
        """A row between two marks, as far as they happened."""
        (a, a2), (b, b2) = begin or (0, 0), end or (0, 0)
        return self.append(kind, a=a, a2=a2, b=b, b2=b2, **fields)

    def begin(self, window: tuple[int, int], **fields: int) -> int:
        """Begin a step, which has ended on the device; its row."""
        number, self.steps = self.steps, self.steps + 1
        return self.append(rf.STEP, a=window[0], b=window[1], x=number, a2=self.ring.count, b2=number, **fields)

    def end(self, step: int, issued: int) -> None:
        """End it; `issued`: by the backends."""
        self.ring._rows["y"][step] = behind = self.ring.count
        assert behind < self.ring.slots
        self.append(rf.SUMMARY, b=step, x=issued)

    def collective(
        self,
        seq: int,
        communicator: int,
        launch: int | None,
        begin: Mark | None,
        end: Mark | None,
        by_future: bool = False,
    ) -> bool:
        """Rows of an all-reduce; returns whether a backend counts it: a batch is launched once."""
        flags, began_ns, both = rf.BY_FUTURE if by_future else 0, (begin or (0, 1))[1] or 1, end[0] * 2 if end else 0
        of_group = {"op": self.op, "dtype": rf.NO_DTYPE, "group": self.group}
        index = self.append(rf.COLLECTIVE, flags, a=began_ns, b=both, x=64, y=seq, **of_group)
        packed = ((-1 if launch is None else launch) + 1) << 32 | communicator
        self.between(rf.SPAN, begin, end, x=index, y=packed, flags=0 if end else 1)
        counted = launch is None or launch != self.last_launch
        self.last_launch = self.last_launch if launch is None else launch
        return counted
