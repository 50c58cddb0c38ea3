"""A recorded program does what it does without AORTA, in hostile environments too."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from aorta.records.run_files import NOTE_FILE
from tests.recording.hostile import OF_TORCH, ORDINARY, QUICK, Environment
from tests.recording.test_zero_lines import recorded
from tests.runs import ROOT, environment, finished, once, program, record, succeeded

AORTA = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from aorta.commands import main; sys.exit(main())"


Ended = tuple[subprocess.CompletedProcess[str], bytes | None]


def ended(place: Path, one: Environment, *before: str) -> Ended:
    """How the program ended, and the weights that it left."""
    folder = place / "program"  # the same path both times
    for name, text in one.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    known = {"python": sys.executable, "injected": str(ROOT / "aorta" / "recording" / "injected")}
    own = environment(PYTHONDONTWRITEBYTECODE="1")
    own.pop("PYTHONPATH", None)
    own |= {name: value.format(**known) for name, value in one.variables.items()}
    done = finished([*before, *(word.format(**known) for word in one.words)], own=own, folder=folder)
    weights = folder / "weights.pt"
    return done, weights.read_bytes() if weights.exists() else None


def ordinary(factory: pytest.TempPathFactory) -> Ended:
    """How the program ended where nothing is in its way."""

    def run(folder: Path) -> None:
        (folder / "ended").write_bytes(pickle.dumps(ended(folder, ORDINARY)))

    found: Ended = pickle.loads((once(factory, "an ordinary program", run) / "ended").read_bytes())
    return found


@pytest.mark.parametrize(
    "one",
    [*QUICK, OF_TORCH[0], *(pytest.param(one, marks=pytest.mark.thorough) for one in OF_TORCH[1:])],
    ids=lambda one: one.name,
)
def test_a_program_is_what_it_is_without(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, one: Environment
) -> None:
    if subprocess.run(one.needs, capture_output=True, check=False).returncode:
        pytest.skip(f"{' '.join(one.needs)}: not permitted here")
    plain, plain_weights = ordinary(tmp_path_factory) if one.is_ordinary else ended(tmp_path, one)
    done, weights = ended(tmp_path, one, sys.executable, "-I", "-c", AORTA, "record", str(tmp_path / "out"), "--")
    assert (done.returncode, done.stdout, weights) == (plain.returncode, plain.stdout, plain_weights), done.stderr
    assert done.returncode == one.code
    said = [line for line in done.stderr.splitlines() if line not in plain.stderr.splitlines()]
    if one.steps is None:
        assert [path.name for path in tmp_path.glob("out/*")] == [NOTE_FILE]
        assert not said or one.code == 1  # a traceback, with a line more
    elif one.steps:
        assert len(record(tmp_path / "out").steps) in (one.steps if isinstance(one.steps, range) else [one.steps])
    else:
        assert len(said) == 1
        assert said[0].startswith("aorta: nothing is recorded: ")


@pytest.mark.dist
@pytest.mark.thorough
def test_compiled_programs_are_compiled_as_without(tmp_path: Path) -> None:
    done = succeeded(program("tests.recording.compiled", str(tmp_path), ranks=1))
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(said) > 30
    for plain, seen in zip(said[::2], said[1::2], strict=True):
        assert plain["ended"] == seen["ended"] == "", seen
        for name in ("sum", "kind"):
            assert plain[name] == seen[name]
        before, after = plain["counted"], seen["counted"]
        assert before["stats"] == after["stats"], seen["kind"]
        for name in ("frames", "graph_break", "recompiles", "unimplemented"):
            assert sum(before[name].values()) >= sum(after[name].values()), (seen["kind"], name)
        assert seen["steps"] == (0 if seen["kind"] == "whole training step" else 7), seen["kind"]
    assert "whole_training_step: no further optimizer step was seen; inside of torch.compile none is" in done.stderr


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["evaluator", "late", "actor"])
def test_no_step_waits_for_a_rank_that_steps_late_or_never(tmp_path: Path, kind: str) -> None:
    done = recorded(tmp_path / "run", kind, "250")
    ranks = [0] if kind == "evaluator" else [0, 1]
    assert sorted(path.name for path in tmp_path.glob("run/rank_*")) == [f"rank_{rank}_metrics.jsonl" for rank in ranks]
    for rank in ranks:
        seen = record(tmp_path / "run", rank)
        assert seen.header.world_size == 2
        assert seen.footer is not None
        assert seen.footer.reason == "completed"
        numbers = [step.global_step for step in seen.steps]
        assert numbers == list(range(seen.header.start_step, 250))
    begun = {record(tmp_path / "run", rank).header.start_step for rank in ranks}
    assert len(begun) == 1
    left_out = "not recorded, as they have taken no optimizer step: ranks 1" in done.stderr
    assert left_out == (kind == "evaluator")
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert ("ranks" in manifest["reasons"]) == left_out


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["removes", "renames", "replaces"])
def test_a_folder_that_does_not_stay_is_said_once(tmp_path: Path, kind: str) -> None:
    done = recorded(tmp_path / "run", kind)
    said = [line for line in done.stderr.splitlines() if str(tmp_path / "run") in line or "run was" in line]
    assert len(said) == 1
    assert said[0].startswith("aorta: 7 steps recorded, but ")
    assert said[0].endswith("was removed, renamed or replaced meanwhile")
    assert list(tmp_path.glob("run/*")) == []
