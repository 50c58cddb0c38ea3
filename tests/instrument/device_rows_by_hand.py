"""A ring whose rows a test writes, of a device or of a CPU: steps that were drawn, or made by hand."""

from __future__ import annotations

from aorta.instrument.instrumentation import ring_facts
from aorta.records import ring_file as rf
from aorta.records.progress import COUNT_WORD
from aorta.records.ring_file import RingFile, RingGroup
from aorta.records.schema import STALL_CUTOFF_NS, ClockReading

ANCHOR = ClockReading(realtime_ns=5_000, boottime_ns=0, monotonic_ns=1_000, uncertainty_ns=1)
LANES = 2
Mark = tuple[int, int]
"""When the device passed it, and when the host had recorded it."""


class DeviceByHand:
    """One rank's ring."""

    def __init__(self, bound_ns: int | None = 3, stall_cutoff_ns: int = STALL_CUTOFF_NS) -> None:
        """Of a CPU, whose marks the host never recorded, where `bound_ns` is None."""
        self.ring = RingFile.create(None, slots=4096)
        self.ring.describe(ring_facts(0, 2, ANCHOR, stall_cutoff_ns, bound_ns=bound_ns))
        self.group = self.ring.group(RingGroup("0", LANES, counts_point_to_point=True))
        self.op = next(at for at, one in enumerate(self.ring.facts.operators) if one.kind == "allreduce")
        self.steps = 0
        self.last_launch: int | None = None

    def append(self, kind: int, **fields: int) -> int:
        """A row; its index."""
        index = self.ring.count
        row = dict.fromkeys(rf.ROW.names or (), 0) | {"kind": kind, "dtype": rf.NO_DTYPE, "stamp": index + 1} | fields
        self.ring._rows[index % self.ring.slots] = tuple(row[name] for name in rf.ROW.names or ())
        self.ring._words[COUNT_WORD] = index + 1
        return index

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
        index = self.append(
            rf.COLLECTIVE,
            a=(begin or (0, 1))[1] or 1,
            b=end[0] * 2 if end else 0,
            x=64,
            y=seq,
            group=self.group,
            op=self.op,
            flags=rf.BY_FUTURE if by_future else 0,
        )
        packed = ((-1 if launch is None else launch) + 1) << 32 | communicator
        self.between(rf.SPAN, begin, end, x=index, y=packed, flags=0 if end else 1)
        counted = launch is None or launch != self.last_launch
        self.last_launch = self.last_launch if launch is None else launch
        return counted
