"""Does AORTA record rightly where people train? `python -m benchmarks.frameworks [NAME ...]`

Every script of `scripts/` runs three times on two gloo ranks: without AORTA, with the lines of AORTA that are marked in
it, and, without those lines, under `aorta record`. Right is a recording of which

* the steps are all that were trained (`aorta record` begins behind the first),
* the collectives in each step are as many as torch.profiler has seen between the same two instants,
* the blocks are the model's,
* and the run's exit code and final weights are those of the run without AORTA, bit by bit.

The frameworks are installed in an environment of their own (`--environment`, made where it is not there; 2 GB beside a
CPU build of torch); the cases that need torch alone run in it too. Prints a table, and one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.plans import say
from tests.rank_records import read_rank
from tests.runs import ROOT, environment

SCRIPTS: Final = Path(__file__).parent / "scripts"
REQUIREMENTS: Final = Path(__file__).parent / "requirements.txt"
MARK: Final = "# AORTA"
NET: Final = ("embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head")
LLAMA: Final = (
    "model.embed_tokens",
    *(f"model.layers.{layer}" for layer in range(3)),
    "model.norm",
    "model.rotary_emb",
    "lm_head",
)
TIMEOUT_S: Final = 1800.0
"""DeepSpeed compiles an extension in its first run."""


@dataclass(frozen=True)
class Case:
    """A script, its word, and what a right recording of it has.

    Attributes:
        steps: that a recording with lines has.
        optimizer_steps: that are made; where None, as many.
        fails: whether it ends with an exception.
    """

    script: str
    word: str = ""
    blocks: tuple[str, ...] = NET
    steps: int = 12
    optimizer_steps: int | None = None
    fails: bool = False

    @property
    def name(self) -> str:
        return f"{self.script}_{self.word}" if self.word else self.script

    def expected_steps(self, way: str) -> int:
        return self.steps if way == "lines" else (self.optimizer_steps or self.steps) - 1


CASES: Final = (
    Case("ddp"),
    Case("ddp", "raise", steps=7, fails=True),
    Case("ddp", "break", steps=7),
    Case("ddp", "compile_in_place", blocks=("Net",)),
    Case("fsdp2", "save"),
    Case("fsdp2", "async_save"),
    Case("gan", blocks=(*(f"0.{name}" for name in NET), *(f"1.{index}" for index in range(5)))),
    Case("transformers_ddp", blocks=LLAMA),
    Case("transformers_ddp", "gradient_checkpointing", blocks=LLAMA),
    Case("transformers_ddp", "compile", blocks=("OptimizedModule",)),
    # It is raised where the seventh step ends, before that is logged.
    Case("transformers_ddp", "raise", blocks=LLAMA, steps=6, optimizer_steps=7, fails=True),
    Case("accelerate_ddp"),
    Case("lightning_ddp", blocks=tuple(f"net.{name}" for name in NET)),
    Case("lightning_ddp", "raise", blocks=tuple(f"net.{name}" for name in NET), steps=7, fails=True),
    Case("ray_ddp"),
    Case("deepspeed_zero", "1"),
    Case("deepspeed_zero", "2"),
)


def without_lines(script: str, folder: Path) -> int:
    """Write a script without the lines that are AORTA's into a folder, beside what it imports; return how many."""
    lines = (SCRIPTS / f"{script}.py").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.rstrip().endswith(MARK)]
    assert "aorta" not in "".join(kept).lower(), f"{script}.py has a line of AORTA's that is not marked"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{script}.py").write_text("".join(kept))
    shutil.copy2(SCRIPTS / "watched.py", folder)
    return len(lines) - len(kept)


