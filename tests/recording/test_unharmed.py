"""A recorded program does what it does without AORTA, in hostile environments too: a table of what is put into its
folder, its variables and its command. `{python}` is the interpreter, `{injected}` the folder that AORTA puts first.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from aorta.records.run_files import NOTE_FILE
from tests.recording.test_zero_lines import recorded
from tests.runs import ROOT, environment, finished, once, record

SEEN: Final = """
import os, re, sys
own = sys.modules.get("sitecustomize")
print([entry for entry in sys.path], getattr(own, "__file__", own), "aorta" in sys.modules)
print({name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "AORTA_RECORD", "_", "SHLVL"}})
print(re.sub("^([^:]*injected:?)+", "", os.environ.get("PYTHONPATH", "")))
"""
"""What a program sees of the interpreter that it runs in."""
TRAINS: Final = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "weights.pt")
module = torch.serialization
print(type(module.__loader__).__name__, module.__spec__.loader is module.__loader__)
print([float(value.detach().sum()) for value in model.parameters()])
"""
FREES: Final = """
import gc, weakref
left = [weakref.ref(one) for one in (model, model[0], optimizer)]
del model, optimizer
gc.collect()
print([one() for one in left])
"""
SPAWNS: Final = """
import multiprocessing
if __name__ == "__main__":
    for way in ("spawn", "fork", "forkserver"):
        process = multiprocessing.get_context(way).Process(target=print, args=(way,))
        process.start()
        process.join()
        print(process.exitcode)
"""
SCRIPTS: Final = {
    "<SEEN>": SEEN,
    "<TRAINS>": TRAINS,
    "<FREES>": FREES,
    "<SPAWNS>": SPAWNS,
    "<LONG>": TRAINS.replace("range(4)", "range(300)"),
}


@dataclass(frozen=True)
class Environment:
    """A row of the table. `files`: their texts, in which `<SEEN>` is that script. `steps`: how many are recorded, or
    the least and the most; None: it does not train. `code`: with which the program ends. `needs`: a command that fails
    where the environment cannot be made. `is_ordinary`: without AORTA it is `ORDINARY` to the program.
    """

    name: str
    files: Mapping[str, str] = field(default_factory=lambda: {"x.py": "<SEEN>"})
    variables: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ("{python}", "x.py")
    steps: Sequence[int] | None = None
    code: int = 0
    needs: Sequence[str] = ("true",)
    is_ordinary: bool = False


TABLE: Final = json.loads(Path(__file__).with_suffix(".json").read_text())
QUICK, OF_TORCH = ([Environment(**row) for row in TABLE[kind]] for kind in ("quick", "of torch"))
ORDINARY: Final = OF_TORCH[0]


AORTA = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from aorta.commands import main; sys.exit(main())"


Ended = tuple[subprocess.CompletedProcess[str], bytes | None]


def ended(place: Path, one: Environment, *before: str) -> Ended:
    """How the program ended, and the weights that it left."""
    folder = place / "program"  # the same path both times
    for name, text in one.files.items():
        for token, script in SCRIPTS.items():
            text = text.replace(token, script)
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
def test_a_program_is_what_it_is_without(tmp_path, tmp_path_factory, one):
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
    elif one.steps[-1]:
        assert one.steps[0] <= len(record(tmp_path / "out").steps) <= one.steps[-1]
    else:
        assert len(said) == 1
        assert said[0].startswith("aorta: nothing is recorded: ")


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["evaluator", "late", "actor"])
def test_no_step_waits_for_a_rank_that_steps_late_or_never(tmp_path, kind):
    done = recorded(tmp_path / "run", kind, "250")
    ranks = [0] if kind == "evaluator" else [0, 1]
    assert sorted(path.name for path in tmp_path.glob("run/rank_*")) == [f"rank_{rank}_metrics.jsonl" for rank in ranks]
    for rank in ranks:
        seen = record(tmp_path / "run", rank)
        assert seen.header.world_size == 2
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
@pytest.mark.parametrize("kind", ["removes", "replaces"])
def test_a_folder_that_does_not_stay_is_said_once(tmp_path, kind):
    done = recorded(tmp_path / "run", kind)
    said = [line for line in done.stderr.splitlines() if str(tmp_path / "run") in line or "run was" in line]
    assert len(said) == 1
    assert said[0].startswith("aorta: 7 steps recorded, but ")
    assert said[0].endswith("was removed, renamed or replaced meanwhile")
    assert list(tmp_path.glob("run/*")) == []
