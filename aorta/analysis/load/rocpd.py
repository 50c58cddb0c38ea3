"""Reads rocprofv3's `*_results.db` (rocpd, SQLite, schema 3), and rocmProfileData's older databases (RPD), into one
`Trace` per process.

The views of the file (`kernels`, `regions`) are inner joins, in which a dispatch without event, thread or string
vanishes. So the stored tables `rocpd_<what>_<guid>` are read and joined here, where nothing is lost (W16). An event's
`stack_id` is the correlation id of the call, its `correlation_id` the external one. Must not: use anything in the
environment of a process but what tells its rank (it may hold secrets).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.analysis.load.interval_table import NULL, Interner, Trace, look_up
from aorta.analysis.load.kernel_classifier import NameClassifier
from aorta.analysis.load.rank_inference import Process, place
from aorta.analysis.load.rocprof import HIP_API, MARKERS, NO_KERNELS, RCCL_API, Calls, Copies, Kernels, trace_of
from aorta.analysis.load.sqlite import Database, rows_of
from aorta.errors import InputError
from aorta.records.schema import Header
from aorta.timeline.arrays import Int64

FORMAT: Final = "rocpd"
_DISPATCH: Final = "rocpd_kernel_dispatch"
_VISIBLE: Final = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_MARKED: Final = (*MARKERS, "MARKER_API")


def read_rocpd(path: Path, name: str, classifier: NameClassifier, headers: Sequence[Header] = ()) -> list[Trace]:
    """Read one database.

    Args:
        name: used in messages and as `Trace.path`.
        headers: of records that may identify the rank of a process.

    Raises:
        InputError: it is not a rocpd database of schema 3, or it is damaged.
    """
    with closing(Database(path, name)) as db:
        suffixes = sorted(table.removeprefix(_DISPATCH) for table in db.tables if table.startswith(_DISPATCH))
        if not suffixes:
            raise InputError(
                f"{name}: no table {_DISPATCH}_<guid>; it holds {', '.join(sorted(db.tables)[:8]) or 'no tables'}. Was "
                "it recorded with --kernel-trace, by rocprofv3 of ROCm 7?"
            )
        traces = []
        for suffix in suffixes:
            _check_version(db, suffix)
            traces += _Session(db, suffix, name, classifier, headers).traces()
    if not traces:
        raise InputError(f"{name}: {NO_KERNELS}")
    return traces


def read_rpd(path: Path, name: str, classifier: NameClassifier, headers: Sequence[Header] = ()) -> list[Trace]:
    """Read one database of rocmProfileData (RPD), AMD's older format: `rocpd_op` has what ran on devices, `rocpd_api`
    the calls that launched it, and ranges of ROCTx as calls named `UserMarker`. Arguments as `read_rocpd`.

    Raises:
        InputError: it holds no kernels, or it is damaged.
    """
    with closing(Database(path, name)) as db:
        strings = db.texts("rocpd_string", "id", "string")
        work = db.integers("rocpd_op", ("id", "start", "end", "opType_id"), ("description_id", "gpuId", "queueId"))
        calls = db.integers_if_stored("rocpd_api", ("id", "start", "end"), ("pid", "tid", "apiName_id", "args_id"))
        links = db.integers_if_stored("rocpd_api_ops", ("api_id", "op_id"))
        named = db.integers_if_stored("rocpd_kernelapi", ("api_ptr_id",), ("kernelName_id",))
    work["call"] = look_up(work["id"], links["op_id"], links["api_id"])
    described = work["description_id"]
    unnamed = np.array([not strings.get(code) for code in described.tolist()], bool)
    work["name"] = np.where(unnamed, look_up(work["call"], named["api_ptr_id"], named["kernelName_id"]), described)
    work["tid"], work["pid"] = (look_up(work["call"], calls["id"], calls[column]) for column in ("tid", "pid"))
    kinds = [strings.get(code, "") for code in work["opType_id"].tolist()]
    work["copies"] = np.array([not kind.startswith("Kernel") for kind in kinds], np.int64)
    if work["copies"].all():
        raise InputError(f"{name}: no KernelExecution in rocpd_op: record kernels with RPD's librpd_tracer")
    processes = np.unique(work["pid"][work["copies"] == 0]).tolist()
    traces = []
    for pid in processes:
        mine, own = rows_of(work, work["pid"] == pid), rows_of(calls, calls["pid"] == pid)
        kernels, copies = rows_of(mine, mine["copies"] == 0), rows_of(mine, mine["copies"] == 1)
        is_mark = [strings.get(code) == "UserMarker" for code in own["apiName_id"].tolist()]
        marks, nothing = (rows_of(own, np.array(chosen, bool)) for chosen in (is_mark, [False] * len(is_mark)))
        texts = [strings.get(code, "") for code in marks["args_id"].tolist()]
        ran, names = _coded(strings.get(code, "") for code in kernels["name"].tolist())
        copied, kinds_of_copies = _coded(strings.get(code, "") for code in copies["opType_id"].tolist())
        trace = trace_of(
            "rpd",
            f"{name} (process {pid})" if len(processes) > 1 else name,
            place(Process(name if len(processes) == 1 else "", pid=pid if pid != NULL else None), headers),
            Kernels(
                kernels["tid"],
                kernels["gpuId"],
                kernels["queueId"],
                np.full(len(ran), NULL),
                kernels["id"],
                (kernels["call"],),
                kernels["start"],
                kernels["end"],
                ran,
                names,
            ),
            Copies(copies["gpuId"], copies["queueId"], copies["start"], copies["end"], copied, kinds_of_copies),
            Calls(nothing["tid"], nothing["id"], nothing["start"], nothing["end"], ()),
            (own["id"], own["start"]),
            Calls(marks["tid"], marks["id"], marks["start"], marks["end"], texts),
            classifier,
            copies_observed=bool(len(copies["id"])),
        )
        traces.append(replace(trace, clock="unknown"))
    return traces


def _coded(texts: Iterable[str]) -> tuple[Int64, tuple[str, ...]]:
    """Return the code of each text, `NULL` of an empty one, and the texts by code."""
    names = Interner()
    codes = np.array([names(text) if text else NULL for text in texts], np.int64)
    return codes, names.strings


def _check_version(db: Database, suffix: str) -> None:
    for chunk in db.rows(f"rocpd_metadata{suffix}", ("tag", "value")):
        for tag, value in chunk:
            if tag == "schema_version" and str(value).split(".")[0] != "3":
                raise InputError(f"{db.place}: rocpd schema version {value}; this AORTA reads version 3")


class _Session:
    """One guid of a database, which is usually one process."""

    def __init__(
        self, db: Database, suffix: str, name: str, classifier: NameClassifier, headers: Sequence[Header]
    ) -> None:
        self._db, self._suffix, self._name = db, suffix, name
        self._classifier, self._headers = classifier, headers
        self._strings = self._texts("rocpd_string", "string")
        self._events = self._columns("rocpd_event", ("id",), ("category_id", "stack_id", "parent_stack_id"))

    def _columns(self, table: str, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Int64]:
        return self._db.integers_if_stored(table + self._suffix, required, optional)

    def _texts(self, table: str, value: str) -> dict[int, str]:
        return self._db.texts(table + self._suffix, "id", value)

    def traces(self) -> list[Trace]:
        """Return one trace per process of this session that dispatched kernels."""
        kernels = self._columns(
            _DISPATCH,
            ("start", "end", "kernel_id", "agent_id"),
            ("pid", "tid", "dispatch_id", "queue_id", "stream_id", "event_id"),
        )
        copies = self._columns(
            "rocpd_memory_copy",
            ("start", "end", "name_id"),
            ("pid", "dst_agent_id", "src_agent_id", "size", "stream_id"),
        )
        regions = self._columns("rocpd_region", ("start", "end", "name_id"), ("pid", "tid", "event_id"))
        present = np.unique(kernels["pid"]).tolist()
        return [
            self._process(
                ident,
                len(present) > 1,
                *(rows_of(table, table["pid"] == ident) for table in (kernels, copies, regions)),
            )
            for ident in present
        ]

    def _process(
        self,
        ident: int,
        several: bool,
        kernels: dict[str, Int64],
        copies: dict[str, Int64],
        regions: dict[str, Int64],
    ) -> Trace:
        pid, environment = self._environment(ident)
        devices, host = self._gpus(), self._host()
        used = np.unique(look_up(kernels["agent_id"], *devices))
        where = f"{self._name} (process {pid})" if several else self._name
        placed = place(
            Process(
                path=self._name,
                pid=pid,
                host=host,
                environment_rank=_number(environment.get("RANK")),
                environment_world=_number(environment.get("WORLD_SIZE")),
                gpus=tuple(used[used != NULL].tolist()),
                all_gpus_visible=not any(environment.get(name) for name in _VISIBLE) if environment else None,
            ),
            self._headers,
        )
        calls, launches, marks = self._regions(regions)
        return trace_of(
            FORMAT,
            where,
            placed,
            self._kernels(kernels, devices),
            self._copies(copies, devices),
            calls,
            launches,
            marks,
            self._classifier,
            host=host,
            copies_observed=bool(len(copies["start"])),
        )

    def _kernels(self, rows: dict[str, Int64], devices: tuple[Int64, Int64]) -> Kernels:
        display, mangled = (self._texts("rocpd_info_kernel_symbol", name) for name in ("display_name", "kernel_name"))
        names = Interner()
        code = {ident: names(text) for ident, text in (mangled | display).items() if text}
        return Kernels(
            thread=rows["tid"],
            device=look_up(rows["agent_id"], *devices),
            queue=rows["queue_id"],
            stream=rows["stream_id"],
            dispatch=rows["dispatch_id"],
            correlations=(self._event(rows, "stack_id"), self._event(rows, "parent_stack_id")),
            start_ns=rows["start"],
            end_ns=rows["end"],
            name=np.array([code.get(ident, NULL) for ident in rows["kernel_id"].tolist()], dtype=np.int64),
            names=names.strings,
        )

    def _copies(self, rows: dict[str, Int64], devices: tuple[Int64, Int64]) -> Copies:
        names = Interner()
        codes = [names(self._strings.get(ident, "")) for ident in rows["name_id"].tolist()]
        to, back = (look_up(rows[name], *devices) for name in ("dst_agent_id", "src_agent_id"))
        return Copies(
            device=np.where(to != NULL, to, back),
            stream=rows["stream_id"],
            bytes=rows["size"],
            start_ns=rows["start"],
            end_ns=rows["end"],
            name=np.array(codes, dtype=np.int64),
            names=names.strings,
        )

    def _regions(self, rows: dict[str, Int64]) -> tuple[Calls, tuple[Int64, Int64], Calls]:
        """Return the calls of RCCL and HIP, and markers, which share a table. The text of a marker is in its event, or
        is the region's name.
        """
        category = self._event(rows, "category_id")
        named = {ident: self._strings.get(ident, "") for ident in np.unique(category).tolist()}
        rccl = np.isin(category, [ident for ident, text in named.items() if text == RCCL_API])
        hip = np.isin(category, [ident for ident, text in named.items() if text.startswith(HIP_API)])
        marked = np.isin(category, [ident for ident, text in named.items() if text in _MARKED])
        messages = self._messages(set(rows["event_id"][marked].tolist()))
        correlation = self._event(rows, "stack_id")

        def calls(chosen: NDArray[np.bool_], messages: Mapping[int, str]) -> Calls:
            events, names = rows["event_id"][chosen].tolist(), rows["name_id"][chosen].tolist()
            return Calls(
                rows["tid"][chosen],
                correlation[chosen],
                rows["start"][chosen],
                rows["end"][chosen],
                [messages.get(event) or self._strings.get(name, "") for event, name in zip(events, names, strict=True)],
            )

        return calls(rccl, {}), (correlation[hip], rows["start"][hip]), calls(marked, messages)

    def _messages(self, events: set[int]) -> dict[int, str]:
        """Return `message` in the `extdata` of the markers' events."""
        table = f"rocpd_event{self._suffix}"
        if not events or "extdata" not in self._db.columns(table):
            return {}
        found = {}
        for chunk in self._db.rows(table, ("id", "extdata")):
            for ident, extra in chunk:
                if ident in events and isinstance(extra, str | bytes):
                    text = _object(extra).get("message")
                    if isinstance(text, str) and isinstance(ident, int):
                        found[ident] = text
        return found

    def _event(self, rows: dict[str, Int64], column: str) -> Int64:
        return look_up(rows["event_id"], self._events["id"], self._events[column])

    def _gpus(self) -> tuple[Int64, Int64]:
        """Return the ids of the GPU agents, and their numbers among the GPUs."""
        ids, numbers = [], []
        table = f"rocpd_info_agent{self._suffix}"
        if table in self._db.tables:
            for chunk in self._db.rows(table, ("id", "type"), ("type_index", "absolute_index")):
                for ident, kind, among_gpus, among_all in chunk:
                    number = among_gpus if isinstance(among_gpus, int) else among_all
                    if kind == "GPU" and isinstance(ident, int) and isinstance(number, int):
                        ids.append(ident)
                        numbers.append(number)
        return np.array(ids, dtype=np.int64), np.array(numbers, dtype=np.int64)

    def _environment(self, ident: int) -> tuple[int | None, dict[str, object]]:
        """Return the process id and environment of a row of `rocpd_info_process`."""
        table = f"rocpd_info_process{self._suffix}"
        if table in self._db.tables:
            for chunk in self._db.rows(table, ("id", "pid"), ("environment",)):
                for row, pid, environment in chunk:
                    if row == ident:
                        found = _object(environment) if isinstance(environment, str | bytes) else {}
                        return pid if isinstance(pid, int) else None, found
        return None, {}

    def _host(self) -> str | None:
        hosts = set(self._texts("rocpd_info_node", "hostname").values())
        return hosts.pop() if len(hosts) == 1 else None


def _object(text: str | bytes) -> dict[str, object]:
    """Decode a JSON object; empty where the text is none, so that its facts are unknown."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _number(text: object) -> int | None:
    digits = str(text)
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else None
