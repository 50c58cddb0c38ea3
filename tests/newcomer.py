"""What a newcomer types: the commands of README.md and docs/getting-started.md, as they are printed.

Every command stands in exactly one of two places: `HERE`, run by `tests/test_package.py` as printed, or `ELSEWHERE`,
with what it needs that the tests do not have, or with the test that runs it. Must not: run anything by itself.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.docs.pages import ROOT, fenced
from tests.runs import HANGS_S

PAGES: Final = (ROOT / "README.md", ROOT / "docs" / "getting-started.md")
TWO: Final = "OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 train.py"
HERE: Final[dict[str, int]] = {
    "bash scripts/demo.sh": 0,
    "bash scripts/setup.sh": 0,
    "source .venv/bin/activate": 0,
    "aorta report cuda_traces rocm_traces": 0,
    "python train.py label=first training.max_steps=20": 0,
    f"{TWO} label=two training.max_steps=20": 0,
    f"{TWO} label=sharded parallel=fsdp training.max_steps=20": 0,
    "aorta report two": 0,
    "aorta report two sharded": 0,
    "aorta record artifacts/mine -- torchrun --nproc_per_node 2 docs/examples/plain.py": 0,
    "aorta report artifacts/mine": 0,
}
"""Command -> exit code."""
_CARD: Final = "needs a CUDA or HIP device"
_CANDIDATE: Final = "--candidate parallel.overlap=false fabric=emulated training.max_steps=40"
_PLAN: Final = "eight launches more: the demo is the same plan, and tests/experiments runs its options"
ELSEWHERE: Final[dict[str, str]] = {
    "aorta check-gpu": _CARD,
    "git clone URL aorta": "needs the repository's address; the checkout is made by `checkout`",
    "cd aorta": "the tests are there already",
    "torchrun --nproc_per_node=8 train.py profiling.enabled=true": "tests/test_main_job.py runs one process",
    "bash scripts/rocprof_capture.sh": "needs rocprofv3; tests/scripts has the exit code without it",
    "python analysis/overlap_report.py --reference cuda --candidate rocm": "tests/test_main_job.py runs it on two runs",
    f"aorta ab --output artifacts/ab --launches 4 {_CANDIDATE}": _PLAN,
    "aorta ab --output artifacts/own --launches 4 --command 'torchrun --nproc_per_node 2 docs/examples/plain.py'"
    " --candidate env.OMP_NUM_THREADS=2": "tests/experiments/test_plan_processes.py runs it with one launch a side",
    "aorta report artifacts/ab/reference artifacts/ab/candidate --fail-on 'exposed_comm_ms>5%'": _PLAN,
    "aorta whatif artifacts/ab/reference/00 --set network.bandwidth=x2": f"of a launch of that plan: {_PLAN}",
}
"""Command -> why it is not run as a newcomer would."""


@dataclass(frozen=True)
class Answer:
    """How one command ended, and what it printed."""

    code: int
    out: str
    err: str


def printed() -> Iterator[str]:
    """Every command of the pages, once, in the order a reader meets them."""
    lines = [line for page in PAGES for block in fenced(page, "bash") for line in block.splitlines()]
    yield from dict.fromkeys(line for line in lines if line.strip() and not line.startswith("#"))


def checkout(folder: Path, programs: Path) -> None:
    """A clean checkout, whose environment (`programs`: its bin) set-up finds ready, and traces of two other runs."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    for name in ("cuda_traces", "rocm_traces"):
        shutil.copytree(ROOT / "tests/samples/two_gloo_ranks/torch_profiler", folder / name)
    (folder / ".venv").symlink_to(programs.parent)
    if not (programs / "torchrun").exists():  # torch is another environment's, as after set-up beside a torch
        (programs / "torchrun").write_text(f'#!/bin/sh\nexec "{programs}/python" -m torch.distributed.run "$@"\n')
        (programs / "torchrun").chmod(0o755)
    # What scripts/setup.sh compares: made from these files, in this place.
    made_from = ["pyproject.toml", "constraints.txt", "scripts/setup.sh"]
    made_from += sorted(str(path.relative_to(folder)) for path in (folder / "aorta/instrument/native").glob("*.?pp"))
    stamp = f"{folder}\n" + "".join((folder / name).read_text() for name in made_from)
    (programs.parent / "run.stamp").write_text(stamp)


def typed(commands: list[str], folder: Path, variables: dict[str, str]) -> dict[str, Answer]:
    """The commands one after the other in one shell, as somebody types them."""
    notes = folder.with_name(f"{folder.name}-answers")
    notes.mkdir()
    lines = [
        f"{{ {line}\n}} >{notes}/{n}.out 2>{notes}/{n}.err; echo $? >{notes}/{n}.code"
        for n, line in enumerate(commands)
    ]
    subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        timeout=2 * HANGS_S,
        check=True,
    )

    def read(number: int, what: str) -> str:
        return (notes / f"{number}.{what}").read_text()

    return {line: Answer(int(read(n, "code")), read(n, "out"), read(n, "err")) for n, line in enumerate(commands)}
