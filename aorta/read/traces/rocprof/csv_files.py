"""Reads rocprofv3's CSV files into one `Trace` per process.

Four variants are read: of ROCm 6.2/6.3 (agents as bare numbers, no `Stream_Id`), of 6.4 and later ("Agent 4"), of
`rocpd convert` (a leading `Guid`, other capitals, several processes in a file), and any of them with every field
quoted. One process writes several files (`<pid>_kernel_trace.csv`, `<pid>_marker_api_trace.csv`, ...), which are read
together. Columns are found by name, whatever their capitals.

Occupancy and CU utilisation are derived from raw counters where rocprofv3 was not asked for them, by the formulas and
under the names of rocprofiler-sdk (`counter_defs.yaml`). Its CSV has the sum of a counter over all its instances
(`generateCSV.cpp`); a formula that takes the largest of one instance per XCC can be computed from it only where there
is one XCC. Must not: find a column by its position, guess what a device is, or replace a value that rocprofv3 gave.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import IO, Any, Final, NamedTuple

import msgspec
import numpy as np

from aorta.errors import InputError
from aorta.read.frames import Numbered
from aorta.read.traces.interval_table import NULL, CounterValues, Trace
from aorta.read.traces.open import csv_rows, is_url, rows_of
from aorta.read.traces.reader import FileHead, Process, Ranges, Reader, TraceInput, copies
from aorta.read.traces.rocprof import trace as rocprof

_TRACES: Final = ("kernel_trace", "memory_copy_trace", "rccl_api_trace", "marker_api_trace", "hip_api_trace")
STEMS: Final = (*_TRACES, "counter_collection", "agent_info")
"""Ends of the names of the files that one process writes and this reader uses."""
_ROWS: Final = 4096
"""Rows held as Python objects at a time."""
_SPAN: Final = "start_ns=start_timestamp end_ns=end_timestamp"
_TABLES: Final = {
    "counter": ("dispatch=dispatch_id kernel=kernel_name counter=counter_name value=counter_value", ""),
    "kernel": (
        f"name=kernel_name device=agent_id {_SPAN}",
        "thread=thread_id queue=queue_id stream=stream_id dispatch=dispatch_id correlation=correlation_id",
    ),
    "copy": (f"name=direction {_SPAN}", "from=source_agent_id to=destination_agent_id stream=stream_id"),
    "call": (f"domain=domain name=function {_SPAN}", "process=process_id thread=thread_id correlation=correlation_id"),
    "agent": ("kind=agent_type number=logical_node_id", "name=name simds=simd_count per_cu=simd_per_cu xccs=num_xcc"),
}
"""What the rows of a file are -> name here=column there: those by which it is known, then others."""
_TEXTS: Final = ("guid", "kernel_name", "counter_name", "direction", "domain", "function", "agent_type", "name")
_NO_TEXT: Final = 0
"""Code of the empty text, which is the first."""
_NEEDED: Final = ("start_timestamp", "end_timestamp", "counter_value")
"""Columns without which a row says nothing."""
_NUMBERS: Final = msgspec.json.Decoder(list[int])
_NUMBER: Final = re.compile(r"(-?[0-9]{1,19})")
_AGENT: Final = re.compile(r"(?:[A-Za-z]+ )?([0-9]{1,9})")
_PID: Final = re.compile(r"^(\d{1,10})_(?:[a-z]+_)+trace\.csv", re.IGNORECASE)


def _matches(head: FileHead) -> bool:
    first = head.text.split(b"\n", 1)[0].lower()
    # Counter collection serialises kernels (W17): its times say nothing about overlap.
    return all(name in first for name in (b"start_timestamp", b"end_timestamp", b"kernel_name")) and (
        b"counter_name" not in first
    )


def together(file: str) -> tuple[str, ...]:
    """Return the file and those beside it that the same process wrote, each of which may be compressed."""
    own = PurePath(file.removesuffix(".gz"))
    stem = next((stem for stem in STEMS if own.name.endswith(f"{stem}.csv")), None)
    if is_url(file) or stem is None:
        return (file,)
    beside = [str(own.with_name(own.name.replace(stem, other))) for other in STEMS if other != stem]
    # `gzip -k` leaves both files; their rows are the same and must be read once.
    pairs = ((name, f"{name}.gz") for name in beside)
    return (file, *(there for pair in pairs if (there := next((n for n in pair if Path(n).is_file()), None))))


def _read(source: TraceInput) -> Iterator[Trace]:
    texts = Numbered({"": 0})
    parts: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _TABLES}
    for path, stream in source.streams.items():
        kind, columns = _table(path, stream, texts)
        parts[kind].append(columns)
    tables = {
        kind: {
            name: np.concatenate([part.pop(name) for part in found] or [np.zeros(0, np.int64)])
            for name in _columns(kind)
        }
        for kind, found in parts.items()
    }
    if not len(tables["kernel"]["guid"]):
        raise InputError(f"{source.place}: {rocprof.NO_KERNELS} and give its kernel_trace.csv")
    guids = set(np.concatenate([table["guid"] for table in tables.values()]).tolist())
    from_name = {int(match[1]) for path in source.streams if (match := _PID.match(PurePath(path).name))}
    words = tuple(texts)

    def coded(wanted: Callable[[str], bool]) -> list[int]:
        return [code for code, text in enumerate(words) if wanted(text)]

    computed = np.unique(tables["kernel"]["guid"]).tolist()
    for guid in computed:  # a helper process may have run no kernels
        own = {kind: rows_of(table, table["guid"] == guid) for kind, table in tables.items()}
        ran, copied, called = own["kernel"], own["copy"], own["call"]
        ids = called["process"]
        pids = set(ids[ids != NULL].tolist()) or (from_name if len(guids) == 1 else set())
        where = f"{source.place} ({words[guid]})" if words[guid] and len(guids) > 1 else source.place
        notes = [f"{where}: rows of {len(pids)} processes without a Guid to tell them apart"] if len(pids) > 1 else []
        hip, rccl, marks = (
            rows_of(called, np.isin(called["domain"], coded(wanted)))
            for wanted in (
                lambda text: text.startswith(rocprof.HIP_API),
                rocprof.RCCL_API.__eq__,
                rocprof.MARKERS.__contains__,
            )
        )
        to_host = np.isin(copied["name"], coded(lambda text: text.upper().endswith("TO_HOST")))
        counters = _counters(own, words, where, notes)
        yield rocprof.trace_of_rocprof(
            source,
            ROCPROF_CSV.name,
            # "Agent 4" counts CPUs too, so it is not the number of a GPU, and says nothing about the rank.
            Process(
                where,
                pid=next(iter(pids)) if len(pids) == 1 else None,
                shared=len(computed) > 1 or len(pids) > 1,
            ),
            {**ran, "name": np.where(ran["name"] == _NO_TEXT, NULL, ran["name"])},
            words,
            copies(
                where,
                device=np.where(to_host, copied["from"], copied["to"]),
                names=words,
                **{name: copied[name] for name in ("start_ns", "end_ns", "stream", "name")},
            ),
            Ranges(marks["start_ns"], marks["end_ns"], [words[code] for code in marks["name"].tolist()]),
            {**hip, "text": [words[code] for code in hip["name"].tolist()]},
            {**rccl, "text": [words[code] for code in rccl["name"].tolist()]},
            notes=notes,
            copies_observed=bool(parts["copy"]),
            hardware_counters=counters,
        )


def _counters(
    tables: dict[str, dict[str, Any]], texts: Sequence[str], where: str, notes: list[str]
) -> CounterValues | None:
    """Return the counters of kernels of this process: a value belongs to the kernel of its dispatch id, if that has its
    name (a file of another run numbers other kernels). Values of one counter and dispatch, one of each of its
    instances, are added up, as rocprofv3 does itself.
    """
    ran, values, agents = tables["kernel"], tables["counter"], tables["agent"]
    if not len(values["dispatch"]):
        return None
    known = {*zip(ran["dispatch"].tolist(), ran["name"].tolist(), strict=True)}
    sums: dict[tuple[int, int], float] = {}
    strays = 0
    columns = (values[name].tolist() for name in ("dispatch", "kernel", "counter", "value"))
    for dispatch, kernel, counter, value in zip(*columns, strict=True):
        if (dispatch, kernel) in known:
            sums[dispatch, counter] = sums.get((dispatch, counter), 0.0) + value
        else:
            strays += 1
    if strays:
        notes.append(f"{where}: {strays} values of hardware counters belong to no kernel of this trace; left out")
    codes = {code: at for at, code in enumerate(dict.fromkeys(code for _, code in sums))}
    joined = CounterValues(
        np.array([origin for origin, _ in sums], np.int64),
        np.array([codes[code] for _, code in sums], np.int64),
        np.array([*sums.values()], np.float64),
        tuple(texts[code] for code in codes),
    )
    about = (agents[name].tolist() for name in ("kind", "name", "simds", "per_cu", "xccs"))
    gpus = [
        Agent(texts[name], xccs if xccs > 0 else None, simds / per_cu if simds > 0 and per_cu > 0 else None)
        for kind, name, simds, per_cu, xccs in zip(*about, strict=True)
        if texts[kind].upper() == "GPU"
    ]
    return with_derived(joined, gpus)


def _columns(kind: str) -> dict[str, str]:
    known, others = _TABLES[kind]
    return {"guid": "guid", **dict(each.split("=") for each in f"{known} {others}".split())}


def _table(path: str, stream: IO[bytes], texts: Numbered) -> tuple[str, dict[str, Any]]:
    """Read one file: what its rows are, and their columns. Texts become codes of `texts`, and what is missing `NULL`.

    Raises:
        InputError: it has none of the known columns, or a row cannot be read; names file and line.
    """
    lines = csv_rows(stream, path)
    _, head = next(lines, (1, []))
    at = {name.strip().lower(): column for column, name in enumerate(head)}
    known = {kind: [each.partition("=")[2] for each in needed.split()] for kind, (needed, _) in _TABLES.items()}
    kind = next((kind for kind, names in known.items() if at.keys() >= set(names)), None)
    if kind is None:
        raise InputError(
            f"{path}:1: not a rocprofv3 trace: the columns are {', '.join(head[:12])[:300] or 'none'}; a kernel trace "
            f"has {', '.join(known['kernel'])}, a copy trace {', '.join(known['copy'])}, an API or marker trace "
            f"{', '.join(known['call'])}"
        )
    parts: dict[str, list[Any]] = {name: [] for name in _columns(kind)}
    while rows := list(islice(lines, _ROWS)):
        for number, row in rows:
            if len(row) != len(head):
                fields = f"{len(row)} fields for {len(head)} columns"
                raise InputError(f"{path}:{number}: {fields}: cut off, or edited by hand?")
        cells = list(zip(*(row for _, row in rows), strict=True))
        for name, column in _columns(kind).items():
            values = cells[at[column]] if column in at else ("",) * len(rows)
            needed = column in _NEEDED or (kind == "counter" and column == "dispatch_id")
            if column in _TEXTS:
                parts[name].append(np.array([texts[cell] for cell in values], np.int64))
                continue
            if not needed and not any(values):
                parts[name].append(np.full(len(rows), NULL, np.int64))
                continue
            parse, wanted = _PARSERS.get(column, (_integer, "an integer of 64 bits is needed"))
            if parse is _integer:
                with suppress(msgspec.DecodeError, OverflowError, UnicodeError):  # quick, where every cell is a number
                    numbers = _NUMBERS.decode(f"[{','.join(values)}]")
                    if len(numbers) == len(rows):
                        parts[name].append(np.array(numbers, np.int64))
                        continue
            empty = {} if needed else dict.fromkeys(("", "null", "None"), NULL)
            parsed = {cell: empty[cell] if cell in empty else parse(cell) for cell in set(values)}
            for (number, _), cell in zip(rows, values, strict=True):
                if parsed[cell] is None:
                    raise InputError(f"{path}:{number}: {column} is {cell[:60]!r}; {wanted}")
            parts[name].append(np.array([parsed[cell] for cell in values], np.float64 if parse is _real else np.int64))
    return kind, {name: np.concatenate(parts.pop(name) or [np.zeros(0, np.int64)]) for name in list(parts)}


def _integer(cell: str, pattern: re.Pattern[str] = _NUMBER) -> int | None:
    match = pattern.fullmatch(cell)  # int() accepts "1_000", and refuses a number only after 4,300 digits
    return int(match[1]) if match and -(2**63) <= int(match[1]) < 2**63 else None


def _agent(cell: str) -> int | None:
    return _integer(cell, _AGENT)


def _real(cell: str) -> float | None:
    try:
        found = float(cell)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


_PARSERS: Final[dict[str, tuple[Callable[[str], float | None], str]]] = {
    "counter_value": (_real, "a finite number is needed"),
    **dict.fromkeys(
        ("agent_id", "source_agent_id", "destination_agent_id"), (_agent, 'an agent is "Agent 4", "GPU 0" or a number')
    ),
}
"""How a column is read that holds neither texts nor plain integers, and what its cells have to be."""


_CDNA: Final = ("gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")
_RDNA: Final = ("gfx1010", "gfx1030", "gfx1031", "gfx1032")
_RDNA_3: Final = ("gfx1100", "gfx1101", "gfx1102")
_COUNTED_BY_XCC: Final = frozenset({"GRBM_GUI_ACTIVE", "GRBM_COUNT"})
"""Cycles, counted by each XCC; formulas take the largest."""
_SLOTS: Final = 32
"""Waves a CU can hold, in the formulas of `OccupancyPercent`."""


class Formula(NamedTuple):
    """`metric` = `factor` x counter `of` / counter `by`, and by the number of CUs where it is `per_cu`."""

    metric: str
    architectures: tuple[str, ...]
    factor: float
    of: str
    by: str
    per_cu: bool


FORMULAS: Final = (
    # Of the cycles of all CUs the share in which a CU was busy, 0 to 1.
    Formula("SIMD_UTILIZATION", _CDNA, 1, "SQ_BUSY_CU_CYCLES", "GRBM_COUNT", True),
    # Percent; on CDNA SQ_WAVE_CYCLES counts every fourth cycle.
    Formula("OccupancyPercent", _CDNA, 400 / _SLOTS, "SQ_WAVE_CYCLES", "GRBM_GUI_ACTIVE", True),
    Formula("OccupancyPercent", _RDNA + _RDNA_3, 100 / _SLOTS, "SQ_WAVE_CYCLES", "GRBM_GUI_ACTIVE", True),
    # Waves. On CDNA both need SQ_LEVEL_WAVES added up cycle by cycle, which no raw counter in the CSV is.
    Formula("MeanOccupancyPerCU", _RDNA_3, 1, "SQ_WAVE_CYCLES", "GRBM_GUI_ACTIVE", True),
    Formula("MeanOccupancyPerActiveCU", _RDNA_3, 1, "SQ_WAVE_CYCLES", "SQ_BUSY_CYCLES", False),
)


@dataclass(frozen=True)
class Agent:
    """A GPU in rocprofv3's `agent_info`: its architecture, and how many XCCs and CUs it has; None where not stated. The
    number of CUs is SIMDs / SIMDs per CU, as in rocprofiler-sdk (`CU_NUM`).
    """

    name: str
    xccs: int | None
    cus: float | None


def with_derived(counters: CounterValues, agents: Sequence[Agent]) -> CounterValues:
    """Add what `FORMULAS` gives for each kernel that has both counters, except where rocprofv3 gave it. Which of the
    GPUs (`agents`) a kernel ran on is not needed while they are alike.
    """
    architectures = {each.name for each in agents}
    wanted = [each for each in FORMULAS if each.of in counters.names and each.metric not in counters.names]
    known = [each for each in wanted if not agents or architectures & {*each.architectures}]
    missing: dict[str, list[str]] = defaultdict(list)
    for formula in known:
        if (why := _why_not_derived(formula, counters, agents)) is not None:
            missing[why].append(formula.metric)
            continue
        of, by = (np.flatnonzero(counters.counter == counters.names.index(name)) for name in (formula.of, formula.by))
        kernels, left, right = np.intersect1d(
            counters.origin[of], counters.origin[by], assume_unique=True, return_indices=True
        )
        divisor = counters.value[by[right]]
        used = divisor > 0
        per_cu = agents[0].cus if formula.per_cu and agents[0].cus else 1
        values = formula.factor * counters.value[of[left[used]]] / divisor[used] / per_cu
        counters = replace(
            counters,
            origin=np.append(counters.origin, kernels[used]),
            counter=np.append(counters.counter, np.full(len(values), len(counters.names))),
            value=np.append(counters.value, values),
            names=(*counters.names, formula.metric),
            derived_from={**counters.derived_from, formula.metric: f"{formula.of}, {formula.by}"},
        )
    if wanted and not known:
        unknown = f"rocprofiler-sdk has no formula for {', '.join(sorted(architectures))}"
        missing[unknown] = [each.metric for each in wanted]
    said = [f"{', '.join(dict.fromkeys(metrics))} not derived: {why}" for why, metrics in missing.items()]
    return replace(counters, missing=tuple(said))


def _why_not_derived(formula: Formula, counters: CounterValues, agents: Sequence[Agent]) -> str | None:
    if not agents:
        return "no agent_info.csv beside the counters says what device it is"
    agent, *others = dict.fromkeys(agents)
    if others:
        return f"the GPUs of agent_info.csv are not alike ({', '.join(each.name for each in (agent, *others))})"
    if formula.by not in counters.names:
        return f"{formula.by} was not collected with {formula.of}"
    if formula.per_cu and not agent.cus:
        return "agent_info.csv has no number of compute units"
    if formula.by in _COUNTED_BY_XCC and agent.xccs != 1:
        count = "an unknown number of" if agent.xccs is None else agent.xccs
        return f"it takes the largest {formula.by} of {count} XCCs, and the CSV has their sum; name it behind --pmc"
    return None


ROCPROF_CSV: Final = Reader(
    "rocprofv3-csv",
    "rocprofv3 *_kernel_trace.csv and the files beside it",
    _matches,
    _read,
    together,
    rocprof.process_of,
)
