"""What each rank says of the traces that it saved, listed in the manifest, logged, and judged.

Must not look at another rank's disk: its files are known from its own account alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeAlias

from aorta.distributed.output_folder import RunFolder, write_manifest
from aorta.distributed.topology import Topology
from aorta.errors import AortaError
from aorta.profiling.window_recording import NullProfiler, WindowRecording
from aorta.records.run_files import MANIFEST_FILE, read_manifest

_log = logging.getLogger(__name__)
Account: TypeAlias = Mapping[str, Any]
"""What one rank saved of its traces (JSON types)."""
NOTHING: Final[Account] = {"windows": [], "kept": [], "pending": 0}
"""Account of a rank that gave none."""
_SHOWN: Final = 3


def account(profiler: WindowRecording | NullProfiler, topology: Topology) -> Account:
    """Return what one rank saved; paths are absolute."""
    of_rank = {**NOTHING, "node": topology.node_rank, "host": topology.host}
    if not isinstance(profiler, WindowRecording):
        return of_rank
    pending = profiler.saver.pending
    kept, windows = [], []
    for saved in profiler.saver.kept():
        traces = [file.path for file in saved.files if file.on_disk and file.kind in ("trace", "chrome")]
        kept.append({**asdict(saved.window.moment), "path": str(traces[-1]) if traces else None})
    for saved in list(profiler.saver.windows):
        files = [
            {
                "kind": file.kind,
                "path": str(file.path),
                "bytes": file.bytes,
                "here": file.on_disk,
                "uploaded_to": file.address,
                "error": file.error
                or ("not uploaded when the run ended" if pending and file.destination and not file.address else None),
            }
            for file in saved.files
        ]
        of_window = {name: getattr(saved.window, name) for name in ("first_step", "last_step", "partial")}
        windows.append({**of_window, "files": files})
    return {**of_rank, "windows": windows, "kept": kept, "pending": pending}


def saved_traces(accounts: Sequence[Account]) -> list[tuple[dict[str, Any], list[str | None]]]:
    """Return, per window and newest last, the fields of its `Moment`, and its trace by global rank, None where that
    rank has none on its disk.
    """
    by_batch: dict[int, tuple[dict[str, Any], list[str | None]]] = {}
    for rank, of_rank in enumerate(accounts):
        for entry in of_rank["kept"]:
            moment = {name: value for name, value in entry.items() if name != "path"}
            _, paths = by_batch.setdefault(moment["batch"], (moment, [None] * len(accounts)))
            paths[rank] = entry["path"]
    return [by_batch[batch] for batch in sorted(by_batch)]


def publish(accounts: Sequence[Account], folder: RunFolder | None) -> None:
    """Add the list to the run's manifest, if there is one, and log one line. Paths below the run's folder are relative
    to it, as they are on every node that has such a folder.
    """
    unfinished, where = sum(of_rank["pending"] for of_rank in accounts), ""
    if folder is not None:
        root, where = folder.path, f"; the list is in {folder.path / MANIFEST_FILE} (traces)"

        def shown(path: str | None) -> str | None:
            return path if path is None or not Path(path).is_relative_to(root) else str(Path(path).relative_to(root))

        ranks = {
            str(rank): [
                {**window, "files": [{**file, "path": shown(file["path"])} for file in window["files"]]}
                for window in of_rank["windows"]
            ]
            for rank, of_rank in enumerate(accounts)
            if of_rank["windows"]
        }
        kept = [{**moment, "paths": list(map(shown, paths))} for moment, paths in saved_traces(accounts)]
        traces = {"ranks": ranks, "saved_traces": kept, "unfinished": unfinished}
        try:
            write_manifest(folder, {**read_manifest(root), "traces": traces})
        except (OSError, ValueError, AortaError) as error:
            _log.error("profiling: %s does not list the traces: %s", root / MANIFEST_FILE, error)
    files = [file for _, file in files_of(accounts)]
    if not files and not unfinished:
        return  # the profiler has said why
    here: dict[tuple[int, str], list[str]] = {}
    folders: dict[tuple[int, str], dict[str, list[str]]] = {}
    for rank, of_rank in enumerate(accounts):
        if paths := [file["path"] for _, file in files_of([of_rank]) if file["here"]]:
            node, common = (of_rank["node"], of_rank["host"]), os.path.commonpath([Path(path).parent for path in paths])
            here.setdefault(node, []).extend(paths)
            folders.setdefault(node, {}).setdefault(common, []).append(str(rank))
    by_node = [
        f"{len(paths)} on node {node[0]} ({node[1]}), "
        + _few([f"rank {_few(ranks)} in {common}" for common, ranks in folders[node].items()])
        for node, paths in here.items()
    ]
    uploaded = [file["uploaded_to"] for file in files if file["uploaded_to"]]
    failed = [file["error"] for file in files if file["error"]]
    _log.log(
        logging.WARNING if failed or unfinished else logging.INFO,
        "profiling: %d file(s) of %d rank(s): %s; %d uploaded%s, %d failed%s%s%s",
        len(files),
        sum(bool(of_rank["windows"]) for of_rank in accounts),
        "; ".join(by_node) or "none on disk",
        len(uploaded),
        f" ({_few(sorted({address.rpartition('/')[0] for address in uploaded}))})" if uploaded else "",
        len(failed),
        f" ({_few(sorted(set(failed)))})" if failed else "",
        f", {unfinished} unfinished" if unfinished else "",
        where,
    )


def missing_traces(accounts: Sequence[Account]) -> str:
    """Return by rank which files are missing or not uploaded, and why; "" if none."""
    files = list(files_of(accounts))
    lines = [
        f"rank {rank}: {file['path']} ({'still' if file['here'] else 'not'} on disk): {file['error']}"
        for rank, file in files
        if file["error"]
    ]
    if unfinished := [
        f"rank {rank}: {of_rank['pending']}" for rank, of_rank in enumerate(accounts) if of_rank["pending"]
    ]:
        lines.append(f"writes or uploads unfinished after profiling.upload_wait_s: {', '.join(unfinished)}")
    whole = sum(not file["error"] for _, file in files)
    return f"profiling: {_few(lines)}; the other {whole} file(s) are complete" if lines else ""


def files_of(accounts: Sequence[Account]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for rank, of_rank in enumerate(accounts):
        yield from ((rank, file) for window in of_rank["windows"] for file in window["files"])


def _few(words: Sequence[str]) -> str:
    return ", ".join(words[:_SHOWN]) + (f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else "")
