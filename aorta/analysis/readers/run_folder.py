"""A run folder -> a `Run`: the records of one launch, all ranks that can be read, and their health.

Enters: a folder with `rank_<rank>_metrics.jsonl` files and perhaps `run.json`; everything else in it is ignored, the
`history` of earlier runs included. Leaves: a `Run`. Must not: mix runs or attempts, choose between two readings
without saying so, or hold the steps of more than a few files in memory.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from aorta.analysis.readers.columns import Columns, Stored
from aorta.analysis.readers.engines import Engine, Local, progress
from aorta.analysis.readers.health import Health, examine
from aorta.analysis.readers.manifest import Manifest, read_manifest
from aorta.analysis.readers.scan import Scan, scan
from aorta.analysis.readers.store import Store
from aorta.errors import InputError
from aorta.telemetry.reader import LINE_LIMIT, RANK_FILE_NAME, decode_line, read_rank
from aorta.telemetry.schema import RANK_FILE, RANK_FILE_GLOB, Footer, Header, Step

WORLD_LIMIT: Final = 1 << 20
"""Ranks of a run: ten times the largest machines of today, and few enough to count those that are missing."""


@dataclass(frozen=True)
class Record:
    """One rank of a run. Its steps stand in `Run.columns`; whole ones are read from the file again when asked for."""

    stored: Stored
    columns: Columns

    @property
    def path(self) -> Path:
        """Its file."""
        return self.stored.scan.path

    @property
    def header(self) -> Header:
        """Its first line."""
        return self.stored.scan.header

    @property
    def footer(self) -> Footer | None:
        """Its last line; None after a kill."""
        return self.stored.scan.footer

    @property
    def problems(self) -> list[str]:
        """What was wrong with it, with `file:line`."""
        return list(self.stored.scan.problems)

    @property
    def steps(self) -> list[Step]:
        """Every step of the training, whole, each global step once: read anew each time, and large."""
        steps = {step.global_step: step for step in reversed(read_rank(self.path).steps)}
        return [steps[key] for key in sorted(steps)]

    @property
    def isolated(self) -> list[Step]:
        """Every step of the isolated baselines, whole, in the order of the file: read anew each time."""
        return read_rank(self.path).isolated

    def step(self, global_step: int) -> Step | None:
        """One step, whole; None where the rank does not have it.

        Raises:
            InputError: the file changed since, or the line holds a type that the schema does not know.
        """
        places = (self.columns.integers_of(self.stored, "global_step") == global_step).nonzero()[0]
        if not len(places):
            return None
        offset = int(self.columns.integers_of(self.stored, "line_offset")[places[0]])
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                line = decode_line(file.readline(LINE_LIMIT))
            if not isinstance(line, Step):
                raise ValueError("another line stands there now")
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.path.name}: global step {global_step}, at byte {offset}, cannot be read whole ({error}) (in "
                f"{self.path.parent})"
            ) from error
        return line


@dataclass(frozen=True)
class Run:
    """One launch. `records` is ordered by rank and never empty; all its headers agree on run, attempt and size."""

    path: Path
    records: Mapping[int, Record]
    columns: Columns
    manifest: Manifest | None
    health: Health

    @property
    def header(self) -> Header:
        """The header of the lowest rank, for the facts all ranks share."""
        return next(iter(self.records.values())).header


def rank_files(folder: Path) -> list[Path]:
    """The records directly in `folder`, by rank; empty when there are none or the folder cannot be listed."""
    try:
        named = [(RANK_FILE_NAME.match(path.name), path) for path in folder.glob(RANK_FILE_GLOB)]
    except OSError:
        return []
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match and path.is_file())]


class _Shared:
    """Footers of a thousand ranks list the same thousand ranks; they are kept once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], list[int]] = {}

    def groups(self, found: Scan) -> Scan:
        """The scan, with equal lists of ranks made one."""
        if found.footer is None:
            return found
        groups = {name: self._known.setdefault(tuple(ranks), ranks) for name, ranks in found.footer.groups.items()}
        return replace(found, footer=msgspec.structs.replace(found.footer, groups=groups))


