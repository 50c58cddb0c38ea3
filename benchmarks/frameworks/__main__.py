"""Does AORTA record rightly where people train? `python -m benchmarks.frameworks [NAME ...]`

Every script of `scripts/` runs three times on two gloo ranks: without AORTA, with the lines of AORTA that are marked in
it, and, without those lines, under `aorta record`. Right is a recording of which

* the steps are all that were trained (`aorta record` begins behind the first): each contains the end of the optimizer
  step of its number, as torch's public hook saw it, and no other,
* it contains the wait for its data, where this process loads it, unless an evaluation or a checkpoint came before,
* no evaluation is in a step, a step behind one says so under `aorta record`, and no other does (after its warm-up),
* the steps take as long as from one optimizer step's end to the next, within 3 % (the median of the ratios): those
  without an evaluation or a checkpoint, in the same run, as runs differ by more,
* the collectives in each step are as many as torch.profiler has seen between the same two instants, and under `aorta
  record` as many as with lines, where neither an evaluation nor a checkpoint is near,
* the blocks are the model's,
* and the run's exit code and final weights are those of the run without AORTA, bit by bit.

The frameworks are installed in an environment of their own (`--environment`, made where it is not there; 2 GB beside a
CPU build of torch); the cases that need torch alone run in it too. Prints a table, and one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from aorta.errors import InputError
from benchmarks.plans import say
from tests.rank_records import RankRecord, read_rank
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
WITHIN: Final = 0.03
TIMEOUT_S: Final = 1800.0
"""DeepSpeed compiles an extension in its first run."""


@dataclass(frozen=True)
class Case:
    """A script, its word, and what a right recording of it has.

    Attributes:
        steps: that a recording with lines has.
        optimizer_steps: that are made; where None, as many.
        optimizers: that step in turn.
        fails: whether it ends with an exception.
    """

    script: str
    word: str = ""
    blocks: tuple[str, ...] = NET
    steps: int = 12
    optimizer_steps: int | None = None
    optimizers: int = 1
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
    Case("ddp", "compile", blocks=("OptimizedModule",)),
    Case("ddp", "barrier"),
    Case("fsdp2", "save"),
    Case("fsdp2", "async_save"),
    Case("gan", blocks=(*(f"0.{name}" for name in NET), *(f"1.{index}" for index in range(5))), optimizers=2),
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
    Case("deepspeed_zero", "3"),
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


def seen_by_witness(folder: Path, rank: int) -> dict[str, Any]:
    """What `watched` left of a rank."""
    answer: dict[str, Any] = json.loads((folder / "watched" / f"rank_{rank}.json").read_text())
    return answer


def record_of(folder: Path, rank: int) -> RankRecord | None:
    path = folder / "artifacts/mine" / f"rank_{rank}_metrics.jsonl"
    return read_rank(path) if path.exists() else None


@dataclass(frozen=True)
class Undisturbed:
    """Of the steps of a rank beside which no evaluation or checkpoint was: collectives by number, and how long they
    took, by AORTA and by the witness, which knows no beginning of the first. In that of the first under `aorta record`
    all ranks begin to record.
    """

    collectives: dict[int, int]
    lengths_ns: list[tuple[int, int]]


def compare_steps(case: Case, way: str, record: RankRecord, witness: dict[str, Any]) -> tuple[Undisturbed, set[str]]:
    """Hold a rank's steps to the witness's marks; returns also what is wrong."""
    ends = witness["stepped"][0 if way == "zero" else case.optimizers - 1 :: case.optimizers]
    collectives, lengths, problems = {}, [], set()
    for step in record.steps:
        number = step.global_step
        if [at for at, end in enumerate(ends) if step.t_start_ns <= end < step.t_end_ns] != [number]:
            problems.add("steps")
            continue
        between = [name for at, name in witness["collectives"] if step.t_start_ns <= at < step.t_end_ns]
        if not len(between) == len(step.collectives) == step.coverage.issued:
            problems.add("collectives")
        flagged, begin = "boundary" in step.reasons, ends[number - 1] if number else 0
        beside = {what for what, start, end in witness["pauses"] if start < ends[number] and end > begin}
        if way == "zero" and not (flagged if "evaluation" in beside else beside or step.warmup or not flagged):
            problems.add("boundaries")
        evaluations = (pause for pause in witness["pauses"] if pause[0] == "evaluation")
        if any(start < step.t_end_ns and end > step.t_start_ns for _, start, end in evaluations):
            problems.add("an evaluation in a step")
        loads = [at for at in witness["loads"] if begin < at < ends[number]]
        if number and not beside and not flagged and loads and loads[0] < step.t_start_ns:
            problems.add("a step without its data")
        if number > (way == "zero") and not beside and not flagged:
            collectives[number] = len(step.collectives)
            lengths.append((step.t_end_ns - step.t_start_ns, ends[number] - begin))
    return Undisturbed(collectives, lengths), problems


def judge(case: Case, way: str, folder: Path, plain: Path, code: int, plain_code: int) -> dict[str, Any]:
    """Return a row of the table; `wrong` names what is not as it has to be."""
    row: dict[str, Any] = {"case": case.name, "way": way, "wrong": []}
    steps, lengths, recorded, problems = [], [], 0, set()
    for rank in range(2):
        witness = seen_by_witness(folder, rank)
        if witness["weights"] != seen_by_witness(plain, rank)["weights"]:
            problems.add("weights")
        record = record_of(folder, rank)
        if record is None:
            problems.add("no record")
            continue
        undisturbed, wrong = compare_steps(case, way, record, witness)
        problems |= wrong
        if way == "zero" and (lined := record_of(folder.parent / "lines", rank)) is not None:
            theirs = compare_steps(case, "lines", lined, seen_by_witness(folder.parent / "lines", rank))[0].collectives
            both = undisturbed.collectives.keys() & theirs.keys()
            if not both or any(undisturbed.collectives[number] != theirs[number] for number in both):
                problems.add("collectives with lines")
        lengths += undisturbed.lengths_ns
        recorded += sum(len(step.collectives) for step in record.steps)
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
    medians = [statistics.median(side) / 1e6 for side in zip(*lengths, strict=True)] or [0.0, 0.0]
    if not lengths or abs(statistics.median(own / witnessed for own, witnessed in lengths) - 1) > WITHIN:
        problems.add("step length")
    row |= {
        "lines": without_lines(case.script, folder / "plain") if way == "lines" else 0,
        "steps": steps,
        "expected_steps": case.expected_steps(way),
        "collectives": recorded,
        "step_ms": medians[0],
        "witness_ms": medians[1],
        "compared_steps": len(lengths),
        "blocks": blocks,
        "same_weights": "weights" not in problems,
        "wrong": sorted(problems),
    }
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    shown = [("case", "lines", "steps", "collectives", "step", "witness's", "blocks", "weights", "")]
    for row in rows:
        steps = "/".join(map(str, row["steps"])) or "none"
        shown.append(
            (
                row["case"],
                str(row["lines"]),
                f"{steps} of {row['expected_steps']}",
                str(row["collectives"]),
                f"{row['step_ms']:.2f} ms",
                f"{row['witness_ms']:.2f} ms",
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
    if words.output.exists() and (not words.output.is_dir() or any(words.output.iterdir())):
        sys.stderr.write(f"{words.output}: not an empty folder; remove it, or give another with --output\n")
        return InputError.exit_code
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
