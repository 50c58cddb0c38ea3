"""What each rank saved of its traces, and where: gathered, written to `run.json`, reported in one line, and judged.

Must not look at any rank's disk: a file of another node is known from that rank's account alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from aorta.distributed.output_folder import RunFolder, write_manifest
from aorta.distributed.topology import Topology
from aorta.errors import AortaError
from aorta.profiling.trace_saver import Moment, SavedWindow
from aorta.profiling.window_recording import NullProfiler, WindowRecording
from aorta.records.run_files import MANIFEST_FILE, read_manifest

_log = logging.getLogger(__name__)
Account: TypeAlias = Mapping[str, Any]
"""What one rank saved (JSON types)."""
SavedTraces: TypeAlias = list[dict[str, Any]]
"""Per window, newest last: the fields of `Moment`, and `paths` by global rank."""
NOTHING: Account = {"windows": [], "kept": [], "pending": 0}
"""Of a rank that is not known of."""
_SHOWN = 3


def pending(profiler: WindowRecording | NullProfiler) -> int:
    """Count the pieces of work that are not finished."""
    return profiler.saver.pending if isinstance(profiler, WindowRecording) else 0


def account(profiler: WindowRecording | NullProfiler, topology: Topology) -> Account:
    """Return what one rank saved; paths are absolute."""
    mine: dict[str, Any] = {"node": topology.node_rank, "host": topology.host, "windows": [], "kept": [], "pending": 0}
    if isinstance(profiler, WindowRecording):
        mine["pending"] = pending(profiler)
        mine["kept"] = [_moment(saved) for saved in profiler.saver.kept()]
        mine["windows"] = [_window(saved, mine["pending"] > 0) for saved in list(profiler.saver.windows)]
    return mine


def _window(saved: SavedWindow, unfinished: bool) -> dict[str, Any]:
    window = saved.window
    return {
        "first_step": window.first_step,
        "last_step": window.last_step,
        "partial": window.partial,
        "files": [
            {
                "kind": file.kind,
                "path": str(file.path),
                "bytes": file.bytes,
                "here": file.on_disk,
                "uploaded_to": file.address,
                "error": file.error
                or (
                    "not uploaded when the run ended" if unfinished and file.destination and not file.address else None
                ),
            }
            for file in saved.files
        ],
    }


def _moment(saved: SavedWindow) -> dict[str, Any]:
    traces = [file.path for file in saved.files if file.on_disk and file.kind in ("trace", "chrome")]
    return {**asdict(saved.window.moment), "path": str(traces[-1]) if traces else None}


def saved_traces(everyone: Sequence[Account]) -> SavedTraces:
    """Return when each window closed and, by global rank, its trace on that rank's disk (None: none); newest last."""
    found: dict[int, dict[str, Any]] = {}
    for rank, mine in enumerate(everyone):
        for entry in mine["kept"]:
            moment = {name: value for name, value in entry.items() if name != "path"}
            row = found.setdefault(moment["batch"], {**moment, "paths": [None] * len(everyone)})
            row["paths"][rank] = entry["path"]
    return [found[batch] for batch in sorted(found)]


def as_paths(saved: SavedTraces) -> list[tuple[Moment, list[Path | None]]]:
    """Return the same in the types of Python."""
    return [
        (
            Moment(**{name: value for name, value in row.items() if name != "paths"}),
            [None if path is None else Path(path) for path in row["paths"]],
        )
        for row in saved
    ]


