"""A recorded program does what it does without AORTA, in hostile environments too: a table of what is put into its
folder, its variables and its command. `{python}` is the interpreter, `{injected}` the folder that AORTA puts first.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
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
BEHIND: Final = "import sys; sys.own = __file__"


@dataclass(frozen=True)
class Environment:
    """`steps`: how many are recorded; None: it does not train. `code`: with which the program ends. `needs`: a command
    that fails where the environment cannot be made. `is_ordinary`: without AORTA it is `ORDINARY` to the program.
    """

    name: str
    files: Mapping[str, str] = field(default_factory=lambda: {"x.py": SEEN})
    variables: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ("{python}", "x.py")
    steps: int | range | None = None
    code: int = 0
    needs: tuple[str, ...] = ("true",)
    is_ordinary: bool = False


def shell(text: str) -> tuple[str, ...]:
    return ("sh", "-c", text)


def trains(
    name: str,
    before: str = "",
    files: Mapping[str, str] | None = None,
    words: tuple[str, ...] = ("{python}", "x.py"),
    steps: int | range = 3,
    needs: tuple[str, ...] = ("true",),
) -> Environment:
    own = {"x.py": before + TRAINS, **(files or {})}
    return Environment(name, own, words=words, steps=steps, needs=needs, is_ordinary=not before)


SPAWNS: Final = """
import multiprocessing
if __name__ == "__main__":
    for way in ("spawn", "fork", "forkserver"):
        process = multiprocessing.get_context(way).Process(target=print, args=(way,))
        process.start()
        process.join()
        print(process.exitcode)
"""
QUICK: Final = (
    Environment("nothing special"),
    Environment("an empty PYTHONPATH", variables={"PYTHONPATH": ""}),
    Environment(
        "a module that only an empty entry finds",
        {"sub/x.py": "import beside; print(beside.__file__)", "beside.py": ""},
        {"PYTHONPATH": ":src"},
        ("{python}", "sub/x.py"),
    ),
    Environment("the folder of AORTA twice", variables={"PYTHONPATH": "{injected}:src"}),
    Environment("a sitecustomize of its own", {"x.py": SEEN, "own/sitecustomize.py": BEHIND}, {"PYTHONPATH": "own"}),
    Environment("one beside the script", {"x.py": "import sitecustomize, sys\n" + SEEN, "sitecustomize.py": BEHIND}),
    Environment("one that fails", {"x.py": SEEN, "own/sitecustomize.py": "1 / 0"}, {"PYTHONPATH": "own"}),
    Environment(
        "one that ends it", {"x.py": SEEN, "own/sitecustomize.py": "raise SystemExit(7)"}, {"PYTHONPATH": "own"}, code=1
    ),
    Environment(
        "none, and a program that asks for it",
        {"x.py": "try:\n    import sitecustomize\nexcept ImportError as error:\n    print(error, error.name)\n"},
    ),
    Environment("-I below a shell", words=shell("exec {python} -I x.py")),
    Environment(
        "a current folder that is gone",
        {"x.py": "print(1)"},
        words=shell("mkdir a; cd a; rmdir ../a; exec {python} ../x.py"),
    ),
    Environment(
        "exec",
        {"x.py": "import os, sys; sys.argv[1:] or os.execv(sys.executable, [sys.executable, 'x.py', '1'])\n" + SEEN},
    ),
    Environment(
        "a child without variables",
        {"x.py": "import subprocess, sys; subprocess.run([sys.executable, 'y.py'], env={})", "y.py": SEEN},
    ),
    Environment("spawn", {"x.py": SPAWNS}),
    Environment("a signal", {"x.py": "import os; os.kill(os.getpid(), 15)"}, code=-15),
)
FINDER: Final = "import sys, importlib.util\nclass F:\n    {body}\nsys.meta_path.insert(0, F())\n"


ORDINARY: Final = trains("an ordinary program")
OF_TORCH: Final = (
    ORDINARY,
    Environment("no standard stream", {"x.py": TRAINS}, words=shell("exec {python} x.py <&- >&- 2>&-"), steps=3),
    Environment("a model that is freed", {"x.py": TRAINS + FREES}, steps=3),
    trains(
        "a finder that takes its place and counts",
        FINDER.format(body="seen = []\n    def find_spec(self, name, path=None, target=None): self.seen.append(name)")
        + "import atexit; atexit.register(lambda: print(F.seen.count('torch.serialization') > 0))\n",
    ),
    trains("a clone beside the script", files={"aorta/README.md": "", "aorta/aorta/__init__.py": "1 / 0"}),
    trains(
        "another project's package", "import aorta; print(aorta.mine)\n", {"aorta/__init__.py": "mine = 5"}, steps=0
    ),
    trains("that package, not imported", files={"aorta/__init__.py": "1 / 0"}, steps=0),
    trains(
        "OUT becomes another user's",
        words=shell(
            "if test -d ../out; then chown -R 65534 ../out; fi; exec setpriv --bounding-set=-all {python} x.py"
        ),
        steps=0,
        needs=("setpriv", "--reuid=65534", "true"),
    ),
    Environment(
        "a disk that gets full",
        {"x.py": TRAINS.replace("range(4)", "range(300)")},
        words=shell("ulimit -f 64; exec {python} x.py"),
        steps=range(1, 299),
    ),
    Environment(
        "a restart by its launcher",
        {"x.py": "import os; first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n" + TRAINS + "1 / (not first)\n"},
        words=("{python}", "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", "x.py"),
        steps=3,
    ),
)


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
    elif one.steps:
        assert len(record(tmp_path / "out").steps) in (one.steps if isinstance(one.steps, range) else [one.steps])
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
