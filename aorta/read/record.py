"""Loads a run folder as a `Run`: the records of all ranks that can be read, and their health.

Reads `rank_<rank>_metrics.jsonl` and, where it exists, `run.json`; everything else in the folder is ignored, including
the `history` of earlier runs. Must not: mix runs or attempts, choose between two interpretations without saying so,
fail because the manifest is missing, or use one of another run.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from aorta.documents.dataset import Health
from aorta.errors import InputError
from aorta.read.engines import Engine, Local, progress
from aorta.read.frames import NO_TIME
from aorta.read.join import join
from aorta.read.ledger import notes_of
from aorta.read.record_columns import read_tables
from aorta.read.run import RankTables, Run, gaps_of, partial_steps
from aorta.records.clocks import CLOCK_SYNC_FILE, RankClock, read_clock_sync
from aorta.records.record_file import header_of
from aorta.records.ring_record import salvage
from aorta.records.run_files import (
    MANIFEST_FILE,
    RANK_FILE,
    RANK_FILE_GLOB,
    RANK_FILE_NAME,
    rank_files,
    read_manifest,
    why_unrecorded,
)
from aorta.records.schema import PYTHON_COST, SCHEMA_VERSION, WORLD_LIMIT, Header, chosen_python

Manifest: TypeAlias = Mapping[str, object]


def manifest_of(folder: Path, run_id: str) -> tuple[Manifest | None, str | None]:
    """Return the manifest of the run `run_id` in a folder and None, or None and why there is none that can be used."""
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return None, f"there is no {MANIFEST_FILE}: only what the headers say is known"
    except OSError as error:
        return None, f"{MANIFEST_FILE} cannot be read ({error.strerror or error}): only what the headers say is known"
    except ValueError as error:
        return None, f"{MANIFEST_FILE} is not a JSON object ({error}): only what the headers say is known"
    if manifest.get("run_id") != run_id:
        return None, (
            f"{MANIFEST_FILE} belongs to run {manifest.get('run_id')!r}, the records to {run_id!r}: it is not used"
        )
    if manifest.get("schema_version") != SCHEMA_VERSION:
        return None, (
            f"{MANIFEST_FILE} has schema version {manifest.get('schema_version')!r}, this AORTA reads "
            f"{SCHEMA_VERSION}: it is not used"
        )
    return manifest, None


def config_of(manifest: Manifest | None) -> Mapping[str, object]:
    """Return the resolved configuration, nested as it was written; empty without a manifest."""
    config = manifest.get("config") if manifest is not None else None
    return config if isinstance(config, dict) else {}


def _interceptors(manifest: Manifest | None) -> list[str]:
    """Return what each rank states: `native`, or `python: why`."""
    topology = (manifest or {}).get("topology")
    ranks = topology if isinstance(topology, list) else []
    return [text for rank in ranks if isinstance(rank, dict) and isinstance(text := rank.get("interceptor"), str)]


def interceptor(manifest: Manifest | None) -> str | None:
    """Return what timed the collectives of a run on its ranks: `native`, `python`, both joined by `, ` where ranks
    differ; None where the manifest does not say.
    """
    return ", ".join(sorted({text.partition(":")[0] for text in _interceptors(manifest)})) or None


def collective_library(manifest: Manifest | None) -> str | None:
    """Return version and SHA-256 of the file from which NCCL's or RCCL's functions come, its path where there is no
    SHA-256, and ranks that have another; None where the manifest states none.
    """
    library = (manifest or {}).get("collective_library")
    if not isinstance(library, dict):
        return None
    digest, others = library.get("sha256"), (manifest or {}).get("collective_library_differences")
    build = f"sha256 {digest[:12]}" if isinstance(digest, str) else library.get("path")
    ranks = f", another on rank {', '.join(others)}" if isinstance(others, dict) and others else ""
    return f"{library.get('version')} ({build}){ranks}"


def _clocks_of(folder: Path, run_id: str | None, attempt: int | None) -> tuple[Mapping[int, RankClock], str | None]:
    """Return the clocks by rank and None, or none and why."""
    path = folder / CLOCK_SYNC_FILE
    if not path.is_file():
        return {}, f"there is no {CLOCK_SYNC_FILE}"
    try:
        sync = read_clock_sync(path)
    except InputError as error:
        return {}, str(error)
    if (sync.run_id, sync.attempt) != (run_id, attempt):
        return {}, f"{CLOCK_SYNC_FILE} is of run {sync.run_id!r}, attempt {sync.attempt}"
    return {clock.rank: clock for clock in sync.ranks}, None


def load_run(
    path: str | Path | Sequence[Path], engine: Engine | None = None, *, spans: bool = False, exposed: bool = False
) -> Run:
    """Read the records of a run; those of killed ranks are completed first, where their folder can be written.

    Args:
        path: its folder, or several with ranks of one run (those of its nodes).
        engine: where they are read; by default on this machine's cores.
        spans, exposed: keep what ran inside each step, give its exposed communication in pieces (`RankTables`).

    Raises:
        InputError: the folder does not exist, holds no readable record, mixes runs, or its ranks disagree about the
            world size; two folders hold the same rank; or the engine failed.
        ToolMissing: the engine needs a package that is not installed.
    """
    folders = [Path(path)] if isinstance(path, str | Path) else path
    left_out: list[str] = []
    for item in folders:
        salvage(item, left_out)
    files = [file for item in folders for file in rank_files(item)]
    folder = next((item for item in folders if (item / MANIFEST_FILE).is_file()), folders[0])  # that of rank 0's node
    if not files:
        raise InputError(nothing_found(folder))
    headers: dict[Path, Header] = {}
    for file in files:
        try:
            headers[file] = header_of(file)
        except InputError as error:
            left_out.append(str(error))
    if not headers:
        raise _unreadable(folder, len(files), left_out)
    _refuse_mixture(folder, headers)
    latest = max(header.attempt for header in headers.values())  # ranks of different attempts never ran together
    left_out += [
        f"{file.name}: attempt {header.attempt}, the last attempt of this run is {latest}"
        for file, header in headers.items()
        if header.attempt != latest
    ]
    chosen = _one_per_rank({file: item for file, item in headers.items() if item.attempt == latest}, left_out)

    def read() -> Iterator[RankTables]:
        known: dict[tuple[int, ...], Sequence[int]] = {}
        with progress(len(chosen), f"reading {folder}") as tick:
            for tables in (engine or Local()).map(partial(read_tables, spans=spans, exposed=exposed), chosen):
                if isinstance(tables, InputError):
                    left_out.append(str(tables))
                else:
                    # The footers of a thousand ranks list the same thousand: equal lists become one.
                    groups = {name: known.setdefault(tuple(of), of) for name, of in tables.source.groups.items()}
                    yield replace(tables, source=replace(tables.source, groups=groups))
                tick()

    frames = join(read(), len(chosen))
    if not frames.ranks:
        raise _unreadable(folder, len(files), left_out)
    source = next(iter(frames.ranks.values())).source
    manifest, manifest_problem = manifest_of(folder, source.identity)
    clocks, why_not = _clocks_of(folder, source.run_id, source.attempt)
    begun = (manifest or {}).get("created_unix_ns")
    if isinstance(begun, int) and (unrecorded := why_unrecorded(folder, begun)) is not None:
        left_out.append(f"the run that was started last, as this is an earlier one; {unrecorded}")
    health = _health(frames.ranks, left_out, manifest, manifest_problem)
    return Run(
        **vars(frames), location=str(folder), manifest=manifest, health=health, clocks=clocks, clocks_missing=why_not
    )


def _unreadable(folder: Path, files: int, left_out: Sequence[str]) -> InputError:
    which = "its record cannot" if files == 1 else f"none of its {files} records can"
    reason, *others = dict.fromkeys(text.partition(": ")[2].removeprefix("cannot be read: ") for text in left_out)
    why = f" {reason}" if len(left_out) > 1 and not others else "\n  ".join(["", *left_out])
    return InputError(f"{folder}: {which} be read:{why}")


def _health(
    ranks: Mapping[int, RankTables],
    files_left_out: Sequence[str],
    manifest: Manifest | None,
    manifest_problem: str | None,
) -> Health:
    """Return the facts about ranks that belong to one run, one attempt and one world size."""
    sources = [tables.source for tables in ranks.values()]
    problems = [problem for tables in ranks.values() for problem in tables.problems]
    hashes = sorted({str(source.manifest_hash) for source in sources})
    if len(hashes) > 1:
        problems.append(f"the ranks ran with different configurations: manifest hashes {', '.join(hashes)}")
    fabric = config_of(manifest).get("fabric")
    if not isinstance(fabric, dict) or fabric.get("kind") in (None, "none"):
        fabric = None  # it delays nothing on purpose
    # The backend of emulated ranks is the emulation: its ends are measured like those of a real one.
    delayed = fabric is not None and sources[0].emulated_ranks is None
    ends = Counter[str | None]()
    for tables in ranks.values() if delayed else ():
        rows = tables.collectives
        used = tables.steps.used[rows.step] & (rows.end_ns != NO_TIME)
        counts: Sequence[int] = np.bincount(rows.name[used], minlength=len(rows.names)).tolist()
        for name, count in zip(rows.names, counts, strict=True):
            ends[name.end_source] += count
    stated = [text.partition(":")[2].strip() for text in _interceptors(manifest) if text.startswith("python:")]
    python = next((why for why in stated if not chosen_python(why)), None)
    world_size = sources[0].world_size
    health = Health(
        ranks_expected=world_size or None,
        ranks_read=[*ranks],
        ranks_missing=sorted(set(range(world_size)) - ranks.keys()),
        files_left_out=[*files_left_out],
        steps_not_on_all_ranks=partial_steps(ranks.values()),
        instrument_modes=sorted({source.instrument_mode for source in sources}),
        problems=problems,
        endings={str(rank): str(tables.source.ending) for rank, tables in ranks.items()},
        attempt=sources[0].attempt,
        emulated_ranks=sources[0].emulated_ranks,
        emulated_fabric=fabric,
        emulated_fabric_rows=ends.total() if delayed else None,
        emulated_fabric_backend_slower_rows=ends["future"] + ends["wait"] if delayed and not ends["event"] else None,
        manifest_problem=manifest_problem,
        timed_from_python=None if python is None else f"{python}; {PYTHON_COST}",
        gaps=gaps_of(ranks),
    )
    health.notes = notes_of(health)
    return health


def nothing_found(folder: Path) -> str:
    wanted = RANK_FILE.format(rank="<rank>")
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        return f"{folder}: {error.strerror or error}; expected a folder with {wanted} files"
    if not stat.S_ISDIR(mode):
        return f"{folder}: not a folder; expected one with {wanted} files"
    if (unrecorded := why_unrecorded(folder)) is not None:
        return unrecorded
    below = sorted({str(path.parent) for path in folder.rglob(RANK_FILE_GLOB)})
    hint = f"; there are some in {', '.join(below)}" if below else ""
    return f"{folder}: no {wanted} in this folder{hint}. Give the folder of one run (training.output_dir)"


def _refuse_mixture(folder: Path, headers: Mapping[Path, Header]) -> None:
    """Raise an `InputError` unless headers agree on the run and, within an attempt, on the world size."""
    (first_file, first), *others = headers.items()
    sizes = {first.attempt: (first_file, first)}
    for file, other in others:
        if other.run_id != first.run_id:
            raise InputError(
                f"{folder}: two runs are mixed: {first_file.name} belongs to run {first.run_id!r}, {file.name} to run "
                f"{other.run_id!r}. Move the files of one run to a folder of their own"
            )
        earlier, before = sizes.setdefault(other.attempt, (file, other))
        if before.world_size != other.world_size:
            raise InputError(
                f"{folder}: {earlier.name} says world size {before.world_size}, {file.name} says {other.world_size}: "
                "these ranks did not train together"
            )


def _one_per_rank(headers: Mapping[Path, Header], left_out: list[str]) -> list[Path]:
    """Return the records by rank. The file with the name that a run gives it wins over `rank_00_...`; the other is
    reported as left out. Raises an `InputError` where no record is left, or two folders hold the same rank.
    """
    chosen: dict[int, Path] = {}
    for file, header in sorted(headers.items(), key=lambda item: (item[1].rank, len(item[0].name))):
        rank, size, name = header.rank, header.world_size, file.name
        match = RANK_FILE_NAME.match(name)
        if match is None or int(match[1]) != rank:
            left_out.append(f"{name}:1: its header says rank {rank}; expected {RANK_FILE.format(rank=rank)}")
        elif not 0 < size <= WORLD_LIMIT:
            left_out.append(f"{name}:1: a world of {size} ranks; 1 to {WORLD_LIMIT} are allowed")
        elif not 0 <= rank < size:
            left_out.append(f"{name}:1: rank {rank} of a world of {size}")
        elif rank in chosen and file.parent != chosen[rank].parent:
            raise InputError(f"{file}: rank {rank} is in {chosen[rank]} too. Give each node's folder of one run, once")
        elif rank in chosen:
            left_out.append(f"{name}: a second record of rank {rank}, {chosen[rank].name} is used")
        else:
            chosen[rank] = file
    if not chosen:
        raise InputError(f"{next(iter(headers)).parent}: no usable record:\n  " + "\n  ".join(left_out))
    return list(chosen.values())
