"""Reads what holds for a run as a whole, and what ran inside one step of a record.

Two parts. *Run*: its manifest (`run.json`), the headers and footers of its records, and how far its collectives were
covered.

    manifest, why_not = manifest_of(folder, run_id)
    config_of(manifest).get("parallel")

*Step*: read from its line again, as all steps would be too much to hold.

Must not: fail a report because the manifest is missing, use one of another run, or take another line for the step's,
should the file have changed since its columns were read.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aorta.analysis.step_intervals import Details, StepIntervals, StepLanes, StepPart, StepPartRows, UserRangesOfStep
from aorta.analysis.tables import COMPLETED, NO_TIME, Collectives, CoverageFacts, Ints, Source, Steps
from aorta.autopsy.processes import process_facts
from aorta.errors import InputError
from aorta.records.clocks import boot_id
from aorta.records.device_values import read_words
from aorta.records.files import open_regular
from aorta.records.reader import LINE_LIMIT
from aorta.records.run_files import MANIFEST_FILE, read_manifest
from aorta.records.schema import SCHEMA_VERSION, DeviceSample, Footer, Header, chosen_python
from aorta.records.step_line import StepLine, decode_line, decode_spans
from aorta.timeline.classes import BUBBLE

FORMAT: Final = "aorta"
"""`Source.format` of AORTA's own records."""
KILLED: Final = "killed (no footer)"
RUNNING: Final = "still running"
Manifest: TypeAlias = Mapping[str, object]


def manifest_of(folder: Path, run_id: str) -> tuple[Manifest | None, str | None]:
    """Return the manifest that belongs to some records.

    Args:
        folder: where they are.
        run_id: the run that they agree on.

    Returns:
        It and None, or None and why it was not used.
    """
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


def interceptor(manifest: Manifest | None) -> str | None:
    """Return what timed the collectives of a run on its ranks: `native`, `python`, both joined by `, ` where ranks
    differ; None where the manifest does not say.
    """
    stated = [rank.get("interceptor") for rank in _topology(manifest)]
    return ", ".join(sorted({each.partition(":")[0] for each in stated if isinstance(each, str)})) or None


def timed_from_python(manifest: Manifest | None, platform: str | None) -> str | None:
    """Return why collectives were timed from Python on some rank, as the manifest says; None where they were not, and
    on a CPU where the configuration asked for it.
    """
    stated = [rank.get("interceptor") for rank in _topology(manifest)]
    reasons = [
        each.partition(":")[2].strip() for each in stated if isinstance(each, str) and each.startswith("python:")
    ]
    if platform == "cpu":
        reasons = [why for why in reasons if not chosen_python(why)]
    return reasons[0] if reasons else None


def _topology(manifest: Manifest | None) -> list[Mapping[str, object]]:
    """Return what the manifest says of each rank."""
    topology = manifest.get("topology") if manifest is not None else None
    return [rank for rank in topology if isinstance(rank, dict)] if isinstance(topology, list) else []


def emulated_fabric(manifest: Manifest | None) -> Mapping[str, object] | None:
    """Return the `fabric` node if it delays collectives on purpose, else None. Times of such a run describe no real
    hardware.
    """
    fabric = config_of(manifest).get("fabric")
    if not isinstance(fabric, dict) or fabric.get("kind") in (None, "none"):
        return None
    return fabric


def source_of(path: Path, header: Header, footer: Footer | None) -> Source:
    """Describe where the record of one rank comes from, by its first and last line."""
    shared = {name: getattr(header, name) for name in header.__struct_fields__ if name in Source.__dataclass_fields__}
    groups = {} if footer is None else footer.groups
    ending = RUNNING if footer is None and _is_running(header) else _ending(footer)
    return Source(path=str(path), format=FORMAT, groups=groups, ending=ending, **shared)