def publish(everyone: Sequence[Account], folder: RunFolder | None) -> None:
    """Add the list to the run's manifest, where there is one, and log one line. Paths below the run's folder are
    written relative to it, as they are on every node that has such a folder.
    """
    place = ""
    if folder is not None:
        target, place = folder.path / MANIFEST_FILE, f"; the list is in {folder.path / MANIFEST_FILE} (traces)"
        try:
            write_manifest(folder, {**read_manifest(folder.path), "traces": _listed(everyone, folder.path)})
        except (OSError, ValueError, AortaError) as error:
            _log.error("profiling: %s does not say where the traces are: %s", target, error)
    files = list(_files(everyone))
    there = sorted({file["uploaded_to"].rpartition("/")[0] for _, file in files if file["uploaded_to"]})
    failed = sorted({file["error"] for _, file in files if file["error"]})
    unfinished = sum(mine["pending"] for mine in everyone)
    if not files and not unfinished:
        return  # the profiler has said why
    _log.log(
        logging.WARNING if failed or unfinished else logging.INFO,
        "profiling: %d file(s) of %d rank(s): %s; %d uploaded%s, %d failed%s%s%s",
        len(files),
        sum(bool(mine["windows"]) for mine in everyone),
        "; ".join(_by_node(everyone)) or "none here",
        sum(bool(file["uploaded_to"]) for _, file in files),
        f" ({_few(there)})" if there else "",
        sum(bool(file["error"]) for _, file in files),
        f" ({_few(failed)})" if failed else "",
        f", {unfinished} still under way" if unfinished else "",
        place,
    )


def missing(everyone: Sequence[Account]) -> str:
    """Return what did not get where it was to go, by rank, with where it is instead; "" if nothing."""
    lines = [
        f"rank {rank}: {file['path']} {'is here' if file['here'] else 'is nowhere'}, {file['error']}"
        for rank, file in _files(everyone)
        if file["error"]
    ]
    unfinished = [
        f"rank {rank}: {mine['pending']} piece(s) of work" for rank, mine in enumerate(everyone) if mine["pending"]
    ]
    if unfinished:
        lines.append(f"{', '.join(unfinished)} still under way after profiling.upload_wait_s")
    if not lines:
        return ""
    whole = sum(not file["error"] for _, file in _files(everyone))
    return f"profiling: {_few(lines)}; the other {whole} file(s) are where they were to go"


def any_exists(everyone: Sequence[Account]) -> bool:
    """Return whether a file was refused where it was to go, because another one has its name."""
    return any((file["error"] or "").startswith(f"{FileExistsError.__name__}: ") for _, file in _files(everyone))


def _listed(everyone: Sequence[Account], root: Path) -> dict[str, Any]:
    def shown(path: str | None) -> str | None:
        return path if path is None or not Path(path).is_relative_to(root) else str(Path(path).relative_to(root))

    def window(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {**entry, "files": [{**file, "path": shown(file["path"])} for file in entry["files"]]}

    return {
        "ranks": {
            str(rank): [window(one) for one in mine["windows"]] for rank, mine in enumerate(everyone) if mine["windows"]
        },
        "saved_traces": [{**row, "paths": [shown(path) for path in row["paths"]]} for row in saved_traces(everyone)],
        "unfinished": sum(mine["pending"] for mine in everyone),
    }


def _files(everyone: Sequence[Account]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for rank, mine in enumerate(everyone):
        for file in _files_of(mine):
            yield rank, file


def _files_of(mine: Account) -> Iterator[Mapping[str, Any]]:
    return (file for window in mine["windows"] for file in window["files"])


def _by_node(everyone: Sequence[Account]) -> Iterator[str]:
    """Yield, per node and folder, how many files, of which ranks."""
    found: dict[tuple[int, str], dict[str, list[int]]] = {}
    here: dict[tuple[int, str], int] = {}
    for rank, mine in enumerate(everyone):
        paths = [file["path"] for file in _files_of(mine) if file["here"]]
        if paths:
            node = (mine["node"], mine["host"])
            folder = os.path.commonpath([Path(path).parent for path in paths])
            found.setdefault(node, {}).setdefault(folder, []).append(rank)
            here[node] = here.get(node, 0) + len(paths)
    for node, folders in found.items():
        places = [f"rank {_few(list(map(str, ranks)))} in {folder}" for folder, ranks in folders.items()]
        yield f"{here[node]} on node {node[0]} ({node[1]}), {_few(places)}"


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:_SHOWN]) + (f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else "")
