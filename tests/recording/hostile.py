"""Environments in which a recorded program must do what it does without AORTA: a table of what is put into its folder,
its variables and its command. `{python}` is the interpreter, `{out}` the folder of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

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
    Environment("an empty entry in front", variables={"PYTHONPATH": ":src"}),
    Environment("an empty entry behind", variables={"PYTHONPATH": "src:"}),
    Environment("an empty entry between", variables={"PYTHONPATH": "src::lib"}),
    Environment(
        "a module that only an empty entry finds",
        {"sub/x.py": "import beside; print(beside.__file__)", "beside.py": ""},
        {"PYTHONPATH": ":src"},
        ("{python}", "sub/x.py"),
    ),
    Environment("the folder of AORTA twice", variables={"PYTHONPATH": "{injected}:src"}),
    Environment("a sitecustomize of its own", {"x.py": SEEN, "own/sitecustomize.py": BEHIND}, {"PYTHONPATH": "own"}),
    Environment("one that is a package", {"x.py": SEEN, "own/sitecustomize/__init__.py": ""}, {"PYTHONPATH": "own"}),
    Environment("one beside the script", {"x.py": "import sitecustomize, sys\n" + SEEN, "sitecustomize.py": BEHIND}),
    Environment(
        "one that comes late",
        {
            "x.py": "import sys; sys.path.insert(0, 'own'); import sitecustomize\n" + SEEN,
            "own/sitecustomize.py": BEHIND,
        },
    ),
    Environment("one that fails", {"x.py": SEEN, "own/sitecustomize.py": "1 / 0"}, {"PYTHONPATH": "own"}),
    Environment(
        "one that ends it", {"x.py": SEEN, "own/sitecustomize.py": "raise SystemExit(7)"}, {"PYTHONPATH": "own"}, code=1
    ),
    Environment(
        "none, and a program that asks for it",
        {"x.py": "try:\n    import sitecustomize\nexcept ImportError as error:\n    print(error, error.name)\n"},
    ),
    Environment("-I below a shell", words=shell("exec {python} -I x.py")),
    Environment("-S below a shell", {"x.py": "print(1)"}, words=shell("exec {python} -S x.py")),
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
SLOTS: Final = """
import sys, importlib.util
class Loader:
    __slots__ = ("loader",)
    def __init__(self, loader): self.loader = loader
    def create_module(self, spec): return None
    def exec_module(self, module): self.loader.exec_module(module)
class F:
    busy = False
    def find_spec(self, name, path=None, target=None):
        if self.busy or not name.startswith("torch."): return None
        F.busy = True
        try: spec = importlib.util.find_spec(name)
        finally: F.busy = False
        if spec is not None and name in {"torch.serialization", "torch.optim.optimizer"}:
            spec.loader = Loader(spec.loader)
        return spec
sys.meta_path.insert(0, F())
"""
BOUND: Final = "if test -d ../out; then mount --bind ../out ../out && mount -o remount,bind,ro ../out; fi; "
ORDINARY: Final = trains("an ordinary program")
OF_TORCH: Final = (
    ORDINARY,
    Environment("no standard stream", {"x.py": TRAINS}, words=shell("exec {python} x.py <&- >&- 2>&-"), steps=3),
    Environment("a model that is freed", {"x.py": TRAINS + FREES}, steps=3),
    trains("a finder of the old kind", FINDER.format(body="def find_module(self, name, path=None): return None")),
    trains("loaders that take no attribute", SLOTS),
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
    trains(
        "OUT becomes a read-only mount",
        words=("unshare", "-m", *shell(BOUND + "exec {python} x.py")),
        steps=0,
        needs=("unshare", "-m", "true"),
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