def _is_running(header: Header) -> bool:
    """Return whether the process that writes a record is alive: on this host since its boot, and not a later one with
    the same pid. Of another host or pid namespace that is not known.
    """
    facts = process_facts(header.pid)
    if facts is None or header.boot_id != boot_id() or header.host != socket.gethostname():
        return False
    started_ns = facts.start_ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return facts.state not in "ZX" and started_ns <= header.clock.boottime_ns


def _ending(footer: Footer | None) -> str:
    match footer:
        case None:
            return KILLED
        case Footer(reason="signal"):
            return f"stopped by {footer.signal or 'a signal'}, exit code {footer.exit_code}"
        case Footer(reason="error", exit_code=0):
            return f"recorded in part: {footer.error or 'not recorded why'}"
        case Footer(reason="error"):
            return f"ended by an error, exit code {footer.exit_code}: {footer.error or 'not recorded'}"
        case _:
            return COMPLETED


def coverage_facts(steps: Steps, collectives: Collectives, footer: Footer | None) -> CoverageFacts:
    """Summarise coverage. A step of unknown coverage does not count as one in which a collective was missed."""
    reasons, uncovered, first = Counter[str](), 0, None
    assert steps.coverage is not None
    for code, coverage in enumerate(steps.coverages):
        missed = coverage.issued is not None and coverage.seen != coverage.issued
        if coverage.complete and not missed:
            continue
        at = np.flatnonzero(steps.coverage == code)
        if not len(at):
            continue
        if not coverage.complete:
            uncovered += len(at)
            reasons[coverage.reason or f"{coverage.seen} collectives seen, {coverage.issued} issued"] += len(at)
        if missed:
            step = int(steps.global_step[at[0]])
            first = step if first is None else min(first, step)
    used = np.repeat(steps.used, steps.row_counts) & (collectives.end_ns != NO_TIME)
    found = Counter[str | None]()
    counts = np.bincount(collectives.name[used], minlength=len(collectives.names)).tolist()
    for name, count in zip(collectives.names, counts, strict=True):
        if count:
            found[name.end_source] += count
    times = [(steps.coverages[code], count) for code, count in enumerate(np.bincount(steps.coverage).tolist())]
    outside = sum(coverage.outside * count for coverage, count in times)
    outside += 0 if footer is None else footer.outside
    seen = sum(coverage.seen * count for coverage, count in times)
    unwatched = sum(coverage.unwatched * count for coverage, count in times) / max(seen, 1)
    return CoverageFacts(dict(found), uncovered, dict(reasons), first, outside, unwatched)


_ANOTHER_LINE: Final = "another line stands there now"
WORDS: Final = "rocm-smi"
"""Source of the samples that are read from `rocm_smi_output`."""


def samples_from_text(header: Header) -> bool:
    """Return whether what rocm-smi printed is read as samples: in records that have no others."""
    return header.device_telemetry is None or header.device_telemetry.source is None


def mono_ns(t_ns: int, t_start_ns: int, start_mono_ns: int) -> int:
    """Return a wall-clock time on the clock of the steps, by the start of a step on both.

    Raises:
        ValueError: a column cannot hold it.
    """
    at_ns = t_ns - t_start_ns + start_mono_ns
    if not -(2**62) < at_ns < 2**62:
        raise ValueError(f"rocm_smi_t_ns is {t_ns}: centuries from its step")
    return at_ns


