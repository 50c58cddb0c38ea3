"""Step and phase, noted by compiled functions: the file says what it does when Python notes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from aorta.records.progress_file import RING_WORDS, ProgressFile, ProgressState, read_progress
from tests.instrument.taps import compiled_part
from tests.records.test_progress_file import facts


def noted(path: Path, *, compiled: bool) -> list[ProgressState]:
    progress, states = ProgressFile.create(path, facts()), []

    def look() -> None:
        seen = read_progress(path)
        assert seen.torn is None
        states.append(seen.state._replace(phase_since_ns=0, progress_ns=0))

    progress.begin_step(3)
    progress.enter("forward")
    if compiled:
        for _ in range(2):  # of two, the first stays
            progress.compile_phases(compiled_part().Progress(str(path), *RING_WORDS, []))
    look()
    assert progress.enter("optimizer") == "forward"  # what was noted before goes on
    assert progress.enter("mine") == "mine"
    look()
    assert progress.enter("".join(["back", "ward"])) == "optimizer"  # equal, and another object
    look()
    progress.end_step()
    look()
    progress.begin_step(1 << 38)
    look()
    with pytest.raises(OSError, match="full"), progress.phase("checkpoint"):
        raise OSError("full")
    look()
    return states


def test_compiled_functions_note_what_python_does(tmp_path: Path) -> None:
    by_python, compiled = (noted(tmp_path / str(each), compiled=each) for each in (False, True))
    assert compiled == by_python
    assert [state.phase for state in compiled] == ["forward", "optimizer", "backward", "none", "step", "checkpoint"]
