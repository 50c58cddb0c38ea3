"""Reads nsys's SQLite export (`nsys export --type sqlite`) into one `Trace` per process; a file may hold all ranks of a
node.

Names are ids into `StringIds`. Times are nanoseconds since the session began; with its `utcEpochNs` they become
CLOCK_REALTIME, coarsely. Process and thread are packed into `globalPid` and `globalTid`. Tables are created only when
they have rows, and columns differ between versions. Must not: expect a table or column without looking it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from aorta.analysis.load.interval_table import (
    NULL,
    Clock,
    Interner,
    IntervalClass,
    Intervals,
    Trace,
    concatenate,
    intervals,
    look_up,
    step_of,
)
from aorta.analysis.load.kernel_classifier import NameClassifier, kind_of, step_windows
from aorta.analysis.load.microseconds import LARGEST_NS, check_devices, check_instants
from aorta.analysis.load.rank_inference import Process, place
from aorta.analysis.load.sqlite import Database, rows_of
from aorta.errors import InputError
from aorta.records.schema import Header
from aorta.timeline.arrays import Int64
from aorta.timeline.kernel_names import computes, launches_communication

_Packed = TypeVar("_Packed", int, Int64)
FORMAT: Final = "nsys"
_KERNEL: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
_MEMCPY: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSET: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
_RUNTIME: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
_GRAPHS: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
"""A CUDA graph traced as a whole: when it ran, but not which kernels (nsys --cuda-graph-trace=graph, its default)."""
_NVTX: Final = "NVTX_EVENTS"
_RANGES: Final = (59, 60)
"""`eventType` of push/pop and of start/end ranges (nsys, ENUM_NSYS_EVENT_TYPE); 34 is a mark."""
_SHIFT: Final = 1 << 24
"""globalTid = hardware and virtual machine, then 24 bits of process id, then 24 bits of thread id."""
_NO_BYTES: Final = (
    "nsys does not record the size, the group or the data type of a collective: bytes and bandwidths are not available"
)


def read_nsys(path: Path, name: str, classifier: NameClassifier, headers: Sequence[Header] = ()) -> list[Trace]:
    """Read one export.

    Args:
        name: used in messages and as `Trace.path`.
        headers: of records that may identify the rank of a process.

    Raises:
        InputError: it is not an nsys export, holds no kernels, or is damaged.
    """
    with closing(Database(path, name)) as db:
        if _KERNEL not in db.tables:
            raise InputError(
                f"{name}: no table {_KERNEL}; it holds {', '.join(sorted(db.tables)[:8]) or 'no tables'}. nsys "
                "writes it when kernels were traced: nsys profile --trace=cuda,nvtx --cuda-graph-trace=node, then "
                "nsys export --type sqlite"
            )
        return _Export(db, name, classifier, headers).traces()


class _Export:
    def __init__(self, db: Database, name: str, classifier: NameClassifier, headers: Sequence[Header]) -> None:
        self._db, self._name, self._classifier, self._headers = db, name, classifier, headers
        self._strings = db.texts("StringIds", "id", "value")
        self._clock, self._epoch = self._session_start()

    def traces(self) -> list[Trace]:
        kernels = self._db.integers(
            _KERNEL,
            ("start", "end", "deviceId", "streamId"),
            ("demangledName", "shortName", "mangledName", "correlationId", "globalPid"),
        )
        copies = [
            (
                table,
                self._db.integers_if_stored(
                    table, ("start", "end", "deviceId", "streamId"), ("bytes", "copyKind", "globalPid")
                ),
            )
            for table in (_MEMCPY, _MEMSET)
        ]
        calls = self._db.integers_if_stored(_RUNTIME, ("start",), ("correlationId", "globalTid"))
        ranges, texts = self._ranges()
        operations = self._db.texts("ENUM_CUDA_MEMCPY_OPER", "id", "label") if self._labels() else {}
        check_instants(self._name, _KERNEL, kernels["start"], kernels["end"])
        check_devices(self._name, _KERNEL, kernels["deviceId"])
        present = np.unique(kernels["globalPid"]).tolist()
        lost = [f"{self._name}: {note}" for table, rows in copies if (note := _assign(table, rows, present))]
        traces = []
        graphs = self._db.integers_if_stored(_GRAPHS, ("start",), ("globalPid",))["globalPid"]
        for owner in present:
            mine = {table: rows_of(rows, rows["globalPid"] == owner) for table, rows in copies}
            own_calls = rows_of(calls, _process(calls["globalTid"]) == _process(owner)) if owner != NULL else calls
            own = _process(ranges["globalTid"]) == _process(owner) if owner != NULL else ranges["start"] >= 0
            traces.append(
                self._trace(
                    owner,
                    len(present) > 1,
                    rows_of(kernels, kernels["globalPid"] == owner),
                    self._copies(mine, operations),
                    own_calls,
                    rows_of(ranges, own),
                    [text for text, keep in zip(texts, own.tolist(), strict=True) if keep],
                )
            )
            if count := int(((graphs == owner) | (graphs == NULL)).sum()):
                traces[-1] = _without_graphs(traces[-1], count)
        return [replace(trace, notes=(*trace.notes, *lost)) for trace in traces]

    def _trace(
        self,
        owner: int,
        several: bool,
        kernels: dict[str, Int64],
        copies: Intervals,
        calls: dict[str, Int64],
        ranges: dict[str, Int64],
        texts: list[str],
    ) -> Trace:
        pid = _process(owner) if owner != NULL else None
        where = f"{self._name} (process {pid})" if several else self._name
        # The path names one rank, so it cannot identify several processes of one file.
        placed = place(Process(path="" if several else self._name, pid=pid, host=self._host()), self._headers)
        notes = [note if not several else f"{where}{note}" for note in placed.notes]
        launched = self._launches(kernels, calls)
        rows = concatenate([self._kernels(kernels, launched), copies])
        rows = replace(
            rows,
            start_ns=rows.start_ns + self._epoch,
            end_ns=rows.end_ns + self._epoch,
            launch_ns=np.where(rows.launch_ns == NULL, NULL, rows.launch_ns + self._epoch),
        )
        check_instants(self._name, "NVTX range", ranges["start"], ranges["end"])
        steps, step_notes = step_windows(texts, ranges["start"] + self._epoch, ranges["end"] + self._epoch, placed.rank)
        rank = np.full(len(rows), placed.rank, np.int32)
        rows = replace(rows, rank=rank, step=step_of(rank, rows.start_ns, steps))
        rows = self._issued(rows, kernels, calls, ranges, texts)
        unlinked = int((launched == NULL).sum()) if len(calls["start"]) else 0
        has_comm = bool((rows.cls == IntervalClass.COMM).any())
        notes += step_notes
        if not len(calls["start"]):
            notes.append(f"{where}: no table {_RUNTIME}: which kernels lack a launch is not known")
        return Trace(
            path=where,
            format=FORMAT,
            clock=self._clock,
            intervals=rows,
            windows=steps,
            ranks=(placed.rank,),
            world_size=placed.world_size,
            platform="cuda",
            backend="nccl" if has_comm else None,
            host=self._host(),
            counters={"kernels_unlinked": unlinked},
            notes=(*notes, *((_NO_BYTES,) if has_comm else ())),
            copies_observed=_MEMCPY in self._db.tables or _MEMSET in self._db.tables,
        )

    def _kernels(self, rows: dict[str, Int64], launched: Int64) -> Intervals:
        """Return the kernel rows, with the demangled name, else the mangled, else the short one."""
        code = rows["demangledName"]
        for other in ("mangledName", "shortName"):
            code = np.where(code == NULL, rows[other], code)
        present, where = np.unique(code, return_inverse=True)
        names = Interner()  # several ids may refer to one name
        where = np.array([names(self._strings.get(ident, "")) for ident in present.tolist()], dtype=np.int64)[where]
        classes, kinds = self._classifier.kernels(names.strings)
        return intervals(
            start_ns=rows["start"],
            end_ns=rows["end"],
            device=rows["deviceId"],
            stream=rows["streamId"],
            cls=classes[where],
            kind=kinds[where],
            name=where,
            launch_ns=launched,
            names=names.strings,
        )

    def _copies(self, tables: dict[str, dict[str, Int64]], operations: dict[int, str]) -> Intervals:
        parts = []
        for table, rows in tables.items():
            check_instants(self._name, table, rows["start"], rows["end"])
            check_devices(self._name, table, rows["deviceId"])
            names = Interner()
            word = "memset" if table == _MEMSET else "memcpy"
            codes = [names(operations.get(kind, word)) for kind in rows["copyKind"].tolist()]
            parts.append(
                intervals(
                    start_ns=rows["start"],
                    end_ns=rows["end"],
                    device=rows["deviceId"],
                    stream=rows["streamId"],
                    bytes=np.maximum(rows["bytes"], NULL),
                    cls=np.int8(IntervalClass.COPY),
                    name=np.array(codes, dtype=np.int32),
                    names=names.strings,
                )
            )
        return concatenate(parts)

    def _launches(self, kernels: dict[str, Int64], calls: dict[str, Int64]) -> Int64:
        """Return when the host launched each kernel, in ns of the session; `NULL` where the file does not say."""
        launched = look_up(kernels["correlationId"], calls["correlationId"], calls["start"])
        return np.where(kernels["correlationId"] == NULL, NULL, launched)

    def _issued(
        self,
        rows: Intervals,
        kernels: dict[str, Int64],
        calls: dict[str, Int64],
        ranges: dict[str, Int64],
        texts: list[str],
    ) -> Intervals:
        """Return the rows with those as communication that were launched inside a range that issues it (`c10d::` of
        torch.autograd.profiler.emit_nvtx, NCCL's calls), unless their names are known to compute.
        """
        issuing = np.flatnonzero([launches_communication(text) for text in texts])
        issuing = issuing[np.argsort(ranges["start"][issuing], kind="stable")]
        kinds = np.array([kind_of(texts[at]) for at in issuing.tolist()], np.int8)
        cls, kind = rows.cls.copy(), rows.kind.copy()
        other = np.array([not computes(name) for name in rows.names], bool)
        thread = look_up(kernels["correlationId"], calls["correlationId"], calls["globalTid"])
        launched = np.flatnonzero((rows.cls == IntervalClass.COMPUTE) & (rows.launch_ns != NULL))
        launched = launched[other[rows.name[launched]]]
        for each in np.unique(ranges["globalTid"][issuing]).tolist():
            own = ranges["globalTid"][issuing] == each
            start, reach = ranges["start"][issuing[own]], np.maximum.accumulate(ranges["end"][issuing[own]])
            here = launched[thread[launched] == each]
            at = np.searchsorted(start + self._epoch, rows.launch_ns[here], side="right") - 1
            inside = (at >= 0) & (rows.launch_ns[here] < reach[at] + self._epoch)
            cls[here[inside]], kind[here[inside]] = IntervalClass.COMM, kinds[own][at[inside]]
        return replace(rows, cls=cls, kind=kind)

    def _ranges(self) -> tuple[dict[str, Int64], list[str]]:
        """Return the NVTX ranges and the text of each, its own or the one its id refers to."""
        if _NVTX not in self._db.tables:
            return {name: np.zeros(0, np.int64) for name in ("start", "end", "globalTid")}, []
        rows = self._db.integers(_NVTX, ("start", "end"), ("eventType", "textId", "globalTid"))
        own: list[str] = []
        for chunk in self._db.rows(_NVTX, ("start",), ("text",)):
            own += [text if isinstance(text, str) else "" for _, text in chunk]
        # A range that was still open when the recording ended has no end.
        closed = rows["end"] != NULL
        used = np.flatnonzero(closed & (np.isin(rows["eventType"], _RANGES) | (rows["eventType"] == NULL)))
        texts = [own[row] or self._strings.get(int(rows["textId"][row]), "") for row in used.tolist()]
        return rows_of(rows, used), texts

    def _labels(self) -> bool:
        return {"id", "label"} <= set(self._db.columns("ENUM_CUDA_MEMCPY_OPER"))

    def _session_start(self) -> tuple[Clock, int]:
        """Return the clock of the file, and the offset to add to its times."""
        start = self._db.integers_if_stored("TARGET_INFO_SESSION_START_TIME", (), ("utcEpochNs",))["utcEpochNs"]
        if len(start) == 1 and 0 < start[0] <= LARGEST_NS // 2:
            return "REALTIME", int(start[0])
        return "unknown", 0

    def _host(self) -> str | None:
        table = "TARGET_INFO_SYSTEM_ENV"
        if not {"name", "value"} <= set(self._db.columns(table)):
            return None
        for chunk in self._db.rows(table, ("name", "value")):
            for name, value in chunk:
                if name == "Hostname" and isinstance(value, str):
                    return value
        return None


def _without_graphs(trace: Trace, count: int) -> Trace:
    why = f"{count} CUDA graph launches were traced as a whole, their kernels unseen; use --cuda-graph-trace=node"
    return replace(trace, unseen=why, compute_unseen=True)


def _assign(table: str, rows: dict[str, Int64], owners: list[int]) -> str | None:
    """Assign copies without a process id to the only process if there is just one; otherwise note that they belong to
    none (W16).
    """
    if len(owners) == 1:
        rows["globalPid"] = np.where(rows["globalPid"] == NULL, owners[0], rows["globalPid"])
    strays = int((~np.isin(rows["globalPid"], owners)).sum())
    return f"{strays} row(s) of {table} belong to no process that ran kernels; left out" if strays else None


def _process(packed: _Packed) -> _Packed:
    """Return the process ids of global process or thread ids."""
    return packed // _SHIFT % _SHIFT
