"""Every command that a page, a Dockerfile, a workflow or a notebook shows can be meant: launcher, words and script are
taken apart as the real ones would.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from dockerfile_parse import DockerfileParser
from torch.distributed.run import get_args_parser

from aorta import train_command
from aorta.analysis.gate import add_gate_arguments
from aorta.commands import COMMANDS as AORTA_COMMANDS
from aorta.experiments import plan_command as plans
from aorta.experiments.plan import read_plan
from aorta.gpu_check import check_command as gpu_check
from aorta.gpu_check.check_ranks import chosen
from aorta.train_command import compose as main
from aorta.whatif import parse_changes
from tests.docs.pages import PAGES, ROOT, fenced

SCRIPTS = {
    "analysis/merge_traces.py": "merge",
    "analysis/overlap_report.py": "report",
    "analysis/rpc_report.py": "rpc",
    "scripts/ab.sh": "ab",
    "train.py": "train",
}
"""Script -> the command of `aorta` that it is."""


COMMANDS = list(
    dict.fromkeys(
        line
        for page in PAGES
        for block in fenced(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    )
)
"""Every command of the pages, once."""


def words_of(line: str) -> list[str]:
    """The command without the variables set before it; a script as the command of `aorta` that it is."""
    words = shlex.split(line)
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if words[0] in ("python", "bash") and words[1] in SCRIPTS:
        return ["aorta", SCRIPTS[words[1]], *words[2:]]
    return words


GOOD: set[tuple[str | None, ...]] = set()
"""What was composed: the number of ranks, and words. Pages show the same in many commands."""


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Composes the configuration of `train.py` from words."""

    def composed(words: list[str]) -> None:
        if (same := (os.environ.get("WORLD_SIZE"), *words)) in GOOD:
            return
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        monkeypatch.chdir(tmp_path)
        try:
            code: object = main(lambda _resolved: 0, ROOT / "config")
        except SystemExit as end:  # Hydra's own end of --help
            code = end.code
        assert code in (0, None)
        GOOD.add(same)

    return composed


@pytest.mark.thorough
@pytest.mark.spec("D29")
@pytest.mark.parametrize("line", COMMANDS, ids=COMMANDS)
def test_command(line: str, compose: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    match words_of(line):
        case ["aorta", "demo", *rest]:
            compose([*plans.DEMO_OVERRIDES, *plans.demo_parser().parse_intermixed_args(rest).overrides])
        case ["aorta", "train", *rest]:
            compose(train_command.split_ranks(rest)[1])
        case ["torchrun", *rest]:
            options = get_args_parser().parse_args(rest)
            assert (ROOT / options.training_script).is_file()
            if options.nproc_per_node.isdigit():  # a mesh has to be filled
                monkeypatch.setenv("WORLD_SIZE", options.nproc_per_node)
            if options.training_script == "train.py":
                compose(options.training_script_args)
        case ["aorta", "ab", *rest]:
            plan = read_plan(plans.parse(rest), ROOT)
            for side in plan.sides:
                compose(plan.words_of(side))
        case ["aorta", "check-gpu", *rest]:
            asked = gpu_check.parser().parse_args(rest)
            strategies, overrides = gpu_check.strategies_in(asked.words)
            for strategy in strategies:
                compose(list(chosen(strategy, overrides, ranks=1)))
        case ["aorta", command, *rest]:
            own = rest[: rest.index("--")] if command == "record" else rest
            options = vars(AORTA_COMMANDS[command].options().parse_intermixed_args(own))
            assert len(options.get("log_dir", ())) == len(options.get("label", ()))
            parse_changes(options.get("set") or ())
        case ["sbatch", *rest]:
            script = next(place for place, word in enumerate(rest) if not word.startswith("-"))
            assert (ROOT / rest[script]).is_file()
            compose(rest[script + 1 :])
        case [".venv/bin/python", "-m", "pip", "install", *rest]:
            places = [word for word in rest if word.startswith("https:")]
            assert all(place.startswith("https://download.pytorch.org/whl/") for place in places)
        case ["bash", "scripts/setup.sh", *rest]:
            taken = re.search('allowed: ([^"]+)', (ROOT / "scripts/setup.sh").read_text())
            assert {word for word in rest if word.startswith("--")} <= set(re.findall(r"--\w+", taken[1]))
        case ["bash", "scripts/one_card.sh", _, *rest]:
            compose(["experiment=full", *rest])
        case ["bash", "scripts/demo.sh", *rest]:
            assert not rest
        case ["bash", script, *rest]:
            assert (ROOT / script).is_file()
            arguments = [word for word in rest if word != "--dry-run"]
            if arguments and "=" not in arguments[0] and not arguments[0].startswith("-"):
                assert (ROOT / arguments.pop(0)).is_file()
            compose(arguments)
        case ["docker", "build", *rest]:
            assert (ROOT / rest[rest.index("-f") + 1]).is_file()
        case ["docker", "run", *rest]:
            image = next(place for place, word in enumerate(rest) if word.startswith("aorta:"))
            if inside := rest[image + 1 :]:
                test_command(shlex.join(inside), compose, monkeypatch)
        case ["python", "-m", "benchmarks.frameworks"]:
            pass  # tests/integrations/test_frameworks.py runs what needs no framework
        case words:
            start = ("source .venv/bin/activate", "jq ", "python3 -m venv .venv", "git clone URL aorta", "cd aorta")
            start += ("scripts/check", "salloc --nodes 1 aorta ab ")  # tests/experiments/test_slurm.py
            start += ("python3 -m venv otava", "otava/bin/")  # benchmarks/history.py
            assert shlex.join(words).startswith(start), f"no rule for {line!r}"


def test_the_workflow_s_commands_are_shell_and_need_nothing_of_this_checkout() -> None:
    page = (ROOT / "docs" / "compare.md").read_text()
    (block,) = re.findall(r"```yaml\n(name: .*?)```", page, re.DOTALL)
    scripts = [step["run"] for job in yaml.safe_load(block)["jobs"].values() for step in job["steps"] if "run" in step]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    text = "\n".join(scripts)
    assert set(re.findall(r"(?<!\S)[\w/.]+\.(?:sh|py)\b", text)) == {"train.py", "../base/train.py"}
    started = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line.startswith("aorta ")]
    assert [name for _, name, *_ in started] == ["ab", "report"]
    for _, name, *arguments in started:
        _, overrides = AORTA_COMMANDS[name].options().parse_known_args(arguments)
        assert not [word for word in overrides if word.startswith("-")]
    for source in (page, text):
        conditions = re.findall(r"--fail-on '([^']+)'", source)
        assert conditions
        parser = argparse.ArgumentParser()
        add_gate_arguments(parser)
        parsed = parser.parse_args([word for condition in conditions for word in ("--fail-on", condition)])
        assert [condition.text for condition in parsed.fail_on] == conditions


