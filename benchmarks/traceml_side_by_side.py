"""AORTA beside TraceML 0.5.0, by single runs: `python -m benchmarks.traceml_side_by_side [--traceml VENV]`.

`planted_program` with one cause planted, on two gloo ranks, is run as each tool's documentation has it: `traceml run`
with the two lines of TraceML for a loop of one's own (`traceml=1`), and `aorta record` with none. TraceML is installed
from PyPI into an environment of its own, which sees the torch that runs this (`--traceml` takes such an environment).

    named      the cause and the rank: of TraceML the diagnosis that it puts first, and its `culprit_rank`,
               of AORTA who holds the others up and why, what it finds, and the largest row of its tree
    parts      step, data and optimizer of either beyond a stopwatch in the program, in ms
    overhead   the step and its processor time, all threads of a rank, beside launches without a tool, in turns

Prints both answers of each cause, and one JSON object last. No target: it compares.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from pathlib import Path
from statistics import median
from sysconfig import get_path
from typing import Any, NamedTuple

import numpy as np

from aorta.recording.zero_lines import VARIABLE
from benchmarks import plans
from benchmarks.planted_causes import PROGRAM, say
from tests.runs import ROOT, environment, finished, free_port, torchrun

RELEASE = "traceml-ai==0.5.0"
SIZES = "width=256 bucket_mb=4 batch=32 steps=46"
RANK = 1


class Planted(NamedTuple):
    """Words of the program; what either has to answer, as a pattern of `diagnosis` and of AORTA's sentences; whether
    it is rank `RANK` that has to be named.
    """

    words: str
    traceml: str
    aorta: str
    of_rank: bool = False


ASLEEP = rf"rank {RANK} holds .*idle between data and forward"
CAUSES = {
    "nothing": Planted("", "BALANCED|COMPUTE_BOUND|RESIDUAL_HEAVY", "$^"),
    "asleep20": Planted(f"slow_rank={RANK} slow_ms=20", "STRAGGLER", ASLEEP, of_rank=True),
    "asleep40": Planted(f"slow_rank={RANK} slow_ms=40", "STRAGGLER", ASLEEP, of_rank=True),
    "asleep80": Planted(f"slow_rank={RANK} slow_ms=80", "STRAGGLER", ASLEEP, of_rank=True),
    "data_of_rank": Planted(
        f"slow_rank={RANK} slow_data_ms=40", "INPUT_STRAGGLER", f"rank {RANK} holds .*DataLoader", of_rank=True
    ),
    "computation_of_rank": Planted(
        f"slow_rank={RANK} slow_computations=4",
        "COMPUTE_STRAGGLER",
        f"rank {RANK} (holds|computes) .*(computation|longer)",
        of_rank=True,
    ),
    "data20": Planted("data_ms=20", "INPUT_BOUND", "ranks? [01-]* waits? .* for the next batch"),
    "data40": Planted("data_ms=40", "INPUT_BOUND", "ranks? [01-]* waits? .* for the next batch"),
    "idle40": Planted("idle_ms=40", "RESIDUAL_HEAVY", "largest: idle: .*unexplained.*data and forward"),
    "synchronous": Planted("synchronous=1", "RESIDUAL_HEAVY", "largest: exposed allreduce"),
}


class Answer(NamedTuple):
    """What a tool says of a run: in words, the rank it names, and the parts of its step."""

    said: list[str]
    rank: int | None
    parts: dict[str, float]


def installed(folder: Path) -> Path:
    """Return an environment with TraceML and its requirements in which the packages of this one are found, too."""
    venv.create(folder, with_pip=True, symlinks=True)
    places = Path(folder, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    (places / "running.pth").write_text(get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", RELEASE], check=True, capture_output=True)
    return folder


def stopwatch(prefix: Path, *, every: bool) -> dict[str, float]:
    """Return means over ranks."""
    found = [json.loads(file.read_text()) for file in prefix.parent.glob(f"{prefix.name}-*.json")]
    return {
        name: float(np.mean([(each["all"] if every else each)[name] for each in found])) for name in found[0]["all"]
    }


def with_traceml(tools: Path, words: str, folder: Path) -> Answer:
    """Run it once below TraceML."""
    run = [str(tools / "bin" / "traceml"), "run", str(PROGRAM), "--nproc-per-node", "2", "--logs-dir", str(folder)]
    ports = ["--master-port", str(free_port()), "--aggregator-port", str(free_port()), "--run-name", "run"]
    more = ["--args", *f"{SIZES} {words} traceml=1 stopwatch={folder / 'watch'}".split()]
    done = finished([*run, *ports, *more], own=environment())
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = json.loads((folder / "run" / "final_summary.json").read_text())["step_time"]
    first, means = found["diagnosis"], found["global"]["average"]
    parts = {"step": means["step_time_ms"], "data": means["input_wait_ms"], "optimizer": means["optimizer_ms"]}
    said = [f"{first['kind']}: {first['summary']}", *(each["kind"] for each in found["issues"][1:])]
    return Answer(said, (first["evidence"] or {}).get("culprit_rank"), parts)


def with_aorta(words: str, folder: Path) -> Answer:
    """Run it once below `aorta record`, and report on it."""
    program = torchrun(2, str(PROGRAM), *f"{SIZES} {words} stopwatch={folder / 'watch'}".split())
    for command in (
        ["record", str(folder / "run"), "--", *program],
        ["report", str(folder / "run"), "--no-html", "--output", str(folder / "report")],
    ):
        done = finished([sys.executable, "-m", "aorta", *command], own=environment(PYTHONPATH=str(ROOT)))
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    (found,) = json.loads((folder / "report" / "summary.json").read_text())["datasets"].values()
    stragglers = [(each["rank"], each["because"]) for each in found["stragglers"]["ranks"]]
    said = [f"rank {rank} holds the others up: {because}" for rank, because in stragglers]
    said += [found["stragglers"]["uneven"]] if found["stragglers"]["uneven"] else []
    said += [each["sentence"] for each in found["findings"]]
    account = found["account"]
    parts = {"step": account["step_ms"]}
    for part in account["parts"]:
        parts |= {below["name"]: below["ms"] for below in part["parts"] if below["name"] in ("data", "optimizer")}
    tree = [
        line.strip() for line in done.stdout.splitlines() if re.match(r"\s*(exposed|idle|data|forward|backward)", line)
    ]
    shares = [float(share[1]) if (share := re.search(r"([\d.]+) ?%", line)) else 0.0 for line in tree]
    largest = tree[int(np.argmax(shares))] if tree else ""
    said.append(re.sub(r"  +", ": ", f"largest: {largest}"))
    return Answer(said, stragglers[0][0] if len(stragglers) == 1 else None, parts)


def plain(words: str, folder: Path) -> None:
    """Run it once without a tool."""
    own = {name: value for name, value in environment().items() if name != VARIABLE}
    done = finished(torchrun(2, str(PROGRAM), *f"{SIZES} {words} stopwatch={folder / 'watch'}".split()), own=own)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


def answered(pattern: str, tool: str, answer: Answer) -> bool:
    """Return whether what it says first (AORTA: any of what it says) matches."""
    return any(re.match(pattern, sentence) for sentence in (answer.said[:1] if tool == "traceml" else answer.said))


def main() -> int:
    """Run all causes below both, then nothing below both and neither, in turns."""
    parser = plans.arguments(__doc__)
    parser.add_argument("--traceml", type=Path, metavar="VENV", help="an environment that has it")
    parser.add_argument("--causes", nargs="+", choices=[*CAUSES], default=[*CAUSES], metavar="CAUSE")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="launches of each arm of the overhead")
    words = parser.parse_args()
    named: dict[str, dict[str, Any]] = {}
    beyond: dict[str, dict[str, list[float]]] = {tool: defaultdict(list) for tool in ("aorta", "traceml")}
    steps: dict[str, list[dict[str, float]]] = {"plain": [], "aorta": [], "traceml": []}
    equal: dict[str, list[bool]] = {tool: [] for tool in beyond}

    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        tools = words.traceml or installed(base / "traceml")

        def run(tool: str, name: str, turn: int = 0) -> tuple[bool, bool]:
            """Return whether the cause is right, and the rank."""
            (folder := base / f"{name}-{tool}-{turn}").mkdir()
            cause = CAUSES[name]
            answer = with_aorta(cause.words, folder) if tool == "aorta" else with_traceml(tools, cause.words, folder)
            watch = stopwatch(folder / "watch", every=tool == "traceml")
            for part, value in answer.parts.items():
                beyond[tool][part].append(value - watch[part])
            ranked = answer.rank == (RANK if cause.of_rank else None)
            right = ranked if name == "nothing" and tool == "aorta" else answered(getattr(cause, tool), tool, answer)
            say(f"{name:20s} {tool:8s} cause {right!s:5s} rank {ranked!s:5s} {watch['step']:.0f} ms: {answer.said}")
            if name == "nothing":
                steps[tool].append(stopwatch(folder / "watch", every=False))
            return right, ranked

        for name in words.causes[: 2 if words.quick else None]:
            named[name] = {tool: dict(zip(("cause", "rank"), run(tool, name), strict=True)) for tool in beyond}
        for turn in range(1, words.turns + 1):
            for tool in steps if turn % 2 == 0 else reversed(steps):
                if tool == "plain":
                    (folder := base / f"plain-{turn}").mkdir()
                    plain("", folder)
                    steps[tool].append(stopwatch(folder / "watch", every=False))
                else:
                    equal[tool].append(all(run(tool, "nothing", turn)))
            shown = [round(own[-1]["step"], 1) for own in steps.values()]
            say(f"turn {turn}: {shown} ms, load {os.getloadavg()[0]:.1f}")
    figures = {
        "release": RELEASE,
        "named": named,
        "both_right": {
            tool: sum(each[tool]["cause"] and each[tool]["rank"] for each in named.values()) for tool in beyond
        },
        "nothing_named_of_nothing": {tool: f"{sum(own)} of {len(own)}" for tool, own in equal.items()},
        "beyond_the_stopwatch_ms": {
            tool: {part: np.percentile(values, (0, 50, 100)).round(2).tolist() for part, values in parts.items()}
            for tool, parts in beyond.items()
        },
        "median_of_launches_ms": {
            tool: {part: round(median(each[part] for each in own), 2) for part in ("step", "processor")}
            for tool, own in steps.items()
            if own
        },
    }
    return plans.say("traceml_side_by_side", figures, {})


if __name__ == "__main__":
    sys.exit(main())