def load_run(path: str | Path, engine: Engine | None = None) -> Run:
    """Read every rank of one run folder, one process a file at a time (`engine`, by default this machine's cores).

    Raises:
        InputError: the folder does not exist, holds no record that can be read, mixes runs, or its ranks disagree
            about the world size; or the engine failed.
        ToolMissing: the engine needs a package that is not installed.
    """
    folder = Path(path)
    files = rank_files(folder)
    if not files:
        raise InputError(_nothing_found(folder))
    left_out: list[str] = []
    readable: list[Stored] = []
    store, shared = Store(), _Shared()
    with progress(len(files), f"reading {folder}") as tick:
        for found in (engine or Local()).map(scan, files):
            if isinstance(found, Scan):
                readable.append(Stored.of(shared.groups(found), store))
            else:
                left_out.append(str(found))
            tick()
    if not readable:
        raise InputError(f"{folder}: none of its {len(files)} records can be read:\n  " + "\n  ".join(left_out))
    scans = [stored.scan for stored in readable]
    _refuse_mixture(folder, scans)
    chosen = _one_per_rank(_latest_attempt(scans, left_out), left_out)
    by_path = {stored.scan.path: stored for stored in readable}
    columns = Columns(store, {rank: by_path[found.path] for rank, found in chosen.items()})
    run_id = next(iter(chosen.values())).header.run_id
    manifest, manifest_problem = read_manifest(folder, run_id)
    health = examine(chosen, columns.partial_steps(), left_out, manifest, manifest_problem)
    records = {rank: Record(stored, columns) for rank, stored in columns.ranks.items()}
    return Run(folder, records, columns, manifest, health)


def _nothing_found(folder: Path) -> str:
    wanted = RANK_FILE.format(rank="<rank>")
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        return f"{folder}: {error.strerror or error}; expected a folder with {wanted} files"
    if not stat.S_ISDIR(mode):
        return f"{folder}: not a folder; expected one with {wanted} files"
    below = sorted({str(path.parent) for path in folder.glob(f"*/{RANK_FILE_GLOB}")})
    hint = f"; there are some in {', '.join(below)}" if below else ""
    return f"{folder}: no {wanted} in this folder{hint}. Give the folder of one run (training.output_dir)"


def _refuse_mixture(folder: Path, records: list[Scan]) -> None:
    """Headers must agree on the run; within an attempt, also on the world size.

    Raises:
        InputError: names both readings and their files.
    """
    first = records[0]
    for other in records[1:]:
        if other.header.run_id != first.header.run_id:
            raise InputError(
                f"{folder}: two runs are mixed: {first.path.name} belongs to run {first.header.run_id!r}, "
                f"{other.path.name} to run {other.header.run_id!r}. Move the files of one run to a folder of their own"
            )
    sizes: dict[int, Scan] = {}
    for record in records:
        before = sizes.setdefault(record.header.attempt, record)
        if before.header.world_size != record.header.world_size:
            raise InputError(
                f"{folder}: {before.path.name} says world size {before.header.world_size}, {record.path.name} says "
                f"{record.header.world_size}: these ranks did not train together"
            )


def _latest_attempt(records: list[Scan], left_out: list[str]) -> list[Scan]:
    """A restarted job numbers its attempts; ranks of different attempts never met, so only the last one is used."""
    latest = max(record.header.attempt for record in records)
    left_out += [
        f"{record.path.name}: attempt {record.header.attempt}, the last attempt of this run is {latest}"
        for record in records
        if record.header.attempt != latest
    ]
    return [record for record in records if record.header.attempt == latest]


def _one_per_rank(records: list[Scan], left_out: list[str]) -> dict[int, Scan]:
    """Records by rank. The file named as a run names it wins over `rank_00_...`; the other is said to be left out."""
    chosen: dict[int, Scan] = {}
    for record in sorted(records, key=lambda record: (record.header.rank, len(record.path.name))):
        rank, name = record.header.rank, record.path.name
        match = RANK_FILE_NAME.match(name)
        if match is None or int(match[1]) != rank:
            left_out.append(f"{name}:1: its header says rank {rank}; expected {RANK_FILE.format(rank=rank)}")
        elif not 0 < record.header.world_size <= WORLD_LIMIT:
            size = record.header.world_size
            left_out.append(f"{name}:1: a world of {size} ranks; 1 to {WORLD_LIMIT} are allowed")
        elif not 0 <= rank < record.header.world_size:
            left_out.append(f"{name}:1: rank {rank} of a world of {record.header.world_size}")
        elif rank in chosen:
            left_out.append(f"{name}: a second record of rank {rank}, {chosen[rank].path.name} is used")
        else:
            chosen[rank] = record
    if not chosen:
        raise InputError(f"{records[0].path.parent}: no usable record:\n  " + "\n  ".join(left_out))
    return chosen
