"""Reads nsys's SQLite export (`nsys export --type sqlite`) into one `Trace` per process; a file may hold all ranks of a
node.

Names are ids into `StringIds`. Times are nanoseconds since the session began; with its `utcEpochNs` they become
CLOCK_REALTIME, coarsely. Process and thread are packed into `globalPid` and `globalTid`: hardware and virtual machine,
then 24 bits of process id, then 24 bits of thread id. Tables are created only when they have rows, and columns differ
between versions. Must not: expect a table or column without looking it up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from aorta.errors import InputError
from aorta.read.ledger import COMM, lacking
from aorta.read.traces.chrome_json import LARGEST_NS
from aorta.read.traces.claims import Claims, launches_of, reconciled
from aorta.read.traces.consistency import incomplete
from aorta.read.traces.interval_table import NULL, IntervalClass, Trace, kind_of, look_up
from aorta.read.traces.open import Database, coded, rows_of
from aorta.read.traces.reader import Process, Ranges, Reader, TraceInput, copies, kernels, trace_of
from aorta.timeline.arrays import Int64, IntervalArray, containing
from aorta.timeline.classes import COMPUTE, computes, launches_communication

_KERNEL: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES: Final = {"CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy", "CUPTI_ACTIVITY_KIND_MEMSET": "memset"}
_RUNTIME: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
_GRAPHS: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
"""A CUDA graph traced as a whole: when it ran, but not which kernels (nsys --cuda-graph-trace=graph, its default)."""
_NVTX: Final = "NVTX_EVENTS"
_RANGES: Final = "(59, 60)"
"""`eventType` of push/pop and of start/end ranges (nsys, ENUM_NSYS_EVENT_TYPE); 34 is a mark."""
_MIXED: Final = -2
"""Kind of what a range issues that does not say which collective: ncclGroupEnd."""
_PROCESS: Final = ~0xFFFFFF
"""What the `globalPid` of a process and the `globalTid` of its threads have in common."""
_SPAN: Final = "start_ns=start end_ns=end"
_WHEN_WHERE: Final = ("start_ns", "end_ns", "device", "stream")
_PLACE: Final = "device=deviceId stream=streamId"


def _read(source: TraceInput) -> Iterator[Trace]:
    db, origin = source.database, source.origin
    assert db is not None
    if _KERNEL not in db.tables:
        raise InputError(
            f"{origin}: no table {_KERNEL}; it holds {', '.join(sorted(db.tables)[:8])}. nsys writes it when kernels "
            "were traced: nsys profile --trace=cuda,nvtx --cuda-graph-trace=node, then nsys export --type sqlite"
        )
    strings = db.texts("StringIds", "id", "value")
    names = "demangledName mangledName shortName"
    stored = db.stored(_KERNEL, f"{_SPAN} {_PLACE}", f"correlation=correlationId process=globalPid {names}")
    ran = db.select(
        _KERNEL,
        "SELECT start_ns, end_ns, device, stream, correlation, process, "
        f"COALESCE({names.replace(' ', ', ')}) AS name FROM {stored}",
    )
    calls = db.columns(_RUNTIME, "start_ns=start", "end_ns=end correlation=correlationId thread=globalTid name=nameId")
    ranges = db.select(
        _NVTX,
        "SELECT start_ns, end_ns, thread, COALESCE(NULLIF(text, ''), value) AS text "
        f"FROM {db.stored(_NVTX, _SPAN, 'eventType text textId thread=globalTid')} "
        f"LEFT JOIN {db.stored('StringIds', 'id value')} ON id = textId "
        # A range that was still open when the recording ended has no end.
        f"WHERE end_ns IS NOT NULL AND COALESCE(eventType IN {_RANGES}, 1)",
        texts={"text"},
    )
    graphs = db.columns(_GRAPHS, "", "process=globalPid")["process"]
    owners = np.unique(ran["process"])
    copied = {table: _copies(db, table, owners) for table in _COPIES}
    lost = [
        f"{origin}: {strays} row(s) of {table} belong to no process that ran kernels; left out"
        for table, rows in copied.items()
        if (strays := int((~np.isin(rows["process"], owners)).sum()))
    ]
    sql = f"SELECT text FROM {db.stored('DIAGNOSTIC_EVENT', '', 'text')} WHERE text LIKE 'Not all CUDA %'"
    losses = [f"nsys says: {text}" for text in sorted({*db.select("DIAGNOSTIC_EVENT", sql, texts={"text"})["text"]})]
    lost += [f"{origin}: {text}" for text in losses]
    began = db.columns("TARGET_INFO_SESSION_START_TIME", "", "utcEpochNs")["utcEpochNs"]
    dated = len(began) == 1 and 0 < began[0] <= LARGEST_NS // 2
    since_ns = int(began[0]) if dated else 0
    environment = db.stored("TARGET_INFO_SYSTEM_ENV", "", "name value")
    sql = f"SELECT value FROM {environment} WHERE name = 'Hostname'"
    host = next(filter(None, db.select("TARGET_INFO_SYSTEM_ENV", sql, texts={"value"})["value"]), None)
    for owner in owners.tolist():
        pid = None if owner == NULL else owner >> 24 & 0xFFFFFF
        own_kernels, *own_copies = (rows_of(rows, rows["process"] == owner) for rows in (ran, *copied.values()))
        own_calls, own_ranges = (
            rows_of(rows, (rows["thread"] & _PROCESS == owner) | (owner == NULL)) for rows in (calls, ranges)
        )
        known = own_kernels["correlation"] != NULL
        launched = np.where(
            known, look_up(own_kernels["correlation"], own_calls["correlation"], own_calls["start_ns"]), NULL
        )
        rows = kernels(
            origin,
            source.classifier,
            *coded(own_kernels["name"], strings),
            **{column: own_kernels[column] for column in _WHEN_WHERE},
            launch_ns=launched,
        )
        issued = _kinds_issued(own_calls, own_ranges)
        kind = np.where(launched == NULL, NULL, look_up(own_kernels["correlation"], own_calls["correlation"], issued))
        sent = (rows.cls == IntervalClass.COMPUTE) & (kind != NULL) & ~rows.named(computes)
        rows.cls[sent], rows.kind[sent] = IntervalClass.COMM, np.where(kind == _MIXED, NULL, kind)[sent]
        count = int(((graphs == owner) | (graphs == NULL)).sum())
        has_calls = bool(len(own_calls["start_ns"]))
        where = f"{origin} (process {pid})" if len(owners) > 1 else origin
        unlaunched = f"{where}: no table {_RUNTIME}: which kernels lack a launch is not known"
        trace = trace_of(
            source,
            "nsys",
            Process(where, pid=pid, host=host, shared=len(owners) > 1),
            [
                rows,
                *(
                    copies(origin, table["text"], **{name: table[name] for name in (*_WHEN_WHERE, "bytes")})
                    for table in own_copies
                ),
            ],
            Ranges(own_ranges["start_ns"], own_ranges["end_ns"], own_ranges["text"]),
            clock="REALTIME" if dated else "unknown",
            since_ns=since_ns,
            platform="cuda",
            notes=() if has_calls else (unlaunched,),
            unsized="nsys",
            counters={"kernels_unlinked": int((launched == NULL).sum()) if has_calls else 0},
            copies_observed=not db.tables.isdisjoint(_COPIES),
            gaps=lacking(
                f"{count} CUDA graph launches were traced as a whole, their kernels unseen; use "
                "--cuda-graph-trace=node",
                *((COMPUTE, COMM) if count else ()),
                seen=False,
            ),
        )
        links = [own_kernels["correlation"], *(table["correlation"] for table in own_copies)]
        claims = Claims(
            own_calls["start_ns"] + since_ns,
            own_calls["correlation"],
            launches_of(*coded(own_calls["name"], strings)),
            own_calls["name"],
            issued != NULL,
            np.concatenate(links),
            own_calls["end_ns"] - own_calls["start_ns"],
            issued=Counter(filter(launches_communication, own_ranges["text"])),
        )
        trace = reconciled(trace, claims)
        gaps = incomplete(trace, losses[0]) if losses else ()
        yield replace(trace, notes=(*trace.notes, *lost), gaps=(*trace.gaps, *gaps))


def _copies(db: Database, table: str, owners: Int64) -> dict[str, Any]:
    """Return copies with the word for each. Those without a process belong to the only one, if there is just one
    (W16).
    """
    rows = db.select(
        table,
        "SELECT start_ns, end_ns, device, stream, MAX(bytes, -1) AS bytes, process, correlation, "
        f"COALESCE(label, '{_COPIES[table]}') AS text "
        f"FROM {db.stored(table, f'{_SPAN} {_PLACE}', 'bytes copyKind process=globalPid correlation=correlationId')} "
        f"LEFT JOIN {db.stored('ENUM_CUDA_MEMCPY_OPER', '', 'id label')} ON id = copyKind",
        texts={"text"},
    )
    if len(owners) == 1:
        rows["process"] = np.where(rows["process"] == NULL, owners[0], rows["process"])
    return rows


def _kinds_issued(calls: dict[str, Any], ranges: dict[str, Any]) -> Int64:
    """Return the kind of collective of each call that its thread made inside a range that issues one (`c10d::` of
    torch.autograd.profiler.emit_nvtx, NCCL's calls), `_MIXED` where the range does not say it, `NULL` of other calls.
    """
    issuing = np.flatnonzero([launches_communication(text) for text in ranges["text"]])
    issuing = issuing[np.argsort(ranges["start_ns"][issuing], kind="stable")]
    kinds = np.array([kind_of(ranges["text"][index]) for index in issuing.tolist()], np.int64)
    kinds[kinds == NULL] = _MIXED
    issued = np.full(len(calls["start_ns"]), NULL, np.int64)
    for thread in np.unique(ranges["thread"][issuing]).tolist():
        own = ranges["thread"][issuing] == thread
        start, end = ranges["start_ns"][issuing[own]], ranges["end_ns"][issuing[own]]
        here = np.flatnonzero(calls["thread"] == thread)
        index = containing(calls["start_ns"][here], IntervalArray(start, np.maximum.accumulate(end)))
        issued[here[index >= 0]] = kinds[own][index[index >= 0]]
    return issued


NSYS: Final = Reader(
    "nsys",
    "nsys .sqlite",
    lambda head: "StringIds" in head.tables or any(name.startswith("CUPTI_") for name in head.tables),
    _read,
)