DEVICES = {"cuda": ["--gpus all"], "rocm": ["--device /dev/kfd", "--device /dev/dri", "--group-add video"]}


@pytest.mark.parametrize("platform", DEVICES)
def test_an_image_copies_and_calls_what_is_there_and_its_page_gives_it_its_devices(platform: str) -> None:
    path = ROOT / "docker" / f"{platform}.Dockerfile"
    found: dict[str, list[str]] = {}
    for entry in DockerfileParser(fileobj=io.BytesIO(path.read_bytes())).structure:
        found.setdefault(entry["instruction"], []).append(entry["value"])
    for copied in found["COPY"]:
        *sources, _ = [word for word in copied.split() if not word.startswith("--")]
        assert all((ROOT / source).exists() for source in sources)
    calls = [shlex.split(part) for run in found["RUN"] for part in run.split("&&")]
    assert [words for words in calls if words[0] == "bash"] == [["bash", "scripts/setup.sh"]]
    program, word, *_ = re.findall(r'"([^"]+)"', *found["CMD"])
    assert (program, word in AORTA_COMMANDS) == ("aorta", True)
    lines = [line for block in fenced(ROOT / "docs" / "gpu.md", "bash") for line in block.splitlines()]
    assert any(f"-f docker/{path.name} -t aorta:{platform} ." in line for line in lines)
    starts = [line for line in lines if line.startswith("docker run") and f"aorta:{platform}" in line]
    assert starts
    for line in starts:
        assert all(option in line for option in (*DEVICES[platform], "--ipc=host", "--shm-size"))


def test_the_notebook_s_cells_run_and_find_what_is_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("two", "sharded"):
        shutil.copytree(ROOT / "tests" / "samples" / "two_gloo_ranks", tmp_path / "artifacts" / name)
    monkeypatch.chdir(tmp_path)
    left: dict[str, Any] = {}
    for number, cell in enumerate(fenced(ROOT / "docs" / "notebook.md", "python")):
        exec(compile(cell, f"docs/notebook.md, cell {number}", "exec"), left)
    left["plt"].close("all")
    steps, used, reduces, medians = (left[name] for name in ("steps", "used", "reduces", "medians"))
    assert {type(table) for table in (steps, used, reduces, medians)} == {pd.DataFrame}
    assert (len(steps), len(used)) == (12, 6), "two ranks of six steps, half of them warm-up"
    assert reduces.groupby("instance")["rank"].nunique().eq(2).all()
    assert (reduces.wait_ms + reduces.transfer_ms - reduces.duration_ms).abs().max() < 1e-9
    assert medians.loc["two"].equals(medians.loc["sharded"]), "here both are the same run"
    assert all(Path(picture).stat().st_size > 3_000 for picture in ("steps.png", "collectives.png"))