@dataclass(frozen=True)
class RecordDetails(Details):
    """Details of a record: reads the lines of its file again, by their offsets."""

    path: Path
    lanes: tuple[str, ...]
    global_step: Ints
    length_ns: Ints
    line_offset: Ints
    sample_lines: array[int]
    local_rank_of: tuple[int, int]
    """The local rank, and the ranks of the run."""
    mark_lines: array[int]

    def step(self, place: int) -> StepIntervals:
        """Return one step, from its line."""
        with self._open(f"global step {self.global_step[place]}, at byte {self.line_offset[place]}, ") as file:
            return self._step(file, place)

    def lanes_of(self, places: npt.NDArray[np.intp]) -> StepLanes:
        """Return what ran when in some steps, from their lines."""
        ranges, stalls, bubbles = StepPartRows(), StepPartRows(), StepPartRows()
        regions: dict[tuple[str, str | None], int] = {}
        region: list[int] = []
        with self._open("") as file:
            for place in places.tolist():
                line = decode_spans(_text_at(file, int(self.line_offset[place])))
                if line.global_step != self.global_step[place]:
                    raise ValueError(_ANOTHER_LINE)
                ranges.add([*(row[2:] for row in line.compute), *(row[1:] for row in line.aux)])
                region += [regions.setdefault((phase, block), len(regions)) for block, phase, _, _ in line.compute]
                region += [regions.setdefault((name, None), len(regions)) for name, _, _ in line.aux]
                stalls.add([(row.start_ns, row.end_ns) for row in line.stalls])
                bubbles.add(self._step(file, place).lane(BUBBLE) if line.overlap.get("bubble_ms", 0.0) != 0.0 else [])
        part, code = ranges.part(), np.array(region, np.int64)
        of_block = np.array([block is not None for _, block in regions], bool)[code] if region else np.zeros(0, bool)
        compute = StepPart(*(column[of_block] for column in part))
        return StepLanes(compute, stalls.part(), bubbles.part(), part, code, tuple(regions))

    def device_samples(self) -> Iterator[tuple[DeviceSample, str | None]]:
        """Yield the device samples, from the lines that hold any."""
        if not self.sample_lines:
            return
        with self._open("its device samples ") as file:
            for offset in self.sample_lines:
                line = _line_at(file, offset)
                samples = line.device
                for sample in samples:
                    yield sample, line.reasons.get("device")
                if not samples and line.rocm_smi_t_ns is not None:
                    yield self._of_words(line, line.rocm_smi_t_ns)

    def user_ranges(self) -> Iterator[UserRangesOfStep]:
        """Yield the caller's ranges, from the lines that hold any."""
        if not self.mark_lines:
            return
        with self._open("its ranges ") as file:
            for offset in self.mark_lines:
                line = _line_at(file, offset)
                yield UserRangesOfStep(line.global_step, line.start_mono_ns, line.ranges)

    def _of_words(self, line: StepLine, t_ns: int) -> tuple[DeviceSample, str | None]:
        at_ns = mono_ns(t_ns, line.t_start_ns, line.start_mono_ns)
        values, reason = read_words(
            line.rocm_smi_output,
            *self.local_rank_of,
            exit_code=line.rocm_smi_exit_code,
            stderr=line.rocm_smi_stderr,
            error=line.rocm_smi_error,
        )
        return DeviceSample(at_ns, at_ns, **asdict(values)), reason

    def size_bytes(self) -> int:
        """Return the size of the file; 0 where it no longer exists, which reading it will report."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def absolute(self) -> RecordDetails:
        """Return the same with an absolute path, for workers with another working directory."""
        return replace(self, path=self.path.absolute())

    def _step(self, file: BinaryIO, place: int) -> StepIntervals:
        line = _line_at(file, int(self.line_offset[place]))
        if line.global_step != self.global_step[place]:
            raise ValueError(_ANOTHER_LINE)
        return StepIntervals(
            int(self.length_ns[place]),
            self.lanes,
            line.active_segments,
            line.compute,
            line.stalls,
            line.aux,
            line.ranges,
            line.waits,
            line.ready,
        )

    @contextmanager
    def _open(self, what: str) -> Iterator[BinaryIO]:
        try:
            with open_regular(self.path, 1 << 20) as file:
                yield file
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.path.name}: {what}cannot be read again ({error}) (in {self.path.parent})"
            ) from error


def _line_at(file: BinaryIO, offset: int) -> StepLine:
    """Return the step whose line begins at `offset`.

    Raises:
        ValueError: there is no step now.
    """
    line = decode_line(_text_at(file, offset))
    if not isinstance(line, StepLine):
        raise ValueError(_ANOTHER_LINE)
    return line


def _text_at(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.readline(LINE_LIMIT)
