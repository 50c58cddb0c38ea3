"""A recorded program does what it does without AORTA, in hostile environments too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.recording.hostile import Environment
from tests.runs import ROOT, environment, finished

INJECTED = ROOT / "aorta" / "recording" / "injected"


def run(place: Path, one: Environment, *, is_recorded: bool) -> subprocess.CompletedProcess[str]:
    folder = place / "program"  # the same path both times
    for name, text in one.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    known = {"python": sys.executable, "injected": str(INJECTED)}
    words = [word.format(**known) for word in one.words]
    own = environment(PYTHONDONTWRITEBYTECODE="1")
    own.pop("PYTHONPATH", None)
    own |= {name: value.format(**known) for name, value in one.variables.items()}
    if is_recorded:
        record_them = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from aorta.commands import main; sys.exit(main())"
        )
        words = [sys.executable, "-P", "-c", record_them, "record", str(place / "out"), "--", *words]
    done = finished(words, own=own, folder=folder)
    (weights := folder / "weights.pt").replace(place / f"weights {is_recorded}") if weights_of(folder) else None
    return done


def weights_of(folder: Path) -> bytes | None:
    return path.read_bytes() if (path := folder / "weights.pt").exists() else None