def run(case: Case, way: str, python: Path | str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a case in one way ("plain", "lines", "zero"), with what it leaves in an empty folder."""
    (folder / "watched").mkdir(parents=True)
    without_lines(case.script, folder / "plain")
    script = str(SCRIPTS / f"{case.script}.py" if way == "lines" else folder / "plain" / f"{case.script}.py")
    words = [str(python), script]
    if case.script != "ray_ddp":  # which starts its workers itself
        words[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    if case.word:
        words.append(case.word)
    if way == "zero":
        words[:0] = [str(python), "-m", "aorta", "record", str(folder / "artifacts/mine"), "--"]
    own = {
        "WATCHED": str(folder / "watched"),
        "PYTHONPATH": str(ROOT),
        "KINETO_LOG_LEVEL": "5",
        "DS_ACCELERATOR": "cpu",
    }
    own |= {"HF_HUB_OFFLINE": "1", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(
        words, cwd=folder, env=environment(**own), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    return done


def seen_by_profiler(folder: Path, rank: int) -> dict[str, Any]:
    """What `watched` left of a rank: `weights`, and `collectives` as [start in ns of the system's clock, operator]."""
    answer: dict[str, Any] = json.loads((folder / "watched" / f"rank_{rank}.json").read_text())
    return answer


def judge(case: Case, way: str, folder: Path, plain: Path, code: int, plain_code: int) -> dict[str, Any]:
    """Return a row of the table; `wrong` names what is not as it has to be."""
    row: dict[str, Any] = {"case": case.name, "way": way, "wrong": []}
    steps, recorded, counted, problems = [], 0, 0, set()
    for rank in range(2):
        witness = seen_by_profiler(folder, rank)
        if witness["weights"] != seen_by_profiler(plain, rank)["weights"]:
            problems.add("weights")
        path = folder / "artifacts/mine" / f"rank_{rank}_metrics.jsonl"
        if not path.exists():
            problems.add("no record")
            continue
        record = read_rank(path)
        for step in record.steps:
            between = [name for at, name in witness["collectives"] if step.t_start_ns <= at < step.t_end_ns]
            if not len(between) == len(step.collectives) == step.coverage.issued:
                problems.add("collectives")
            recorded, counted = recorded + len(step.collectives), counted + len(between)
        steps.append(len(record.steps))
        if record.footer is None or (record.footer.reason == "completed") == case.fails:
            problems.add("footer")
        elif case.fails and "in the middle" not in str(record.footer.error):
            problems.add("the footer's error")
    manifest = folder / "artifacts/mine" / "run.json"
    blocks = json.loads(manifest.read_text())["plan"]["blocks"] if manifest.exists() else []
    if set(blocks) != set(case.blocks):
        problems.add("blocks")
    if steps != [case.expected_steps(way)] * 2:
        problems.add("steps")
    if code != plain_code or (code == 0) == case.fails:
        problems.add("exit code")
    row |= {
        "lines": without_lines(case.script, folder / "plain") if way == "lines" else 0,
        "steps": steps,
        "expected_steps": case.expected_steps(way),
        "collectives": recorded,
        "profiler": counted,
        "blocks": blocks,
        "same_weights": "weights" not in problems,
        "wrong": sorted(problems),
    }
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    shown = [("case", "lines", "steps", "collectives", "torch.profiler", "blocks", "weights", "")]
    for row in rows:
        steps = "/".join(map(str, row["steps"])) or "none"
        shown.append(
            (
                row["case"],
                str(row["lines"]),
                f"{steps} of {row['expected_steps']}",
                str(row["collectives"]),
                str(row["profiler"]),
                str(len(row["blocks"])),
                "same" if row["same_weights"] else "DIFFER",
                "" if not row["wrong"] else "WRONG: " + ", ".join(row["wrong"]),
            )
        )
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)) for line in shown)


def prepare(folder: Path) -> Path:
    """Return the Python of the environment with the frameworks, which is made where it is not there."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True)
        own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        # torch first: of the version that is here, and of the kind that pip is set up for (--index-url, --find-links).
        version = f"torch=={torch.__version__.partition('+')[0]}"
        pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), version]
        subprocess.run(pip, check=True)
        subprocess.run([*pip, *own, "-r", str(REQUIREMENTS)], check=True)
        (folder / "ready").touch()
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; without any: all")
    cache = Path.home() / ".cache" / "aorta" / "frameworks"
    parser.add_argument("--environment", type=Path, default=cache, help=f"of the frameworks (default {cache})")
    parser.add_argument("--output", type=Path, default=Path("artifacts/frameworks"), help="an empty folder")
    parser.add_argument("--ways", nargs="+", default=["lines", "zero"], choices=["lines", "zero"])
    words = parser.parse_args()
    if unknown := set(words.names) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(names)}")
    python = prepare(words.environment.resolve())
    rows = []
    for case in CASES:
        if words.names and case.name not in words.names:
            continue
        folder = words.output.resolve() / case.name
        plain = run(case, "plain", python, folder / "plain")
        for way in words.ways:
            done = run(case, way, python, folder / way)
            rows.append(judge(case, way, folder / way, folder / "plain", done.returncode, plain.returncode))
            sys.stderr.write(table(rows[-1:]).splitlines()[1] + "\n")
    sys.stdout.write(table(rows) + "\n")
    listed = [str(python), "-m", "pip", "list", "--format=json"]
    versions = {
        each["name"]: each["version"]
        for each in json.loads(subprocess.run(listed, capture_output=True, check=True).stdout)
    }
    wanted = [
        line.partition("==")[0].partition("[")[0] for line in REQUIREMENTS.read_text().splitlines() if "==" in line
    ]
    figures = {"versions": {name: versions.get(name) for name in ("torch", *wanted)}, "rows": rows}
    return say("frameworks", figures, {f"{row['case']} {row['way']}": not row["wrong"] for row in rows})


if __name__ == "__main__":
    sys.exit(main())
