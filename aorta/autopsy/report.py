"""Evidence of a run or of dumps, whatever there is, and the report on it in the run's folder.

    write_verdict(folder, verdict_on_run(folder))    # autopsy/autopsy.json and autopsy/autopsy.txt

Must not change or wake a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from aorta.autopsy.evidence import RankEvidence
from aorta.autopsy.flight_recorder import read_dumps
from aorta.autopsy.judge import judge
from aorta.autopsy.progress_evidence import progress_evidence
from aorta.autopsy.verdict import Verdict, verdict_text
from aorta.errors import InputError
from aorta.records.files import decode_json, json_text, read_small, write_whole
from aorta.records.progress_file import PROGRESS_DIR
from aorta.records.run_files import AUTOPSY_DIR

STUCK_AFTER_S: Final = 10.0
"""A recorded rank that made progress within so many seconds is not stuck: the watchdog's least timeout."""
WATCHED_AFTER_S: Final = 1.0
"""The same of evidence that a watchdog saved when its timeout, which may be shorter than that, was over."""
JSON_FILE: Final = "autopsy.json"
TEXT_FILE: Final = "autopsy.txt"

_VERDICT: Final = msgspec.json.Decoder(Verdict)


def evidence_of(paths: Sequence[Path], *, live: bool = False) -> list[RankEvidence]:
    """Return the evidence of a run folder, or of dumps of torch's Flight Recorder.

    Args:
        paths: a run folder with progress files; or dumps, and folders of dumps.
        live: ask the running ranks of this host for their stacks.

    Raises:
        InputError: there is no evidence, or several runs.
    """
    runs = [path for path in paths if (path / PROGRESS_DIR).is_dir()]
    if not runs:
        if live:
            raise InputError(f"{paths[0]}: no {PROGRESS_DIR}/ in it: --live looks at a recorded run of this host")
        return read_dumps(paths)
    if len(runs) > 1:
        raise InputError(f"{runs[0]} and {runs[1]}: an autopsy is of one run")
    found = progress_evidence(runs[0], stacks=live, saved=not live)
    others = [path for path in paths if path != runs[0]]
    return [*found, *(read_dumps(others) if others else [])]


def verdict_on(evidence: Sequence[RankEvidence], *, watched: bool, stuck_after_s: float | None = None) -> Verdict:
    """Judge evidence. Where it has ages, a rank that moved shortly before shows that nothing is stuck.

    Args:
        watched: the evidence was saved by a watchdog, which has waited already, unless a rank ended.
        stuck_after_s: what is shortly; None: `STUCK_AFTER_S`, or of evidence that was waited for `WATCHED_AFTER_S`.
    """
    waited = watched and all(one.state != "dead" and one.exit is None for one in evidence)
    usual_s = WATCHED_AFTER_S if waited else STUCK_AFTER_S
    return judge(evidence, stuck_after_s=usual_s if stuck_after_s is None else stuck_after_s)


def has_saved_evidence(folder: Path) -> bool:
    """Return whether a watchdog has saved evidence in a run's folder."""
    return any((folder / AUTOPSY_DIR).glob("rank_*.json"))


def verdict_on_run(folder: Path) -> Verdict:
    """Judge what there is of a run.

    Raises:
        InputError: there is no evidence in the folder.
    """
    return verdict_on(evidence_of([folder]), watched=has_saved_evidence(folder))


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Write a verdict into a run's folder, as JSON and as text.

    Raises:
        OSError: it cannot be written.
    """
    output = folder / AUTOPSY_DIR
    output.mkdir(exist_ok=True)
    write_whole(output / JSON_FILE, as_json(verdict).decode())
    write_whole(output / TEXT_FILE, f"{verdict_text(verdict, stacks=True)}\n")


def read_autopsy(folder: Path) -> Verdict | None:
    """Return the report that `write_verdict` left in a run's folder; None where there is none.

    Raises:
        InputError: it cannot be read; names the file.
    """
    path = folder / AUTOPSY_DIR / JSON_FILE
    try:
        return decode_json(read_small(path), _VERDICT)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; move it away to read the run without it") from error


def as_json(verdict: Verdict) -> bytes:
    """Return the document that `docs/schemas/autopsy-1.schema.json` describes."""
    return json_text(msgspec.to_builtins(verdict)).encode()
