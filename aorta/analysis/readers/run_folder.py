"""A run folder -> a `Run`: the records of one launch, all ranks that can be read, and their health.

Enters: a folder with `rank_<rank>_metrics.jsonl` files and perhaps `run.json`; everything else in it is ignored, the
`history` of earlier runs included. Leaves: a `Run`. Must not: mix runs or attempts, or choose between two readings
without saying so.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from aorta.analysis.readers.health import Health, examine
from aorta.analysis.readers.manifest import Manifest, read_manifest
from aorta.errors import InputError
from aorta.telemetry.reader import RANK_FILE_NAME, RankRecord, read_rank
from aorta.telemetry.schema import RANK_FILE, RANK_FILE_GLOB, Header


@dataclass(frozen=True)
class Run:
    """One launch. `records` is ordered by rank and never empty; all its headers agree on run, attempt and size."""

    path: Path
    records: Mapping[int, RankRecord]
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


def load_run(path: str | Path) -> Run:
    """Read every rank of one run folder.

    Raises:
        InputError: the folder does not exist, holds no record that can be read, mixes runs, or its ranks disagree
            about the world size.
    """
    folder = Path(path)
    files = rank_files(folder)
    if not files:
        raise InputError(_nothing_found(folder))
    left_out: list[str] = []
    readable: list[RankRecord] = []
    for file in files:
        try:
            readable.append(read_rank(file))
        except InputError as error:
            left_out.append(str(error))
    if not readable:
        raise InputError(f"{folder}: none of its {len(files)} records can be read:\n  " + "\n  ".join(left_out))
    _refuse_mixture(folder, readable)
    records = _one_per_rank(_latest_attempt(readable, left_out), left_out)
    run_id = next(iter(records.values())).header.run_id
    manifest, manifest_problem = read_manifest(folder, run_id)
    return Run(folder, records, manifest, examine(records, left_out, manifest, manifest_problem))


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


def _refuse_mixture(folder: Path, records: list[RankRecord]) -> None:
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
    sizes: dict[int, RankRecord] = {}
    for record in records:
        before = sizes.setdefault(record.header.attempt, record)
        if before.header.world_size != record.header.world_size:
            raise InputError(
                f"{folder}: {before.path.name} says world size {before.header.world_size}, {record.path.name} says "
                f"{record.header.world_size}: these ranks did not train together"
            )


def _latest_attempt(records: list[RankRecord], left_out: list[str]) -> list[RankRecord]:
    """A restarted job numbers its attempts; ranks of different attempts never met, so only the last one is used."""
    latest = max(record.header.attempt for record in records)
    left_out += [
        f"{record.path.name}: attempt {record.header.attempt}, the last attempt of this run is {latest}"
        for record in records
        if record.header.attempt != latest
    ]
    return [record for record in records if record.header.attempt == latest]


def _one_per_rank(records: list[RankRecord], left_out: list[str]) -> dict[int, RankRecord]:
    """Records by rank. The file named as a run names it wins over `rank_00_...`; the other is said to be left out."""
    chosen: dict[int, RankRecord] = {}
    for record in sorted(records, key=lambda record: (record.header.rank, len(record.path.name))):
        rank, name = record.header.rank, record.path.name
        match = RANK_FILE_NAME.match(name)
        if match is None or int(match[1]) != rank:
            left_out.append(f"{name}:1: its header says rank {rank}; expected {RANK_FILE.format(rank=rank)}")
        elif not 0 <= rank < record.header.world_size:
            left_out.append(f"{name}:1: rank {rank} of a world of {record.header.world_size}")
        elif rank in chosen:
            left_out.append(f"{name}: a second record of rank {rank}, {chosen[rank].path.name} is used")
        else:
            chosen[rank] = _consistent(record)
    if not chosen:
        raise InputError(f"{records[0].path.parent}: no usable record:\n  " + "\n  ".join(left_out))
    return chosen


def _consistent(record: RankRecord) -> RankRecord:
    """The record with each global step once, and what was wrong with its steps added to its problems."""
    name, problems = record.path.name, list(record.problems)
    steps = {step.global_step: step for step in reversed(record.steps)}
    if len(steps) < len(record.steps):
        problems.append(
            f"{name}: {len(record.steps) - len(steps)} step(s) repeat a global step; the first of each is used"
        )
    read = len(record.steps) + len(record.isolated)
    if record.footer is not None and record.footer.steps_written != read:
        problems.append(f"{name}: its footer counts {record.footer.steps_written} steps, {read} could be read")
    return replace(record, steps=[steps[key] for key in sorted(steps)], problems=problems)
