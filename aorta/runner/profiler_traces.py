"""A run's torch.profiler traces: checked before anything starts, opened for the loop, listed in `run.json` at the end.

Must not be a condition of the record: what goes wrong after the start is logged and written down, never raised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from aorta.config.mesh import data_parallel_size
from aorta.config.rank_words import selected_ranks
from aorta.config.schema import Config
from aorta.config.templates import fill
from aorta.distributed.gather_when_idle import gather_when_idle
from aorta.distributed.output_folder import RunFolder, write_manifest
from aorta.distributed.peers import Peers
from aorta.distributed.topology import Topology
from aorta.errors import AortaError, ConfigError, FolderNotEmpty, PeerFailed
from aorta.profiling.destinations import Destination, destination
from aorta.profiling.torch_profiler import NullProfiler, Profiler, chrome_trace_disabled
from aorta.profiling.trace_names import Counters, TracePlace, coordinate_of
from aorta.profiling.trace_saver import SavedWindow
from aorta.profiling.window_recording import WindowRecording
from aorta.records.clock_offsets import ClockSync, trace_metadata
from aorta.records.run_files import MANIFEST_FILE, read_manifest

_log = logging.getLogger(__name__)
_SIGNAL_WAIT_S = 20.0
"""Limit after a signal: launchers kill 30 s after it."""


class Traces:
    """The traces of one rank.

    Args:
        platform: the label of a run without one, as in its record.
    """

    def __init__(self, config: Config, topology: Topology, platform: str, peers: Peers) -> None:
        self._config, self._peers, self._topology = config, peers, topology
        self._settings = config.profiling
        self._place = TracePlace(
            config.label or platform,
            topology.rank,
            topology.local_rank,
            topology.world_size,
            topology.local_world_size,
            topology.node_rank,
            topology.host,
            topology.pid,
        )
        self._trace_remote: Destination | None = None
        self._memory_remote: Destination | None = None

    def check(self) -> None:
        """Before the run touches anything: check folders that must be empty and upload destinations. Collective.

        Raises:
            ConfigError: on every rank, when any rank cannot continue; names it.
        """
        if not self._settings.enabled:
            return
        answer: list[str] | None = None
        try:
            self._check_mine()
        except ConfigError as error:
            answer = [type(error).__name__, str(error)]
        answers = self._peers.gather("profiling", answer)
        failed = {rank: found for rank, found in enumerate(answers) if found}
        if failed:
            kind = FolderNotEmpty if FolderNotEmpty.__name__ in {name for name, _ in failed.values()} else ConfigError
            said: dict[str, list[int]] = {}
            for rank, (_, text) in failed.items():
                said.setdefault(text, []).append(rank)
            raise kind("; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in said.items()))

    def facts(self) -> dict[str, Any]:
        """The manifest's entry about them at the start."""
        return {"chrome_trace_disabled": "rocm"} if chrome_trace_disabled(self._settings) else {}

    def open(
        self, folder: RunFolder, mesh: Mapping[str, int], first_step: int, clocks: ClockSync | None
    ) -> WindowRecording | NullProfiler:
        """The profiler of the loop.

        Args:
            mesh: dimension -> size, as the strategy lays ranks out; empty for one dimension over all.
            clocks: what is known of the ranks' clocks; each trace repeats its own rank's.
        """
        config, place = self._config, self._place
        per_step = (
            config.training.batch_size
            * config.training.gradient_accumulation
            * data_parallel_size(config, place.world_size)
        )
        where = self._own_folder()
        return Profiler(
            self._settings,
            replace(place, coordinate=coordinate_of(place.rank, list(mesh.values()), place.world_size)),
            folder.traces(place.rank).parent if where is None else where,
            counters=Counters(config.dataset.num_samples // per_step, per_step, config.dataset.sequence_length),
            trace_remote=self._trace_remote,
            memory_remote=self._memory_remote,
            metadata=trace_metadata(clocks, place.rank),
        ).open(first_step)

    def settle(self, profiler: WindowRecording | NullProfiler, folder: RunFolder, *, stopped: bool) -> None:
        """Wait for every rank's files and uploads, and say what is where. Collective.

        Args:
            stopped: a signal ended the run, so there is little time.
        """
        if not self._settings.enabled:
            return
        profiler.close()
        deadline = _Deadline(_SIGNAL_WAIT_S if stopped else self._settings.upload_wait_s)
        try:
            everyone = gather_when_idle(
                self._peers,
                "traces",
                lambda: isinstance(profiler, WindowRecording) and profiler.saver.pending > 0 and not deadline.passed,
                lambda: _account(profiler, folder.path),
            )
        except PeerFailed as error:
            _log.error("profiling: not every rank said where its traces are: %s", error)
            return
        finally:
            # All the time there is has been given: at its own end the recording would wait as long again.
            if isinstance(profiler, WindowRecording):
                profiler.saver.given_up = True
        if self._topology.rank == 0:
            _publish(everyone, folder)

    def _check_mine(self) -> None:
        settings, known = self._settings, self._place.variables()
        folder = self._own_folder()
        if folder is not None and not settings.overwrite and self._topology.restart_count == 0:
            must_be_empty(folder)
        selected = selected_ranks(settings.ranks)
        if selected is not None and self._place.rank not in selected:
            return
        root = settings.remote_root
        self._trace_remote = destination(root, settings.remote_file_name, known, overwrite=settings.overwrite)
        if settings.memory_filename is not None:
            self._memory_remote = destination(
                root, settings.memory_remote_file_name, known, overwrite=settings.overwrite
            )
        addresses = {to.remote.address: to for to in (self._trace_remote, self._memory_remote) if to}
        for to in addresses.values():
            to.remote.check(f"rank{self._place.rank}")

    def _own_folder(self) -> Path | None:
        """The configured folder; None for the run's own."""
        if self._settings.folder is None:
            return None
        return Path(self._config.training.output_dir, fill(self._settings.folder, self._place.variables())).absolute()


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        return time.monotonic() > self._end


def must_be_empty(folder: Path) -> None:
    """Check that a folder is empty; hidden files and folders do not count, and a missing folder is empty.

    Raises:
        FolderNotEmpty: names the folder and a file in it.
    """
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        inside = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts):
            raise FolderNotEmpty(
                f"FileExistsError: {folder} is not empty; {inside} exists. Set profiling.overwrite=true, choose "
                "another profiling.folder, or label the run"
            )


def _account(profiler: WindowRecording | NullProfiler, root: Path) -> dict[str, Any]:
    """What one rank saved (JSON types); paths relative to the run's folder where they are in it."""
    if not isinstance(profiler, WindowRecording):
        return {"windows": [], "kept": []}
    pending = profiler.saver.pending
    kept = profiler.saver.kept()
    windows = [_window(saved, root, pending > 0) for saved in list(profiler.saver.windows)]
    return {"windows": windows, "kept": [_moment(saved, root) for saved in kept], "pending": pending}


def _window(saved: SavedWindow, root: Path, unfinished: bool) -> dict[str, Any]:
    window = saved.window
    return {
        "first_step": window.first_step,
        "last_step": window.last_step,
        "partial": window.partial,
        "files": [
            {
                "kind": file.kind,
                "path": _shown(file.path, root),
                "bytes": file.bytes,
                "here": file.here,
                "uploaded_to": file.there,
                "error": file.error
                or ("not uploaded when the run ended" if unfinished and file.wanted_there and not file.there else None),
            }
            for file in saved.files
        ],
    }


def _moment(saved: SavedWindow, root: Path) -> dict[str, Any]:
    traces = [file.path for file in saved.files if file.here and file.kind in ("trace", "chrome")]
    return {**asdict(saved.window.moment), "path": _shown(traces[-1], root) if traces else None}


def _shown(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def saved_traces(everyone: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """When each window closed and, by global rank, its trace on that rank's disk (null: none); newest last."""
    found: dict[int, dict[str, Any]] = {}
    for rank, account in enumerate(everyone):
        for entry in account["kept"]:
            moment = {name: value for name, value in entry.items() if name != "path"}
            row = found.setdefault(moment["batch"], {**moment, "paths": [None] * len(everyone)})
            row["paths"][rank] = entry["path"]
    return [found[batch] for batch in sorted(found)]


def _publish(everyone: Sequence[Mapping[str, Any]], folder: RunFolder) -> None:
    """Add the list to the manifest, and one line to the log."""
    files = [file for account in everyone for window in account["windows"] for file in window["files"]]
    unfinished = sum(account.get("pending", 0) for account in everyone)
    there = [file["uploaded_to"] for file in files if file["uploaded_to"]]
    failed = [file for file in files if file["error"]]
    traces = {
        "ranks": {str(rank): account["windows"] for rank, account in enumerate(everyone) if account["windows"]},
        "saved_traces": saved_traces(everyone),
        "unfinished": unfinished,
    }
    try:
        write_manifest(folder, {**read_manifest(folder.path), "traces": traces})
    except (OSError, ValueError, AortaError) as error:
        _log.error("profiling: %s does not say where the traces are: %s", folder.path / MANIFEST_FILE, error)
    here = [file for file in files if file["here"]]
    places = sorted({str(Path(folder.path, file["path"]).parent) for file in here})
    _log.log(
        logging.WARNING if failed or unfinished else logging.INFO,
        "profiling: %d file(s) of %d rank(s): %d here%s, %d uploaded%s, %d failed%s%s; the list is in %s (traces)",
        len(files),
        sum(bool(account["windows"]) for account in everyone),
        len(here),
        f" ({_few(places)})" if here else "",
        len(there),
        f" ({_few(sorted({address.rpartition('/')[0] for address in there}))})" if there else "",
        len(failed),
        f" ({_few(sorted({file['error'] for file in failed}))})" if failed else "",
        f", {unfinished} still under way" if unfinished else "",
        folder.path / MANIFEST_FILE,
    )


def _few(words: Sequence[str], most: int = 3) -> str:
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
